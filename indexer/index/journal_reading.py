"""Reads a journal: which blocks each entry was about, as content keys as far as these are known.

What a hash means is told by the stores of the journal itself, whose tokens are chained once more, and else by what the
publisher knows now: that does not change as long as it is remembered. What neither tells stays a hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from indexer.identity.chain import salted_seed
from indexer.identity.chain_kernels import chain, hash_granules
from indexer.index.columns import U64
from indexer.index.journal import Batch, Entry, Kind, Note, size_of
from indexer.index.names_seen import NamesSeen
from indexer.index.placing import holder_key
from indexer.index.publisher import PublisherIndex, addressee_of
from indexer.index.runs import RunReader, namespace_of
from indexer.index.state import EngineHash, HolderKey
from indexer.index.tiers import canonical_medium
from indexer.wire.decode import decode_batch
from indexer.wire.errors import WireError
from indexer.wire.events import AllBlocksCleared, BlockStored, Event, RemovedEverywhere, StandardStored

SLICE_BYTES = 64 * 1024  # read in some milliseconds
PAGE_BYTES_MAX = 128 * 1024  # or one entry more; as JSON up to 40 times as much, where hashes are small numbers


class Happening(NamedTuple):
    """One event of a batch, or one note. `medium`, `group`, `owner`: None = all of the publisher's.

    `keys[i]`: what `hashes[i]` means, None = not known; no hashes at all: whatever is held there. `block_tokens`: of
    stores. `gap`: missing numbers, both included.
    """

    kind: Kind
    sequence_number: int | None
    at: float | None
    medium: str | None = None
    group: int | None = None
    owner: str | None = None
    hashes: Sequence[EngineHash] = ()
    keys: Sequence[int | None] = ()
    block_tokens: int | None = None
    gap: tuple[int, int] | None = None


class _Start(NamedTuple):
    """Where a chain stands; None = at the root."""

    key: int | None


class Page(NamedTuple):
    """Some of a journal, in order. `next_position`: of what follows; `dropped_last`: the entry before the first one,
    if it is gone."""

    happenings: list[Happening]
    next_position: int
    dropped_last: Entry | None


def read_page(publisher: PublisherIndex, position: int, entries_max: int) -> Generator[None, None, Page]:
    """Up to so many entries from this position on, and PAGE_BYTES_MAX of them, as what the generator returns; each of
    its steps takes some milliseconds."""
    journal = publisher.journal
    dropped_last = journal.dropped_last if position < journal.dropped else None
    reader = JournalReader(publisher)
    happenings: list[Happening] = []
    size, paused_at = 0, 0
    position = min(max(position, journal.dropped), journal.end)
    for entry in list(islice(journal.entries(position), entries_max)):
        happenings += reader.read(entry)
        position += 1
        size += size_of(entry)
        if size > PAGE_BYTES_MAX:
            break
        if size - paused_at > SLICE_BYTES:
            paused_at = size
            yield
    return Page(happenings, position, dropped_last)


class JournalReader:
    """Of one publisher; to be given entries in their order. Cost: some 0.2 us a granule, 10 us an event."""

    def __init__(self, publisher: PublisherIndex) -> None:
        self._publisher = publisher
        self._addressee = addressee_of(publisher.registration)
        self._told: dict[EngineHash, int] = {}
        self._runs: RunReader | None = None
        if publisher.granule is not None:
            self._runs = RunReader(Counter(), publisher.options, NamesSeen())
            self._runs.change_granule(publisher.granule)

    def read(self, entry: Entry) -> Iterator[Happening]:
        if isinstance(entry, Note):
            yield from self._read_note(entry)
            return
        for event in decode_batch(entry.payload, self._addressee).events:
            yield self._read_event(entry, event)

    def _read_note(self, note: Note) -> Iterator[Happening]:
        kind, number, at, gap, blocks = note
        if not blocks:
            yield Happening(kind, number, at, gap=gap)
        by_place: dict[HolderKey, list[EngineHash]] = {}
        for place, engine_hash in blocks:
            by_place.setdefault(place, []).append(engine_hash)
        for place, hashes in by_place.items():
            yield Happening(kind, number, at, place.medium, place.group, place.owner, hashes, self._keys_of(hashes))

    def _read_event(self, batch: Batch, event: Event) -> Happening:
        number, at = batch.sequence_number, batch.at
        if isinstance(event, AllBlocksCleared):
            medium = None if event.medium is None else canonical_medium(event.medium, None)
            return Happening(Kind.CLEARED, number, at, medium)
        hashes = event.block_hashes
        medium, group, owner = holder_key(event)
        if isinstance(event, BlockStored):
            keys = self._stored_keys(event)
            return Happening(Kind.STORED, number, at, medium, group, owner, hashes, keys, event.block_size or None)
        keys = self._keys_of(hashes)
        if isinstance(event, RemovedEverywhere):
            return Happening(Kind.REMOVED, number, at, None, group, None, hashes, keys)
        return Happening(Kind.REMOVED, number, at, medium, group, owner, hashes, keys)

    # ------------------------------------------------------------------ what hashes mean

    def _keys_of(self, hashes: Sequence[EngineHash]) -> Sequence[int | None]:
        told = self._told
        keys: list[int | None] = [told.get(engine_hash) for engine_hash in hashes]
        if None in keys:
            unknown = [engine_hash for engine_hash, key in zip(hashes, keys, strict=True) if key is None]
            known = iter(self._publisher.residents.keys_of(unknown))
            keys = [next(known) if key is None else key for key in keys]
        return keys

    def _stored_keys(self, event: BlockStored) -> Sequence[int | None]:
        """A dense store that tells content is chained from its start; all others are known by their hashes or not."""
        keys = self._chained(event) if self._runs is not None and event.block_hashes else None
        if keys is None:
            return self._keys_of(event.block_hashes)
        self._told.update(zip(event.block_hashes, keys, strict=True))
        return keys

    def _chained(self, event: BlockStored) -> list[int] | None:
        assert self._runs is not None
        if isinstance(event, StandardStored):
            return event.content_keys if event.hash_tokens == self._runs.granule and event.content_keys else None
        is_dense = event.block_size > 0 and event.token_count == len(event.block_hashes) * event.block_size
        if not is_dense or not self._publisher.placing.defines_content(event):
            return None
        try:
            start = self._start(self._runs, event)
            if start is None:
                return None
            local_hashes = self._local_hashes(self._runs, event, is_root=start.key is None)
        except WireError:
            return None
        step = event.block_size // self._runs.granule
        return _chain(start.key, local_hashes)[step - 1 :: step]

    def _local_hashes(self, runs: RunReader, event: BlockStored, *, is_root: bool) -> U64:
        """Of every granule. Raises WireError."""
        if event.extra_keys or not isinstance(event.tokens, bytes) or event.block_size % runs.granule:
            return np.array(runs.read(event, at_root=is_root, counts=True).local_hashes, np.uint64)
        tokens, seed = np.frombuffer(event.tokens, np.uint32), runs.seed_of(event)
        count = len(tokens) // runs.granule
        found = np.empty(count, np.uint64)
        hash_granules(tokens, 0, count, runs.granule, np.uint64(seed), found, 0)  # type: ignore[arg-type]
        if is_root and event.cache_salt:
            first_seed = np.uint64(salted_seed(seed, event.cache_salt))
            hash_granules(tokens, 0, 1, runs.granule, first_seed, found, 0)  # type: ignore[arg-type]
        return found

    def _start(self, runs: RunReader, event: BlockStored) -> _Start | None:
        """Where its tokens start: at its parent, or at the end of the skipped context, which is walked."""
        has_context = event.skipped_tokens or event.skipped_parent_block_hash is not None
        if event.parent_block_hash is not None or not has_context:
            start = self._after(event.parent_block_hash, event)
            if start is not None or not has_context:
                return start
        before = self._after(event.skipped_parent_block_hash, event)
        if before is None:
            return None
        context = runs.read_context(event, at_root=before.key is None)
        keys = _chain(before.key, np.array(context, np.uint64))
        if keys and event.parent_block_hash is not None:
            self._told[event.parent_block_hash] = keys[-1]
        return _Start(keys[-1]) if keys else before

    def _after(self, parent: EngineHash | None, event: BlockStored) -> _Start | None:
        """After this block; None if that is not known."""
        if parent is None:
            return _Start(None)
        residents = self._publisher.residents
        if parent in self._told and not residents.variants:
            return _Start(self._told[parent])
        point = residents.resolve_in(parent, namespace_of(event))
        return None if point is None else _Start(point.key)


def _chain(parent_key: int | None, local_hashes: U64) -> list[int]:
    """As `chain_keys`."""
    keys, pair = np.empty(len(local_hashes), np.uint64), np.empty(2, np.uint64)
    key = np.uint64(parent_key or 0)
    chain(key, parent_key is not None, local_hashes, 0, len(keys), keys, 0, pair)  # type: ignore[arg-type]
    found: list[int] = keys.tolist()
    return found
