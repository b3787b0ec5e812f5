"""Reads back what was written: registrations, and one publisher's state as the index takes it.

Rows are streamed with server-side cursors, so that memory does not grow with them. Synchronous: `Store` calls this in a
thread, in one repeatable-read transaction, so that rows and checkpoint belong together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from indexer.identity.chain import SCHEME
from indexer.index.columns import PublisherRows, StoredResidencies
from indexer.index.state import (
    Checkpoint,
    Coverage,
    CoverageReason,
    EngineHash,
    GhostRow,
    GroupState,
    HolderKey,
    ResidencyRow,
)
from indexer.registration import Registration
from indexer.store.engine import StoreUnusable, driver_connection
from indexer.store.read_columns import read_residencies
from indexer.store.tables import (
    hash_from_bytes,
    publisher_groups,
    publishers,
    to_unsigned,
)

FETCH_ROWS = 10_000

_RESIDENCIES = (
    "SELECT medium, group_idx, owner, engine_hash, content_key, parent_key, local_hash, block_tokens, position,"
    " reference_count, cohort FROM holders JOIN residencies USING (holder_id) WHERE publisher_id = %s"
)
_GHOSTS = "SELECT engine_hash, content_key, end_granules, ordinal FROM ghosts WHERE publisher_id = %s ORDER BY ordinal"
_WHO_HAS_GHOSTS = (
    "SELECT publisher_id FROM publishers p WHERE EXISTS (SELECT FROM ghosts g WHERE g.publisher_id = p.publisher_id)"
)


@dataclass(frozen=True, slots=True)
class StoredPublisher:
    """What the store keeps of a publisher beside its rows."""

    checkpoint: Checkpoint
    granule: int | None
    groups: tuple[GroupState, ...]
    side_state: bytes | None
    flushes: int  # transactions that wrote rows of it

    def rows(
        self, residencies: Iterable[StoredResidencies], ghosts: Iterable[tuple[EngineHash, GhostRow]]
    ) -> PublisherRows:
        """With these."""
        return PublisherRows(self.checkpoint, self.granule, self.groups, residencies, ghosts, self.side_state)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """All that the store has of a publisher."""

    publisher: StoredPublisher
    residencies: list[StoredResidencies]
    ghosts: list[tuple[EngineHash, GhostRow]]


def read_registrations(connection: Connection) -> list[Registration]:
    """All registered publishers, oldest first."""
    wanted = select(publishers).where(publishers.c.removed_at.is_(None)).order_by(publishers.c.publisher_id)
    return [to_registration(row) for row in connection.execute(wanted)]


def to_registration(row: Row[tuple[object, ...]]) -> Registration:
    return Registration(
        worker_id=row.worker_id,
        dp_rank=row.dp_rank,
        model=row.model,
        endpoint=row.endpoint,
        replay_endpoint=row.replay_endpoint,
        tenant=row.tenant,
        engine=row.engine,
        block_size=row.block_size,
        options=row.options,
        publisher_id=row.publisher_id,
    )


def read_publisher(connection: Connection, publisher_id: int) -> StoredPublisher | None:
    """None if it is not registered (any more). Raises StoreUnusable if its rows follow another identity scheme."""
    return read_publishers(connection, [publisher_id]).get(publisher_id)


def read_publishers(connection: Connection, publisher_ids: Sequence[int]) -> Mapping[int, StoredPublisher]:
    """Those of them that are (still) registered, by publisher_id. Raises StoreUnusable as for one."""
    ids = list(publisher_ids)
    wanted = select(publishers).where(publishers.c.publisher_id == func.any(ids), publishers.c.removed_at.is_(None))
    groups = _read_groups(connection, ids)
    return {
        row.publisher_id: _to_publisher(row, groups.get(row.publisher_id, ())) for row in connection.execute(wanted)
    }


def _to_publisher(row: Row[Any], groups: Sequence[GroupState]) -> StoredPublisher:
    if row.scheme != SCHEME:
        raise StoreUnusable(
            f"publisher {row.worker_id!r} rank {row.dp_rank} was stored with identity scheme {row.scheme}, "
            f"this version knows scheme {SCHEME}: keys of two schemes cannot be mixed; delete the publisher "
            "and register it again, or start the version that wrote it"
        )
    checkpoint = Checkpoint(
        generation=row.generation,
        sequence_number=row.sequence_number,
        fingerprint=row.fingerprint,
        coverage=Coverage(row.coverage),
        since=row.since,
        reason=CoverageReason(row.coverage_reason),
        coverage_at=None if row.coverage_at is None else row.coverage_at.timestamp(),
        cohort=row.cohort,
        verified_since=row.verified_since,
    )
    return StoredPublisher(checkpoint, row.granule, tuple(groups), row.side_state, row.flushes)


def read_rows(publisher_id: int, portion_rows: int, connection: Connection) -> StoredRows | None:
    """None as for `read_publisher`."""
    publisher = read_publisher(connection, publisher_id)
    if publisher is None:
        return None
    residencies = list(read_residencies(connection, publisher_id, portion_rows=portion_rows))
    return StoredRows(publisher, residencies, list(stream_ghosts(connection, publisher_id)))


def _read_groups(connection: Connection, publisher_ids: list[int]) -> Mapping[int, Sequence[GroupState]]:
    """By publisher_id, in the order of their numbers."""
    table = publisher_groups
    wanted = select(table).where(table.c.publisher_id == func.any(publisher_ids)).order_by(table.c.group_idx)
    groups: defaultdict[int, list[GroupState]] = defaultdict(list)
    for row in connection.execute(wanted):
        state = GroupState(row.group_idx, row.kind, row.block_tokens, row.window_tokens, tuple(row.sizes))
        groups[row.publisher_id].append(state)
    return groups


def stream_residencies(
    connection: Connection, publisher_id: int
) -> Iterator[tuple[HolderKey, EngineHash, ResidencyRow]]:
    """Every residency of a publisher, in no order."""
    holders: dict[tuple[str, int, str], HolderKey] = {}
    with driver_connection(connection).cursor("residencies", binary=True) as cursor:
        cursor.itersize = FETCH_ROWS
        cursor.execute(_RESIDENCIES, (publisher_id,))
        for medium, group, owner, stored_hash, key, parent, local, tokens, position, *others in cursor:
            place = (medium, group, owner)
            holder = holders.get(place) or holders.setdefault(place, HolderKey(*place))
            parent_key = None if parent is None else to_unsigned(parent)
            local_hash = None if local is None else to_unsigned(local)
            row = ResidencyRow(to_unsigned(key), parent_key, local_hash, tokens, position, *others)
            yield holder, hash_from_bytes(stored_hash), row


def who_has_ghosts(connection: Connection) -> set[int]:
    """publisher_id of each: to look for those of one that has none takes as long as to read some."""
    return {publisher_id for (publisher_id,) in driver_connection(connection).execute(_WHO_HAS_GHOSTS)}


def stream_ghosts(connection: Connection, publisher_id: int) -> Iterator[tuple[EngineHash, GhostRow]]:
    """Every ghost of a publisher, the one to be forgotten first comes first."""
    with driver_connection(connection).cursor("ghosts", binary=True) as cursor:
        cursor.itersize = FETCH_ROWS
        cursor.execute(_GHOSTS, (publisher_id,))
        for stored_hash, key, end_granules, ordinal in cursor:
            yield hash_from_bytes(stored_hash), GhostRow(to_unsigned(key), end_granules, ordinal)
