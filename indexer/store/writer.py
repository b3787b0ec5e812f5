"""Write-behind: brings what changed in memory to Postgres, every few hundred milliseconds or N changes.

Purpose: the index never waits for the database. Changes are coalesced in the index until a flush takes them; a block
stored and evicted between two flushes costs no row.

Invariants: one flush at a time; changes that were taken are either written, or given back to their publisher with
everything newer on top; when a flush ends, however it ends, none of its writes is still under way.

At the bounds: more than `flush_changes_max` pending changes start a flush early, and a flush writes about as many per
transaction (a publisher is never split). A publisher with a value that Postgres refuses is tried again every
`HOLD_BACK_S`, and its changes stay pending; the others are written. While the database is away, tries are spaced with
growing pauses of at most `retry_max_s`; pending changes then grow to no more than one per residency and ghost that
memory or the store has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence

import structlog

from indexer.errors import StoreUnavailable
from indexer.index.content_index import ContentIndex
from indexer.index.publisher import PublisherIndex
from indexer.index.state import PublisherChanges
from indexer.store.engine import ValueRefused
from indexer.store.postgres import RETRY_FIRST_S, Store

log = structlog.get_logger()

PENDING_CHECK_S = 0.05
HOLD_BACK_S = 60.0


class Writer:
    """The write-behind task. The plain attributes are for metrics; all but `pending` only grow or are replaced."""

    def __init__(
        self,
        store: Store,
        index: ContentIndex,
        flush_interval_s: float = 0.25,
        flush_changes_max: int = 50_000,
        *,
        retry_max_s: float = 10.0,
    ) -> None:
        self._store = store
        self._index = index
        self._flush_interval_s = flush_interval_s
        self._flush_changes_max = flush_changes_max
        self._retry_max_s = retry_max_s
        self._one_flush = asyncio.Lock()
        self._held_back: dict[int, float] = {}  # publisher_id -> when to try again (monotonic)
        self._under_way = 0  # changes that a flush has taken
        self.rows_written = 0
        self.flushes = 0
        self.flush_failures = 0
        self.values_refused = 0
        self.last_flush_s: float | None = None
        self.last_flush_at: float | None = None  # seconds since 1970

    @property
    def pending(self) -> int:
        """Changes in memory that the database does not have yet."""
        return self._under_way + sum(publisher.changes_pending for publisher in self._index.publishers())

    async def run(self) -> None:
        """Flush until cancelled. Never raises because of the database."""
        pause_s = self._flush_interval_s
        while True:
            await self._wait(pause_s)
            try:
                await self.flush()
                pause_s = self._flush_interval_s
            except StoreUnavailable as error:
                pause_s = min(max(2 * pause_s, RETRY_FIRST_S), max(self._retry_max_s, self._flush_interval_s))
                log.warning("flush_failed", reason=str(error), pending=self.pending, next_try_s=round(pause_s, 3))

    async def flush(self) -> None:
        """Write everything that has changed until now. Raises StoreUnavailable; then nothing is lost."""
        async with self._one_flush:
            started = time.monotonic()
            for publishers in self._portions():
                await self._write(publishers)
            self.last_flush_s = time.monotonic() - started
            self.last_flush_at = time.time()

    def _portions(self) -> Iterator[list[PublisherIndex]]:
        """All publishers that are not held back, in lists of about `flush_changes_max` changes."""
        portion: list[PublisherIndex] = []
        size = 0
        for publisher in self._index.publishers():
            if self._held_back.get(publisher.registration.publisher_id, 0.0) > time.monotonic():
                continue
            portion.append(publisher)
            size += publisher.changes_pending
            if size >= self._flush_changes_max:
                yield portion
                portion, size = [], 0
        yield portion

    async def _write(self, publishers: Sequence[PublisherIndex]) -> None:
        """Take the changes of these publishers and write them in one transaction, or give them back."""
        taken = [(publisher, changes) for publisher in publishers if (changes := publisher.take_changes())]
        if not taken:
            return
        self._under_way = sum(changes.size for _, changes in taken)
        try:
            await _fold([changes for _, changes in taken])
            outcome = await self._store.write([changes for _, changes in taken])
        except ValueRefused as error:
            _give_back(taken)
            await self._isolate([publisher for publisher, _ in taken], error)
        except BaseException:
            _give_back(taken)
            self.flush_failures += 1
            raise
        else:
            self.flushes += 1
            self.rows_written += outcome.rows
        finally:
            self._under_way = 0

    async def _isolate(self, publishers: Sequence[PublisherIndex], error: ValueRefused) -> None:
        """Write each publisher by itself, so that one with an impossible value does not stop the others."""
        if len(publishers) > 1:
            for publisher in publishers:
                await self._write([publisher])
            return
        registration = publishers[0].registration
        self._held_back[registration.publisher_id] = time.monotonic() + HOLD_BACK_S
        self.flush_failures += 1
        self.values_refused += 1
        log.error("changes_refused", worker_id=registration.worker_id, dp_rank=registration.dp_rank, reason=str(error))

    async def _wait(self, pause_s: float) -> None:
        """Until the pause is over, or more is pending than may be; after a failure, always the whole pause."""
        ends = time.monotonic() + pause_s
        may_be_early = pause_s <= self._flush_interval_s
        while (left := ends - time.monotonic()) > 0:
            await asyncio.sleep(min(left, PENDING_CHECK_S))
            if may_be_early and self.pending > self._flush_changes_max:
                return


async def _fold(taken: Sequence[PublisherChanges]) -> None:
    """Bring changes into the form that is written, in a thread. In this form they are also given back, so that tries
    that fail do not pile up. Whoever is cancelled meanwhile waits for the end: the thread works on what he gives back.
    """

    def fold_all() -> None:
        for changes in taken:
            changes.fold()

    folding = asyncio.ensure_future(asyncio.to_thread(fold_all))
    try:
        await asyncio.shield(folding)
    finally:
        await asyncio.wait({folding})


def _give_back(taken: Iterable[tuple[PublisherIndex, PublisherChanges]]) -> None:
    for publisher, changes in taken:
        publisher.restore_changes(changes)
