"""Engine hashes that are not resident, or not only resident, but resolvable as parents.

What a hash means does not change when its block goes, so ghosts outlive removals, clears and restarts. They are
bounded: at `ghosts_max` those that became ghosts first are forgotten; their later children become orphans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

from indexer.index.state import EngineHash, GhostRow

FORGOTTEN_AT_ONCE = 64  # one in so many
POSITION_BITS = 32
POSITION_MASK = (1 << POSITION_BITS) - 1
_make_row = partial(tuple.__new__, GhostRow)  # a third of the cost of calling the class


class Ghosts:
    """Engine hash -> where the chain stands after its block. Cost: a dict entry and one integer each."""

    __slots__ = ("_added", "_changed", "_cleared", "_packed", "allowance", "forgotten", "ghosts_max", "ordinal")

    def __init__(self, ghosts_max: int) -> None:
        self.ghosts_max = ghosts_max
        self.allowance = 0  # so many more may be kept: residencies that chains go on from as ghosts (lookahead)
        self.forgotten = 0
        self.ordinal = 0
        self._packed: dict[EngineHash, int] = {}  # content key << 32 | end in granules
        self._added: dict[EngineHash, GhostRow] = {}  # the store has no row for sure
        self._changed: dict[EngineHash, GhostRow | None] = {}
        self._cleared = False

    def __len__(self) -> int:
        return len(self._packed)

    def get(self, engine_hash: EngineHash) -> tuple[int, int] | None:
        """(content key, end in granules), or None."""
        packed = self._packed.get(engine_hash)
        return None if packed is None else (packed >> POSITION_BITS, packed & POSITION_MASK)

    def remember(self, engine_hash: EngineHash, key: int, end_granules: int) -> None:
        """The newest ghost from now on."""
        self.remember_all((engine_hash,), (key,), (end_granules,))

    def remember_all(self, hashes: Sequence[EngineHash], keys: Sequence[int], ends: Sequence[int]) -> None:
        """`remember`, for many, in this order. Cost: 0.5 us each if all are new, else 1.5 us."""
        first = self.ordinal + 1
        self.ordinal += len(hashes)
        packed = [key << POSITION_BITS | end for key, end in zip(keys, ends, strict=True)]
        rows = map(_make_row, zip(keys, ends, range(first, self.ordinal + 1), strict=True))
        if self._are_new(hashes):
            self._packed.update(zip(hashes, packed, strict=True))
            self._added.update(zip(hashes, rows, strict=True))
        else:
            self._remember_each(hashes, packed, rows)
        self.keep_bound()

    def _are_new(self, hashes: Sequence[EngineHash]) -> bool:
        """Whether they are distinct, and neither here nor a change that the store does not have yet."""
        is_unknown = self._packed.keys().isdisjoint(hashes) and self._changed.keys().isdisjoint(hashes)
        return is_unknown and len(set(hashes)) == len(hashes)

    def _remember_each(self, hashes: Sequence[EngineHash], values: Sequence[int], rows: Iterable[GhostRow]) -> None:
        packed, added, changed = self._packed, self._added, self._changed
        for engine_hash, value, row in zip(hashes, values, rows, strict=True):
            known = packed.pop(engine_hash, None)
            packed[engine_hash] = value
            is_new = engine_hash in added or (known is None and engine_hash not in changed)
            (added if is_new else changed)[engine_hash] = row

    def keep_bound(self) -> None:
        """Forget the oldest beyond the bound, which settings may have lowered since they were stored."""
        excess = len(self._packed) - self.ghosts_max - self.allowance
        if excess > 0:
            self._forget_oldest(excess + self.ghosts_max // FORGOTTEN_AT_ONCE)

    def _forget_oldest(self, count: int) -> None:
        """Many at once: to find the oldest, a dict walks over all the places from which older ones were taken."""
        packed, added = self._packed, self._added
        oldest = list(islice(packed, count))
        for engine_hash in oldest:
            del packed[engine_hash]
        self._changed.update(dict.fromkeys([h for h in oldest if added.pop(h, None) is None]))
        self.forgotten += count

    def clear(self) -> None:
        """Forget all: their keys mean nothing any more."""
        self._packed.clear()
        self._added, self._changed, self._cleared = {}, {}, True

    def load(self, ghosts: Iterable[tuple[EngineHash, GhostRow]]) -> None:
        """From the store, in ascending order of `ordinal`."""
        for engine_hash, row in ghosts:
            self._packed[engine_hash] = row.content_key << POSITION_BITS | row.end_granules
            self.ordinal = row.ordinal
        self.keep_bound()

    @property
    def changes_pending(self) -> int:
        return len(self._added) + len(self._changed) + self._cleared

    def take_changes(self) -> tuple[bool, dict[EngineHash, GhostRow | None]]:
        """(forget every row first, then these)."""
        taken = (self._cleared, {**self._changed, **self._added})
        self._added, self._changed, self._cleared = {}, {}, False
        return taken

    def restore_changes(self, cleared: bool, rows: dict[EngineHash, GhostRow | None]) -> None:
        """A flush failed, or nobody knows; newer changes win."""
        if self._cleared:
            return
        self._cleared = cleared
        self._changed = {**rows, **self._changed, **self._added}
        self._added = {}

    def rows(self) -> Iterable[tuple[EngineHash, int, int]]:
        """(engine hash, content key, end in granules) of each, oldest first."""
        for engine_hash, packed in self._packed.items():
            yield engine_hash, packed >> POSITION_BITS, packed & POSITION_MASK
