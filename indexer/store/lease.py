"""Who writes which publisher: one replica at a time, by lease and term.

Purpose: several processes follow the same publishers and share one Postgres; each publisher's rows are written by one
of them. Who holds the advisory lock of a publisher's shard on its one lease session may *claim* the publisher: its row
gets the next `term`, and every flush names the term it was claimed with. Locks say who should write, terms who may.

A process that dies loses its session, and with it its locks, at once; one that is frozen or out of reach loses them
after SESSION_TIMEOUT_S, by the server's own clock. Its lost lease is not taken from a replica: as long as nobody else
has claimed the publisher, its flushes are right, and the first one after that is refused. So a replica whose database
was away for a while goes on as if nothing had happened, if nobody else has come meanwhile.

Invariants: a publisher is claimed only on the session that holds its lock, so who has lost it cannot claim; the term of
a row never falls; a claim waits for a flush under way, and none with an older term comes after it.

If broken: two replicas would mix their rows of one publisher.

The same session looks, twice a second and whenever somebody tells, who is registered, how far the rows are, and what
operators have asked other replicas for: that keeps it alive, and is how replicas learn of each other.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import psycopg
import structlog
from psycopg.conninfo import make_conninfo

from indexer.index.state import ProvenBatch
from indexer.registration import Command, CommandKind
from indexer.store.engine import APPLICATION_NAME, parse_database_url, reason_of
from indexer.store.tables import to_unsigned

log = structlog.get_logger()

SHARDS = 64
"""Locks of all: one for every publisher would not fit Postgres' table of locks."""
LOCKS = 1_803_894_347
NEWS_CHANNEL = "kv_indexer"

LOOK_INTERVAL_S = 0.5
SESSION_TIMEOUT_S = 4.0
LOCK_TIMEOUT_S = 1.0
NEW_SESSION_PAUSE_S = 0.5
ASKED_LOOK_TIMEOUT_S = 2.0
COMMANDS_KEPT_S = 60.0
"""Who cannot look for longer than that misses what operators asked the others for."""
HOST_CHARACTERS_MAX = 30  # Postgres keeps 63 bytes of a name

_SET_UP = (
    f"SET idle_session_timeout = '{int(SESSION_TIMEOUT_S * 1000)}'; SET lock_timeout = '{int(LOCK_TIMEOUT_S * 1000)}';"
    f" LISTEN {NEWS_CHANNEL}"
)
_CONNECT_ARGUMENTS = {
    "connect_timeout": "5",
    "keepalives_idle": "1",
    "keepalives_interval": "1",
    "keepalives_count": "3",
    "tcp_user_timeout": "4000",
}
_TRY_LOCKS = "SELECT shard FROM unnest(%s::int[]) AS shard WHERE pg_try_advisory_lock(%s, shard)"
_LOOK = """
    SELECT publisher_id, generation, sequence_number, flushes, fingerprint, coverage IN ('complete', 'since')
    FROM publishers WHERE removed_at IS NULL
"""
_COMMANDS = """
    SELECT command_id, publisher_id, what, extract(epoch FROM now() - made_at)::float FROM commands
    WHERE origin <> %s AND made_at > now() - make_interval(secs => %s) ORDER BY command_id
"""
_CLAIM = """
    WITH ours AS (SELECT publisher_id FROM publishers WHERE publisher_id = ANY(%(ids)s::bigint[]) AND removed_at IS NULL
        ORDER BY publisher_id FOR UPDATE)
    UPDATE publishers SET term = term + 1, writer = %(writer)s FROM ours
    WHERE publishers.publisher_id = ours.publisher_id
    RETURNING publishers.publisher_id, term, flushes
"""
_END_WRITERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name <> %(writer)s AND application_name IN
        (SELECT writer FROM publishers WHERE publisher_id = ANY(%(ids)s::bigint[]))
"""


class Lease(NamedTuple):
    """The right to write a publisher. `flushes`: how many had written its rows when it was claimed."""

    term: int
    flushes: int


class StoredState(NamedTuple):
    """How far a publisher's rows are. `is_proven`: whoever wrote them has missed nothing and doubted nothing since the
    number that its coverage names."""

    generation: int
    sequence_number: int | None
    flushes: int
    fingerprint: int | None = None
    is_proven: bool = False

    @property
    def proven_batch(self) -> ProvenBatch | None:
        if not self.is_proven or self.sequence_number is None or self.fingerprint is None:
            return None
        return ProvenBatch(self.generation, self.sequence_number, self.fingerprint)


StoredStates = Mapping[int, StoredState]  # by publisher_id: everyone who is registered


class Look(NamedTuple):
    """What a look has found. `commands`: all of the last minute that others were given, oldest first."""

    states: StoredStates
    commands: Sequence[Command] = ()


class Leases(Protocol):
    """What the writer asks."""

    def lease(self, publisher_id: int) -> Lease | None:
        """None: somebody else writes it, or will."""

    def refused(self, publisher_id: int, term: int) -> None:
        """A flush with this term was refused: somebody else has claimed the publisher since."""


def replica_name() -> str:
    """Tells this process from all others, in `publishers.writer` and among the server's connections."""
    return f"{APPLICATION_NAME} {socket.gethostname()[:HOST_CHARACTERS_MAX]} {os.getpid()} {secrets.token_hex(3)}"


def shard_of(publisher_id: int) -> int:
    return publisher_id % SHARDS


class LeaseTable:
    """Which locks and leases this replica has. Pure."""

    def __init__(self) -> None:
        self._locks: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self._claimed: set[int] = set()  # on this session, so that nobody else can have claimed them

    def __len__(self) -> int:
        """Leases held, those of a lost session included."""
        return len(self._leases)

    def lease(self, publisher_id: int) -> Lease | None:
        return self._leases.get(publisher_id)

    @property
    def missing_locks(self) -> list[int]:
        return [shard for shard in range(SHARDS) if shard not in self._locks]

    def locked(self, shards: Iterable[int]) -> None:
        self._locks.update(shards)

    def to_claim(self, registered: Collection[int]) -> list[int]:
        """Of the publishers that are registered now. Others are forgotten."""
        for gone in self._leases.keys() - registered:
            del self._leases[gone]
        self._claimed.intersection_update(registered)
        return sorted(i for i in registered if i not in self._claimed and shard_of(i) in self._locks)

    def claimed(self, publisher_id: int, lease: Lease) -> None:
        assert shard_of(publisher_id) in self._locks, "only who holds the lock claims"
        self._claimed.add(publisher_id)
        self._leases[publisher_id] = lease

    def refused(self, publisher_id: int, term: int) -> None:
        """The lease is over, if it is (still) the one with this term."""
        lease = self._leases.get(publisher_id)
        if lease is not None and lease.term == term:
            del self._leases[publisher_id]
            self._claimed.discard(publisher_id)

    def session_lost(self) -> None:
        """The locks are gone. The leases hold until somebody else claims, and are claimed anew with new locks."""
        self._locks.clear()
        self._claimed.clear()


class LeaseKeeper:
    """Keeps the lease session. The plain attributes are for metrics."""

    def __init__(self, database_url: str, name: str, on_look: Callable[[Look], None] = lambda _: None) -> None:
        """`name`: of this replica (`replica_name`). `on_look`: called with what every look has found."""
        self._url = parse_database_url(database_url)
        self._name = name
        self._on_look = on_look
        self._table = LeaseTable()
        self._wake = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._was_lost = False
        self.looks = 0  # begun until now
        self.publishers = 0
        self.claims = 0

    @property
    def held(self) -> int:
        return len(self._table)

    def lease(self, publisher_id: int) -> Lease | None:
        return self._table.lease(publisher_id)

    def refused(self, publisher_id: int, term: int) -> None:
        self._table.refused(publisher_id, term)

    async def run(self) -> None:
        """Until cancelled, which gives all locks up. Never raises because of the database."""
        while True:
            try:
                await self._keep_session()
            except psycopg.Error as error:
                if not self._was_lost:
                    log.warning("lease_session_lost", reason=reason_of(error, self._url), leases=self.held)
                self._was_lost = True
            finally:
                self._table.session_lost()
            await asyncio.sleep(NEW_SESSION_PAUSE_S)

    async def look_now(self) -> bool:
        """Look, and claim what can be claimed, before the next turn. False: that did not succeed in time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        done, _ = await asyncio.wait({waiter}, timeout=ASKED_LOOK_TIMEOUT_S)
        return bool(done)

    async def _keep_session(self) -> None:
        connection = await self._connect()
        try:
            await connection.execute(_SET_UP.encode())
            while True:
                waiters, self._waiters = self._waiters, []
                await self._look(connection)
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)
                await self._wait_for_news(connection.fileno())
        finally:
            await connection.close()

    async def _connect(self) -> psycopg.AsyncConnection:
        url = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        arguments = {key: value for key, value in _CONNECT_ARGUMENTS.items() if key not in self._url.query}
        conninfo = make_conninfo(url, **arguments, application_name=self._name)
        connection = await psycopg.AsyncConnection.connect(conninfo, autocommit=True)
        connection.add_notify_handler(lambda _: None)  # that there is something to read is news enough
        return connection

    async def _look(self, connection: psycopg.AsyncConnection) -> None:
        table = self._table
        self.looks += 1
        if missing := table.missing_locks:
            cursor = await connection.execute(_TRY_LOCKS, (missing, LOCKS))
            table.locked([shard for (shard,) in await cursor.fetchall()])
        cursor = await connection.execute(_LOOK)
        states = {i: _to_state(*columns) for i, *columns in await cursor.fetchall()}
        cursor = await connection.execute(_COMMANDS, (self._name, COMMANDS_KEPT_S))
        commands = [Command(i, of, CommandKind(what), age_s) for i, of, what, age_s in await cursor.fetchall()]
        if unclaimed := table.to_claim(states.keys()):
            await self._claim(connection, unclaimed)
        self.publishers = len(states)
        if self._was_lost:
            log.info("lease_session_returned", leases=self.held)
            self._was_lost = False
        self._on_look(Look(states, commands))

    async def _claim(self, connection: psycopg.AsyncConnection, publisher_ids: list[int]) -> None:
        values = {"ids": publisher_ids, "writer": self._name}
        try:
            cursor = await connection.execute(_CLAIM, values)
        except psycopg.errors.LockNotAvailable:
            log.warning("writer_ended", reason="it lost its lease in the middle of a flush and keeps the rows locked")
            await connection.execute(_END_WRITERS, values)
            return
        for publisher_id, term, flushes in await cursor.fetchall():
            self._table.claimed(publisher_id, Lease(term, flushes))
            self.claims += 1

    async def _wait_for_news(self, descriptor: int) -> None:
        """Until something can be read, somebody asks, or it is time."""
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, self._wake.set)
        try:
            async with asyncio.timeout(LOOK_INTERVAL_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(descriptor)
            self._wake.clear()


def _to_state(
    generation: int, sequence_number: int | None, flushes: int, fingerprint: int | None, is_proven: bool
) -> StoredState:
    number = None if sequence_number is None else to_unsigned(sequence_number)
    return StoredState(generation, number, flushes, fingerprint and to_unsigned(fingerprint), is_proven)
