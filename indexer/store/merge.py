"""Writes changes of publishers: new residencies by COPY, all else by COPY into staging tables and a merge of each.

Purpose: bring rows and checkpoints to the state the changes name, fast. Runs inside the caller's transaction, so that
effects and checkpoint are one.

Invariants: every statement names the new state, not a difference to the old one, so that writing the same changes twice
is the same as once; a publisher that is unregistered gets no rows, nor does one whose row has another term than the
caller holds (see lease.py), and it is locked from that check to the commit; publishers are locked in ascending order of
their id, so that two writers never wait for each other in a circle, and never mix their rows of one publisher.

If broken: rows and checkpoint would disagree, and recovery would skip or repeat batches unnoticed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import NamedTuple, TypeAlias

import psycopg
from psycopg import sql
from psycopg.copy import LibpqWriter

from indexer.index.state import CountChange, HolderChanges, PublisherChanges, ResidencyRow
from indexer.store.copy_columns import count_rows, removal_rows, residency_rows
from indexer.store.copy_format import (
    CHUNK_BYTES,
    COUNT_COLUMNS,
    GHOST_COLUMNS,
    GHOST_KEY_COLUMNS,
    RESIDENCY_COLUMNS,
    RESIDENCY_KEY_COLUMNS,
    Packed,
    count_field,
    ghost_fields,
    ghost_prefix,
    hash_field,
    holder_prefix,
    in_chunks,
    residency_fields,
)
from indexer.store.engine import ValueRefused
from indexer.store.tables import to_signed

# Merges look rows up by the primary key, so that a flush costs what it changes, never what is stored. Staging tables
# have no statistics: left to itself, the planner may read the whole table instead.
_PREPARE = (
    "SET LOCAL client_min_messages = warning; SET LOCAL jit = off; SET LOCAL enable_indexscan = on;"
    " SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off;"
    " SET LOCAL idle_in_transaction_session_timeout = '60s'"  # a writer that froze keeps its locks no longer
)
_LOCK_PUBLISHERS = (
    "SELECT publisher_id, term FROM publishers WHERE publisher_id = ANY(%s::bigint[]) AND removed_at IS NULL"
    " ORDER BY publisher_id FOR UPDATE"
)
_UPDATE_PUBLISHER = (
    "UPDATE publishers SET generation = %s, sequence_number = %s, fingerprint = %s, coverage = %s, since = %s,"
    " coverage_reason = %s, coverage_at = %s, cohort = %s, verified_since = %s,"
    " granule = %s, side_state = COALESCE(%s, side_state), flushes = flushes + 1 WHERE publisher_id = %s"
)
_DELETE_GROUPS = "DELETE FROM publisher_groups WHERE publisher_id = %s"
_INSERT_GROUP = (
    "INSERT INTO publisher_groups (publisher_id, group_idx, kind, block_tokens, window_tokens, sizes)"
    " VALUES (%s, %s, %s, %s, %s, %s)"
)
# Nobody else adds holders of these publishers meanwhile: they are locked.
_READ_HOLDERS = (
    "SELECT holder_id, publisher_id, medium, group_idx, owner FROM holders WHERE publisher_id = ANY(%s::bigint[])"
)
_NUMBER_HOLDERS = (
    "INSERT INTO holders (publisher_id, medium, group_idx, owner)"
    " SELECT * FROM unnest(%s::bigint[], %s::text[], %s::int[], %s::text[])"
    " RETURNING holder_id, publisher_id, medium, group_idx, owner"
)
_FORGET_EMPTY_HOLDERS = (
    "DELETE FROM holders h WHERE publisher_id = ANY(%s::bigint[]) AND holder_id <> ALL(%s::int[])"
    " AND NOT EXISTS (SELECT FROM residencies r WHERE r.holder_id = h.holder_id)"
)
_CLEAR_HOLDERS = "DELETE FROM residencies WHERE holder_id = ANY(%s::int[])"
# After all else: what has become of a block since its cohort was dropped has another cohort, and stays.
_DELETE_EXPIRED = (
    "DELETE FROM residencies r USING holders h WHERE r.holder_id = h.holder_id AND h.publisher_id = %s AND cohort <= %s"
)
_CLEAR_GHOSTS = "DELETE FROM ghosts WHERE publisher_id = %s"

_DELETE_RESIDENCIES = (
    "DELETE FROM residencies r USING staged_removals s"
    " WHERE r.holder_id = s.holder_id AND r.engine_hash = s.engine_hash"
)
_UPDATE_COUNTS = (
    "UPDATE residencies r SET reference_count = s.reference_count, cohort = s.cohort FROM staged_counts s"
    " WHERE r.holder_id = s.holder_id AND r.engine_hash = s.engine_hash"
)
_DELETE_GHOSTS = (
    "DELETE FROM ghosts g USING staged_ghost_removals s"
    " WHERE g.publisher_id = s.publisher_id AND g.engine_hash = s.engine_hash"
)


class _NumberedHolder(NamedTuple):
    """`may_hide_rows`: see `PublisherChanges`."""

    holder_id: int
    changes: HolderChanges
    may_hide_rows: bool


_Holders: TypeAlias = Sequence[_NumberedHolder]


class WriteOutcome(NamedTuple):
    """`rows`: staged rows and checkpoints moved. `fenced`: publishers of which nothing was written, for their term."""

    rows: int
    fenced: frozenset[int] = frozenset()


def write_changes(
    connection: psycopg.Connection, changes: Sequence[PublisherChanges], terms: Mapping[int, int]
) -> WriteOutcome:
    """Write all changes of publishers that still exist and have the term that the caller holds (by default 0, that of a
    publisher that nobody has claimed)."""
    with connection.cursor() as cursor:
        cursor.execute(_PREPARE)
        cursor.execute(_LOCK_PUBLISHERS, ([change.publisher_id for change in changes],))
        stored_terms: dict[int, int] = dict(cursor.fetchall())
        fenced = {i for i, term in stored_terms.items() if term != terms.get(i, 0)}
        changes = [c for c in changes if c.publisher_id in stored_terms and c.publisher_id not in fenced]
        if not changes:
            return WriteOutcome(0, frozenset(fenced))
        rows = _write_residencies(cursor, changes) + _write_ghosts(cursor, changes)
        _write_groups(cursor, changes)
        cursor.executemany(_UPDATE_PUBLISHER, [_publisher_values(change) for change in changes])
        return WriteOutcome(rows + len(changes), frozenset(fenced))


def empty_staging(connection: psycopg.Connection) -> None:
    """Before changes are written a second time in one transaction."""
    staged = connection.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = pg_my_temp_schema() AND relname LIKE 'staged_%'"
    ).fetchall()
    if staged:
        tables = sql.SQL(", ").join(sql.Identifier("pg_temp", name) for (name,) in staged)
        connection.execute(sql.SQL("TRUNCATE {}").format(tables))


def _write_residencies(cursor: psycopg.Cursor, changes: Sequence[PublisherChanges]) -> int:
    """Removals go first: a block removed and stored again is in both."""
    holders = _numbered_holders(cursor, changes)
    cleared = [holder_id for holder_id, holder, _ in holders if holder.cleared]
    if cleared:
        cursor.execute(_CLEAR_HOLDERS, (cleared,))
    key_columns = RESIDENCY_KEY_COLUMNS
    rows = (
        _stage_and_merge(cursor, "removals", "residencies", key_columns, _removals(holders), _DELETE_RESIDENCIES)
        + _insert_residencies(cursor, holders)
        + _stage_and_merge(cursor, "counts", "residencies", COUNT_COLUMNS, _counts(holders), _UPDATE_COUNTS)
    )
    expired = [(c.publisher_id, c.expired) for c in changes if c.expired is not None]
    if expired:
        cursor.executemany(_DELETE_EXPIRED, expired)
    return rows


def _insert_residencies(cursor: psycopg.Cursor, holders: _Holders) -> int:
    """New ones straight into the table, which costs a quarter less than a merge: they have no rows.

    Some may have, and are merged: those under wide hashes, of which nobody knows, and those that memory holds anew.
    If others have (what was unverified until just before the flush, or the same changes once more), all are merged.
    """
    to_merge = [holder for holder in holders if holder.may_hide_rows]
    rows = _some(_new_residencies(holder for holder in holders if not holder.may_hide_rows), "residencies")
    count = 0
    if rows is not None:
        try:
            with cursor.connection.transaction():  # a savepoint
                count = _copy(cursor, "residencies", RESIDENCY_COLUMNS, rows)
        except psycopg.errors.UniqueViolation:
            to_merge = list(holders)
    merge = _upsert("residencies", RESIDENCY_KEY_COLUMNS, RESIDENCY_COLUMNS)
    merged = chain(_wide_residencies(holders), _new_residencies(to_merge))
    return count + _stage_and_merge(cursor, "residencies", "residencies", RESIDENCY_COLUMNS, merged, merge)


def _numbered_holders(cursor: psycopg.Cursor, changes: Sequence[PublisherChanges]) -> _Holders:
    """All holders that changed, with their numbers in the store. New ones get one, and those of the same publishers
    that hold nothing any more lose theirs: places with ever other owners do not pile up."""
    changed = {
        (change.publisher_id, *holder.holder): (holder, change.may_hide_rows)
        for change in changes
        for holder in change.holders
    }
    if not changed:
        return []
    cursor.execute(_READ_HOLDERS, ([change.publisher_id for change in changes],))
    numbers = {place: holder_id for holder_id, *key in cursor if (place := tuple(key)) in changed}
    if missing := [place for place in changed if place not in numbers]:
        columns = tuple(map(list, zip(*missing, strict=True)))
        cursor.execute(_FORGET_EMPTY_HOLDERS, (columns[0], list(numbers.values())))
        cursor.execute(_NUMBER_HOLDERS, columns)
        numbers.update((tuple(key), holder_id) for holder_id, *key in cursor)
    return [_NumberedHolder(numbers[place], *holder) for place, holder in changed.items()]


def _write_ghosts(cursor: psycopg.Cursor, changes: Sequence[PublisherChanges]) -> int:
    cleared = [(c.publisher_id,) for c in changes if c.ghosts_cleared]
    if cleared:
        cursor.executemany(_CLEAR_GHOSTS, cleared)
    return _stage_and_merge(
        cursor, "ghost_removals", "ghosts", GHOST_KEY_COLUMNS, _ghost_removals(changes), _DELETE_GHOSTS
    ) + _stage_and_merge(
        cursor,
        "ghosts",
        "ghosts",
        GHOST_COLUMNS,
        _new_ghosts(changes),
        _upsert("ghosts", GHOST_KEY_COLUMNS, GHOST_COLUMNS),
    )


def _write_groups(cursor: psycopg.Cursor, changes: Sequence[PublisherChanges]) -> None:
    changed = [(c.publisher_id, c.groups) for c in changes if c.groups is not None]
    if not changed:
        return
    cursor.executemany(_DELETE_GROUPS, [(publisher_id,) for publisher_id, _ in changed])
    cursor.executemany(
        _INSERT_GROUP,
        [
            (publisher_id, g.group, g.kind, g.block_tokens, g.window, list(g.sizes))
            for publisher_id, groups in changed
            for g in groups
        ],
    )


def _publisher_values(change: PublisherChanges) -> tuple[object, ...]:
    point = change.checkpoint
    return (
        point.generation,
        _signed_or_null(point.sequence_number),
        _signed_or_null(point.fingerprint),
        str(point.coverage),
        _signed_or_null(point.since),
        str(point.reason),
        None if point.coverage_at is None else datetime.fromtimestamp(point.coverage_at, UTC),
        point.cohort,
        _signed_or_null(point.verified_since),
        change.granule,
        change.side_state,
        change.publisher_id,
    )


def _signed_or_null(value: int | None) -> int | None:
    return None if value is None else to_signed(value)


def _stage_and_merge(
    cursor: psycopg.Cursor, staged: str, target: str, columns: tuple[str, ...], rows: Iterable[Packed], merge: str
) -> int:
    """COPY `rows` into the temporary table staged_<staged>, empty at each start of a transaction, and merge it."""
    packed = _some(rows, target)
    if packed is None:
        return 0
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    create = "CREATE TEMPORARY TABLE IF NOT EXISTS {} ON COMMIT DELETE ROWS AS SELECT {} FROM {} WITH NO DATA"
    cursor.execute(sql.SQL(create).format(sql.Identifier(f"staged_{staged}"), names, sql.Identifier(target)))
    count = _copy(cursor, f"staged_{staged}", columns, packed)
    cursor.execute(merge.encode())
    return count


def _copy(cursor: psycopg.Cursor, table: str, columns: tuple[str, ...], packed: Iterable[Packed]) -> int:
    """How many rows that were."""
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    copy_in = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(sql.Identifier(table), names)
    # libpq keeps for good as much memory as it once was given ahead of the server.
    with cursor.copy(copy_in, writer=LibpqWriter(cursor, flush_threshold=CHUNK_BYTES)) as copy:
        for chunk in in_chunks(packed):
            copy.write(chunk)
    return cursor.rowcount


def _some(rows: Iterable[Packed], target: str) -> Iterator[Packed] | None:
    """The same rows, None if there are none. Raises ValueRefused, now or later, at one that does not fit."""
    fitting = _fitting(rows, target)
    first = next(fitting, None)
    return None if first is None else chain((first,), fitting)


def _fitting(rows: Iterable[Packed], target: str) -> Iterator[Packed]:
    try:
        yield from rows
    except (struct.error, ValueError) as error:
        raise ValueRefused(f"a value cannot be stored in {target}: {error}") from error


def _upsert(table: str, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
    names = ", ".join(columns)
    values = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return (
        f"INSERT INTO {table} ({names}) SELECT {names} FROM staged_{table}"
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {values}"
    )


def _new_residencies(holders: Iterable[_NumberedHolder]) -> Iterator[Packed]:
    for holder_id, holder, _ in holders:
        prefix = holder_prefix(RESIDENCY_COLUMNS, holder_id)
        for portion in holder.portions():
            yield from residency_rows(prefix, portion.upserted)


def _wide_residencies(holders: _Holders) -> Iterator[Packed]:
    for holder_id, holder, _ in holders:
        prefix = holder_prefix(RESIDENCY_COLUMNS, holder_id)
        for engine_hash, row in holder.rows.items():
            if isinstance(row, ResidencyRow):
                yield prefix + hash_field(engine_hash) + residency_fields(row)


def _counts(holders: _Holders) -> Iterator[Packed]:
    for holder_id, holder, _ in holders:
        prefix = holder_prefix(COUNT_COLUMNS, holder_id)
        for engine_hash, row in holder.rows.items():
            if isinstance(row, CountChange):
                yield prefix + hash_field(engine_hash) + count_field(row)
        if holder.columns is not None:
            yield from count_rows(prefix, *holder.columns.count_changes)


def _removals(holders: _Holders) -> Iterator[Packed]:
    for holder_id, holder, _ in holders:
        prefix = holder_prefix(RESIDENCY_KEY_COLUMNS, holder_id)
        for engine_hash, row in holder.rows.items():
            if row is None:
                yield prefix + hash_field(engine_hash)
        if holder.columns is not None:
            yield from removal_rows(prefix, holder.columns.removed)


def _new_ghosts(changes: Sequence[PublisherChanges]) -> Iterator[Packed]:
    for change in changes:
        prefix = ghost_prefix(GHOST_COLUMNS, change.publisher_id)
        for engine_hash, row in change.ghosts.items():
            if row is not None:
                yield prefix + hash_field(engine_hash) + ghost_fields(row)


def _ghost_removals(changes: Sequence[PublisherChanges]) -> Iterator[Packed]:
    for change in changes:
        prefix = ghost_prefix(GHOST_KEY_COLUMNS, change.publisher_id)
        for engine_hash, row in change.ghosts.items():
            if row is None:
                yield prefix + hash_field(engine_hash)
