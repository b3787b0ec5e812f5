"""The index as the store sees it, as plainly as can be: dicts of rows, and what changed since the last flush."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from indexer.index.columns import PublisherRows
from indexer.index.state import (
    Checkpoint,
    CountChange,
    EngineHash,
    GhostRow,
    GroupState,
    HolderChanges,
    HolderKey,
    PublisherChanges,
    ResidencyRow,
)
from indexer.registration import PublisherKey, Registration

Row = ResidencyRow | CountChange | None


class StandInPublisher:
    """Keeps the rows of one publisher and coalesces their changes; every change moves the checkpoint by one."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.checkpoint = Checkpoint()
        self.granule: int | None = None
        self.groups: tuple[GroupState, ...] = ()
        self.side_state: bytes | None = None
        self.rows: dict[HolderKey, dict[EngineHash, ResidencyRow]] = {}
        self.ghost_rows: dict[EngineHash, GhostRow] = {}
        self.changed: dict[HolderKey, HolderChanges] = {}
        self.changed_ghosts: dict[EngineHash, GhostRow | None] = {}
        self.ghosts_cleared = False
        self._is_changed = False

    def store(self, holder: HolderKey, engine_hash: EngineHash, row: ResidencyRow) -> None:
        self.rows.setdefault(holder, {})[engine_hash] = row
        self._change(holder, engine_hash, row)

    def count(self, holder: HolderKey, engine_hash: EngineHash, reference_count: int) -> None:
        rows = self.rows[holder]
        rows[engine_hash] = rows[engine_hash]._replace(reference_count=reference_count)
        pending = self.changed.get(holder)
        older = pending.rows.get(engine_hash) if pending else None
        is_row = isinstance(older, ResidencyRow)
        self._change(holder, engine_hash, rows[engine_hash] if is_row else CountChange(reference_count))

    def remove(self, holder: HolderKey, engine_hash: EngineHash) -> None:
        self.rows.get(holder, {}).pop(engine_hash, None)
        self._change(holder, engine_hash, None)

    def clear(self, holder: HolderKey) -> None:
        self.rows[holder] = {}
        self.changed[holder] = HolderChanges(holder, cleared=True)
        self._step()

    def remember(self, engine_hash: EngineHash, row: GhostRow | None) -> None:
        """A ghost, or None: forget it."""
        if row is None:
            self.ghost_rows.pop(engine_hash, None)
        else:
            self.ghost_rows[engine_hash] = row
        self.changed_ghosts[engine_hash] = row
        self._step()

    def _change(self, holder: HolderKey, engine_hash: EngineHash, row: Row) -> None:
        self.changed.setdefault(holder, HolderChanges(holder)).rows[engine_hash] = row
        self._step()

    def _step(self) -> None:
        number = self.checkpoint.sequence_number
        self.checkpoint = replace(self.checkpoint, sequence_number=0 if number is None else number + 1)
        self._is_changed = True

    # What the store and the writer use

    @property
    def changes_pending(self) -> int:
        return sum(len(c.rows) + c.cleared for c in self.changed.values()) + len(self.changed_ghosts)

    def take_changes(self) -> PublisherChanges | None:
        if not self._is_changed:
            return None
        registration = self.registration
        taken = PublisherChanges(
            publisher=registration.key,
            publisher_id=registration.publisher_id,
            checkpoint=self.checkpoint,
            granule=self.granule,
            holders=list(self.changed.values()),
            ghosts_cleared=self.ghosts_cleared,
            ghosts=self.changed_ghosts,
            expired=None,
            groups=self.groups,
            side_state=self.side_state,
        )
        self.changed, self.changed_ghosts, self.ghosts_cleared, self._is_changed = {}, {}, False, False
        return taken

    def restore_changes(self, changes: PublisherChanges) -> None:
        self._is_changed = True
        self.changed_ghosts = {**changes.ghosts, **self.changed_ghosts}
        for older in changes.holders:
            newer = self.changed.get(older.holder)
            if newer is None:
                self.changed[older.holder] = older
            elif not newer.cleared:
                rows = {**older.rows, **{h: _merged(older.rows.get(h), row) for h, row in newer.rows.items()}}
                self.changed[older.holder] = HolderChanges(older.holder, older.cleared, rows)

    def load(self, rows: PublisherRows) -> None:
        self.checkpoint, self.granule, groups, residencies, ghosts, self.side_state = rows
        self.groups = tuple(groups)
        assert all(len(portion) for portion in residencies)
        self.ghost_rows = dict(ghosts)

    def catch_up_with_others(self) -> None:
        """It has nothing to hear from others."""

    def residencies(self) -> Iterator[tuple[HolderKey, EngineHash, int, int]]:
        for holder, rows in self.rows.items():
            for engine_hash, row in rows.items():
                yield holder, engine_hash, row.content_key, row.reference_count

    def ghosts(self) -> Iterator[tuple[EngineHash, int, int]]:
        for engine_hash, row in self.ghost_rows.items():
            yield engine_hash, row.content_key, row.end_granules

    def state(self) -> dict[str, object]:
        """Everything, for comparing."""
        rows = {holder: rows for holder, rows in self.rows.items() if rows}
        return {
            "rows": rows,
            "ghosts": self.ghost_rows,
            "checkpoint": self.checkpoint,
            "granule": self.granule,
            "groups": self.groups,
            "side_state": self.side_state,
        }


class StandInIndex:
    """Publishers by key."""

    def __init__(self) -> None:
        self._publishers: dict[PublisherKey, StandInPublisher] = {}

    def add_publisher(self, registration: Registration) -> StandInPublisher:
        return self._publishers.setdefault(registration.key, StandInPublisher(registration))

    def remove_publisher(self, key: PublisherKey) -> None:
        self._publishers.pop(key, None)

    def publisher(self, key: PublisherKey) -> StandInPublisher | None:
        return self._publishers.get(key)

    def publishers(self) -> list[StandInPublisher]:
        return list(self._publishers.values())


def _merged(older: Row, newer: Row) -> Row:
    if isinstance(newer, CountChange) and isinstance(older, ResidencyRow):
        return older._replace(reference_count=newer.reference_count)
    return newer
