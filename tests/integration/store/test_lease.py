"""Leases of several replicas on a real Postgres: one writer at a time, another soon after it is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psycopg
import pytest

from indexer.registration import CommandKind
from indexer.store.lease import SHARDS, Lease, LeaseKeeper, Look, StoredState, replica_name
from tests.integration.store.lease_holder import lease_holder
from tests.integration.store.making import GPU, open_store, registration, row, until
from tests.integration.store.stand_in import StandInPublisher

ANOTHER_WRITES_WITHIN_S = 5.0


@asynccontextmanager
async def keeping(database_url: str, name: str = "") -> AsyncIterator[LeaseKeeper]:
    """A keeper that has looked once."""
    keeper = LeaseKeeper(database_url, name or replica_name())
    task = asyncio.create_task(keeper.run())
    try:
        assert await keeper.look_now()
        yield keeper
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def execute(database_url: str, statement: str) -> None:
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(statement.encode())


def test_one_of_two_replicas_holds_every_lease(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            ids = [(await store.save(registration(f"worker-{n}"))).publisher_id for n in range(2 * SHARDS)]
            async with keeping(database_url) as first, keeping(database_url) as second:
                assert (first.held, second.held) == (2 * SHARDS, 0)
                assert first.lease(ids[0]) == Lease(1, 0)
                assert second.lease(ids[0]) is None

    asyncio.run(scenario())


def test_a_replica_that_stops_hands_its_leases_over(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher_id = (await store.save(registration())).publisher_id
            async with keeping(database_url) as first:
                async with keeping(database_url) as second:
                    assert await second.look_now()
                    assert second.held == 0
                assert first.lease(publisher_id) == Lease(1, 0)
            async with keeping(database_url) as third:
                assert third.lease(publisher_id) == Lease(2, 0)

    asyncio.run(scenario())


def test_a_registration_is_seen_when_it_is_told_and_needs_no_look(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.store.lease.LOOK_INTERVAL_S", 600.0)
    monkeypatch.setattr("indexer.store.lease._SET_UP", "LISTEN kv_indexer")

    async def scenario() -> None:
        async with open_store(database_url) as store, keeping(database_url) as keeper:
            publisher_id = (await store.save(registration())).publisher_id
            await until(lambda: keeper.lease(publisher_id) is not None)
            await store.delete(publisher_id)
            await until(lambda: keeper.publishers == 0)

    asyncio.run(scenario())


def test_without_notifications_the_next_look_sees_it(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.store.lease._SET_UP", "SELECT 1")

    async def scenario() -> None:
        async with open_store(database_url) as store, keeping(database_url) as keeper:
            publisher_id = (await store.save(registration())).publisher_id
            await until(lambda: keeper.lease(publisher_id) is not None)

    asyncio.run(scenario())


def test_every_look_says_who_is_registered(database_url: str) -> None:
    async def scenario() -> None:
        looks: list[Look] = []
        keeper = LeaseKeeper(database_url, replica_name(), looks.append)
        task = asyncio.create_task(keeper.run())
        async with open_store(database_url) as store:
            publisher = StandInPublisher(await store.save(registration()))
            publisher_id = publisher.registration.publisher_id
            await until(lambda: bool(looks) and publisher_id in looks[-1].states)
            assert looks[-1].states[publisher_id] == StoredState(1, None, 0, is_proven=True)
            publisher.store(GPU, 1, row(1))
            changes = publisher.take_changes()
            assert changes is not None
            await until(lambda: keeper.lease(publisher_id) is not None)
            await store.write([changes], {publisher_id: 1})
            await until(lambda: tuple(looks[-1].states[publisher_id][:3]) == (1, 0, 1))
            await store.delete(publisher_id)
            await until(lambda: publisher_id not in looks[-1].states)
        task.cancel()

    asyncio.run(scenario())


def test_a_command_is_told_to_all_others_at_once(database_url: str) -> None:
    async def scenario() -> None:
        looks: dict[str, list[Look]] = {"here": [], "there": []}
        tasks = [asyncio.create_task(LeaseKeeper(database_url, n, found.append).run()) for n, found in looks.items()]
        async with open_store(database_url) as store:
            await until(lambda: all(looks.values()))
            await store.tell(CommandKind.CLEAR, [7, 9], "here")
            await until(lambda: len(looks["there"][-1].commands) == 2)
            assert [(c.publisher_id, c.kind) for c in looks["there"][-1].commands] == [
                (7, CommandKind.CLEAR),
                (9, CommandKind.CLEAR),
            ]
            assert not any(look.commands for look in looks["here"])
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def test_a_writer_that_was_overtaken_is_refused(database_url: str) -> None:
    """It paused; another one claimed and wrote; back again, it knows nothing of that."""

    async def scenario() -> None:
        async with open_store(database_url) as store:
            saved = await store.save(registration())
            publisher_id = saved.publisher_id
            old, new = StandInPublisher(saved), StandInPublisher(saved)
            async with keeping(database_url):
                pass  # it had term 1
            async with keeping(database_url) as keeper:
                lease = keeper.lease(publisher_id)
                assert lease == Lease(2, 0)
                new.store(GPU, 1, row(1))
                old.store(GPU, 2, row(2))
                changes, late = new.take_changes(), old.take_changes()
                assert changes is not None
                assert late is not None
                assert not (await store.write([changes], {publisher_id: lease.term})).fenced
                outcome = await store.write([late], {publisher_id: 1})
                assert outcome == (0, frozenset({publisher_id}))
                assert await store.block_rows(2) == []

    asyncio.run(scenario())


def test_a_claim_waits_for_a_flush_under_way(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher_id = (await store.save(registration())).publisher_id
            with psycopg.connect(database_url.replace("+psycopg", "")) as flush:
                flush.execute("SELECT 1 FROM publishers FOR UPDATE")
                keeper = LeaseKeeper(database_url, replica_name())
                task = asyncio.create_task(keeper.run())
                await until(lambda: _waits_for_a_lock(database_url))
                assert keeper.lease(publisher_id) is None
                flush.execute("UPDATE publishers SET flushes = flushes + 1")
                flush.commit()
                await until(lambda: keeper.lease(publisher_id) == Lease(1, 1))
                task.cancel()

    asyncio.run(scenario())


def _waits_for_a_lock(database_url: str) -> bool:
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        found = connection.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone()
    return found is not None and found[0] > 0


def test_a_writer_that_froze_in_the_middle_of_a_flush_is_ended(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher_id = (await store.save(registration())).publisher_id
            async with keeping(database_url, "kv-indexer frozen"):
                pass  # it has been the writer
            frozen = psycopg.connect(database_url.replace("+psycopg", ""), application_name="kv-indexer frozen")
            with suppress(psycopg.Error), frozen:
                frozen.execute("SELECT 1 FROM publishers FOR UPDATE")
                async with keeping(database_url) as keeper:
                    await until(lambda: keeper.lease(publisher_id) == Lease(2, 0), ANOTHER_WRITES_WITHIN_S)
                frozen.execute("UPDATE publishers SET flushes = flushes + 1")
                frozen.commit()
            assert frozen.broken

    asyncio.run(scenario())


def test_a_killed_holder_is_followed_at_once_and_a_frozen_one_within_five_seconds(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher_id = (await store.save(registration())).publisher_id
            for term, number in ((1, signal.SIGKILL), (3, signal.SIGSTOP)):
                with lease_holder(database_url) as holder:
                    async with keeping(database_url) as keeper:
                        assert keeper.lease(publisher_id) is None
                        os.kill(holder.pid, number)
                        began = time.monotonic()
                        await until(lambda seen=keeper: seen.held == 1)
                        assert time.monotonic() - began < ANOTHER_WRITES_WITHIN_S
                        assert keeper.lease(publisher_id) == Lease(term + 1, 0)

    asyncio.run(scenario())


def test_a_session_that_is_cut_is_made_again_and_its_leases_with_it(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store, keeping(database_url, "kv-indexer cut") as keeper:
            publisher_id = (await store.save(registration())).publisher_id
            await until(lambda: keeper.lease(publisher_id) == Lease(1, 0))
            execute(
                database_url,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kv-indexer cut'",
            )
            await until(lambda: keeper.lease(publisher_id) == Lease(2, 0))
            assert keeper.claims == 2

    asyncio.run(scenario())
