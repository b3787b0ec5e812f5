"""What is written comes back: rows, ghosts, checkpoint, groups and side state, bit for bit."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import psycopg
import pytest

from indexer.index.state import (
    Checkpoint,
    CountChange,
    Coverage,
    CoverageReason,
    GhostRow,
    GroupState,
    HolderChanges,
    HolderKey,
)
from indexer.store.engine import StoreUnusable, ValueRefused
from indexer.store.postgres import Store
from tests.integration.store.making import CPU, GPU, open_store, recovered, registration, row, write
from tests.integration.store.stand_in import StandInPublisher

EDGES = (0, 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)


async def registered(store: Store, worker_id: str = "http://worker-1:8000") -> StandInPublisher:
    return StandInPublisher(await store.save(registration(worker_id)))


def query(database_url: str, statement: str) -> list[tuple]:
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        return connection.execute(statement).fetchall()


def test_a_new_publisher_recovers_empty(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            assert (await recovered(store, publisher)).state() == publisher.state()

    asyncio.run(scenario())


def test_everything_written_comes_back(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            publisher.store(GPU, 7, row(100))
            publisher.store(GPU, b"\x01" * 32, row(200, parent_key=100, count=3, position=16))
            publisher.store(GPU, b"", row(250)._replace(local_hash=None))
            publisher.store(HolderKey("CPU", 2, "peer"), 7, row(300, parent_key=0)._replace(local_hash=None))
            publisher.remember(9, GhostRow(2**64 - 1, 33, 1))
            publisher.remember(b"old", GhostRow(5, 4_000_000_000, 0))
            publisher.granule = 16
            publisher.groups = (GroupState(0, "full_attention", 16, None, (16, 32)), GroupState(1, "mamba", 528, 4, ()))
            publisher.side_state = b"\x00opaque\xff"
            publisher.checkpoint = Checkpoint(
                3, 2**63 + 5, 2**64 - 1, Coverage.SINCE, 17, CoverageReason.CLEARED, 1_785_312_000.123
            )
            await write(store, publisher)
            fresh = await recovered(store, publisher)
            assert fresh.state() == publisher.state()
            assert list(fresh.ghost_rows) == [b"old", 9]

    asyncio.run(scenario())


def test_64_bit_hashes_come_back_bit_for_bit(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            for edge in EDGES:
                publisher.store(GPU, edge, row(edge, parent_key=edge)._replace(local_hash=edge))
                publisher.remember(edge, GhostRow(edge, 1, edge >> 2))
            await write(store, publisher)
            assert (await recovered(store, publisher)).state() == publisher.state()
            for edge in EDGES:
                assert [found["content_key"] for found in await store.block_rows(edge)] == [edge]

    asyncio.run(scenario())
    kept = query(database_url, "SELECT content_key FROM residencies ORDER BY engine_hash")
    assert [key for (key,) in kept] == [0, 1, 2**53 + 1, 2**63 - 1, -(2**63), -1]


def test_side_state_and_groups_stay_when_unchanged(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            publisher.side_state, publisher.groups = b"kept", (GroupState(0, "full_attention", 16, None, (16,)),)
            publisher.store(GPU, 1, row(1))
            await write(store, publisher)
            publisher.store(GPU, 2, row(2))
            changes = publisher.take_changes()
            assert changes is not None
            await store.write([replace(changes, side_state=None, groups=None)])
            assert (await recovered(store, publisher)).state() == publisher.state()

    asyncio.run(scenario())


def test_a_cleared_holder_loses_its_old_rows_and_keeps_its_new_ones(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            for number in range(10):
                publisher.store(GPU, number, row(number))
                publisher.store(CPU, number, row(number))
            await write(store, publisher)
            publisher.clear(GPU)
            publisher.store(GPU, 3, row(33))
            await write(store, publisher)
            fresh = await recovered(store, publisher)
            assert fresh.rows[GPU] == {3: row(33)}
            assert len(fresh.rows[CPU]) == 10

    asyncio.run(scenario())


def test_places_that_hold_nothing_do_not_pile_up(database_url: str) -> None:
    """An owner that is never seen again, over and over."""

    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            publisher.store(GPU, 1, row(1))
            await write(store, publisher)
            for number in range(5):
                passing = HolderKey("CPU", 0, f"owner {number}")
                publisher.store(passing, 2, row(2))
                await write(store, publisher)
                publisher.remove(passing, 2)
                await write(store, publisher)
            fresh = await recovered(store, publisher)
            assert fresh.rows == {GPU: {1: row(1)}}

    asyncio.run(scenario())
    assert query(database_url, "SELECT medium, owner FROM holders ORDER BY holder_id") == [
        ("GPU", ""),
        ("CPU", "owner 4"),
    ]


def test_a_count_change_touches_nothing_but_the_count(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            publisher.store(GPU, 1, row(1, parent_key=5))
            await write(store, publisher)
            publisher.count(GPU, 1, 4)
            changes = publisher.take_changes()
            assert changes is not None
            assert changes.holders == [HolderChanges(GPU, False, {1: CountChange(4)})]
            await store.write([changes])
            assert (await recovered(store, publisher)).rows == {GPU: {1: row(1, parent_key=5, count=4)}}

    asyncio.run(scenario())


def test_a_count_change_of_a_row_that_is_not_stored_adds_none(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            publisher.store(GPU, 1, row(1))
            changes = publisher.take_changes()
            assert changes is not None
            changes.holders = [HolderChanges(GPU, False, {2: CountChange(4)})]
            await store.write([changes])
            assert (await recovered(store, publisher)).rows == {}

    asyncio.run(scenario())


def test_ghosts_are_forgotten_one_by_one_and_all_at_once(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            for number in range(5):
                publisher.remember(number, GhostRow(number, number, number))
            await write(store, publisher)
            publisher.remember(2, None)
            await write(store, publisher)
            assert list((await recovered(store, publisher)).ghost_rows) == [0, 1, 3, 4]
            publisher.ghosts_cleared = True
            publisher.remember(8, GhostRow(8, 8, 8))
            await write(store, publisher)
            assert list((await recovered(store, publisher)).ghost_rows) == [8]

    asyncio.run(scenario())


def test_writing_the_same_changes_again_changes_nothing(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            publisher.store(GPU, 1, row(1))
            publisher.store(GPU, 2, row(2))
            await write(store, publisher)
            publisher.clear(GPU)
            publisher.store(GPU, 3, row(3))
            publisher.remove(GPU, 2)
            publisher.remember(2, GhostRow(2, 1, 1))
            changes = publisher.take_changes()
            assert changes is not None
            await store.write([changes])
            await store.write([changes])
            assert (await recovered(store, publisher)).state() == publisher.state()

    asyncio.run(scenario())


def test_a_deleted_publisher_is_skipped_and_the_others_are_written(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            gone, stays = await registered(store, "gone"), await registered(store, "stays")
            for publisher in (gone, stays):
                publisher.store(GPU, 1, row(1))
                publisher.remember(2, GhostRow(2, 1, 1))
            await store.delete(gone.registration.publisher_id)
            assert await write(store, gone, stays) == 3
            again = StandInPublisher(await store.save(registration("gone")))
            assert again.registration.publisher_id != gone.registration.publisher_id
            assert (await recovered(store, again)).rows == {}
            assert (await recovered(store, stays)).rows == {GPU: {1: row(1)}}
            with pytest.raises(StoreUnusable, match="no longer stored"):
                await recovered(store, gone)

    asyncio.run(scenario())


def test_deleting_a_publisher_deletes_its_rows(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            publisher.groups = (GroupState(0, "full_attention", 16, None, (16,)),)
            publisher.store(GPU, 1, row(1))
            publisher.remember(2, GhostRow(2, 1, 1))
            await write(store, publisher)
            await store.delete(publisher.registration.publisher_id)
            await store.delete(publisher.registration.publisher_id)
            assert await store.registrations() == []
            assert await store.block_rows(1) == []
            assert await store.sweep()
            assert not await store.sweep()

    asyncio.run(scenario())
    for table in ("publishers", "publisher_groups", "holders", "residencies", "ghosts"):
        assert query(database_url, f"SELECT count(*) FROM {table}") == [(0,)]


def test_a_value_that_does_not_fit_is_refused_and_nothing_is_written(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            for holder, engine_hash, bad in (
                (GPU, 1, row(1, count=2**40)),
                (GPU, random.Random(1).randbytes(9_000), row(1)),
                (HolderKey("G\0PU", 0, ""), 1, row(1)),
                (HolderKey("GPU", 2**40, ""), 1, row(1)),
            ):
                publisher.store(holder, engine_hash, bad)
                with pytest.raises(ValueRefused):
                    await write(store, publisher)
                assert store.is_reachable
            assert (await recovered(store, publisher)).rows == {}

    asyncio.run(scenario())


def test_rows_of_another_identity_scheme_are_refused(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store)
            with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
                connection.execute("UPDATE publishers SET scheme = 2")
            with pytest.raises(StoreUnusable, match="identity scheme 2"):
                await recovered(store, publisher)

    asyncio.run(scenario())


def test_block_rows_name_who_holds_a_block(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            first, second = await registered(store, "first"), await registered(store, "second")
            first.store(GPU, 1, row(77, parent_key=2**64 - 1, count=2, position=32))
            second.store(CPU, b"abc", row(77, parent_key=2**64 - 1, position=32))
            await write(store, first, second)
            rows = await store.block_rows(77)
            assert [(r["worker_id"], r["medium"], r["group"], r["engine_hash"]) for r in rows] == [
                ("first", "GPU", 0, 1),
                ("second", "CPU", 0, b"abc"),
            ]
            assert rows[0]["parent_key"] == 2**64 - 1
            assert rows[0]["reference_count"] == 2
            assert rows[0]["position"] == 32
            assert await store.block_rows(78) == []

    asyncio.run(scenario())


def test_two_writers_of_one_publisher_do_not_mix_their_rows(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as one, open_store(database_url) as other:
            publisher, second = await registered(one), await registered(one, "second")
            writers = []
            for number, store in enumerate((one, other)):
                for turn in range(5):
                    for target in (publisher, second):
                        target.clear(GPU)
                        for engine_hash in range(200):
                            target.store(GPU, engine_hash, row(1_000 * number + turn))
                    changes = [c for p in (publisher, second) if (c := p.take_changes())]
                    writers.append(store.write(changes if turn % 2 else changes[::-1]))
            await asyncio.gather(*writers)
            fresh = await recovered(one, publisher)
            assert len(fresh.rows[GPU]) == 200
            assert len({found.content_key for found in fresh.rows[GPU].values()}) == 1

    asyncio.run(scenario())
