"""Live batches that were received and not applied yet, in order, within two bounds."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from indexer.wire.frames import timestamp_of

BATCH_BYTES = 200  # roughly what Python needs for a batch beside its payload


class NumberedBatch(NamedTuple):
    """One message of the stream, from the subscription or from a replay."""

    sequence_number: int
    fingerprint: int
    payload: bytes

    @property
    def sent_at(self) -> float | None:
        """The engine's clock; it may step, so it proves nothing."""
        return timestamp_of(self.payload)


class HeldBatches:
    """A queue. It may go beyond its byte bound by one burst; whoever fills it asks `room` first."""

    __slots__ = ("_batches", "_batches_max", "_bytes_max", "_popped", "held_bytes", "marks")

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._batches: deque[NumberedBatch] = deque()
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self.held_bytes = 0
        self.marks: deque[int] = deque()
        self._popped = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def room(self) -> int:
        """How many more batches may be held."""
        return 0 if self.held_bytes >= self._bytes_max else self._batches_max - len(self._batches)

    @property
    def first(self) -> NumberedBatch | None:
        return self._batches[0] if self._batches else None

    def first_few(self, batches_max: int, bytes_max: int) -> list[NumberedBatch]:
        """At least one, if there is any; more as far as both bounds allow."""
        few: list[NumberedBatch] = []
        for batch in islice(self._batches, batches_max):
            bytes_max -= len(batch.payload)
            if bytes_max < 0 and few:
                break
            few.append(batch)
        return few

    def nth(self, place: int) -> NumberedBatch | None:
        """The first is number 0."""
        return self._batches[place] if place < len(self._batches) else None

    def holds(self, sequence_number: int, fingerprint: int) -> bool:
        """Whether this very batch waits. Cost: per batch."""
        return any(b.sequence_number == sequence_number and b.fingerprint == fingerprint for b in self._batches)

    def drop_before(self, sequence_number: int, fingerprint: int) -> int:
        """Drop what stands before this batch, which waits; how many."""
        count = 0
        while (first := self.first) and (first.sequence_number, first.fingerprint) != (sequence_number, fingerprint):
            self.pop()
            count += 1
        return count

    def extend(self, batches: list[NumberedBatch]) -> None:
        self._batches.extend(batches)
        self.held_bytes += _size(batches)

    def mark(self) -> None:
        """A connection was made: what is held by now came through an earlier one."""
        self.marks.append(self._popped + len(self._batches))

    def takes_mark(self) -> bool:
        """Whether the queue has come to a mark, which is taken away."""
        is_there = bool(self.marks) and self.marks[0] <= self._popped
        if is_there:
            self.marks.popleft()
        return is_there

    def pop(self) -> NumberedBatch:
        batch = self._batches[0]
        self.pop_few([batch])
        return batch

    def pop_few(self, batches: list[NumberedBatch]) -> None:
        """These are the first."""
        for _ in batches:
            self._batches.popleft()
        self.held_bytes -= _size(batches)
        self._popped += len(batches)


def _size(batches: list[NumberedBatch]) -> int:
    return BATCH_BYTES * len(batches) + sum([len(batch.payload) for batch in batches])
