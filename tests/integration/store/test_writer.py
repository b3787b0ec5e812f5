"""The write-behind task: when it flushes, and that nothing is lost when the database goes away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest

from indexer.errors import StoreUnavailable
from indexer.index.state import HolderKey
from indexer.store.embedded import EmbeddedPostgres
from indexer.store.postgres import Store
from indexer.store.writer import REST_MIN_S, Writer, rest_after
from tests.integration.store.making import CPU, GPU, open_store, recovered, registration, row, until
from tests.integration.store.stand_in import StandInIndex, StandInPublisher


async def add_publisher(store: Store, index: StandInIndex, worker_id: str = "worker") -> StandInPublisher:
    return index.add_publisher(await store.save(registration(worker_id)))


@asynccontextmanager
async def running(writer: Writer) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(writer.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_changes_reach_the_database_by_themselves(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            writer = Writer(store, index, 0.02, 1_000)
            async with running(writer):
                publisher.store(GPU, 1, row(1))
                await until(lambda: writer.flushes == 1)
                assert writer.rows_written == 2
                assert writer.pending == 0
            assert (await recovered(store, publisher)).state() == publisher.state()

    asyncio.run(scenario())


def test_a_block_stored_and_evicted_between_two_flushes_costs_no_row(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            publisher.store(GPU, 1, row(1))
            publisher.remove(GPU, 1)
            await Writer(store, index).flush()
            assert (await recovered(store, publisher)).state() == publisher.state()

    asyncio.run(scenario())


def test_more_pending_changes_than_the_bound_start_a_flush_early(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            writer = Writer(store, index, flush_interval_s=60, flush_changes_max=100)
            async with running(writer):
                for number in range(101):
                    publisher.store(GPU, number, row(number))
                await until(lambda: writer.flushes == 1)

    asyncio.run(scenario())


def test_a_large_flush_is_several_transactions_of_whole_publishers(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            for worker in range(5):
                publisher = await add_publisher(store, index, f"worker-{worker}")
                for number in range(60):
                    publisher.store(GPU, number, row(number))
            writer = Writer(store, index, flush_changes_max=100)
            await writer.flush()
            assert writer.flushes == 3
            assert writer.rows_written == 5 * 61

    asyncio.run(scenario())


def test_one_publisher_with_an_impossible_value_does_not_stop_the_others(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            good, bad = await add_publisher(store, index, "good"), await add_publisher(store, index, "bad")
            good.store(GPU, 1, row(1))
            bad.store(HolderKey("\0", 0, ""), 1, row(1))
            writer = Writer(store, index)
            await writer.flush()
            assert writer.values_refused == 1
            assert (await recovered(store, good)).state() == good.state()
            assert bad.changes_pending == 1
            good.store(GPU, 2, row(2))
            await writer.flush()
            assert writer.values_refused == 1, "the bad one is held back for a while"
            assert (await recovered(store, good)).state() == good.state()

    asyncio.run(scenario())


def test_a_flush_that_is_cancelled_loses_nothing(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            writer = Writer(store, index)
            for pause_s in (0.0, 0.001, 0.003, 0.01, 0.03):
                for number in range(3_000):
                    publisher.store(GPU, number, row(number, count=1 + int(pause_s * 1_000)))
                flush = asyncio.create_task(writer.flush())
                await asyncio.sleep(pause_s)
                flush.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await flush
            await writer.flush()
            assert (await recovered(store, publisher)).state() == publisher.state()

    asyncio.run(scenario())


def test_a_connection_that_is_cut_is_replaced(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            publisher.store(GPU, 1, row(1))
            with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            await Writer(store, index).flush()
            assert store.is_reachable
            assert (await recovered(store, publisher)).state() == publisher.state()

    asyncio.run(scenario())


def test_nothing_is_lost_when_the_server_is_killed_again_and_again(data_dir: Path) -> None:
    """kill -9 of the postmaster while changes stream in; the outcome of the last commit is then unknown."""

    async def scenario() -> None:
        server = EmbeddedPostgres(data_dir)
        watching = None
        try:
            async with open_store(await server.start()) as store:
                watching = asyncio.create_task(server.watch())
                index = StandInIndex()
                publisher = await add_publisher(store, index)
                writer = Writer(store, index, 0.02, 500, retry_max_s=0.5)
                async with running(writer):
                    for kills in range(1, 4):
                        await _change_for_a_while(publisher, 0.3)
                        failures = writer.flush_failures
                        assert server.pid is not None
                        os.kill(server.pid, signal.SIGKILL)
                        await until(lambda seen=failures: _change(publisher) or writer.flush_failures > seen)
                        assert not store.is_reachable
                        assert store.last_error
                        flushes = writer.flushes
                        await until(lambda seen=flushes: _change(publisher) or writer.flushes > seen, 60)
                        assert server.restarts == kills
                assert store.is_reachable
                await writer.flush()
                assert writer.pending == 0
                assert (await recovered(store, publisher)).state() == publisher.state()
                assert (await store.audit(index)).is_equal
        finally:
            if watching is not None:
                watching.cancel()
            await server.stop()

    async def _change_for_a_while(publisher: StandInPublisher, seconds: float) -> None:
        for _ in range(int(seconds / 0.01)):
            _change(publisher)
            await asyncio.sleep(0.01)

    asyncio.run(scenario())


def _change(publisher: StandInPublisher) -> None:
    """Fifty stores; now and then removals, counts, a clear."""
    number = (publisher.checkpoint.sequence_number or 0) + 1
    for engine_hash in range(number, number + 50):
        publisher.store(GPU, engine_hash, row(engine_hash))
        publisher.store(CPU, engine_hash % 97, row(engine_hash))
    publisher.remove(GPU, number)
    publisher.count(GPU, number + 1, 5)
    if number % 7 == 0:
        publisher.clear(CPU)


def test_a_failed_flush_says_so_and_keeps_the_changes(data_dir: Path) -> None:
    async def scenario() -> None:
        server = EmbeddedPostgres(data_dir)
        async with open_store(await server.start()) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            publisher.store(GPU, 1, row(1))
            await server.stop()
            writer = Writer(store, index)
            with pytest.raises(StoreUnavailable):
                await writer.flush()
            assert (writer.flush_failures, writer.flushes, writer.pending) == (1, 0, 1)
            assert not store.is_reachable
            await server.start()
            await writer.flush()
            assert (writer.flush_failures, writer.flushes, writer.pending) == (1, 1, 0)
            assert store.is_reachable
            assert (await recovered(store, publisher)).state() == publisher.state()
        await server.stop()

    asyncio.run(scenario())


def test_flushes_begin_an_interval_apart_and_rest_a_little_in_any_case() -> None:
    assert rest_after(0.0, 0.25) == 0.25
    assert rest_after(0.1, 0.25) == pytest.approx(0.15)
    assert rest_after(0.24, 0.25) == rest_after(3.0, 0.25) == REST_MIN_S
    assert rest_after(3.0, 0.01) == 0.01


def test_lag_is_the_age_of_what_the_database_does_not_have(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            writer = Writer(store, index)
            await until(lambda: time.monotonic() - writer._stored_until > 0.02)
            assert writer.lag_s == 0.0, "there is no change, however long ago the last flush was"
            await writer.flush()
            publisher.store(GPU, 1, row(1))
            with psycopg.connect(database_url.replace("+psycopg", "")) as other:
                other.execute("SELECT 1 FROM publishers FOR UPDATE")
                flush = asyncio.create_task(writer.flush())
                await until(lambda: publisher.changes_pending == 0)
                assert writer.pending == 1, "it is on its way, but not there"
                await until(lambda: writer.lag_s > 0.05)
            await flush
            assert (writer.pending, writer.lag_s) == (0, 0.0)

    asyncio.run(scenario())


def test_lag_grows_while_flushes_fail_and_while_a_publisher_is_held_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            writer = Writer(store, index)
            publisher.store(HolderKey("\0", 0, ""), 1, row(1))
            for _ in range(2):
                before = writer._stored_until
                await writer.flush()
                assert writer._stored_until == before, "the value is refused"
            index.remove_publisher(publisher.registration.key)
            await writer.flush()
            assert writer.lag_s == 0.0

            async def write(*_: object) -> int:
                raise StoreUnavailable("away")

            (await add_publisher(store, index, "other")).store(GPU, 1, row(1))
            before = writer._stored_until
            with monkeypatch.context() as patched:
                patched.setattr(store, "write", write)
                with pytest.raises(StoreUnavailable):
                    await writer.flush()
            assert writer._stored_until == before
            await until(lambda: writer.lag_s > 0.02)
            await writer.flush()
            assert writer.lag_s == 0.0

    asyncio.run(scenario())


def test_a_write_that_waits_is_seen_as_stalled_and_can_be_cancelled(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = await add_publisher(store, index)
            publisher.store(GPU, 1, row(1))
            writer = Writer(store, index)
            with psycopg.connect(database_url.replace("+psycopg", "")) as other:
                other.execute("SELECT 1 FROM publishers FOR UPDATE")
                flush = asyncio.create_task(writer.flush())
                assert store.is_reachable
                monkeypatch.setattr("indexer.store.postgres.STALLED_AFTER_S", 0.0)
                await until(lambda: not store.is_reachable)
                flush.cancel()
                done, _ = await asyncio.wait({flush}, timeout=10)
                assert done
            assert writer.pending == 1
            await writer.flush()
            assert (await recovered(store, publisher)).state() == publisher.state()

    asyncio.run(scenario())
