"""The store: everything the service asks of Postgres, as coroutines.

Purpose: keep registrations, residencies and checkpoints durable, and give them back after a restart.

Invariants: database work and the packing of rows run in threads, never on the event loop; every call is one
transaction and is bounded in time; when a call returns, raises or is cancelled, its thread no longer writes, so that
two writes never overtake each other; no error carries a password.

If broken: an old write could land after a newer one, and rows would disagree with memory for good.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psycopg
import structlog
from sqlalchemy import Connection, Row, Select, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from indexer.errors import PublisherConflict, StoreUnavailable
from indexer.identity.chain import SCHEME
from indexer.index.columns import U64, PublisherState, StoredResidencies
from indexer.index.content_index import ContentIndex
from indexer.index.publisher import PublisherIndex
from indexer.index.state import EngineHash, GhostRow, HolderKey, PublisherChanges, StoredBlock, StoredCut
from indexer.registration import CommandKind, PublisherKey, Registration
from indexer.store.audit import AuditReport, audit_publisher, take_snapshots, unknown_publishers
from indexer.store.dump import Dump
from indexer.store.engine import (
    APPLICATION_NAME,
    CONNECTIONS_MAX,
    StoreUnusable,
    ValueRefused,
    create_database_engine,
    driver_connection,
    prepare,
    reason_of,
    refuses_a_value,
    unavailable,
)
from indexer.store.lease import COMMANDS_KEPT_S, NEWS_CHANNEL
from indexer.store.merge import WriteOutcome, write_changes
from indexer.store.past import keep_past, sweep_past
from indexer.store.read_all import read_all_residencies
from indexer.store.read_columns import read_residencies
from indexer.store.read_links import read_links
from indexer.store.reconcile import reconcile_rows
from indexer.store.recovery import (
    StoredPublisher,
    StoredRows,
    read_publisher,
    read_publishers,
    read_registrations,
    read_rows,
    stream_ghosts,
    to_registration,
    who_has_ghosts,
)
from indexer.store.tables import commands, ghosts, hash_from_bytes, holders, publishers, residencies

log = structlog.get_logger()

T = TypeVar("T")

CALL_TIMEOUT_S = 600.0
RECOVERY_TIMEOUT_S = 3_600.0
DUMP_TIMEOUT_S = 600.0
STALLED_AFTER_S = 30.0
BLOCK_ROWS_MAX = 1_000
RETRY_FIRST_S = 0.25
NO_TERMS: Mapping[int, int] = {}
_BLOCK_COLUMNS = (
    *(column for column in holders.c if column is not holders.c.holder_id),
    *(column for column in residencies.c if column is not residencies.c.holder_id),
)


class Store:
    """Postgres as the service sees it. `open` before anything else; one object per process and database.

    Every method raises StoreUnavailable if the database is away, and works again when it is back.
    """

    def __init__(self, database_url: str, *, retry_max_s: float = 10.0, name: str = APPLICATION_NAME) -> None:
        """Does not connect yet. Raises StoreUnusable if the URL cannot be read. `name`: see `lease.replica_name`."""
        self._engine = create_database_engine(database_url, name)
        self._threads = ThreadPoolExecutor(CONNECTIONS_MAX, thread_name_prefix="store")
        self._retry_max_s = retry_max_s
        self._calls: set[_Call] = set()
        self._one_recovery = asyncio.Lock()
        self._writing_since: float | None = None
        self._was_reached = False
        self.last_error: str | None = None

    @property
    def is_reachable(self) -> bool:
        """The last contact succeeded, and no write waits for an answer for longer than STALLED_AFTER_S."""
        is_stalled = self._writing_since is not None and time.monotonic() - self._writing_since > STALLED_AFTER_S
        return self._was_reached and not is_stalled

    async def open(self, *, wait: bool) -> None:
        """Connect and migrate. `wait`: as long as the database is away, try again, with growing pauses."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                return await self._call(prepare)
            except StoreUnusable:
                raise
            except StoreUnavailable as error:
                if not wait:
                    raise
                log.warning("database_awaited", reason=str(error), next_try_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._retry_max_s)

    async def close(self) -> None:
        """Cut off what still runs and close all connections."""
        for call in self._calls:
            call.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._engine.dispose()

    async def ping(self) -> None:
        """One empty round trip: brings `is_reachable` up to date while nothing else is asked."""
        await self._call(lambda connection: connection.execute(select(1)).scalar_one())

    async def registrations(self) -> list[Registration]:
        """All registered publishers, oldest first."""
        return await self._call(read_registrations)

    async def save(self, registration: Registration) -> Registration:
        """Keep a registration; returns it with its publisher_id. Saved before with the same values: the old id.

        Raises PublisherConflict if its key is taken with other values, ValueRefused for a value Postgres cannot hold.
        """
        return await self._call(partial(_save, registration))

    async def delete(self, publisher_id: int) -> None:
        """Forget a publisher, for everyone and at once; its rows go with `sweep`. Unknown: nothing happens."""
        await self._call(partial(_delete, publisher_id))

    async def tell(self, kind: CommandKind, publisher_ids: Sequence[int], origin: str) -> None:
        """Tell all other replicas what an operator asked the one named `origin` for."""
        await self._call(partial(_tell, kind, publisher_ids, origin))

    async def sweep(self) -> bool:
        """Delete the rows of one publisher that was deleted. False: there was none, or others are at it."""
        return await self._call(_sweep)

    async def keep_past(self, is_kept: bool) -> None:
        """Whether it is noted what rows were. To stop forgets all that was."""
        await self._call(partial(keep_past, is_kept))

    async def sweep_past(self, age_max_s: float) -> bool:
        """Forget some of what is older. False: there was nothing left."""
        return await self._call(partial(sweep_past, age_max_s))

    async def read_past(self, work: Callable[[Connection], T]) -> T:
        """Of one moment. Raises PastOutOfReach."""
        return await self._call(work, reads_only=True)

    async def write(self, changes: Sequence[PublisherChanges], terms: Mapping[int, int] = NO_TERMS) -> WriteOutcome:
        """Write effects and checkpoints in one transaction. Writing them again is harmless.

        Changes of a publisher that was deleted are skipped, and those of one whose term is not the one in `terms` (by
        publisher_id; 0 if nobody has claimed it). Raises ValueRefused if a value does not fit its column.
        """
        if not changes:
            return WriteOutcome(0)
        self._writing_since = time.monotonic()
        try:
            return await self._call(lambda connection: write_changes(driver_connection(connection), changes, terms))
        finally:
            self._writing_since = None

    async def reconcile(self, state: PublisherState, term: int) -> int | None:
        """Make the rows of a publisher equal to memory, see reconcile.py; how many differed. None: another one writes
        it, or it is gone."""
        return await self._call(lambda connection: reconcile_rows(connection, state, term))

    async def recover(self, publisher: PublisherIndex) -> int:
        """Read checkpoint and rows of a fresh publisher and load them into it; one publisher at a time. Returns how
        many flushes have written those rows.

        Loading runs in the reading thread: nothing else may use the index until this returns. If it raises, the
        publisher is partly loaded and must be thrown away.
        """
        async with self._one_recovery:
            return await self._call(partial(_recover, publisher), reads_only=True, timeout_s=RECOVERY_TIMEOUT_S)

    async def recover_all(self, publishers: Sequence[PublisherIndex]) -> Mapping[int, int]:
        """The same of several at once: flushes by publisher_id. If it raises, all of them must be thrown away."""
        async with self._one_recovery:
            return await self._call(partial(_recover_all, publishers), reads_only=True, timeout_s=RECOVERY_TIMEOUT_S)

    async def read(self, publisher_id: int, portion_rows: int) -> StoredRows | None:
        """Checkpoint and rows of a publisher, residencies in portions of at most so many; None if it is not registered
        any more."""
        async with self._one_recovery:
            work = partial(read_rows, publisher_id, portion_rows)
            return await self._call(work, reads_only=True, timeout_s=RECOVERY_TIMEOUT_S)

    async def sequence_number(self, publisher_id: int) -> int | None:
        """Of the last batch whose effects are stored."""
        wanted = select(publishers.c.sequence_number).where(publishers.c.publisher_id == publisher_id)
        return await self._call(lambda connection: connection.execute(wanted).scalar_one_or_none())

    async def links(self, publisher_id: int, holder: HolderKey) -> tuple[U64, U64]:
        """Blocks of one place and their parents, as far as they are written; see `read_links`."""
        return await self._call(lambda c: read_links(c, publisher_id, holder), reads_only=True)

    async def block_rows(self, content_key: int, tenants: Collection[str] | None = None) -> list[dict[str, object]]:
        """Who of these tenants (None = all) holds this content, as stored: at most BLOCK_ROWS_MAX rows, with the names
        of the columns."""
        return await self._call(partial(_block_rows, content_key, tenants))

    async def dump(self, tenants: Collection[str] | None = None) -> AsyncGenerator[StoredCut | list[StoredBlock], None]:
        """See `Dump.read`. Holds one connection meanwhile; whoever stops reading must close the iterator."""
        call = _Call()
        self._calls.add(call)
        dump = Dump(self._engine, self._threads, DUMP_TIMEOUT_S, call.start)
        try:
            async with aclosing(dump.read(tenants)) as parts:
                async for part in parts:
                    yield part
        except (DBAPIError, psycopg.Error, PoolTimeout) as error:
            call.abort()
            raise unavailable(error, self._engine.url) from error
        except BaseException:
            call.abort()
            raise
        finally:
            self._calls.discard(call)
            with suppress(RuntimeError):  # the store is closed
                self._threads.submit(dump.close)  # not awaited: whoever reads may be cancelled

    async def audit(self, index: ContentIndex, is_ours: Callable[[int], bool] = lambda _: True) -> AuditReport:
        """Compare memory and rows; flush first. Copying one publisher's residencies holds the event loop.

        Only of publishers that this replica writes (`is_ours`, by publisher_id): others' rows are of another moment."""
        report = AuditReport()
        stored = [registration.key for registration in await self.registrations()]
        for difference in unknown_publishers(stored, index):
            report.add(difference)
        ours = [p for p in index.publishers() if is_ours(p.registration.publisher_id)]
        report.publishers_of_others = len(index.publishers()) - len(ours)
        for snapshot in take_snapshots(ours):
            await self._call(partial(audit_publisher, snapshot, report), reads_only=True)
        return report

    async def _call(
        self, work: Callable[[Connection], T], *, reads_only: bool = False, timeout_s: float = CALL_TIMEOUT_S
    ) -> T:
        """Run `work` in a thread and one transaction. Cancelled or out of time: breaks the connection, then waits."""
        call = _Call()
        self._calls.add(call)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, self._run, call, work, reads_only)
        try:
            done, _ = await asyncio.wait({future}, timeout=timeout_s)
            if not done:
                call.abort()
                await asyncio.wait({future})
        except asyncio.CancelledError:
            call.abort()
            await asyncio.wait({future})
            future.exception()
            raise
        finally:
            self._calls.discard(call)
        return self._outcome(future)

    def _run(self, call: _Call, work: Callable[[Connection], T], reads_only: bool) -> T:
        engine = self._engine.execution_options(isolation_level="REPEATABLE READ") if reads_only else self._engine
        with engine.begin() as connection:
            call.start(driver_connection(connection))
            try:
                return work(connection)
            finally:
                call.end()

    def _outcome(self, future: asyncio.Future[T]) -> T:
        """The result, or the driver's error as one of ours; notes whether the database was reached."""
        try:
            result = future.result()
        except (DBAPIError, psycopg.Error, PoolTimeout) as error:
            if refuses_a_value(error):
                raise ValueRefused(f"a value cannot be stored: {reason_of(error, self._engine.url)}") from error
            away = unavailable(error, self._engine.url)
            self._was_reached, self.last_error = False, str(away)
            raise away from error
        self._was_reached, self.last_error = True, None
        return result


class _Call:
    """A call under way in a thread. `abort` may be called from any other thread, at any time."""

    def __init__(self) -> None:
        self._connection: psycopg.Connection | None = None
        self._is_aborted = False

    def start(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        if self._is_aborted:
            self.abort()

    def end(self) -> None:
        self._connection = None

    def abort(self) -> None:
        """Shut the connection's socket down: whatever the thread waits for ends with an error at once."""
        self._is_aborted = True
        connection = self._connection
        if connection is None:
            return
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def _save(registration: Registration, connection: Connection) -> Registration:
    values = {
        "worker_id": registration.worker_id,
        "dp_rank": registration.dp_rank,
        "tenant": registration.tenant,
        "model": registration.model,
        "engine": registration.engine,
        "endpoint": registration.endpoint,
        "replay_endpoint": registration.replay_endpoint,
        "block_size": registration.block_size,
        "options": dict(registration.options),
        "scheme": SCHEME,
    }
    new = insert(publishers).values(values).on_conflict_do_nothing().returning(publishers.c.publisher_id)
    publisher_id = connection.execute(new).scalar_one_or_none()
    if publisher_id is not None:
        _tell_others(connection)
        return replace(registration, publisher_id=publisher_id)
    saved = to_registration(connection.execute(_of_key(registration.key)).one())
    for field in fields(Registration):
        if field.name != "publisher_id" and getattr(saved, field.name) != getattr(registration, field.name):
            raise PublisherConflict(registration.worker_id, registration.dp_rank, field.name)
    return saved


def _of_key(key: PublisherKey) -> Select[Any]:
    return select(publishers).where(
        publishers.c.worker_id == key.worker_id,
        publishers.c.dp_rank == key.dp_rank,
        publishers.c.removed_at.is_(None),
    )


def _delete(publisher_id: int, connection: Connection) -> None:
    is_it = publishers.c.publisher_id == publisher_id
    connection.execute(update(publishers).where(is_it, publishers.c.removed_at.is_(None)).values(removed_at=func.now()))
    _tell_others(connection)


def _sweep(connection: Connection) -> bool:
    removed = select(publishers.c.publisher_id).where(publishers.c.removed_at.is_not(None)).limit(1)
    publisher_id = connection.execute(removed.with_for_update(skip_locked=True)).scalar_one_or_none()
    if publisher_id is None:
        return False
    held = select(holders.c.holder_id).where(holders.c.publisher_id == publisher_id)
    connection.execute(delete(residencies).where(residencies.c.holder_id.in_(held)))
    for table in (ghosts, publishers):
        connection.execute(delete(table).where(table.c.publisher_id == publisher_id))
    return True


def _tell(kind: CommandKind, publisher_ids: Sequence[int], origin: str, connection: Connection) -> None:
    connection.execute(delete(commands).where(commands.c.made_at < func.now() - timedelta(seconds=COMMANDS_KEPT_S)))
    rows = [{"publisher_id": i, "what": kind.value, "origin": origin} for i in publisher_ids]
    connection.execute(insert(commands), rows)
    _tell_others(connection)


def _tell_others(connection: Connection) -> None:
    """When this transaction commits, every replica looks."""
    connection.execute(select(func.pg_notify(NEWS_CHANNEL, "")))


def _recover_all(publishers: Sequence[PublisherIndex], connection: Connection) -> Mapping[int, int]:
    """One after the other, if most rows are of others."""
    if 2 * len(publishers) < len(read_registrations(connection)):
        return {publisher.registration.publisher_id: _recover(publisher, connection) for publisher in publishers}
    stored = read_publishers(connection, [publisher.registration.publisher_id for publisher in publishers])
    with_ghosts = who_has_ghosts(connection)
    flushes = {}
    loads = {}
    for publisher in publishers:
        publisher_id = publisher.registration.publisher_id
        known = _check_known(publisher.registration, stored.get(publisher_id))
        flushes[publisher_id] = known.flushes
        ghosts = stream_ghosts(connection, publisher_id) if publisher_id in with_ghosts else ()
        loads[publisher_id] = _Load(publisher, known, ghosts)
    for publisher_id, portion in read_all_residencies(connection, list(loads)):
        loads[publisher_id].add(portion)
    for load in loads.values():
        load.finish()
    return flushes


class _Load:
    """A publisher whose residencies come in portions, between those of others."""

    def __init__(
        self, publisher: PublisherIndex, stored: StoredPublisher, ghosts: Iterable[tuple[EngineHash, GhostRow]]
    ) -> None:
        self._publisher = publisher
        self._portions: deque[StoredResidencies | None] = deque()
        self._loading = publisher.loading(stored.rows(iter(self._portions.popleft, None), ghosts))

    def add(self, portion: StoredResidencies) -> None:
        self._portions.append(portion)
        next(self._loading, None)

    def finish(self) -> None:
        """All have come."""
        self._portions.append(None)
        for _ in self._loading:
            raise AssertionError("nothing is left to load")
        self._publisher.catch_up_with_others()


def _check_known(registration: Registration, stored: StoredPublisher | None) -> StoredPublisher:
    if stored is None:
        raise StoreUnusable(f"publisher {registration.worker_id!r} rank {registration.dp_rank} is no longer stored")
    return stored


def _recover(publisher: PublisherIndex, connection: Connection) -> int:
    registration = publisher.registration
    stored = _check_known(registration, read_publisher(connection, registration.publisher_id))
    publisher_id = registration.publisher_id
    publisher.load(stored.rows(read_residencies(connection, publisher_id), stream_ghosts(connection, publisher_id)))
    publisher.catch_up_with_others()
    return stored.flushes


def _block_rows(content_key: int, tenants: Collection[str] | None, connection: Connection) -> list[dict[str, object]]:
    wanted = (
        select(publishers.c.worker_id, publishers.c.dp_rank, publishers.c.tenant, publishers.c.model, *_BLOCK_COLUMNS)
        .join(holders, residencies.c.holder_id == holders.c.holder_id)
        .join(publishers, holders.c.publisher_id == publishers.c.publisher_id)
        .where(residencies.c.content_key == content_key, publishers.c.removed_at.is_(None))
        .order_by(publishers.c.worker_id, publishers.c.dp_rank, holders.c.medium, holders.c.group_idx)
        .limit(BLOCK_ROWS_MAX)
    )
    if tenants is not None:
        wanted = wanted.where(publishers.c.tenant.in_(tenants))
    return [_block_row(row) for row in connection.execute(wanted)]


def _block_row(row: Row[Any]) -> dict[str, object]:
    """The columns by name, but for `group`; the engine hash as an integer, or bytes if the engine named it so."""
    values: dict[str, object] = dict(row._mapping)
    values["group"] = values.pop("group_idx")
    values["engine_hash"] = hash_from_bytes(row.engine_hash)
    return values
