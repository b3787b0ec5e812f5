"""Engine hashes that are resolvable as parents, in dicts, the oldest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from indexer.index.columns import U64
from indexer.index.ghosts import FORGOTTEN_AT_ONCE
from indexer.index.state import EngineHash, GhostRow

POSITION_BITS = 32
POSITION_MASK = (1 << POSITION_BITS) - 1


class Ghosts:
    """See `indexer.index.ghosts.Ghosts`, whose place it takes."""

    def __init__(self, ghosts_max: int) -> None:
        self.ghosts_max = ghosts_max
        self.allowance = 0
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
        self._remember(engine_hash, key, end_granules)
        self.keep_bound()

    def remember_all(self, hashes: U64, keys: U64, ends: U64) -> None:
        self.remember_each(list(zip(hashes.tolist(), keys.tolist(), ends.tolist(), strict=True)))

    def remember_each(self, ghosts: Sequence[tuple[EngineHash, int, int]]) -> None:
        """The bound is kept after all of them, or after each if some are wide."""
        is_wide = any(isinstance(engine_hash, bytes) for engine_hash, _, _ in ghosts)
        for ghost in ghosts:
            self._remember(*ghost)
            if is_wide:
                self.keep_bound()
        self.keep_bound()

    def _remember(self, engine_hash: EngineHash, key: int, end_granules: int) -> None:
        known = self._packed.pop(engine_hash, None)
        self._packed[engine_hash] = key << POSITION_BITS | end_granules
        self.ordinal += 1
        is_new = engine_hash in self._added or (known is None and engine_hash not in self._changed)
        (self._added if is_new else self._changed)[engine_hash] = GhostRow(key, end_granules, self.ordinal)

    def keep_bound(self) -> None:
        """Forget the oldest beyond the bound, which settings may have lowered since they were stored."""
        excess = len(self._packed) - self.ghosts_max - self.allowance
        if excess > 0:
            self._forget_oldest(excess + self.ghosts_max // FORGOTTEN_AT_ONCE)

    def _forget_oldest(self, count: int) -> None:
        """Many at once: to find the oldest, a dict walks over all the places from which older ones were taken."""
        for engine_hash in list(islice(self._packed, count)):
            self._forget(engine_hash)

    def _forget(self, engine_hash: EngineHash) -> None:
        del self._packed[engine_hash]
        self.forgotten += 1
        if self._added.pop(engine_hash, None) is None:
            self._changed[engine_hash] = None

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
