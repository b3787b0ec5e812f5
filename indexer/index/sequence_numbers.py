"""The last sequence number of every publisher of a scope, in one array: what kernels write into answers.

Purpose: the number changes with every batch, and so cannot be part of a text that is kept.

Invariant: a row is of one publisher at a time; -1 = no batch yet. If broken: an answer would have another's number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NO_NUMBER = -1
NOBODYS = 0  # a row that nobody reads


class SequenceNumbers:
    """Rows are given back, so there are never more than publishers at a time."""

    __slots__ = ("_cells", "_free", "_taken", "array")

    def __init__(self) -> None:
        self._free: list[int] = []
        self._taken = 1
        self._use(np.full(16, NO_NUMBER, np.int64))

    def take(self) -> int:
        """A row for a publisher."""
        if self._free:
            return self._free.pop()
        if self._taken == len(self.array):
            self._use(np.concatenate((self.array, np.full_like(self.array, NO_NUMBER))))
        self._taken += 1
        return self._taken - 1

    def give_back(self, row: int) -> None:
        self.note(row, None)
        self._free.append(row)

    def note(self, row: int, sequence_number: int | None) -> None:
        """Cost: 0.1 us."""
        self._cells[row] = NO_NUMBER if sequence_number is None else sequence_number

    def _use(self, array: npt.NDArray[np.int64]) -> None:
        self.array = array
        self._cells = array.data
