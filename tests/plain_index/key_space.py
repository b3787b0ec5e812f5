"""Content key -> the holders that have it, for one scope and granule: two dicts.

A holder is a small number, its slot; holders of a key are a bit mask. A key without holders has no entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from indexer.index.columns import U64


class KeySpace:
    """See `indexer.index.key_space.KeySpace`, whose place it takes."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.slots: list[object | None] = []
        self._masks: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self.needs_whole_walk = False  # set by publishers; the plain walk is always whole
        self.known: dict[object, object] = {}  # cleared by publishers
        self.sweeps = ()  # nothing is left for later

    def __len__(self) -> int:
        return len(self._masks)

    def __contains__(self, key: int) -> bool:
        return key in self._masks

    def allocate(self, holder: object) -> int:
        for slot, taken in enumerate(self.slots):
            if taken is None:
                self.slots[slot] = holder
                return slot
        self.slots.append(holder)
        return len(self.slots) - 1

    def release(self, slot: int) -> None:
        self.slots[slot] = None

    def add(self, slot: int, key: int, end_granules: int) -> bool:
        """False if the holder had it already."""
        before = self._masks.get(key, 0)
        if before >> slot & 1:
            return False
        self._masks[key] = before | 1 << slot
        self._ends.setdefault(key, end_granules)
        return True

    def remove(self, slot: int, key: int) -> None:
        before = self._masks[key]
        assert before >> slot & 1, "a holder gives up only what it has"
        self._masks[key] = before ^ 1 << slot
        if not self._masks[key]:
            del self._masks[key], self._ends[key]

    def look_up(self, keys: Iterable[int]) -> list[int]:
        """The holders of each key as a mask."""
        return [self._masks.get(key, 0) for key in keys]

    def end_granules(self, key: int) -> int | None:
        return self._ends.get(key)

    def end_of(self, key: int) -> int:
        return self._ends[key]

    def ends_of(self, keys: U64) -> U64:
        return np.array([self._ends[key] for key in keys.tolist()], np.uint64)

    def holders(self, key: int) -> Iterator[object]:
        mask = self._masks.get(key, 0)
        return (holder for slot, holder in enumerate(self.slots) if mask >> slot & 1 and holder is not None)

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """(key, end in granules, holders as a mask) of each."""
        for key, mask in self._masks.items():
            yield key, self._ends[key], mask
