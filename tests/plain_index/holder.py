"""One place of a publisher that holds blocks: engine hash -> content key, with reference counts and what changed.

Invariants: a hash in `keys` is resident, with `1 + extra.get(hash, 0)` references; its key is in the key space under
this holder's slot exactly while some hash of this holder means it (`aliases` counts hashes that share a key).
`added` and `changed` hold the state that the store does not have yet: `added` where the store has no row for sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat

from indexer.index.key_space import KeySpace
from indexer.index.state import CountChange, EngineHash, HolderChanges, HolderKey, ResidencyRow
from indexer.index.tiers import is_credited, tier_of

_make_row = partial(tuple.__new__, ResidencyRow)  # a third of the cost of calling the class


class Holder:
    """Cost: one dict entry per residency; further references, aliases and changes lie beside."""

    __slots__ = (
        "added",
        "aliases",
        "changed",
        "cleared",
        "extra",
        "is_credited",
        "key",
        "keys",
        "owner",
        "slot",
        "space",
        "tier",
    )

    def __init__(self, key: HolderKey, space: KeySpace, owner: object) -> None:
        self.key = key
        self.owner = owner
        self.space = space
        self.slot = space.allocate(self)
        self.tier = tier_of(key.medium)
        self.is_credited = is_credited(key.medium)
        self.keys: dict[EngineHash, int] = {}
        self.extra: dict[EngineHash, int] = {}
        self.aliases: dict[int, int] = {}
        self.added: dict[EngineHash, ResidencyRow] = {}
        self.changed: dict[EngineHash, ResidencyRow | CountChange | None] = {}
        self.cleared = False

    def reference_count(self, engine_hash: EngineHash) -> int:
        return 1 + self.extra.get(engine_hash, 0) if engine_hash in self.keys else 0

    def references_of_key(self, key: int) -> int:
        """References of every hash that means this key. Cost: per residency; for inspection only."""
        return sum(self.reference_count(h) for h, k in self.keys.items() if k == key)

    def hold(self, engine_hash: EngineHash, row: ResidencyRow, end_granules: int) -> None:
        """A residency begins; the hash was not resident here."""
        key = row.content_key
        self.keys[engine_hash] = key
        if row.reference_count > 1:
            self.extra[engine_hash] = row.reference_count - 1
        if not self.space.add(self.slot, key, end_granules):
            self.aliases[key] = self.aliases.get(key, 1) + 1
        if self.changed and engine_hash in self.changed:
            self.changed[engine_hash] = row
        else:
            self.added[engine_hash] = row

    def hold_run(
        self,
        hashes: Sequence[EngineHash],
        keys: Sequence[int],
        parent_keys: Sequence[int | None],
        local_hashes: Sequence[int],
        block_tokens: int,
        position: int,
    ) -> bool:
        """Residencies of consecutive blocks begin, the first at token `position`. False, and nothing happened, if one
        of the hashes is resident or changed already: then they go one by one. Cost: 0.8 us a block."""
        if not self.keys.keys().isdisjoint(hashes) or (self.changed and not self.changed.keys().isdisjoint(hashes)):
            return False
        self.keys.update(zip(hashes, keys, strict=True))
        for key in self.space.add_run(self.slot, keys, position, block_tokens):
            self.aliases[key] = self.aliases.get(key, 1) + 1
        positions = range(position, position + len(hashes) * block_tokens, block_tokens)
        rows = zip(keys, parent_keys, local_hashes, repeat(block_tokens), positions, repeat(1), strict=False)
        self.added.update(zip(hashes, map(_make_row, rows), strict=False))
        return True

    def refer(self, engine_hash: EngineHash, references: int = 1) -> None:
        """More (or, negative, fewer) references to a residency that stays."""
        extra = self.extra.get(engine_hash, 0) + references
        assert extra >= 0
        if extra:
            self.extra[engine_hash] = extra
        else:
            del self.extra[engine_hash]
        self._note_count(engine_hash, extra + 1)

    def release(self, engine_hash: EngineHash) -> None:
        """One reference ends, and at zero the residency."""
        if self.extra and engine_hash in self.extra:
            self.refer(engine_hash, -1)
        else:
            self.end(engine_hash)

    def end(self, engine_hash: EngineHash) -> None:
        """The residency ends, whatever its count."""
        key = self.keys.pop(engine_hash)
        self.extra.pop(engine_hash, None)
        if self.aliases and key in self.aliases:
            self._end_alias(key)
        else:
            self.space.remove(self.slot, key)
        if self.added.pop(engine_hash, None) is None:
            self.changed[engine_hash] = None

    def clear(self) -> None:
        """Every residency ends."""
        for key in set(self.keys.values()):
            self.space.remove(self.slot, key)
        self.keys.clear()
        self.extra.clear()
        self.aliases.clear()
        self.added = {}
        self.changed = {}
        self.cleared = True

    def take_changes(self) -> HolderChanges | None:
        if not (self.added or self.changed or self.cleared):
            return None
        rows: dict[EngineHash, ResidencyRow | CountChange | None] = {**self.changed, **self.added}
        changes = HolderChanges(self.key, self.cleared, rows)
        self.added, self.changed, self.cleared = {}, {}, False
        return changes

    def restore_changes(self, changes: HolderChanges) -> None:
        """A flush failed, or nobody knows: what it carried may or may not be stored. Newer changes win."""
        if self.cleared:
            return
        self.cleared = changes.cleared
        newer = {**self.changed, **self.added}
        self.changed = {**changes.rows, **{h: _merged(changes.rows.get(h), row) for h, row in newer.items()}}
        self.added = {}

    @property
    def changes_pending(self) -> int:
        return len(self.added) + len(self.changed) + self.cleared

    def _end_alias(self, key: int) -> None:
        self.aliases[key] -= 1
        if self.aliases[key] == 1:
            del self.aliases[key]

    def _note_count(self, engine_hash: EngineHash, count: int) -> None:
        if engine_hash in self.added:
            self.added[engine_hash] = self.added[engine_hash]._replace(reference_count=count)
            return
        row = self.changed.get(engine_hash)
        if isinstance(row, ResidencyRow):
            self.changed[engine_hash] = row._replace(reference_count=count)
        else:
            self.changed[engine_hash] = CountChange(count)


def _merged(
    older: ResidencyRow | CountChange | None, newer: ResidencyRow | CountChange | None
) -> ResidencyRow | CountChange | None:
    """A new count of a row that the failed flush was to write is that row with the count."""
    if isinstance(newer, CountChange) and isinstance(older, ResidencyRow):
        return older._replace(reference_count=newer.reference_count)
    return newer
