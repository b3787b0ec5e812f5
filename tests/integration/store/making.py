"""Registrations, rows and open stores for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from sqlalchemy import Connection

from indexer.index.state import EngineHash, HolderKey, ResidencyRow
from indexer.registration import Registration
from indexer.store.postgres import Store
from indexer.store.recovery import stream_residencies
from tests.integration.store.stand_in import StandInPublisher

GPU = HolderKey("GPU", 0, "")
CPU = HolderKey("CPU", 0, "")


def registration(worker_id: str = "http://worker-1:8000", dp_rank: int = 0, **values: object) -> Registration:
    return Registration(
        worker_id=worker_id, dp_rank=dp_rank, **{"model": "model-a", "endpoint": "tcp://127.0.0.1:5557", **values}
    )


def row(content_key: int, parent_key: int | None = None, count: int = 1, position: int = 0) -> ResidencyRow:
    return ResidencyRow(content_key, parent_key, content_key ^ 0xFFFF, 16, position, count)


@asynccontextmanager
async def open_store(database_url: str) -> AsyncIterator[Store]:
    store = Store(database_url)
    try:
        await store.open(wait=False)
        yield store
    finally:
        await store.close()


async def write(store: Store, *publishers: StandInPublisher) -> int:
    """Flush these publishers."""
    outcome = await store.write([changes for publisher in publishers if (changes := publisher.take_changes())])
    return outcome.rows


async def recovered(store: Store, publisher: StandInPublisher) -> StandInPublisher:
    """A fresh publisher of the same registration, loaded from the store."""
    fresh = StandInPublisher(publisher.registration)
    await store.recover(fresh)
    stored = partial(_stored_rows, publisher.registration.publisher_id)
    for holder, engine_hash, row in await store._call(stored, reads_only=True, timeout_s=60.0):
        fresh.rows.setdefault(holder, {})[engine_hash] = row
    return fresh


def _stored_rows(publisher_id: int, connection: Connection) -> list[tuple[HolderKey, EngineHash, ResidencyRow]]:
    return list(stream_residencies(connection, publisher_id))


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for the condition, with a limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)
