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
from indexer.index.table import Table, Walk


class RetiredSlot:
    """Cost: the tables of what was held, until they are swept."""

    __slots__ = ("_dicts", "_walk", "_wide", "slot")

    def __init__(self, slot: int, table: Table, wide: dict[EngineHash, int], *others: dict[Any, Any]) -> None:
        """`table`, `wide`: engine hash -> content key; `others`: what else the holder knew. All are nobody else's from
        now on. Dicts are emptied bit by bit, too: to let go of 300,000 entries takes 10 ms."""
        self.slot = slot
        self._walk: Walk | None = table.walk()
        self._wide = wide
        self._dicts = [wide, *others]

    @property
    def is_swept(self) -> bool:
        return self._walk is None and not self._dicts

    def next_keys(self, places: int) -> U64:
        """Keys that the slot is to be taken from: those in the next so many places. The same one may come again."""
        if self._walk is None:
            return self._next_of_dicts(places)
        _, keys = self._walk.entries(places)
        if not self._walk:
            self._walk = None  # and the table can go
        return keys

    def _next_of_dicts(self, places: int) -> U64:
        entries = self._dicts[-1]
        values = [entries.popitem()[1] for _ in range(min(places, len(entries)))]
        if not entries:
            self._dicts.pop()
        return np.array(values if entries is self._wide else (), np.uint64)
