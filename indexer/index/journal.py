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
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

from indexer.index.state import EngineHash, HolderKey

ENTRY_BYTES = 160  # of an entry beside its payload
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
_make_batch = partial(tuple.__new__, Batch)  # a third of the cost of calling the class


class Journal:
    """Of one publisher. Cost: 0.2 us a batch; the payload's memory. `bytes_max` 0: nothing is kept."""

    __slots__ = ("_entries", "bytes_max", "dropped", "dropped_last", "size_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self.dropped = 0  # entries, ever
        self.dropped_last: Entry | None = None  # without its payload
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def end(self) -> int:
        """The position after the newest entry."""
        return self.dropped + len(self._entries)

    def entries(self, position: int) -> Iterator[tuple[int, Entry]]:
        """Those from this position on, or from the oldest that is there."""
        first = max(0, position - self.dropped)
        return enumerate(islice(self._entries, first, None), self.dropped + first)

    def newest(self, bytes_max: int) -> list[Entry]:
        """The newest entries, of so many bytes together, oldest first."""
        taken: list[Entry] = []
        for entry in reversed(self._entries):
            bytes_max -= size_of(entry)
            if bytes_max < 0:
                break
            taken.append(entry)
        return taken[::-1]

    def add(self, batches: Sequence[tuple[int, int, bytes]], at: float | None) -> None:
        """These were applied: sequence number, fingerprint and payload of each."""
        if not self.bytes_max:
            return
        size = self.size_bytes
        for number, _, payload in batches:
            self._entries.append(_make_batch((number, at, payload)))
            size += ENTRY_BYTES + len(payload)
        self.size_bytes = size
        if size > self.bytes_max:
            self.trim()

    def note(self, note: Note) -> None:
        if self.bytes_max:
            self._entries.append(note)
            self.size_bytes += size_of(note)
            self.trim()

    def trim(self) -> None:
        """Let the oldest go, as far as all are too many. One that is too large by itself goes at once."""
        while self.size_bytes > self.bytes_max:
            oldest = self._entries.popleft()
            self.size_bytes -= size_of(oldest)
            self.dropped += 1
            self.dropped_last = oldest._replace(payload=b"") if isinstance(oldest, Batch) else oldest


def size_of(entry: Entry) -> int:
    """In bytes."""
    return ENTRY_BYTES + (len(entry.payload) if isinstance(entry, Batch) else BLOCK_BYTES * len(entry.blocks))
