"""A store in dicts: applies what a flush writes as Postgres would, and hands it back for recovery."""

from __future__ import annotations

from dataclasses import dataclass, field

from indexer.index.publisher import PublisherIndex
from indexer.index.state import (
    Checkpoint,
    CountChange,
    EngineHash,
    GhostRow,
    GroupState,
    HolderKey,
    PublisherChanges,
    ResidencyRow,
)


@dataclass
class DictStore:
    """The rows of one publisher."""

    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    granule: int | None = None
    rows: dict[tuple[HolderKey, EngineHash], ResidencyRow] = field(default_factory=dict)
    ghosts: dict[EngineHash, GhostRow] = field(default_factory=dict)
    groups: tuple[GroupState, ...] = ()
    side_state: bytes | None = None

    def flush(self, publisher: PublisherIndex) -> None:
        changes = publisher.take_changes()
        if changes is not None:
            self.write(changes)
        assert publisher.changes_pending == 0

    def write(self, changes: PublisherChanges) -> None:
        self.checkpoint, self.granule = changes.checkpoint, changes.granule
        for holder in changes.holders:
            if holder.cleared:
                self.rows = {key: row for key, row in self.rows.items() if key[0] != holder.holder}
            for engine_hash, row in holder.rows.items():
                key = (holder.holder, engine_hash)
                if row is None:
                    self.rows.pop(key, None)
                elif isinstance(row, CountChange):
                    if key in self.rows:  # UPDATE ... WHERE
                        self.rows[key] = self.rows[key]._replace(reference_count=row.reference_count)
                else:
                    self.rows[key] = row
        if changes.ghosts_cleared:
            self.ghosts = {}
        for engine_hash, ghost in changes.ghosts.items():
            if ghost is None:
                self.ghosts.pop(engine_hash, None)
            else:
                self.ghosts[engine_hash] = ghost
        if changes.groups is not None:
            self.groups = changes.groups
        if changes.side_state is not None:
            self.side_state = changes.side_state

    def recover(self, publisher: PublisherIndex) -> None:
        """Load these rows into a fresh publisher."""
        publisher.load(
            checkpoint=self.checkpoint,
            granule=self.granule,
            groups=self.groups,
            residencies=[(holder, engine_hash, row) for (holder, engine_hash), row in self.rows.items()],
            ghosts=sorted(self.ghosts.items(), key=lambda ghost: ghost[1].ordinal),
            side_state=self.side_state,
        )

    def assert_equals(self, publisher: PublisherIndex) -> None:
        """Holder by holder, hash by hash, count by count; and every ghost."""
        in_memory = {(holder, h): (key, count) for holder, h, key, count in publisher.residencies()}
        assert in_memory == {key: (row.content_key, row.reference_count) for key, row in self.rows.items()}
        assert {h: (key, end) for h, key, end in publisher.ghosts()} == {
            h: (row.content_key, row.end_granules) for h, row in self.ghosts.items()
        }
        assert self.checkpoint == publisher.checkpoint
        assert self.granule == publisher.granule
