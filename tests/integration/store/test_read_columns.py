"""Residencies read as columns are those that are read one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from sqlalchemy import Connection

from indexer.index.columns import StoredResidencies
from indexer.index.state import EngineHash, HolderKey, ResidencyRow
from indexer.store.engine import create_database_engine, driver_connection
from indexer.store.read_all import GLUED as PAGES_GLUED
from indexer.store.read_all import UNIFORM_GLUED, read_all_residencies
from indexer.store.read_columns import (
    GLUED,
    IN_THE_ORDER_ON_DISK,
    HashRange,
    read_holders,
    read_residencies,
)
from indexer.store.recovery import read_registrations, stream_residencies
from tests.integration.store.making import CPU, GPU, open_store, registration, row, write
from tests.integration.store.stand_in import StandInPublisher

PEER = HolderKey("GPU", 3, "peer's")
EDGES = (0, 1, 2**56, 2**63 - 1, 2**63, 2**64 - 1)
WIDE = (b"", b"\x00", b"\x01" * 32, b"\xff" * 8 + b"\x00", b"\xff" * 40)

# Key of a residency, and what memory needs of it: content key, end in tokens, reference count, cohort.
Found = dict[tuple[HolderKey, EngineHash], tuple[int, int, int, int]]


def columns_of(portion: StoredResidencies) -> list[np.ndarray]:
    hashes, keys, ends = portion.engine_hashes, portion.content_keys, portion.end_tokens
    return [hashes, keys, ends, portion.reference_counts, portion.cohorts]


@contextmanager
def snapshot(database_url: str) -> Iterator[Connection]:
    engine = create_database_engine(database_url).execution_options(isolation_level="REPEATABLE READ")
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def as_read(portions: Iterable[StoredResidencies]) -> Found:
    found: Found = {}
    for portion in portions:
        size = len(found)
        for engine_hash, *values in zip(*(column.tolist() for column in columns_of(portion)), strict=True):
            found[portion.holder, engine_hash] = tuple(values)
        for engine_hash, *values in portion.wide:
            found[portion.holder, engine_hash] = tuple(values)
        assert len(found) == size + len(portion)
    return found


def one_by_one(connection: Connection, publisher_id: int) -> Found:
    return {
        (holder, engine_hash): (row.content_key, row.position + row.block_tokens, row.reference_count, row.cohort)
        for holder, engine_hash, row in stream_residencies(connection, publisher_id)
    }


async def fill(database_url: str, rows: dict[HolderKey, dict[EngineHash, ResidencyRow]]) -> int:
    """Another publisher holds blocks under the same hashes. Returns the id of the one that holds `rows`."""
    async with open_store(database_url) as store:
        other = StandInPublisher(await store.save(registration("other")))
        publisher = StandInPublisher(await store.save(registration()))
        for holder, held in rows.items():
            for engine_hash, stored in held.items():
                publisher.store(holder, engine_hash, stored)
                other.store(holder, engine_hash, row(1))
        await write(store, publisher, other)
        return publisher.registration.publisher_id


def some_rows(dice: random.Random, hashes: Iterable[EngineHash]) -> dict[EngineHash, ResidencyRow]:
    def some_row() -> ResidencyRow:
        key, parent, local = (dice.getrandbits(64) for _ in range(3))
        may_be_null = (dice.choice((parent, None)), dice.choice((local, None)))
        position, count = dice.choice((0, 2**40, 2**63 - 1)), dice.choice((1, 7, 2**31 - 1))
        return ResidencyRow(key, *may_be_null, dice.choice((16, 2**31 - 1)), position, count, dice.choice((0, 1, 900)))

    return {engine_hash: some_row() for engine_hash in hashes}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("portion_rows", "query_rows"), [(100_000, 1_000_000), (7, 1_000_000), (7, 40), (3, 1)])
def test_columns_equal_rows_read_one_by_one(database_url: str, seed: int, portion_rows: int, query_rows: int) -> None:
    dice = random.Random(seed)
    rows = {
        GPU: some_rows(dice, (*EDGES, *(dice.getrandbits(64) for _ in range(300)))),
        CPU: some_rows(dice, (*WIDE, *EDGES, *(dice.getrandbits(64) for _ in range(50)))),
        PEER: some_rows(dice, range(50)),
        HolderKey("", 0, ""): some_rows(dice, WIDE),
    }
    publisher_id = asyncio.run(fill(database_url, rows))
    with snapshot(database_url) as connection:
        portions = list(read_residencies(connection, publisher_id, portion_rows=portion_rows, query_rows=query_rows))
        assert max(map(len, portions)) <= portion_rows
        assert as_read(portions) == one_by_one(connection, publisher_id)
        assert len(as_read(portions)) == sum(map(len, rows.values()))


@pytest.mark.parametrize("portion_pages", [1, 3, 1_000])
def test_all_read_in_one_pass_are_those_read_one_by_one(database_url: str, portion_pages: int) -> None:
    dice = random.Random(portion_pages)
    rows = {
        GPU: some_rows(dice, (*EDGES, *(dice.getrandbits(64) for _ in range(900)))),
        CPU: some_rows(dice, (*WIDE, *EDGES)),
        PEER: some_rows(dice, WIDE),
    }
    publisher_id = asyncio.run(fill(database_url, rows))
    with snapshot(database_url) as connection:
        others = {registration.publisher_id for registration in read_registrations(connection)} - {publisher_id}
        assert others
        for wanted in ([publisher_id], [publisher_id, *others], []):
            found: dict[int, list[StoredResidencies]] = {one: [] for one in wanted}
            for one, portion in read_all_residencies(connection, wanted, portion_pages=portion_pages):
                found[one].append(portion)
            for one, portions in found.items():
                assert as_read(portions) == one_by_one(connection, one)
                assert all(len(portion) for portion in portions)


@pytest.mark.parametrize("unlike", ["", "reference_count = 4", "cohort = 8", "engine_hash = 'wide'"])
@pytest.mark.parametrize("portion_pages", [1, 1_000])
def test_rows_alike_and_one_that_is_not_are_read_in_one_pass(
    database_url: str, portion_pages: int, unlike: str
) -> None:
    rows = {GPU: {n << 50: row(n) for n in range(900)}, CPU: {1: row(1)}}
    publisher_id = asyncio.run(fill(database_url, rows))
    with snapshot(database_url) as connection:
        connection.exec_driver_sql("UPDATE residencies SET reference_count = 3, cohort = 7")
        if unlike:
            changed = f"UPDATE residencies SET {unlike} WHERE engine_hash = int8send(1) AND content_key = 1"
            assert connection.exec_driver_sql(changed).rowcount == 2  # the other publisher's, too
        portions = (found for _, found in read_all_residencies(connection, [publisher_id], portion_pages=portion_pages))
        found = as_read(portions)
        assert found == one_by_one(connection, publisher_id)
        assert len(found) == 901
        assert {count for _, _, count, _ in found.values()} >= {3}


def test_pages_are_read_by_their_number(database_url: str) -> None:
    asyncio.run(fill(database_url, {GPU: {n << 50: row(n) for n in range(3_000)}}))
    with snapshot(database_url) as connection:
        for query in (PAGES_GLUED, UNIFORM_GLUED):
            plan = plan_of(connection, query, {"first": "(0,0)", "end": "(3,0)"})
            assert "Tid Range Scan on residencies" in plan


def test_a_publisher_that_holds_nothing_has_no_portions(database_url: str) -> None:
    publisher_id = asyncio.run(fill(database_url, {}))
    with snapshot(database_url) as connection:
        assert list(read_residencies(connection, publisher_id)) == []


def test_what_is_read_belongs_together_though_others_write_meanwhile(database_url: str) -> None:
    publisher_id = asyncio.run(fill(database_url, {GPU: {n << 56: row(n) for n in range(200)}, CPU: {1: row(1)}}))

    async def delete() -> None:
        async with open_store(database_url) as store:
            await store.delete(publisher_id)

    with snapshot(database_url) as connection:
        portions = read_residencies(connection, publisher_id, query_rows=50)
        first = next(portions)
        asyncio.run(delete())
        assert len(as_read([first, *portions])) == 201


def test_columns_own_their_values(database_url: str) -> None:
    publisher_id = asyncio.run(fill(database_url, {GPU: {1: row(1)}}))
    with snapshot(database_url) as connection:
        (portion,) = read_residencies(connection, publisher_id)
    for column in columns_of(portion):
        assert column.flags.owndata
        assert column.dtype.isnative


def test_ranges_are_found_in_the_primary_key(database_url: str) -> None:
    rows = {holder: {n << 50: row(n) for n in range(3_000)} for holder in (GPU, CPU)}
    publisher_id = asyncio.run(fill(database_url, rows))
    with snapshot(database_url) as connection:
        holders = read_holders(driver_connection(connection), publisher_id)
        assert sorted(holders.values()) == [CPU, GPU]
        part = HashRange.whole(*next(iter(holders.items()))).parts()[1]
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        connection.exec_driver_sql(IN_THE_ORDER_ON_DISK)
        reading = plan_of(connection, part.asks(GLUED), {**part.values(), "query_rows": 10})
        assert "Bitmap Index Scan on pk_residencies" in reading
        assert "engine_hash < " in reading.partition("Index Cond")[2]


def plan_of(connection: Connection, query: bytes, values: dict[str, object]) -> str:
    return "\n".join(line for (line,) in driver_connection(connection).execute(b"EXPLAIN " + query, values))
