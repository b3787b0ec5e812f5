"""The sets of holders along a prompt, granule by granule, and where they change.

A set is a mask of slots. Granules in a row that have the same one are folded to a run, so that whoever judges walks
over a few runs, however long the prompt is.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.index.kernels import find_runs
from indexer.index.key_space import KeySpace
from indexer.index.table import I64

Run: TypeAlias = tuple[int, int]
"""A set of holders as a mask, and how many blocks in a row it has."""


class HolderSets:
    """Of consecutive granules, with their runs per block step.

    Masks may have retired slots, too; nobody asks for those.
    """

    __slots__ = ("_granule_runs", "_ids", "_runs", "_space", "any_holder")

    def __init__(self, space: KeySpace, set_ids: npt.NDArray[np.uint32], runs: list[Run] | None = None) -> None:
        self._ids = set_ids
        self._space = space
        self._runs: dict[int, list[Run]] = {}
        self.any_holder = 0
        self._granule_runs = self._find_runs(1) if runs is None else runs
        for mask, _ in self._granule_runs:
            self.any_holder |= mask
        self.any_holder &= ~space.retired

    @property
    def count(self) -> int:
        return len(self._ids)

    def mask_at(self, granule: int) -> int:
        """The holders of the prefix that ends with this granule."""
        return self._space.masks[int(self._ids[granule])]

    def all_runs(self, step: int) -> list[Run]:
        """(mask, blocks) of all blocks of `step` granules, also of those that nobody has."""
        return self._granule_runs if step == 1 else self._find_runs(step)

    def runs(self, step: int) -> list[Run]:
        """(mask, blocks) of the blocks of `step` granules, up to the first block that nobody has."""
        runs = self._runs.get(step)
        if runs is None:
            runs = self._runs[step] = list(takewhile(_is_held, self.all_runs(step)))
        return runs

    def reaches(self, slots: int) -> list[Run]:
        """(granules, slots): how far holders have every granule from the first on, if they have that; ascending."""
        reaches, so_far = [], 0
        for mask, granules in self._granule_runs:
            lost = slots & ~mask
            if lost and so_far:
                reaches.append((so_far, lost))
            slots &= mask
            if not slots:
                return reaches
            so_far += granules
        if so_far:
            reaches.append((so_far, slots))
        return reaches

    def _find_runs(self, step: int) -> list[Run]:
        found = np.empty(2 * self.count, np.int64)
        return read_runs(self._space, found, find_runs(self._ids, self.count, step, found))


def read_runs(space: KeySpace, found: I64, count: int) -> list[Run]:
    """What the kernel `find_runs` found."""
    numbers = iter(found[: 2 * count].tolist())
    masks = space.masks
    return [(masks[set_id], blocks) for set_id, blocks in zip(numbers, numbers, strict=True)]


def _is_held(run: Run) -> bool:
    return run[0] != 0
