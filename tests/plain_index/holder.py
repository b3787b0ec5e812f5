"""One place of a publisher that holds blocks: engine hash -> content key, in dicts.

Invariants: a hash in `keys` is resident, with `1 + extra.get(hash, 0)` references; its key is in the key space under
this holder's slot exactly while some hash of this holder means it.
"""

from __future__ import annotations

from collections.abc import ItemsView, Sequence
from itertools import islice

import numpy as np

from indexer.index.columns import U64, Flags, StoredResidencies
from indexer.index.parent_links import ParentLinks
from indexer.index.state import CountChange, EngineHash, HolderChanges, HolderKey, ResidencyRow
from indexer.index.tiers import GPU, is_credited
from tests.plain_index.key_space import KeySpace

Rows = dict[EngineHash, ResidencyRow | CountChange | None]


class Walk:
    """See `indexer.index.table.Walk`. All comes at once."""

    def __init__(self, keys: dict[EngineHash, int]) -> None:
        self._keys = keys
        self._is_over = False

    def __bool__(self) -> bool:
        return not self._is_over

    def entries(self, _: int) -> tuple[U64, U64]:
        self._is_over = True
        entries = [(engine_hash, key) for engine_hash, key in self._keys.items() if isinstance(engine_hash, int)]
        hashes, keys = np.array(entries, np.uint64).reshape(-1, 2).T
        return hashes, keys


class Pending:
    """See `indexer.index.pending.Pending`. `added`: where the store has no row for sure."""

    def __init__(self, cohort: int) -> None:
        self.cohort = cohort
        self.added: dict[EngineHash, ResidencyRow] = {}
        self.changed: Rows = {}
        self.cleared = False

    def begin_cohort(self, cohort: int) -> None:
        self.cohort = cohort

    def note_dropped(self) -> None:
        """Nothing is noted twice here."""

    @property
    def size(self) -> int:
        return len(self.added) + len(self.changed) + self.cleared

    def note_row(self, engine_hash: EngineHash, row: ResidencyRow) -> None:
        row = row._replace(cohort=self.cohort)
        if engine_hash in self.changed:
            self.changed[engine_hash] = row
        else:
            self.added[engine_hash] = row

    def note_gone(self, engine_hash: EngineHash) -> None:
        if self.added.pop(engine_hash, None) is None:
            self.changed[engine_hash] = None

    def note_count(self, engine_hash: EngineHash, count: int) -> None:
        new = CountChange(count, self.cohort)
        if engine_hash in self.added:
            self.added[engine_hash] = self.added[engine_hash]._replace(**new._asdict())
            return
        row = self.changed.get(engine_hash)
        self.changed[engine_hash] = row._replace(**new._asdict()) if isinstance(row, ResidencyRow) else new

    def clear(self) -> None:
        self.added, self.changed, self.cleared = {}, {}, True

    def take(self, key: HolderKey) -> HolderChanges | None:
        if not self.size:
            return None
        changes = HolderChanges(key, self.cleared, {**self.changed, **self.added})
        self.added, self.changed, self.cleared = {}, {}, False
        return changes

    def restore(self, changes: HolderChanges) -> None:
        """A flush failed, or nobody knows: what it carried may or may not be stored. Newer changes win."""
        if self.cleared:
            return
        self.cleared = changes.cleared
        newer = {**self.changed, **self.added}
        self.changed = {**changes.rows, **{h: _merged(changes.rows.get(h), row) for h, row in newer.items()}}
        self.added = {}


class Holder:
    """See `indexer.index.holder.Holder`, whose place it takes."""

    def __init__(self, key: HolderKey, space: KeySpace, owner: object, pending: Pending, tier: str = GPU) -> None:
        self.key = key
        self.owner = owner
        self.space = space
        self.slot = space.allocate(self)
        self.tier = tier
        self.is_credited = is_credited(key.medium)
        self.is_verified = True
        self.pending = pending
        self.keys: dict[EngineHash, int] = {}
        self.extra: dict[EngineHash, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self.keys

    def get(self, engine_hash: EngineHash) -> int | None:
        return self.keys.get(engine_hash)

    def walk(self) -> Walk:
        return Walk(self.keys)

    def has_each(self, hashes: U64) -> Flags:
        return np.array([engine_hash in self.keys for engine_hash in hashes.tolist()], np.bool_)

    def items(self) -> ItemsView[EngineHash, int]:
        return self.keys.items()

    def some_items(self, count: int) -> tuple[U64, U64, list[tuple[EngineHash, int]]]:
        nothing = np.empty(0, np.uint64)
        return nothing, nothing, list(islice(self.keys.items(), count))

    def extra_references(self, engine_hash: EngineHash) -> int:
        return self.extra.get(engine_hash, 0)

    def reference_count(self, engine_hash: EngineHash) -> int:
        return 1 + self.extra.get(engine_hash, 0) if engine_hash in self.keys else 0

    def references_of_key(self, key: int) -> int:
        return sum(self.reference_count(h) for h, k in self.keys.items() if k == key)

    def hold(self, engine_hash: EngineHash, row: ResidencyRow, end_granules: int) -> None:
        self._begin(engine_hash, row.content_key, end_granules, row.reference_count)
        self.pending.note_row(engine_hash, row)

    def hold_run(self, *_: object) -> bool:
        """Blocks of a run go one by one."""
        return False

    def load(self, stored: StoredResidencies) -> None:
        """Recovery: residencies that are in the store."""
        columns = stored.engine_hashes, stored.content_keys, stored.end_tokens, stored.reference_counts, stored.cohorts
        flat = zip(*(column.tolist() for column in columns), strict=True)
        for engine_hash, key, end_tokens, count, _ in (*flat, *stored.wide):
            self._begin(engine_hash, key, end_tokens // self.space.granule, count)

    def refer(self, engine_hash: EngineHash, references: int = 1) -> None:
        extra = self.extra.pop(engine_hash, 0) + references
        assert extra >= 0
        if extra:
            self.extra[engine_hash] = extra
        self.pending.note_count(engine_hash, extra + 1)

    def single_references(self, hashes: Sequence[EngineHash]) -> tuple[U64, U64, Sequence[EngineHash]]:
        """None: here all go one by one."""
        return np.empty(0, np.uint64), np.empty(0, np.uint64), hashes

    def end_run(self, hashes: U64, keys: U64) -> None:
        """Of none."""
        assert not len(hashes)

    def release(self, engine_hash: EngineHash) -> None:
        if engine_hash in self.extra:
            self.refer(engine_hash, -1)
        else:
            self.end(engine_hash)

    def end(self, engine_hash: EngineHash) -> None:
        self._take_out(engine_hash)
        self.pending.note_gone(engine_hash)

    def _take_out(self, engine_hash: EngineHash) -> None:
        key = self.keys.pop(engine_hash)
        self.extra.pop(engine_hash, None)
        if key not in self.keys.values():
            self.space.remove(self.slot, key)

    def give_chain(self, engine_hash: EngineHash, links: ParentLinks, verified: Holder, _: int) -> EngineHash | None:
        """One block."""
        key = self.keys[engine_hash]
        verified._begin(engine_hash, key, self.space.end_of(key), 1)
        self._take_out(engine_hash)
        self.pending.note_count(engine_hash, 1)
        return links.get(engine_hash)

    def give_some(self, other: Holder, count: int) -> None:
        for engine_hash, key in list(self.keys.items())[:count]:
            other._begin(engine_hash, key, self.space.end_of(key), 1)
            self._take_out(engine_hash)

    def lose_trust(self) -> None:
        self.is_verified = self.is_credited = False
        self.extra = {}

    def clear(self) -> None:
        self._end_all()
        self.keys, self.extra = {}, {}
        self.pending.clear()

    def leave(self) -> None:
        self._end_all()
        self.space.release(self.slot)

    def _end_all(self) -> None:
        for key in set(self.keys.values()):
            self.space.remove(self.slot, key)

    def take_changes(self) -> HolderChanges | None:
        return self.pending.take(self.key)

    def restore_changes(self, changes: HolderChanges) -> None:
        self.pending.restore(changes)

    @property
    def changes_pending(self) -> int:
        return self.pending.size

    def _begin(self, engine_hash: EngineHash, key: int, end_granules: int, references: int) -> None:
        assert engine_hash not in self.keys
        self.keys[engine_hash] = key
        if references > 1:
            self.extra[engine_hash] = references - 1
        self.space.add(self.slot, key, end_granules)


def _merged(
    older: ResidencyRow | CountChange | None, newer: ResidencyRow | CountChange | None
) -> ResidencyRow | CountChange | None:
    """A new count of a row that the failed flush was to write is that row with the count."""
    if isinstance(newer, CountChange) and isinstance(older, ResidencyRow):
        return older._replace(**newer._asdict())
    return newer
