"""Gives publishers that lost batches the parent links that the rows have (see indexer/index/parent_links.py).

Purpose: a proof of a block from before a gap reaches its ancestors only along links, and memory keeps none as long as
nothing was lost.

Invariants: rows are read after a flush, so that all that was held at the gap is among them; the event loop is held for
some milliseconds at a time. While the database is away nothing is given, and less is proven.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from functools import partial

from indexer.errors import StoreUnavailable
from indexer.index.content_index import ContentIndex
from indexer.index.parent_links import ParentLinks
from indexer.index.publisher import PublisherIndex
from indexer.index.state import HolderKey
from indexer.store.postgres import Store
from indexer.store.writer import Writer

INTERVAL_S = 0.25
LEARNED_AT_ONCE = 10_000  # 4 ms


class LinkGiver:
    """One place of one publisher at a time."""

    def __init__(self, store: Store, index: ContentIndex, writer: Writer) -> None:
        self._store = store
        self._index = index
        self._writer = writer

    async def run(self) -> None:
        """Until cancelled. Never raises because of the database."""
        for _ in itertools.count():
            await asyncio.sleep(INTERVAL_S)
            if self._store.is_reachable:
                with suppress(StoreUnavailable):
                    await self.give()

    async def give(self) -> None:
        """To every publisher that wants some now. Raises StoreUnavailable."""
        publishers = self._index.publishers()
        for publisher, key, links in [(p, *wanted) for p in publishers for wanted in p.wanted_links()]:
            await self._give(publisher, key, links)

    async def _give(self, publisher: PublisherIndex, key: HolderKey, links: ParentLinks) -> None:
        await self._writer.flush()
        hashes, parents = await self._store.links(publisher.registration.publisher_id, key)
        for first in range(0, len(hashes), LEARNED_AT_ONCE):
            links.learn(hashes[first : first + LEARNED_AT_ONCE], parents[first : first + LEARNED_AT_ONCE])
            await asyncio.sleep(0)
        for _ in iter(partial(publisher.residents.use_links, key, links), False):
            await asyncio.sleep(0)
