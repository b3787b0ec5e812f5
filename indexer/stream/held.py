"""Live batches that were received and not applied yet, in order, within two bounds."""

from __future__ import annotations

from collections import deque
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

    __slots__ = ("_batches", "_batches_max", "_bytes_max", "held_bytes")

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._batches: deque[NumberedBatch] = deque()
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def room(self) -> int:
        """How many more batches may be held."""
        return 0 if self.held_bytes >= self._bytes_max else self._batches_max - len(self._batches)

    @property
    def first(self) -> NumberedBatch | None:
        return self._batches[0] if self._batches else None

    def nth(self, place: int) -> NumberedBatch | None:
        """The first is number 0."""
        return self._batches[place] if place < len(self._batches) else None

    def holds(self, sequence_number: int, fingerprint: int) -> bool:
        """Whether this very batch waits. Cost: per batch."""
        return any(b.sequence_number == sequence_number and b.fingerprint == fingerprint for b in self._batches)

    def append(self, batch: NumberedBatch) -> None:
        self._batches.append(batch)
        self.held_bytes += len(batch.payload) + BATCH_BYTES

    def pop(self) -> NumberedBatch:
        batch = self._batches.popleft()
        self.held_bytes -= len(batch.payload) + BATCH_BYTES
        return batch
