"""What happened to one publisher of late: its batches as they came, and what came by no batch.

Purpose: say later why a block is not held. At ingest it costs a reference to a payload that is there anyway; events are
decoded, and hashes turned into content keys, only when somebody asks (journal_reading.py).

Invariants: entries are in the order in which they took effect; `size_bytes` is at most `bytes_max` after each call; an
entry has a position that no other entry of the publisher ever has, and positions ascend by one.

If broken: explanations would name events that did not happen, or miss those that did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import chain, islice, pairwise
from typing import NamedTuple, TypeAlias

from indexer.index.state import EngineHash, HolderKey

ENTRY_BYTES = 200  # of an entry beside its payload
CHUNKS = 16  # so many a journal has: what is let go together is no more than that part of it
BLOCK_BYTES = 64  # of a block that a note names


class Kind(StrEnum):
    """What an event, or a note, did. A closed set; docs/api.md says what each means."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # by the engine
    CLEARED_BY_OPERATOR = "cleared_by_operator"
    RESTART = "restart"  # of the engine
    APPLIED_AGAIN = "applied_again"  # all was dropped, to be built anew from a replay
    GAP = "gap"  # batches are lost: what was held is unverified
    UNREADABLE = "unreadable"  # the same, of one batch
    UNVERIFIED_DROPPED = "unverified_dropped"  # what nobody proved after a gap
    EXPIRED = "expired"  # its lifetime is over (`options.no_removals`)
    EVICTED = "evicted"  # the same by number: newer blocks took its place
    RECOVERED = "recovered"  # the service started; what was before is in no journal


class Batch(NamedTuple):
    """A batch that was applied. `at`: when, in seconds since 1970; None = nobody said."""

    sequence_number: int
    at: float | None
    payload: bytes


class Note(NamedTuple):
    """What came by no batch. `sequence_number`: of the last batch before. `blocks`: those it was about; none: all, or
    see `kind`. `gap`: the missing numbers, both included."""

    kind: Kind
    sequence_number: int | None
    at: float | None
    gap: tuple[int, int] | None = None
    blocks: tuple[tuple[HolderKey, EngineHash], ...] = ()


Entry: TypeAlias = Batch | Note
_Kept: TypeAlias = tuple[int, int, bytes] | Note  # of a batch as it was given: sequence number, fingerprint, payload


class _Chunk:
    """Entries that are let go together. `times`: from which one on they are of when."""

    __slots__ = ("at", "entries", "size_bytes", "times")

    def __init__(self) -> None:
        self.entries: list[_Kept] = []
        self.times: list[tuple[int, float | None]] = [(0, None)]
        self.at: float | None = None  # of the newest
        self.size_bytes = 0

    def read(self) -> list[Entry]:
        starts = [*self.times, (len(self.entries), None)]
        return [
            entry if isinstance(entry, Note) else Batch(entry[0], at, entry[2])
            for (first, at), (end, _) in pairwise(starts)
            for entry in self.entries[first:end]
        ]

    def last(self) -> Entry:
        """The newest entry, without its payload."""
        entry = self.entries[-1]
        return entry if isinstance(entry, Note) else Batch(entry[0], self.at, b"")


class Journal:
    """Of one publisher. Cost: 0.3 to 0.6 us a batch; the payload's memory. `bytes_max` 0: nothing is kept."""

    __slots__ = ("_closed", "_closed_bytes", "_open", "bytes_max", "dropped", "dropped_last")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.dropped = 0  # entries, ever
        self.dropped_last: Entry | None = None  # without its payload
        self._closed: deque[_Chunk] = deque()
        self._closed_bytes = 0
        self._open = _Chunk()

    def __len__(self) -> int:
        return sum(len(chunk.entries) for chunk in self._chunks())

    @property
    def size_bytes(self) -> int:
        return self._closed_bytes + self._open.size_bytes

    @property
    def end(self) -> int:
        """The position after the newest entry."""
        return self.dropped + len(self)

    def entries(self, position: int) -> Iterator[Entry]:
        """Those from this position on, or from the oldest that is there."""
        skipped = max(0, position - self.dropped)
        return islice(chain.from_iterable(chunk.read() for chunk in self._chunks()), skipped, None)

    def newest(self, bytes_max: int) -> list[Entry]:
        """The newest entries, of so many bytes together, oldest first."""
        taken: list[Entry] = []
        for entry in chain.from_iterable(reversed(chunk.read()) for chunk in reversed(self._chunks())):
            bytes_max -= size_of(entry)
            if bytes_max < 0:
                break
            taken.append(entry)
        return taken[::-1]

    def add(self, batches: Sequence[tuple[int, int, bytes]], at: float | None) -> None:
        """These were applied: sequence number, fingerprint and payload of each."""
        if not self.bytes_max:
            return
        chunk, size = self._open, ENTRY_BYTES * len(batches)
        for batch in batches:
            size += len(batch[2])
        self._keep(chunk, batches, at, size)

    def note(self, note: Note) -> None:
        if self.bytes_max:
            self._keep(self._open, (note,), note.at, size_of(note))

    def trim(self) -> None:
        """Let the oldest go, some at once, as far as all are too many. Those that are too large go at once."""
        if self._open.size_bytes > self.bytes_max // CHUNKS:
            self._closed.append(self._open)
            self._closed_bytes += self._open.size_bytes
            self._open = _Chunk()
        while self.size_bytes > self.bytes_max:
            oldest = self._closed.popleft()
            self._closed_bytes -= oldest.size_bytes
            self.dropped += len(oldest.entries)
            self.dropped_last = oldest.last()

    def _chunks(self) -> list[_Chunk]:
        return [*self._closed, self._open]

    def _keep(self, chunk: _Chunk, entries: Sequence[_Kept], at: float | None, size_bytes: int) -> None:
        if at != chunk.at:
            chunk.at = at
            chunk.times.append((len(chunk.entries), at))
        chunk.entries.extend(entries)
        chunk.size_bytes += size_bytes
        if chunk.size_bytes > self.bytes_max // CHUNKS or self._closed_bytes + chunk.size_bytes > self.bytes_max:
            self.trim()


def size_of(entry: Entry) -> int:
    """In bytes."""
    return ENTRY_BYTES + (len(entry.payload) if isinstance(entry, Batch) else BLOCK_BYTES * len(entry.blocks))
