"""Content key -> the holders that have it, for one scope and granule.

Purpose: one look-up per granule answers for every publisher at once. A holder is a small number, its slot; a set of
holders is a bit mask, interned under a small id, since few distinct sets exist. An entry packs where its prefix ends
and its set: `end_granules << 32 | set_id`. Adding or removing a holder is a memoised step from set id to set id.

Invariants: a key without holders has no entry; `uses[id]` is the number of entries with that set; a slot that is free
is in no set in use.

If broken: a publisher would be credited with another's blocks, or keep what it lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SET_BITS = 32
SET_MASK = (1 << SET_BITS) - 1
UNUSED_SETS_MAX = 4096
EMPTY_SET = 0


class KeySpace:
    """Cost: a dict entry and two integers per key; about 0.3 us per `add` or `remove`."""

    __slots__ = ("_adding", "_ids", "_removing", "entries", "granule", "masks", "slots", "unused", "uses")

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.entries: dict[int, int] = {}
        self.masks: list[int] = [0]
        self.uses: list[int] = [0]
        self.unused = 0
        self.slots: list[object | None] = []
        self._ids: dict[int, int] = {0: EMPTY_SET}
        self._adding: list[dict[int, int]] = []
        self._removing: list[dict[int, int]] = []

    def allocate(self, holder: object) -> int:
        """A slot for a new holder: the lowest free one."""
        for slot, taken in enumerate(self.slots):
            if taken is None:
                self.slots[slot] = holder
                return slot
        self.slots.append(holder)
        self._adding.append({})
        self._removing.append({})
        return len(self.slots) - 1

    def release(self, slot: int) -> None:
        """Free a slot whose holder has no keys any more."""
        self.slots[slot] = None

    def add(self, slot: int, key: int, end_granules: int) -> bool:
        """The holder has this key from now on. False if it had it already."""
        self._forget_unused_if_many()
        entry = self.entries.get(key)
        if entry is None:
            set_id = self._adding[slot].get(EMPTY_SET) or self._step(slot, EMPTY_SET, self._adding[slot], True)
            self.entries[key] = end_granules << SET_BITS | set_id
        else:
            before = entry & SET_MASK
            set_id = self._adding[slot].get(before) or self._step(slot, before, self._adding[slot], True)
            if set_id == before:
                return False
            self.entries[key] = entry ^ before ^ set_id
            self._unuse(before)
        self._use(set_id)
        return True

    def add_run(self, slot: int, keys: Sequence[int], position: int, block_tokens: int) -> list[int]:
        """The holder has these keys of consecutive blocks, the first of which starts at token `position`.

        Returns those that it had already. Cost: 0.2 us a key.
        """
        self._forget_unused_if_many()
        entries, adding, granule = self.entries, self._adding[slot], self.granule
        had = []
        shared = []
        alone = adding.get(EMPTY_SET) or self._step(slot, EMPTY_SET, adding, True)
        fresh = 0
        end = position
        for key in keys:
            end += block_tokens
            if key not in entries:
                entries[key] = end // granule << SET_BITS | alone
                fresh += 1
            else:
                shared.append((key, end // granule))
        if fresh:
            self._use(alone, fresh)
        for key, end_granules in shared:  # sets may be renumbered from here on
            if not self.add(slot, key, end_granules):
                had.append(key)
        return had

    def remove(self, slot: int, key: int) -> None:
        """The holder has this key no more; it did."""
        self._forget_unused_if_many()
        entry = self.entries[key]
        before = entry & SET_MASK
        set_id = self._removing[slot].get(before)
        if set_id is None:
            set_id = self._step(slot, before, self._removing[slot], False)
        assert set_id != before, "a holder gives up only what it has"
        self._unuse(before)
        if set_id == EMPTY_SET:
            del self.entries[key]
        else:
            self.entries[key] = entry ^ before ^ set_id
            self._use(set_id)

    def look_up(self, keys: list[int]) -> list[int]:
        """The mask of holder slots of each key, 0 for a key that nobody has. Cost: 0.1 us a key."""
        masks, get = self.masks, self.entries.get
        return [masks[get(key, EMPTY_SET) & SET_MASK] for key in keys]

    def end_granules(self, key: int) -> int | None:
        """Where the prefix of this key ends, if anybody holds it."""
        entry = self.entries.get(key)
        return None if entry is None else entry >> SET_BITS

    def end_of(self, key: int) -> int:
        """The same for a key that somebody holds."""
        return self.entries[key] >> SET_BITS

    def holders(self, key: int) -> Iterator[object]:
        """The holders of this key, as given to `allocate`."""
        mask = self.masks[self.entries.get(key, EMPTY_SET) & SET_MASK]
        return (holder for slot, holder in enumerate(self.slots) if mask >> slot & 1 and holder is not None)

    def _step(self, slot: int, before: int, memo: dict[int, int], adding: bool) -> int:
        mask = self.masks[before] | 1 << slot if adding else self.masks[before] & ~(1 << slot)
        set_id = self._ids.get(mask)
        if set_id is None:
            set_id = len(self.masks)
            self._ids[mask] = set_id
            self.masks.append(mask)
            self.uses.append(0)
            self.unused += 1
        memo[before] = set_id
        return set_id

    def _use(self, set_id: int, entries: int = 1) -> None:
        if not self.uses[set_id]:
            self.unused -= 1
        self.uses[set_id] += entries

    def _unuse(self, set_id: int) -> None:
        self.uses[set_id] -= 1
        if not self.uses[set_id]:
            self.unused += 1

    def _forget_unused_if_many(self) -> None:
        """Only between changes: in the midst of one, an entry may name a set that is not counted yet."""
        if self.unused > UNUSED_SETS_MAX + len(self.entries) // 8:
            self._forget_unused()

    def _forget_unused(self) -> None:
        """Renumber the sets in use. Cost: one pass over the entries, after as many sets fell out of use."""
        renumbered = {EMPTY_SET: EMPTY_SET}
        masks, uses = [0], [0]
        for set_id, count in enumerate(self.uses):
            if count:
                renumbered[set_id] = len(masks)
                masks.append(self.masks[set_id])
                uses.append(count)
        for key, entry in self.entries.items():
            set_id = entry & SET_MASK
            self.entries[key] = entry ^ set_id ^ renumbered[set_id]
        self.masks, self.uses, self.unused = masks, uses, 0
        self._ids = {mask: set_id for set_id, mask in enumerate(masks)}
        self._adding = [{} for _ in self.slots]
        self._removing = [{} for _ in self.slots]
