"""Payloads of simple events as columns: the fast way past `decode.py`, with the same meaning.

What events of one shape have in common is decoded once, by `decode_event`, from the first of them; so every rule about
those fields has one home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.wire.batch_kernels import (
    EVENT_END,
    EVENT_START,
    NEW_SHAPE,
    OUTCOME,
    RESULT_FIELDS,
    SHAPE_BYTES_MAX,
    SHAPE_LENGTH,
    SHAPES_MAX,
    SHAPES_SEEN,
    read_payloads,
)
from indexer.wire.decode import EventBatch, decode_batch, decode_event
from indexer.wire.errors import WireError
from indexer.wire.events import Addressee, BlockRemoved, BlockStored

Array: TypeAlias = npt.NDArray[Any]

_float_at = Struct(">d").unpack_from
_SMALLEST = 4_096
ALIGNMENT = 64
EVENT_BYTES_MIN = len("BlockStored")  # without its fields
PAYLOAD_BYTES_MAX = 8 << 20  # of larger ones the buffers would be too; no engine sends any
TIME_OFFSET = 2  # after the array's header and the float's
SHORT_BATCH = 0x92  # without rank
NIL = 0xC0
TOGETHER_MAX = 64  # payloads
_NO_BAD_EVENTS: Counter[str] = Counter()
ALL_SHAPES = (1 << SHAPES_MAX) - 1


@dataclass(slots=True)
class BatchColumns:
    """The events of one payload or of several, n of them, good until the next is read.

    kinds: u8[n], STORED or REMOVED. shape_ids: i64[n]. parents: u64[n], where `has_parent`. hash_ends, token_ends:
    i64[n], where the part of each event ends in `hashes` (u64) and `tokens` (u32). event_starts, event_ends: i64[n],
    where it is in `data`. batch_ends: i64[batches], where the events of each payload end. The arrays are longer than
    that. `shapes_seen`: bit k = some event has shape k; `shapes[k]` is an event of it.
    """

    shapes: Sequence[BlockStored | BlockRemoved]
    batch_ends: Array
    hashes: Array
    tokens: Array
    kinds: Array
    shape_ids: Array
    parents: Array
    has_parent: Array
    hash_ends: Array
    token_ends: Array
    event_starts: Array
    event_ends: Array
    data: bytes = b""
    batches: int = 0
    count: int = 0
    hash_count: int = 0
    token_count: int = 0
    shapes_seen: int = 0

    def event_bytes(self, event: int) -> bytes:
        """The msgpack of one event."""
        return self.data[int(self.event_starts[event]) : int(self.event_ends[event])]

    def batch_of(self, event: int) -> int:
        """The number of the payload that has this event."""
        return int(np.searchsorted(self.batch_ends[: self.batches], event, side="right"))


class PayloadReader:
    """Reads payloads of simple events into its own buffers. Shapes are the same for all publishers.

    `shapes[k]`: an event of shape k, without hashes and tokens. Cost: 0.1 us a block of 16 tokens, 5 us a call.
    """

    def __init__(self) -> None:
        self.shapes: list[BlockStored | BlockRemoved] = []
        self._shape_bytes = np.zeros((SHAPES_MAX, SHAPE_BYTES_MAX), np.uint8)
        self._shape_lengths = np.zeros(SHAPES_MAX, np.int64)
        self._shape = np.zeros(SHAPE_BYTES_MAX, np.uint8)
        self._result = np.zeros(RESULT_FIELDS, np.int64)
        self._payload_ends = np.zeros(TOGETHER_MAX, np.int64)
        self._batch_ends = np.zeros(TOGETHER_MAX, np.int64)
        self._buffers: tuple[Array, ...]
        self._make_buffers(_SMALLEST)

    def read(self, *payloads: bytes) -> BatchColumns | None:
        """The first of these payloads, at most TOGETHER_MAX, as far as they are simple.

        None: not all of the first one is, or it is not even sound; `decode_batch` will tell.
        """
        data = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        if len(data) > PAYLOAD_BYTES_MAX:
            return None
        if len(data) > self._size:
            self._make_buffers(min(max(len(data), 2 * self._size), PAYLOAD_BYTES_MAX))
        ends = self._payload_ends[: len(payloads)]
        ends[:] = list(accumulate(map(len, payloads)))
        began_again = False
        while True:
            batches = self._run(data, ends)
            if self._result[OUTCOME] != NEW_SHAPE:
                break
            if len(self.shapes) == SHAPES_MAX:
                if began_again:
                    break  # these payloads alone have more
                began_again = True
                self._forget_shapes()
            elif not self._learn_shape(data):
                break
        return self._told(data, batches) if batches else None

    def _run(self, data: bytes, payload_ends: Array) -> int:
        batches: int = read_payloads(
            np.frombuffer(data, np.uint8),
            payload_ends,
            self._batch_ends,
            self._shape_bytes,
            self._shape_lengths,
            len(self.shapes),
            self._shape,
            self._result,
            *self._buffers,
        )
        return batches

    def _told(self, data: bytes, batches: int) -> BatchColumns:
        columns = self._columns
        columns.data, columns.batches, columns.count = data, batches, int(self._batch_ends[batches - 1])
        last = columns.count - 1
        columns.hash_count, columns.token_count = int(columns.hash_ends[last]), int(columns.token_ends[last])
        columns.shapes_seen = int(self._result[SHAPES_SEEN]) & ALL_SHAPES
        return columns

    def _learn_shape(self, data: bytes) -> bool:
        """False: this one is refused."""
        try:
            event = decode_event(data[int(self._result[EVENT_START]) : int(self._result[EVENT_END])])
        except WireError:
            return False
        if isinstance(event, BlockStored):
            event.block_hashes, event.parent_block_hash, event.tokens, event.token_count = [], None, b"", 0
        elif isinstance(event, BlockRemoved):
            event.block_hashes = []
        else:
            return False
        length = int(self._result[SHAPE_LENGTH])
        self._shape_bytes[len(self.shapes), :length] = self._shape[:length]
        self._shape_lengths[len(self.shapes)] = length
        self.shapes.append(event)
        return True

    def _forget_shapes(self) -> None:
        """Whoever keeps what shapes mean knows by their list that they are others now."""
        self.shapes = self._columns.shapes = []

    def _make_buffers(self, size: int) -> None:
        """A hash or a token takes a byte at least, an event its name: a payload has no more of them."""
        self._size = size
        events = size // EVENT_BYTES_MIN + 1
        elements: list[tuple[Any, int]] = [(np.uint64, size), (np.uint32, size)]
        kinds: list[Any] = [np.uint8, np.int64, np.uint64, np.bool_, *[np.int64] * 4]
        self._buffers = _untouched(*elements, *((kind, events) for kind in kinds))
        self._columns = BatchColumns(self.shapes, self._batch_ends, *self._buffers)  # type: ignore[arg-type]


def _untouched(*arrays: tuple[Any, int]) -> tuple[Array, ...]:
    """Arrays of these kinds and lengths, of which only what is written to takes memory, and that is little: payloads
    are mostly tokens, or mostly hashes. What the allocator has used for something else would be there as a whole."""
    ends = list(accumulate(-(-np.dtype(kind).itemsize * count // ALIGNMENT) * ALIGNMENT for kind, count in arrays))
    memory = mmap(-1, ends[-1], flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return tuple(
        np.frombuffer(memory, kind, count, start) for (kind, count), start in zip(arrays, [0, *ends], strict=False)
    )


def read_batch(payload: bytes, reader: PayloadReader, addressee: Addressee | None = None) -> EventBatch:
    """The batch as columns, if all of it is simple; else as `decode_batch` makes it. Raises WireError as that does."""
    columns = reader.read(payload)
    if columns is None:
        return decode_batch(payload, addressee)
    (time,) = _float_at(payload, TIME_OFFSET)
    time = time if isfinite(time) else 0.0
    return EventBatch(time, [], rank_of(payload), payload, _NO_BAD_EVENTS, columns)


def rank_of(payload: bytes) -> int | None:
    """The data-parallel rank of a batch that was read as columns."""
    return None if payload[0] == SHORT_BATCH or payload[-1] == NIL else payload[-1]
