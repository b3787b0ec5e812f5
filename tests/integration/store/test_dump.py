"""A dump is one moment for all of each publisher, whatever is written meanwhile, and gives its connection back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from indexer.errors import StoreUnavailable
from indexer.index.state import StoredBlock, StoredCut
from indexer.store import postgres
from indexer.store.dump import BLOCKS_AT_ONCE
from indexer.store.postgres import Store
from tests.integration.store.making import CPU, GPU, open_store, registration, row, write
from tests.integration.store.stand_in import StandInPublisher

WAIT_S = 10.0


async def registered(store: Store, worker_id: str, **values: object) -> StandInPublisher:
    return StandInPublisher(await store.save(registration(worker_id, **values)))


async def dumped(store: Store, tenants: list[str] | None = None) -> list[tuple[StoredCut, list[StoredBlock]]]:
    found: list[tuple[StoredCut, list[StoredBlock]]] = []
    async for part in store.dump(tenants):
        if isinstance(part, StoredCut):
            found.append((part, []))
        else:
            assert 0 < len(part) <= BLOCKS_AT_ONCE
            found[-1][1].extend(part)
    return found


async def wait_until_connections_are_back(store: Store) -> None:
    async with asyncio.timeout(WAIT_S):
        while store._engine.pool.checkedout():  # noqa: ASYNC110 - the pool tells nobody
            await asyncio.sleep(0.01)


def test_every_block_comes_after_its_parent_with_its_publisher(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            last, first = await registered(store, "b"), await registered(store, "a", tenant="a")
            last.granule = 16
            last.store(GPU, 8, row(2**64 - 1, parent_key=100, position=16))
            last.store(CPU, 7, row(100)._replace(local_hash=None))
            last.store(GPU, 7, row(100))
            await write(store, first, last)
            (none, nothing), (cut, blocks) = await dumped(store)
            assert (none.registration.worker_id, none.sequence_number, nothing) == ("a", None, [])
            assert (cut.registration, cut.granule, cut.sequence_number) == (last.registration, 16, 2)
            assert blocks[2:] == [StoredBlock("GPU", 0, 2**64 - 1, 100, (2**64 - 1) ^ 0xFFFF, 16, 16)]
            assert sorted(blocks[:2]) == [
                StoredBlock("CPU", 0, 100, None, None, 16, 0),
                StoredBlock("GPU", 0, 100, None, 100 ^ 0xFFFF, 16, 0),
            ]
            assert [cut.registration.worker_id for cut, _ in await dumped(store, ["a"])] == ["a"]
            assert await dumped(store, []) == []

    asyncio.run(scenario())


def test_what_is_unverified_is_left_out(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store, "a")
            publisher.store(GPU, 7, row(100)._replace(cohort=1))
            publisher.store(GPU, 8, row(101))
            await write(store, publisher)
            assert [block.content_key for block in (await dumped(store))[0][1]] == [101]

    asyncio.run(scenario())


def test_a_dump_is_one_moment_whatever_is_written_meanwhile(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publishers = [await registered(store, name) for name in ("a", "b")]
            for publisher in publishers:
                for key in range(1, 3 * BLOCKS_AT_ONCE):
                    publisher.store(GPU, key, row(key))
            await write(store, *publishers)
            held = set(publishers[0].rows[GPU])
            keys: dict[str, set[int]] = {}
            numbers = {}
            async for part in store.dump():
                if isinstance(part, StoredCut):
                    worker_id = part.registration.worker_id
                    numbers[worker_id], keys[worker_id] = part.sequence_number, set()
                else:
                    keys[worker_id].update(block.content_key for block in part)
                for publisher in publishers:  # and everything changes
                    publisher.remove(GPU, min(publisher.rows[GPU]))
                    publisher.store(GPU, 10_000 + len(held), row(10_000))
                await write(store, *publishers)
            assert keys == {"a": held, "b": held}
            assert numbers == {"a": len(held) - 1, "b": len(held) - 1}

    asyncio.run(scenario())


@pytest.mark.parametrize("parts", [1, 2])
def test_a_reader_that_goes_away_gives_the_connection_back(database_url: str, parts: int) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store, "a")
            for key in range(1, 3 * BLOCKS_AT_ONCE):
                publisher.store(GPU, key, row(key))
            await write(store, publisher)
            async with aclosing(store.dump()) as dump:
                for _ in range(parts):
                    await anext(dump)
            await wait_until_connections_are_back(store)
            assert len((await dumped(store))[0][1]) == 3 * BLOCKS_AT_ONCE - 1
            await wait_until_connections_are_back(store)

    asyncio.run(scenario())


def test_a_cancelled_reader_gives_the_connection_back(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            await registered(store, "a")
            reading = asyncio.create_task(dumped(store))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
            await wait_until_connections_are_back(store)
            assert len(await dumped(store)) == 1

    asyncio.run(scenario())


def test_a_dump_that_takes_too_long_is_given_up(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "DUMP_TIMEOUT_S", -1.0)

    async def scenario() -> None:
        async with open_store(database_url) as store:
            with pytest.raises(StoreUnavailable, match="too long"):
                await dumped(store)
            await wait_until_connections_are_back(store)

    asyncio.run(scenario())


def test_a_database_that_goes_away_is_said(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = await registered(store, "a")
            for key in range(1, 3 * BLOCKS_AT_ONCE):
                publisher.store(GPU, key, row(key))
            await write(store, publisher)
            async with aclosing(store.dump()) as dump:
                await anext(dump)
                for call in store._calls:
                    call.abort()
                with pytest.raises(StoreUnavailable):
                    [part async for part in dump]
            await wait_until_connections_are_back(store)

    asyncio.run(scenario())
