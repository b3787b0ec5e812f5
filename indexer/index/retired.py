"""A slot of a key space whose holder was cleared, as long as it is in sets.

Purpose: what a holder held ends at once for whoever asks, because nobody asks for a retired slot. To take the slot out
of the set of every key takes 0.2 us each, which is too long in one go, so it is done bit by bit: it is swept.

Invariants: every key whose set has the slot is still to come; until none is, nobody else is given the slot.

If broken: the next holder of the slot would be credited with what the cleared one held.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from indexer.index.columns import U64
from indexer.index.state import EngineHash
from indexer.index.table import Table, are_values


class RetiredSlot:
    """Cost: the tables of what was held, until they are swept."""

    __slots__ = ("_columns", "_dicts", "_wide", "slot")

    def __init__(self, slot: int, table: Table, wide: dict[EngineHash, int], *others: dict[Any, Any]) -> None:
        """`table`, `wide`: engine hash -> content key; `others`: what else the holder knew. All are nobody else's from
        now on. Dicts are emptied bit by bit, too: to let go of 300,000 entries takes 10 ms."""
        self.slot = slot
        self._columns = [values for _, values in table.columns()]
        self._wide = wide
        self._dicts = [wide, *others]

    @property
    def is_swept(self) -> bool:
        return not self._columns and not self._dicts

    def next_keys(self, places: int) -> U64:
        """Keys that the slot is to be taken from: those in the next so many places. The same one may come again."""
        return self._next_of_columns(places) if self._columns else self._next_of_dicts(places)

    def _next_of_columns(self, places: int) -> U64:
        column = self._columns.pop()
        if len(column) > places:
            self._columns.append(column[places:])
        part = column[:places]
        return part[are_values(part)]

    def _next_of_dicts(self, places: int) -> U64:
        entries = self._dicts[-1]
        values = [entries.popitem()[1] for _ in range(min(places, len(entries)))]
        if not entries:
            self._dicts.pop()
        return np.array(values if entries is self._wide else (), np.uint64)
