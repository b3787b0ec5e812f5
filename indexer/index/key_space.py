"""Content key -> the holders that have it, for one scope and granule.

Purpose: one look-up per granule answers for every publisher at once. A holder is a small number, its slot; a set of
holders is a bit mask, interned under a small id, since few distinct sets exist. The table's value packs where the
prefix ends and its set: `end_granules << 32 | set_id`. Adding or removing a holder is a step from set id to set id,
made once and looked up by the kernels from then on.

A holder that is cleared gives its slot up: the slot is retired, its bit means nothing in any mask, and it is taken out
of the sets bit by bit (`sweep`; see retired.py).

Invariants: a key without holders has no entry, unless a retired slot has it; `uses[id]` is the number of entries with
that set; a slot that is free is in no set in use.

If broken: a publisher would be credited with another's blocks, or keep what it lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from indexer.index.columns import U64
from indexer.index.kernels import (
    ADDING,
    DONE,
    SPACE_FULL,
    STEP_MISSING,
    space_add,
    space_remove,
    space_renumber,
)
from indexer.index.retired import RetiredSlot
from indexer.index.table import I64, Table

SET_BITS = 32
WORD_BITS = 64
SET_MASK = (1 << SET_BITS) - 1
UNUSED_SETS_MAX = 4096
EMPTY_SET = 0
RETIRED_MAX = 256  # each is a bit in every mask; at the bound the oldest are swept in one go
PLACES_AT_ONCE = 256
STEP_WORK = 32  # a step takes as long as so many places
SWEEP_WORK = 4_096  # a millisecond
_SLOT_SHIFT = 33
_ADDING = int(ADDING)


class KeySpace:
    """Cost: 16 bytes a slot of the table; 0.1 us per key in a run, some microseconds per call."""

    __slots__ = (
        "_check_at",
        "_ids",
        "granule",
        "known",
        "mask_words",
        "masks",
        "needs_whole_walk",
        "retired",
        "slots",
        "steps",
        "steps_made",
        "sweeps",
        "table",
        "uses",
        "words",
    )

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.table = Table()
        self.steps = Table()
        self.masks: list[int] = [0]
        self.words = 1  # of a mask
        self.mask_words = np.zeros(64, np.uint64)  # the masks again, one after the other, for kernels
        self.uses = np.zeros(64, np.int64)
        self.steps_made = 0
        self.slots: list[object | None] = []
        self.retired = 0  # the slots of `sweeps`
        self.sweeps: deque[RetiredSlot] = deque()
        self._ids: dict[int, int] = {0: EMPTY_SET}
        self._check_at = UNUSED_SETS_MAX
        # once some publisher's hits may end behind a granule that nobody has, or what it has lies under other keys
        self.needs_whole_walk = False
        # what queries found out about sets of slots, until a slot is given or freed or a publisher changes its kind
        self.known: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, key: int) -> bool:
        return key in self.table

    def allocate(self, holder: object) -> int:
        """A slot for a new holder: the lowest free one."""
        self.known.clear()
        for slot, taken in enumerate(self.slots):
            if taken is None:
                self.slots[slot] = holder
                return slot
        self.slots.append(holder)
        if len(self.slots) > WORD_BITS * self.words:
            self.words *= 2
            self._write_masks()
        return len(self.slots) - 1

    def release(self, slot: int) -> None:
        """Free a slot whose holder has no keys any more."""
        self.known.clear()
        self.slots[slot] = None

    def retire(self, retired: RetiredSlot) -> None:
        """Its holder has no keys any more. Cost: a slice of a sweep, unless RETIRED_MAX are not swept yet."""
        self.known.clear()
        self.slots[retired.slot] = retired
        self.retired |= 1 << retired.slot
        self.sweeps.append(retired)
        self.sweep(SWEEP_WORK)
        while len(self.sweeps) > RETIRED_MAX:
            self.sweep(SWEEP_WORK)

    def sweep(self, work: int) -> None:
        """Take retired slots out of sets, the oldest first. Cost: 0.1 to 0.25 us for each of `work`, which counts
        places of tables, and steps that have to be made."""
        while self.sweeps and work > 0:
            steps_made = self.steps_made
            work -= self._sweep_some(self.sweeps[0]) + STEP_WORK * (self.steps_made - steps_made)

    def _sweep_some(self, retired: RetiredSlot) -> int:
        """How many places that were."""
        if retired.is_swept:
            self.sweeps.popleft()
            self.retired ^= 1 << retired.slot
            self.release(retired.slot)
            return 0
        keys = retired.next_keys(PLACES_AT_ONCE)
        self._change(space_remove, retired.slot, 0, 0, keys, np.empty(len(keys), np.bool_))
        return PLACES_AT_ONCE

    @property
    def held_keys(self) -> int:
        """Keys that holders have. Cost: while slots are swept, 0.1 us a set."""
        if not self.retired:
            return len(self.table)
        return sum(uses for mask, uses in zip(self.masks, self.uses.tolist(), strict=False) if mask & ~self.retired)

    def add(self, slot: int, key: int, end_granules: int) -> bool:
        """The holder has this key from now on. False if it had it already."""
        return not self.add_run(slot, np.array([key], np.uint64), np.array([end_granules], np.int64))

    def add_run(self, slot: int, keys: U64, ends: npt.NDArray[np.int64]) -> list[int]:
        """The holder has these keys from now on. Returns those that it had already. `ends`: in granules."""
        had = np.zeros(len(keys), np.bool_)
        self._change(space_add, slot, _ADDING, len(keys), keys, ends, had)
        return keys[had].tolist() if np.count_nonzero(had) else []

    def remove(self, slot: int, key: int) -> None:
        """The holder has this key no more; it did."""
        self.remove_run(slot, np.array([key], np.uint64))

    def remove_run(self, slot: int, keys: U64) -> None:
        """The holder has these keys no more; it did."""
        had = np.empty(len(keys), np.bool_)
        self._change(space_remove, slot, 0, 0, keys, had)
        assert had.all(), "a holder gives up only what it has"

    def look_up(self, keys: U64) -> npt.NDArray[np.uint32]:
        """The set id of each key, 0 for a key that nobody has; `masks` has the holders. Cost: 10 ns a key."""
        return self.table.values(keys).astype(np.uint32)

    def ends_of(self, keys: U64) -> U64:
        """Where the prefix of each key ends, in granules; somebody holds them."""
        return self.table.values(keys) >> np.uint64(SET_BITS)

    def end_granules(self, key: int) -> int | None:
        """Where the prefix of this key ends, if anybody holds it."""
        return self.table.get(key) >> SET_BITS or None

    def end_of(self, key: int) -> int:
        """The same for a key that somebody holds."""
        return self.table.get(key) >> SET_BITS

    def holders(self, key: int) -> Iterator[object]:
        """The holders of this key, as given to `allocate`."""
        mask = self.masks[self.table.get(key) & SET_MASK] & ~self.retired
        return (holder for slot, holder in enumerate(self.slots) if mask >> slot & 1 and holder is not None)

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """(key, end in granules, holders as a mask) of each, in no order."""
        keys, values = self.table.items()
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            yield key, value >> SET_BITS, self.masks[value & SET_MASK]

    @property
    def arrays(self) -> tuple[U64, I64, U64, I64, I64]:
        """What kernels take: the table, the steps, how often each set is used."""
        return *self.table.arrays, self.steps.slots, self.steps.meta, self.uses

    def make_step(self, slot: int, direction: int, before: int) -> None:
        """Make the step from this set that a kernel asked for, or renumber all sets: then it will ask again."""
        if len(self.masks) >= self._check_at and self._forget_unused():
            return
        self.steps_made += 1
        mask = self.masks[before]
        mask = mask | 1 << slot if direction else mask & ~(1 << slot)
        set_id = self._ids.get(mask)
        if set_id is None:
            set_id = self._ids[mask] = len(self.masks)
            self.masks.append(mask)
            if set_id >= len(self.uses):
                self.uses = np.concatenate((self.uses, np.zeros_like(self.uses)))
                self.mask_words = np.concatenate((self.mask_words, np.zeros_like(self.mask_words)))
            self.mask_words[set_id * self.words : (set_id + 1) * self.words] = self._words_of(mask)
        self.steps.put(slot << _SLOT_SHIFT | direction | before, set_id + 1)
        self.steps.settle()

    def _words_of(self, *masks: int) -> U64:
        return np.frombuffer(b"".join(mask.to_bytes(8 * self.words, "little") for mask in masks), "<u8")

    def _write_masks(self) -> None:
        """All anew. Cost: 0.2 us a set."""
        self.mask_words = np.zeros(len(self.uses) * self.words, np.uint64)
        self.mask_words[: len(self.masks) * self.words] = self._words_of(*self.masks)

    def _change(
        self, change: Callable[..., int], slot: int, direction: int, added: int, keys: U64, *columns: Any
    ) -> None:
        """Run a kernel over the keys, and give it what it asks for."""
        progress = np.zeros(2, np.int64)
        while (status := self._run(change, slot, keys, columns, progress)) != DONE:
            if status == SPACE_FULL:
                self.table.make_room(added - int(progress[0]))
            else:
                assert status == STEP_MISSING
                self.make_step(slot, direction, int(progress[1]))
        self.table.tidy()

    def _run(
        self, change: Callable[..., int], slot: int, keys: U64, columns: Sequence[Any], progress: npt.NDArray[np.int64]
    ) -> int:
        return change(*self.arrays, slot, keys, *columns, progress)

    def _forget_unused(self) -> bool:
        """Renumber the sets in use, if many are not. Cost: one pass over the table, after as many fell out of use."""
        count = len(self.masks)
        unused = count - 1 - int(np.count_nonzero(self.uses[1:count]))
        bound = UNUSED_SETS_MAX + len(self.table) // 8
        if unused <= bound:
            self._check_at = count + max(UNUSED_SETS_MAX // 8, bound - unused)
            return False
        used = [0, *(np.flatnonzero(self.uses[1:count]) + 1).tolist()]
        renumbered = np.zeros(count, np.uint64)
        renumbered[used] = np.arange(len(used), dtype=np.uint64)
        space_renumber(*self.table.arrays, renumbered)
        self.masks = [self.masks[set_id] for set_id in used]
        uses = np.zeros(max(64, 2 * len(used)), np.int64)
        uses[: len(used)] = self.uses[used]
        self.uses = uses
        self._ids = {mask: set_id for set_id, mask in enumerate(self.masks)}
        self._write_masks()
        self.steps.clear()
        self._check_at = len(self.masks) + UNUSED_SETS_MAX
        return True
