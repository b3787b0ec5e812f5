"""A table of 64-bit keys and values on flat arrays: the Python face of the kernels.

Purpose: millions of entries at 16 bytes a slot. Grows by half (small ones double) at a load of 0.7, shrinks when
most of it is empty. A small one moves into other memory; a large one stays where it is, gets more pages or gives some
back, and moves a few slots with every change, so that none waits for all.

Invariants: no value is 0 (`fits`); no more than `meta[LIMIT]` entries, and room for as many behind the last home, so
that a probe ends.

If broken: entries would be lost or found twice, or a look-up would never end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.index.columns import U64
from indexer.index.kernels import (
    CAPACITY,
    CURSOR,
    FILL,
    IS_BLOCKED,
    LIMIT,
    META_FIELDS,
    MOVED_AT_ONCE,
    OLD_CAPACITY,
    PLACES,
    table_finish,
    table_get,
    table_items,
    table_move,
    table_part,
    table_put,
    table_refill,
    table_remove,
    table_remove_all,
    table_values,
)

I64: TypeAlias = npt.NDArray[np.int64]

SMALLEST = 32
LOAD_MAX = 0.7
SHRINKS_BELOW = 0.2
MAPPED = 1_024  # slots: from here on, arrays are pages of their own
SMALL = 16_384  # slots: below, growing at once costs less than a millisecond, and doubling wastes little
GROWTH = 1.5
MOVED_WITH_PROBES = MOVED_AT_ONCE * 3 // 2  # per change, as whole probes are moved
MADE_AT_ONCE = 65_536  # slots: half a millisecond
MOVED_AT_REST = 16_384  # old homes: half a millisecond
VALUE_MAX = (1 << 64) - 1
SLOT_BYTES = 16
MADV_POPULATE_WRITE = 23  # Linux 5.14


def fits(value: int) -> bool:
    """Whether a table can hold this value."""
    return 0 < value <= VALUE_MAX


class _Memory:
    """Zeros that a table lies in. `array`: words. Large ones are pages, made when they are first touched: what nobody
    uses at the end costs nothing, and what the allocator has freed before would be cleared at once, a millisecond each
    megabyte."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._map: mmap | None = None
        if slots >= MAPPED:
            with suppress(OSError):  # more maps than a process may have
                self._map = mmap(-1, slots * SLOT_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        self.array: U64 = np.zeros(2 * slots, np.uint64) if self._map is None else np.frombuffer(self._map, np.uint64)

    def resized(self, slots: int) -> _Memory:
        """The same with more slots or less. Cost: some microseconds; a copy, if it is no pages, or if somebody looks at
        them: those stay where they are."""
        if self._map is not None and self._resize(self._map, slots):
            return self
        other = _Memory(slots)
        kept = 2 * min(slots, self.slots)
        other.array[:kept] = self.array[:kept]
        return other

    def _resize(self, pages: mmap, slots: int) -> bool:
        self.array = _NONE
        try:
            pages.resize(slots * SLOT_BYTES)
        except (BufferError, OSError, SystemError):
            return False
        else:
            self.slots = slots
            return True
        finally:
            self.array = np.frombuffer(pages, np.uint64)

    def make(self, first: int, end: int) -> None:
        """The pages of these slots. Cost: 2.4 us a page where touching them one by one takes twice as much: once for
        being read, once for being written."""
        start, stop = (slot * SLOT_BYTES // PAGESIZE * PAGESIZE for slot in (first, end))
        if self._map is not None and stop > start:
            with suppress(OSError):  # of a system that does not know how
                self._map.madvise(MADV_POPULATE_WRITE, start, stop - start)


_NONE: U64 = np.zeros(0, np.uint64)


class Table:
    """Cost: 16 bytes a slot, 23 to 34 bytes an entry; about 1 us a call, kernels far less."""

    __slots__ = ("_fields", "_made_for", "_made_from", "_memory", "meta", "slots")

    def __init__(self) -> None:
        self.slots: U64
        self.meta: I64
        self._fields: memoryview  # `meta` again: four times as fast to look at one by one
        self._memory: _Memory
        self._made_for: int  # the capacity for which it has room
        self._made_from: int  # the slot behind which all pages are made, while it grows
        self.clear()

    def __len__(self) -> int:
        return self._fields[FILL]

    def __contains__(self, key: int) -> bool:
        return bool(self.get(key))

    @property
    def nbytes(self) -> int:
        """Of memory that is used."""
        return SLOT_BYTES * max(self._fields[CAPACITY], self._fields[OLD_CAPACITY])

    @property
    def arrays(self) -> tuple[U64, I64]:
        """What kernels take. Others after `make_room`, `let_go`, `tidy` and `clear`; whoever keeps these until then has
        the table copied."""
        return self.slots, self.meta

    def get(self, key: int) -> int:
        """The value, or 0."""
        return int(table_get(*self.arrays, np.uint64(key)))

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

    def __iter__(self) -> Iterator[int]:
        return iter(self.items()[0].tolist())

    def clear(self) -> None:
        self._begin(SMALLEST)

    def make_room(self, count: int) -> None:
        """So many more entries will fit. Cost: as much as is left to move of the last time, usually nothing."""
        wanted = len(self) + count
        if wanted <= self._fields[LIMIT]:
            return
        self._finish_moving()
        capacity = self._fields[CAPACITY]
        grown = 2 * capacity if capacity < SMALL else int(capacity * GROWTH)
        self._use(max(grown, int(wanted / LOAD_MAX) + SMALLEST))

    def expect(self, changes: int) -> None:
        """Before so many changes by a kernel: make the memory to which they will move entries."""
        fields = self._fields
        old_capacity, capacity = fields[OLD_CAPACITY], fields[CAPACITY]
        if old_capacity and self._made_from > old_capacity:
            moved_from = fields[CURSOR] - changes * MOVED_WITH_PROBES
            first = max(moved_from * capacity // old_capacity, old_capacity)
            if first < self._made_from:
                self._memory.make(first, self._made_from)
                self._made_from = first

    def rest(self) -> bool:
        """Now and then, while nothing else happens: move on, so that memory can go, or shrink. False: there is nothing
        more to move."""
        if self._fields[OLD_CAPACITY]:
            self.expect(MOVED_AT_REST // MOVED_AT_ONCE)
            table_move(*self.arrays, MOVED_AT_REST)
        self.tidy()
        return self._fields[OLD_CAPACITY] > 0

    def let_go(self) -> None:
        """After changes by kernels: move what is left of a growth, mostly the last few entries, and give back what was
        shrunk out of."""
        fields = self._fields
        if fields[IS_BLOCKED]:
            self._finish_moving()
        elif not fields[OLD_CAPACITY] and self._made_for > fields[CAPACITY]:
            self._resize(fields[CAPACITY])

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
        """Let nothing be left to move."""
        if self._fields[OLD_CAPACITY]:
            self._finish_moving()

    def walk(self) -> Walk:
        """Through all entries."""
        return Walk(self)

    # ------------------------------------------------------------------ capacity

    def _begin(self, capacity: int) -> None:
        """Other memory, without entries."""
        self._memory, self._made_for = _Memory(_slots_of(capacity)), capacity
        if capacity <= MADE_AT_ONCE:
            self._memory.make(0, capacity)
        self._made_from = 0
        self.slots = self._memory.array
        self.meta = np.zeros(META_FIELDS, np.int64)
        self._fields = self.meta.data
        self.meta[CAPACITY], self.meta[LIMIT] = capacity, _limit_of(capacity)

    def _use(self, capacity: int) -> None:
        """Another capacity; the entries of a large table follow bit by bit."""
        meta = self.meta
        if meta[CAPACITY] < SMALL or not meta[FILL]:
            before = self.arrays
            self._begin(capacity)
            table_refill(*before, *self.arrays)
            return
        meta[OLD_CAPACITY], meta[CURSOR] = meta[CAPACITY], 0
        meta[CAPACITY], meta[LIMIT] = capacity, _limit_of(capacity)
        if capacity > meta[OLD_CAPACITY]:
            meta[CURSOR] = meta[OLD_CAPACITY]
            self._resize(capacity)
            self._made_from = capacity

    def _finish_moving(self) -> None:
        if self._fields[OLD_CAPACITY]:
            self.expect(self._fields[OLD_CAPACITY])
            table_finish(*self.arrays, np.empty(2 * len(self), np.uint64))
        self.let_go()

    def _resize(self, capacity: int) -> None:
        self.slots = _NONE
        self._memory, self._made_for = self._memory.resized(_slots_of(capacity)), capacity
        self.slots = self._memory.array


def _limit_of(capacity: int) -> int:
    return int(capacity * LOAD_MAX)


def _slots_of(capacity: int) -> int:
    """With room behind the last home, should all entries belong there, and for an empty slot behind them."""
    return capacity + _limit_of(capacity) + 1


class Walk:
    """Goes through a table bit by bit. What is there all the time is seen, once or more, whatever happens meanwhile."""

    __slots__ = ("_place", "_table")

    def __init__(self, table: Table) -> None:
        self._table = table
        self._place = 0  # in the order of keys, which is the same at every capacity

    def __bool__(self) -> bool:
        """Whether there is more to see."""
        return self._place < PLACES

    def entries(self, slots: int) -> tuple[U64, U64]:
        """The next keys and their values: those in so many slots, and a few more. Cost: 5 ns a slot."""
        first, end, after = table_part(*self._table.arrays, np.uint64(self._place), slots)
        self._place = int(after)
        keys, values = (self._table.slots[2 * first + i : 2 * end : 2] for i in range(2))
        are_entries = values != 0
        return keys[are_entries], values[are_entries]


def compile_kernels() -> None:
    """Those of large tables."""
    table = Table()
    table.put(1, 1)
    table.make_room(SMALL)
    table.make_room(2 * SMALL)
    table.rest()
    table.settle()
    table.walk().entries(1)
