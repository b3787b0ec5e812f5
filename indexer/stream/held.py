"""Live batches that were received and not applied yet, in order, within two bounds."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

BATCH_BYTES = 200  # roughly what Python needs for a batch beside its payload


class LiveBatch(NamedTuple):
    sequence_number: int
    fingerprint: int
    payload: bytes


class HeldBatches:
    """A queue. It may go beyond its byte bound by one burst; whoever fills it asks `room` first."""

    __slots__ = ("_batches", "_batches_max", "_bytes_max", "held_bytes")

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._batches: deque[LiveBatch] = deque()
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
    def first(self) -> LiveBatch | None:
        return self._batches[0] if self._batches else None

    def first_few(self, batches_max: int, bytes_max: int) -> list[LiveBatch]:
        """At least one, if there is any; more as far as both bounds allow."""
        few: list[LiveBatch] = []
        for batch in islice(self._batches, batches_max):
            bytes_max -= len(batch.payload)
            if bytes_max < 0 and few:
                break
            few.append(batch)
        return few

    def append(self, batch: LiveBatch) -> None:
        self._batches.append(batch)
        self.held_bytes += len(batch.payload) + BATCH_BYTES

    def pop(self) -> LiveBatch:
        batch = self._batches.popleft()
        self.held_bytes -= len(batch.payload) + BATCH_BYTES
        return batch
