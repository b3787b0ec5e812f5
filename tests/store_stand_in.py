"""A store in dicts: applies what a flush writes as Postgres would, and hands it back for recovery."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from indexer.index.columns import PublisherRows, StoredResidencies, WideResidency
from indexer.index.publisher import PublisherIndex
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


def rows_of(changes: HolderChanges) -> Iterator[tuple[EngineHash, ResidencyRow | CountChange | None]]:
    """Every change of a holder by itself, in the order in which they are written."""
    yield from changes.rows.items()
    for portion in changes.portions():
        yield from ((engine_hash, None) for engine_hash in portion.removed.tolist())
        yield from portion.upserted.rows()
        counts = map(CountChange, portion.counts.tolist(), portion.counted_cohorts.tolist())
        yield from zip(portion.counted.tolist(), counts, strict=True)


def stored_residencies(rows: Iterable[tuple[HolderKey, EngineHash, ResidencyRow]]) -> list[StoredResidencies]:
    """Rows as recovery reads them."""
    by_holder: dict[HolderKey, list[WideResidency]] = {}
    for holder, engine_hash, row in rows:
        end = row.position + row.block_tokens
        residency = WideResidency(engine_hash, row.content_key, end, row.reference_count, row.cohort)
        by_holder.setdefault(holder, []).append(residency)
    stored = []
    for holder, residencies in by_holder.items():
        flat = [r for r in residencies if isinstance(r.engine_hash, int)]
        columns = (np.array([r[i] for r in flat], kind) for i, kind in enumerate("QQQIi"))
        wide = [r for r in residencies if isinstance(r.engine_hash, bytes)]
        stored.append(StoredResidencies(holder, *columns, wide))
    return stored


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
        changes.fold()
        self._write_residencies(changes)
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

    def _write_residencies(self, changes: PublisherChanges) -> None:
        for holder in changes.holders:
            if holder.cleared:
                self.rows = {key: row for key, row in self.rows.items() if key[0] != holder.holder}
            for engine_hash, row in rows_of(holder):
                key = (holder.holder, engine_hash)
                if row is None:
                    self.rows.pop(key, None)
                elif isinstance(row, CountChange):
                    if key in self.rows:  # UPDATE ... WHERE
                        self.rows[key] = self.rows[key]._replace(**row._asdict())
                else:
                    self.rows[key] = row
        if changes.expired is not None:
            self.rows = {key: row for key, row in self.rows.items() if row.cohort > changes.expired}

    def recover(self, publisher: PublisherIndex) -> None:
        """Load these rows into a fresh publisher."""
        residencies = stored_residencies((*place, row) for place, row in self.rows.items())
        ghosts = sorted(self.ghosts.items(), key=lambda ghost: ghost[1].ordinal)
        rows = PublisherRows(self.checkpoint, self.granule, self.groups, residencies, ghosts, self.side_state)
        publisher.load(rows)

    def give_links(self, publisher: PublisherIndex) -> None:
        """As the service does with the rows in Postgres."""
        for place, links in publisher.wanted_links():
            rows = {h: row for (holder, h), row in self.rows.items() if holder == place and isinstance(h, int)}
            by_key: dict[int, list[int]] = {}
            for engine_hash, row in rows.items():
                by_key.setdefault(row.content_key, []).append(engine_hash)
            parents = {h: by_key.get(row.parent_key or 0, []) for h, row in rows.items()}
            sure = {h: only for h, (only, *others) in ((h, p) for h, p in parents.items() if p) if not others}
            links.learn(np.array(list(sure), np.uint64), np.array(list(sure.values()), np.uint64))
            while publisher.residents.use_links(place, links):
                pass

    def assert_equals(self, publisher: PublisherIndex) -> None:
        """Holder by holder, hash by hash, count by count of what is verified; and every ghost."""
        in_memory = {(holder, h): (key, count) for holder, h, key, count in publisher.residencies()}
        assert in_memory == {
            key: (row.content_key, row.reference_count if row.cohort == self.checkpoint.cohort else 0)
            for key, row in self.rows.items()
        }
        assert {h: (key, end) for h, key, end in publisher.ghosts()} == {
            h: (row.content_key, row.end_granules) for h, row in self.ghosts.items()
        }
        assert self.checkpoint == publisher.checkpoint
        assert self.granule == publisher.granule
