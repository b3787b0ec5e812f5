"""What the store does not have yet of one place of a publisher, whichever of its holders it is about.

Purpose: a place has one holder that is verified and, after gaps, others that are not (see unverified.py). Blocks move
from one to another, but the store has one row of each, so what changes is noted in one place, in order.

Invariants: `log` and `wide_changes` hold the state that the store does not have yet; where both a clear and others are
pending, the clear was first.
"""

from __future__ import annotations

from indexer.index.change_log import ChangeLog
from indexer.index.state import CountChange, EngineHash, HolderChanges, HolderKey, ResidencyRow

WideChanges = dict[EngineHash, ResidencyRow | CountChange | None]


class Pending:
    """`log`: of hashes of 64 bits; `wide_changes`: of all others."""

    __slots__ = ("cleared", "log", "wide_changes")

    def __init__(self, cohort: int) -> None:
        self.log = ChangeLog(cohort)
        self.wide_changes: WideChanges = {}
        self.cleared = False

    @property
    def cohort(self) -> int:
        return self.log.cohort

    def begin_cohort(self, cohort: int) -> None:
        """What is verified from now on is of this cohort."""
        self.log.begin_cohort(cohort)

    def note_dropped(self) -> None:
        """Residencies ended that are not noted one by one; what they are noted with may come again."""
        self.log.has_only_stores = False

    @property
    def size(self) -> int:
        return self.log.entries + len(self.wide_changes) + self.cleared

    def clear(self) -> WideChanges:
        """Every residency of the place ends; returns what nobody needs any more."""
        forgotten = self.forget()
        self.cleared = True
        return forgotten

    def forget(self) -> WideChanges:
        """There is nothing to write any more: of what was recovered, or is about to be cleared."""
        forgotten, self.wide_changes = self.wide_changes, {}
        self.log = ChangeLog(self.cohort)
        return forgotten

    def note_wide(self, engine_hash: EngineHash, row: ResidencyRow) -> None:
        self.wide_changes[engine_hash] = row if row.cohort == self.cohort else row._replace(cohort=self.cohort)

    def note_wide_count(self, engine_hash: EngineHash, count: int) -> None:
        row = self.wide_changes.get(engine_hash)
        self.wide_changes[engine_hash] = with_count(row, CountChange(count, self.cohort))

    def take(self, key: HolderKey) -> HolderChanges | None:
        if not self.size:
            return None
        changes = HolderChanges(key, self.cleared, self.wide_changes, log=self.log if len(self.log) else None)
        self.forget()
        self.cleared = False
        return changes

    def restore(self, changes: HolderChanges) -> None:
        """A flush failed, or nobody knows: what it carried may or may not be stored. Newer changes win."""
        if self.cleared:
            return
        self.cleared = changes.cleared
        older, newer = changes.rows, self.wide_changes
        counted = {h: with_count(older.get(h), row) for h, row in newer.items() if isinstance(row, CountChange)}
        self.wide_changes = {**older, **newer, **counted}
        if changes.log is not None:
            self.log.put_before(changes.log)
        elif changes.columns is not None:
            self.log.put_before(ChangeLog.of(changes.columns))


def with_count(row: ResidencyRow | CountChange | None, change: CountChange) -> ResidencyRow | CountChange:
    """A new count of a row that is still to be written is that row with the count."""
    return row._replace(**change._asdict()) if isinstance(row, ResidencyRow) else change
