"""What the index believed at a past time: rows as they are, with all that has changed since undone.

Purpose: while this is kept, triggers note what each row was before a statement changed it, in the same transaction; so
flushes, sweeps and take-overs need not know of it, and without it nobody pays. What a publisher holds of one prompt at
a past time is read for the keys of that prompt alone, and loaded into an index of its own, which answers as ever.

Its time is that of transactions: what was stored and evicted between two flushes never shows, and what was applied
shows up to a flush later.

Invariants: `past_begins` has a row exactly while the triggers are there; nothing that changed after that is forgotten.

If broken: past answers would be those of another time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from sqlalchemy import Connection, text

from indexer.errors import PastOutOfReach
from indexer.index.columns import U64, PublisherRows, StoredResidencies, WideResidency
from indexer.index.content_index import ContentIndex
from indexer.index.lookup import prompt_keys_ahead
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.index.state import Checkpoint, Coverage, CoverageReason, GroupState, HolderKey
from indexer.registration import POOL_OPTION, PublisherKey, Registration
from indexer.store.engine import driver_connection
from indexer.store.tables import hash_from_bytes, to_signed, to_unsigned

SWEPT_AT_ONCE = 50_000
T = TypeVar("T")

_PLACE = "h.publisher_id, h.medium, h.group_idx, h.owner"
_NEW = "INSERT INTO residency_changes (at, publisher_id, medium, group_idx, owner, engine_hash, content_key"
_OLD_VALUES = ", position, block_tokens, reference_count, cohort)"
_ROW_BEFORE = "o.engine_hash, o.content_key, o.position, o.block_tokens, o.reference_count, o.cohort"
# Flushes switch off ways to join that tables without statistics must not take; rows of one statement are many.
_KEEP = f"""
CREATE OR REPLACE FUNCTION journal_residencies() RETURNS trigger LANGUAGE plpgsql
  SET enable_hashjoin = on SET enable_mergejoin = on AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    {_NEW}) SELECT now(), {_PLACE}, n.engine_hash, n.content_key FROM inserted n JOIN holders h USING (holder_id);
  ELSIF TG_OP = 'DELETE' THEN
    {_NEW}{_OLD_VALUES} SELECT now(), {_PLACE}, {_ROW_BEFORE} FROM deleted o JOIN holders h USING (holder_id);
  ELSE
    {_NEW}{_OLD_VALUES} SELECT now(), {_PLACE}, {_ROW_BEFORE}
      FROM before o JOIN after n USING (holder_id, engine_hash) JOIN holders h USING (holder_id)
      WHERE (o.content_key, o.cohort) IS DISTINCT FROM (n.content_key, n.cohort);
    {_NEW}) SELECT now(), {_PLACE}, n.engine_hash, n.content_key
      FROM before o JOIN after n USING (holder_id, engine_hash) JOIN holders h USING (holder_id)
      WHERE o.content_key <> n.content_key;
  END IF;
  RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION journal_publisher() RETURNS trigger LANGUAGE plpgsql
  SET enable_hashjoin = on SET enable_mergejoin = on AS $$
BEGIN
  INSERT INTO publisher_states (at, publisher_id, publisher, groups)
    SELECT now(), NEW.publisher_id, to_jsonb(NEW) - 'side_state', COALESCE(jsonb_agg(to_jsonb(g)), '[]')
    FROM publisher_groups g WHERE g.publisher_id = NEW.publisher_id;
  RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION journal_group() RETURNS trigger LANGUAGE plpgsql
  SET enable_hashjoin = on SET enable_mergejoin = on AS $$
BEGIN
  INSERT INTO publisher_states (at, publisher_id, publisher, groups)
    SELECT now(), p.publisher_id, to_jsonb(p) - 'side_state',
      (SELECT jsonb_agg(to_jsonb(g)) FROM publisher_groups g WHERE g.publisher_id = p.publisher_id)
    FROM publishers p WHERE p.publisher_id IN (SELECT publisher_id FROM inserted);
  RETURN NULL;
END $$;
CREATE TRIGGER journal_inserts AFTER INSERT ON residencies REFERENCING NEW TABLE AS inserted
  FOR EACH STATEMENT EXECUTE FUNCTION journal_residencies();
CREATE TRIGGER journal_deletes AFTER DELETE ON residencies REFERENCING OLD TABLE AS deleted
  FOR EACH STATEMENT EXECUTE FUNCTION journal_residencies();
CREATE TRIGGER journal_updates AFTER UPDATE ON residencies REFERENCING OLD TABLE AS before NEW TABLE AS after
  FOR EACH STATEMENT EXECUTE FUNCTION journal_residencies();
CREATE TRIGGER journal_registrations AFTER INSERT ON publishers
  FOR EACH ROW EXECUTE FUNCTION journal_publisher();
CREATE TRIGGER journal_publishers AFTER UPDATE ON publishers FOR EACH ROW WHEN (
  (OLD.generation, OLD.coverage, OLD.since, OLD.coverage_reason, OLD.coverage_at, OLD.cohort, OLD.verified_since,
   OLD.granule, OLD.removed_at) IS DISTINCT FROM
  (NEW.generation, NEW.coverage, NEW.since, NEW.coverage_reason, NEW.coverage_at, NEW.cohort, NEW.verified_since,
   NEW.granule, NEW.removed_at)) EXECUTE FUNCTION journal_publisher();
CREATE TRIGGER journal_groups AFTER INSERT ON publisher_groups REFERENCING NEW TABLE AS inserted
  FOR EACH STATEMENT EXECUTE FUNCTION journal_group();
INSERT INTO publisher_states (at, publisher_id, publisher, groups)
  SELECT now(), p.publisher_id, to_jsonb(p) - 'side_state',
    COALESCE((SELECT jsonb_agg(to_jsonb(g)) FROM publisher_groups g WHERE g.publisher_id = p.publisher_id), '[]')
  FROM publishers p;
INSERT INTO past_begins VALUES (now());
"""
_FORGET = """
DROP TRIGGER IF EXISTS journal_inserts ON residencies;
DROP TRIGGER IF EXISTS journal_deletes ON residencies;
DROP TRIGGER IF EXISTS journal_updates ON residencies;
DROP TRIGGER IF EXISTS journal_registrations ON publishers;
DROP TRIGGER IF EXISTS journal_publishers ON publishers;
DROP TRIGGER IF EXISTS journal_groups ON publisher_groups;
TRUNCATE residency_changes, publisher_states, past_begins;
"""
# No flush is under way while triggers come or go: what it has written, the snapshot has, and what comes is noted.
# In the order in which flushes take them.
_LOCK = "LOCK TABLE residencies, publisher_groups, publishers, past_begins IN SHARE ROW EXCLUSIVE MODE"
_BEGINS = "SELECT extract(epoch FROM at)::float8 FROM past_begins"
_STATES = """
SELECT DISTINCT ON (publisher_id) publisher_id, publisher, groups FROM publisher_states
WHERE at <= :at AND publisher->>'tenant' = :tenant AND (
  (publisher->>'worker_id', CAST(publisher->>'dp_rank' AS int))
    IN (SELECT * FROM unnest(CAST(:workers AS text[]), CAST(:ranks AS int[])))
  OR (publisher->>'model' = :model AND publisher->'options' ? :pool))
ORDER BY publisher_id, state_id DESC
"""
_VALUES = "medium, group_idx, owner, engine_hash, content_key, position, block_tokens, reference_count, cohort"
_CHANGES_SINCE = (
    f"SELECT {_VALUES} FROM residency_changes WHERE content_key = ANY(%s::bigint[]) AND at > %s AND publisher_id = %s"
    " ORDER BY change_id DESC"
)
_ROWS_NOW = (
    f"SELECT {_VALUES} FROM residencies JOIN holders USING (holder_id)"
    " WHERE content_key = ANY(%s::bigint[]) AND publisher_id = %s"
)
_SWEEP_CHANGES = (
    "DELETE FROM residency_changes WHERE change_id IN"
    " (SELECT change_id FROM residency_changes WHERE at < :horizon ORDER BY at LIMIT :rows)"
)
_SWEEP_STATES = (
    "DELETE FROM publisher_states s WHERE at < :horizon AND (publisher->>'removed_at' IS NOT NULL OR EXISTS (SELECT"
    " FROM publisher_states n WHERE n.publisher_id = s.publisher_id AND n.state_id > s.state_id AND n.at <= :horizon))"
)
_MOVE_BEGIN = "UPDATE past_begins SET at = :horizon WHERE at < :horizon"


class PastPublisher(NamedTuple):
    """A publisher as it was. `registration.publisher_id` tells one registration from the next."""

    registration: Registration
    checkpoint: Checkpoint
    granule: int | None
    groups: tuple[GroupState, ...]


@dataclass(frozen=True, slots=True)
class Past:
    """An index of what was held of one prompt, and the publishers that were asked for; None = not registered then."""

    index: ContentIndex
    publishers: list[PublisherIndex | None]


class Reader(Protocol):
    """The part of `Store` that this needs."""

    async def read_past(self, work: Callable[[Connection], T]) -> T: ...


def keep_past(is_kept: bool, connection: Connection) -> None:
    """Begin to note what rows were, or stop and forget it, if that is not so already."""
    if (connection.execute(text(_BEGINS)).first() is not None) == is_kept:
        return
    driver = driver_connection(connection)
    driver.execute(_LOCK)
    if (connection.execute(text(_BEGINS)).first() is not None) != is_kept:  # another replica was quicker
        driver.execute(_KEEP.encode() if is_kept else _FORGET.encode())


def sweep_past(age_max_s: float, connection: Connection) -> bool:
    """Forget some of what is older. False: there was nothing left."""
    horizon = connection.execute(text("SELECT now() - make_interval(secs => :s)"), {"s": age_max_s}).scalar_one()
    connection.execute(text(_MOVE_BEGIN), {"horizon": horizon})
    swept = connection.execute(text(_SWEEP_CHANGES), {"horizon": horizon, "rows": SWEPT_AT_ONCE}).rowcount
    if swept < SWEPT_AT_ONCE:
        connection.execute(text(_SWEEP_STATES), {"horizon": horizon})
    return swept == SWEPT_AT_ONCE


async def past_index(
    reader: Reader, live: ContentIndex, at: float, query: PrefixQuery, wanted: Sequence[PublisherKey]
) -> Past:
    """What these publishers of the prompt's tenant, and its pools, held of it. `at`: in seconds since 1970.

    Raises PastOutOfReach.
    What is no row is as `live` knows it now, of publishers that are registered still: whether hashes look ahead, and
    what connectors do. Cost: some 10 us a granule and publisher, in the database.
    """
    moment = datetime.fromtimestamp(at, UTC)
    publishers = await reader.read_past(partial(_read_publishers, moment, query, wanted))
    index = ContentIndex(live.limits)
    for past in publishers:
        publisher = index.add_publisher(past.registration)
        now = live.publisher(past.registration.key)
        if now is not None and now.registration.publisher_id == past.registration.publisher_id:
            publisher.resemble(now)
        held: list[StoredResidencies] = []
        if past.granule is not None:
            keys = prompt_keys_ahead(query, past.granule, publisher.residents.lookahead_tokens)
            held = await reader.read_past(partial(_read_residencies, moment, past.registration.publisher_id, keys))
        publisher.load(PublisherRows(past.checkpoint, past.granule, past.groups, held))
    return Past(index, [index.publisher(key) for key in wanted])


def _read_publishers(
    moment: datetime, query: PrefixQuery, wanted: Sequence[PublisherKey], connection: Connection
) -> list[PastPublisher]:
    begins_at = connection.execute(text(_BEGINS)).scalar_one_or_none()
    if begins_at is None or moment.timestamp() < begins_at:
        raise PastOutOfReach(begins_at)
    parameters = {
        "at": moment,
        "workers": [key.worker_id for key in wanted],
        "ranks": [key.dp_rank for key in wanted],
        "tenant": query.tenant,
        "model": query.model,
        "pool": POOL_OPTION,
    }
    rows = connection.execute(text(_STATES), parameters).all()
    return [_to_publisher(row.publisher, row.groups) for row in rows if row.publisher["removed_at"] is None]


def _to_publisher(row: dict[str, Any], groups: Iterable[dict[str, Any]]) -> PastPublisher:
    names = ("worker_id", "dp_rank", "model", "endpoint", "replay_endpoint", "tenant", "engine", "block_size")
    registration = Registration(
        **{name: row[name] for name in names}, options=row["options"], publisher_id=row["publisher_id"]
    )
    coverage_at = None if row["coverage_at"] is None else datetime.fromisoformat(row["coverage_at"]).timestamp()
    checkpoint = Checkpoint(
        generation=row["generation"],
        coverage=Coverage(row["coverage"]),
        since=None if row["since"] is None else to_unsigned(row["since"]),
        reason=CoverageReason(row["coverage_reason"]),
        coverage_at=coverage_at,
        cohort=row["cohort"],
        verified_since=None if row["verified_since"] is None else to_unsigned(row["verified_since"]),
    )
    states = tuple(
        GroupState(g["group_idx"], g["kind"], g["block_tokens"], g["window_tokens"], tuple(g["sizes"]))
        for g in sorted(groups, key=itemgetter("group_idx"))
    )
    return PastPublisher(registration, checkpoint, row["granule"], states)


def _read_residencies(
    moment: datetime, publisher_id: int, keys: U64, connection: Connection
) -> list[StoredResidencies]:
    wanted = [to_signed(key) for key in set(keys.tolist())]
    driver = driver_connection(connection)
    rows = {_identity(row): row for row in driver.execute(_ROWS_NOW, (wanted, publisher_id))}
    for change in driver.execute(_CHANGES_SINCE, (wanted, moment, publisher_id)):  # the newest first
        rows[_identity(change)] = change
    places: dict[HolderKey, list[Any]] = {}
    for medium, group, owner, engine_hash, content_key, position, block_tokens, references, cohort in rows.values():
        if cohort is not None:  # else there was no such row
            residency = WideResidency(
                engine_hash, to_unsigned(content_key), position + block_tokens, references, cohort
            )
            places.setdefault(HolderKey(medium, group, owner), []).append(residency)
    return [_to_residencies(place, held) for place, held in places.items()]


def _identity(row: Sequence[Any]) -> tuple[Any, ...]:
    """Place, engine hash and content key."""
    return tuple(row[:5])


def _to_residencies(place: HolderKey, held: Sequence[WideResidency]) -> StoredResidencies:
    narrow = [residency for residency in held if len(residency.engine_hash) == 8]
    wide = [residency for residency in held if len(residency.engine_hash) != 8]
    hashes = [hash_from_bytes(residency.engine_hash) for residency in narrow]
    return StoredResidencies(
        place,
        np.array(hashes, np.uint64),
        np.array([residency.content_key for residency in narrow], np.uint64),
        np.array([residency.end_tokens for residency in narrow], np.uint64),
        np.array([residency.reference_count for residency in narrow], np.uint32),
        np.array([residency.cohort for residency in narrow], np.int32),
        wide,
    )
