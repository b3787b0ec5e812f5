"""A table of 64-bit keys and values on flat arrays: the Python face of the kernels.

Purpose: millions of entries at 16 bytes a slot. Grows by half (small ones double) at a load of 0.7, shrinks when
most of it is empty; both move a few slots with every change, so that none waits for all.

Invariants: values are neither 0 nor 2^64 - 1 (`fits`); no more than `meta[LIMIT]` entries, so that a probe ends.

If broken: entries would be lost or found twice, or a look-up would never end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.index.columns import U64
from indexer.index.kernels import (
    CAPACITY,
    CURSOR,
    FILL,
    LIMIT,
    META_FIELDS,
    MOVED_AT_ONCE,
    OLD_CAPACITY,
    OLD_LIVE,
    table_begin_moving,
    table_get,
    table_items,
    table_move,
    table_put,
    table_remove,
    table_remove_all,
    table_values,
)

I64: TypeAlias = npt.NDArray[np.int64]

SMALLEST = 32
LOAD_MAX = 0.7
SHRINKS_BELOW = 0.2
SMALL = 16_384  # slots: below, growing at once costs less than a millisecond, and doubling wastes little
GROWTH = 1.5
MAPPED = 65_536  # slots: from a megabyte on, arrays are memory of their own
MOVED_AT_REST = 16_384  # slots: half a millisecond
VALUE_MAX = (1 << 64) - 2
SLOT_BYTES = 16
MADV_POPULATE_WRITE = 23  # Linux 5.14
_NONE: U64 = np.zeros(2, np.uint64)


def fits(value: int) -> bool:
    """Whether a table can hold this value."""
    return 0 < value <= VALUE_MAX


def are_values(column: U64) -> npt.NDArray[np.bool_]:
    """Which of the numbers that lie in a table's arrays are values."""
    fit: npt.NDArray[np.bool_] = column - np.uint64(1) < np.uint64(VALUE_MAX)
    return fit


class _Pages:
    """Memory of a large table: fresh pages, which are made when they are touched. What the allocator has freed before
    would be cleared at once, a millisecond each megabyte."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap(-1, size_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        self._size_bytes = size_bytes
        self.made_bytes = 0
        self.array: U64 = np.frombuffer(self._map, np.uint64)

    def make(self, until_bytes: int) -> None:
        """Those up to there. Cost: 2.4 us a page where touching them one by one takes twice as much: once for being
        read, once for being written."""
        until_bytes = min(until_bytes, self._size_bytes) // PAGESIZE * PAGESIZE
        if until_bytes > self.made_bytes:
            with suppress(OSError):  # of a system that does not know how
                self._map.madvise(MADV_POPULATE_WRITE, self.made_bytes, until_bytes - self.made_bytes)
            self.made_bytes = until_bytes


class Part(NamedTuple):
    """Some places of a table's arrays."""

    keys: U64
    values: U64

    def entries(self) -> U64:
        """The keys that are some. Cost: 5 ns a place."""
        found: U64 = self.keys[are_values(self.values)]
        return found


class Table:
    """Cost: 16 bytes a slot, 23 to 34 bytes an entry; about 1 us a call, kernels far less."""

    __slots__ = ("_fields", "_pages", "meta", "old", "slots")

    def __init__(self) -> None:
        self.slots: U64
        self.old: U64
        self.meta: I64
        self._fields: memoryview  # `meta` again: four times as fast to look at one by one
        self._pages: _Pages | None  # of `slots`, if they are large
        self.clear()

    def __len__(self) -> int:
        return self._fields[FILL] + self._fields[OLD_LIVE]

    def __contains__(self, key: int) -> bool:
        return bool(self.get(key))

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.old.nbytes

    @property
    def arrays(self) -> tuple[U64, U64, I64]:
        """What kernels take. Others after `make_room`, `tidy` and `clear`."""
        return self.slots, self.old, self.meta

    def get(self, key: int) -> int:
        """The value, or 0."""
        return int(table_get(self.slots, self.old, self.meta, np.uint64(key)))

    def put(self, key: int, value: int) -> None:
        """Insert or replace."""
        while not table_put(*self.arrays, np.uint64(key), np.uint64(value)):
            self.make_room(1)
        self.tidy()

    def remove(self, key: int) -> int:
        """The value that was taken out, or 0."""
        value = int(table_remove(*self.arrays, np.uint64(key)))
        self.tidy()
        return value

    def remove_all(self, keys: U64) -> None:
        """Take these out, as far as they are there. Cost: 50 ns a key."""
        table_remove_all(*self.arrays, keys)
        self.tidy()

    def values(self, keys: U64) -> U64:
        """The value of each key, 0 where it is not there. Cost: 10 ns a key."""
        values = np.empty(len(keys), np.uint64)
        table_values(*self.arrays, keys, values)
        return values

    def items(self, count_max: int = VALUE_MAX) -> tuple[U64, U64]:
        """Keys and their values, in no order: all, or so many. Cost: 5 ns a slot."""
        count = min(len(self), count_max)
        keys, values = np.empty(count, np.uint64), np.empty(count, np.uint64)
        table_items(*self.arrays, keys, values)
        return keys, values

    def columns(self) -> Iterator[tuple[U64, U64]]:
        """Keys and values as they lie in the arrays, with others between them that are none (see `are_values`)."""
        for arrays in (self.slots, self.old[2 * self.meta[CURSOR] : 2 * self.meta[OLD_CAPACITY]]):
            yield arrays[::2], arrays[1::2]

    def parts(self, places: int) -> list[Part]:
        """The same cut into pieces of so many places, to be looked at in the order of the list while the table changes:
        what is there all the time is seen, but for a few that are moved round the end of the arrays."""
        return [
            Part(keys[first : first + places], values[first : first + places])
            for keys, values in self.columns()
            for first in reversed(range(0, len(keys), places))
        ]

    def __iter__(self) -> Iterator[int]:
        return iter(self.items()[0].tolist())

    def clear(self) -> None:
        self.meta = np.zeros(META_FIELDS, np.int64)
        self._fields = self.meta.data
        self.slots = self.old = _NONE
        self._use(SMALLEST)

    def make_room(self, count: int) -> None:
        """So many more entries will fit. Cost: as much as is left to move of the last time, usually nothing."""
        wanted = len(self) + count
        if wanted <= self.meta[LIMIT]:
            return
        self._finish_moving()
        capacity = int(self.meta[CAPACITY])
        grown = 2 * capacity if capacity < SMALL else int(capacity * GROWTH)
        self._use(max(grown, int(wanted / LOAD_MAX) + SMALLEST))
        if capacity < SMALL:
            self._finish_moving()

    def expect(self, changes: int) -> None:
        """Before so many changes by a kernel: make the memory to which they will move entries."""
        fields = self._fields
        if fields[OLD_CAPACITY] and self._pages is not None:
            moved = fields[CURSOR] + changes * MOVED_AT_ONCE
            self._pages.make(moved * fields[CAPACITY] // fields[OLD_CAPACITY] * SLOT_BYTES)

    def rest(self) -> bool:
        """Now and then, while nothing else happens: move on, so that the old arrays can go, or shrink. False: there is
        nothing more to move."""
        if self._fields[OLD_CAPACITY]:
            self.expect(MOVED_AT_REST // MOVED_AT_ONCE)
            table_move(*self.arrays, MOVED_AT_REST)
        self.tidy()
        return self._fields[OLD_CAPACITY] > 0

    def let_go(self) -> None:
        """After changes by kernels: of arrays that were moved out of."""
        if self.old is not _NONE and not self._fields[OLD_CAPACITY]:
            self.old = _NONE

    def tidy(self) -> None:
        """After changes: `let_go`, and shrink if most of the table is empty."""
        self.let_go()
        fields = self._fields
        if fields[CAPACITY] > SMALL and not fields[OLD_CAPACITY] and fields[FILL] < fields[CAPACITY] * SHRINKS_BELOW:
            added_meanwhile = fields[CAPACITY] // MOVED_AT_ONCE
            capacity = int((2 * fields[FILL] + added_meanwhile) / LOAD_MAX) + SMALLEST
            if capacity < fields[CAPACITY]:
                self._use(capacity)

    def settle(self) -> None:
        """Let nothing be left in the old arrays."""
        if self.meta[OLD_CAPACITY]:
            self._finish_moving()

    def _use(self, capacity: int) -> None:
        """New arrays of so many slots; the entries follow bit by bit."""
        meta = self.meta
        pages = _Pages(capacity * SLOT_BYTES) if capacity >= MAPPED else None
        self.old, self.slots = self.slots, np.zeros(2 * capacity, np.uint64) if pages is None else pages.array
        self._pages = pages
        meta[OLD_CAPACITY], meta[OLD_LIVE], meta[CURSOR] = meta[CAPACITY], meta[FILL], 0
        meta[CAPACITY], meta[FILL], meta[LIMIT] = capacity, 0, int(capacity * LOAD_MAX)
        if not meta[OLD_LIVE]:
            meta[OLD_CAPACITY], self.old = 0, _NONE
        table_begin_moving(self.old, meta)

    def _finish_moving(self) -> None:
        table_move(*self.arrays, int(self.meta[OLD_CAPACITY]))
        self.old = _NONE
