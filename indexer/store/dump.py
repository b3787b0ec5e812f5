"""Reads everything that is stored, bit by bit, in one transaction.

Purpose: a dump of millions of rows that needs no more memory than a few hundred of them, holds up nobody, and says of
every publisher the batch that its rows are of: rows and checkpoint are written in one transaction, and a repeatable
read sees them so.

Invariants: one connection, used by one thread at a time; it goes back to the pool whatever happens, also if whoever
reads goes away in the midst.

If broken: a part of a dump would mix two moments, or dumps that nobody reads would hold all connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from concurrent.futures import Executor
from functools import partial
from threading import Lock
from typing import NamedTuple, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, select

from indexer.errors import StoreUnavailable
from indexer.index.state import StoredBlock, StoredCut
from indexer.store.engine import driver_connection
from indexer.store.recovery import to_registration
from indexer.store.tables import publishers, to_unsigned

BLOCKS_AT_ONCE = 500  # a millisecond on the loop, to encode and send them
_BLOCKS = (
    "SELECT medium, group_idx, content_key, parent_key, local_hash, block_tokens, position"
    " FROM holders JOIN residencies USING (holder_id) WHERE publisher_id = %s AND cohort = %s"
    " ORDER BY position, content_key"
)

T = TypeVar("T")


class _Part(NamedTuple):
    """A publisher at its checkpoint, and the cohort of what is verified there."""

    cut: StoredCut
    cohort: int


class Dump:
    """`note_connection` is told of the connection as soon as there is one. Made for one use."""

    def __init__(
        self, engine: Engine, threads: Executor, timeout_s: float, note_connection: Callable[[psycopg.Connection], None]
    ) -> None:
        self._engine = engine.execution_options(isolation_level="REPEATABLE READ")
        self._threads = threads
        self._deadline = time.monotonic() + timeout_s
        self._note_connection = note_connection
        self._connection: Connection | None = None
        self._cursor: psycopg.ServerCursor | None = None
        self._one_thread = Lock()
        self._is_closed = False

    async def read(self, tenants: Collection[str] | None) -> AsyncGenerator[StoredCut | list[StoredBlock], None]:
        """Cuts of all publishers (of these tenants) by tenant, model, worker and rank, each followed by portions of the
        blocks that the publisher held there, parents first.

        Raises what the driver raises, and StoreUnavailable when its time is over.
        """
        for part in await self._in_thread(partial(self._open, tenants)):
            yield part.cut
            await self._in_thread(partial(self._begin, part))
            while blocks := await self._in_thread(self._next):
                yield blocks

    def close(self) -> None:
        """Not on the loop. Waits for what is under way: a portion, or the sorting of a publisher's rows."""
        with self._one_thread:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if time.monotonic() > self._deadline:
            raise StoreUnavailable("the dump took too long, and would keep the database from tidying up")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._alone, work)

    def _alone(self, work: Callable[[], T]) -> T:
        with self._one_thread:
            if self._is_closed:  # by a reader that went away before this began
                raise StoreUnavailable("the dump is closed")
            return work()

    def _open(self, tenants: Collection[str] | None) -> list[_Part]:
        self._connection = self._engine.connect()
        self._note_connection(driver_connection(self._connection))
        wanted = select(publishers).where(publishers.c.removed_at.is_(None))
        if tenants is not None:
            wanted = wanted.where(publishers.c.tenant.in_(tenants))
        in_order = publishers.c.tenant, publishers.c.model, publishers.c.worker_id, publishers.c.dp_rank
        return [
            _Part(StoredCut(to_registration(row), row.granule, row.coverage, row.sequence_number), row.cohort)
            for row in self._connection.execute(wanted.order_by(*in_order))
        ]

    def _begin(self, part: _Part) -> None:
        assert self._connection is not None
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = driver_connection(self._connection).cursor("dump", binary=True)
        self._cursor.execute(_BLOCKS, (part.cut.registration.publisher_id, part.cohort))

    def _next(self) -> list[StoredBlock]:
        assert self._cursor is not None
        return [
            StoredBlock(medium, group, to_unsigned(key), _hash(parent), _hash(local), block_tokens, position)
            for medium, group, key, parent, local, block_tokens, position in self._cursor.fetchmany(BLOCKS_AT_ONCE)
        ]


def _hash(stored: int | None) -> int | None:
    return None if stored is None else to_unsigned(stored)
