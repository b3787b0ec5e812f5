"""Migrations, opening, and the plans of the queries."""

from __future__ import annotations

import asyncio
import re
import time

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from indexer.errors import PublisherConflict, StoreUnavailable
from indexer.store.engine import StoreUnusable, create_database_engine, migrate
from indexer.store.postgres import Store
from indexer.store.tables import metadata
from tests.integration.store.making import GPU, open_store, registration, row, write
from tests.integration.store.stand_in import StandInIndex, StandInPublisher
from tests.postgres_fixtures import PostgresServer


def plain(database_url: str) -> str:
    return database_url.replace("+psycopg", "")


def test_the_migrated_schema_is_what_the_tables_declare(database_url: str) -> None:
    engine = create_database_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_an_empty_database_is_migrated_and_a_second_time_left_alone(empty_database_url: str) -> None:
    async def scenario() -> None:
        for _ in range(2):
            async with open_store(empty_database_url) as store:
                assert await store.registrations() == []

    asyncio.run(scenario())


def test_rows_from_before_reasons_were_kept_get_the_usual_one(empty_database_url: str) -> None:
    engine = create_database_engine(empty_database_url)
    with engine.begin() as connection:
        migrate(connection, "0001")
    insert = (
        "INSERT INTO publishers (worker_id, dp_rank, tenant, model, engine, endpoint, options, scheme, coverage)"
        " VALUES (%s, 0, 't', 'm', 'vllm', 'tcp://h:1', '{}', 1, %s)"
    )
    with psycopg.connect(plain(empty_database_url)) as old:
        for coverage in ("complete", "since", "degraded"):
            old.execute(insert, (coverage, coverage))
    with engine.begin() as connection:
        migrate(connection)
    engine.dispose()
    with psycopg.connect(plain(empty_database_url)) as new:
        rows = new.execute("SELECT coverage, coverage_reason, coverage_at FROM publishers").fetchall()
    assert sorted(rows) == [
        ("complete", "from_start", None),
        ("degraded", "gap", None),
        ("since", "joined_late", None),
    ]


def test_rows_from_before_holders_had_numbers_are_kept(empty_database_url: str) -> None:
    engine = create_database_engine(empty_database_url)
    with engine.begin() as connection:
        migrate(connection, "0004")
    publisher = (
        "INSERT INTO publishers (worker_id, dp_rank, tenant, model, engine, endpoint, options, scheme)"
        " VALUES (%s, 0, 'default', 'model-a', 'auto', 'tcp://h:1', '{}', 1) RETURNING publisher_id"
    )
    residency = "INSERT INTO residencies VALUES (%s, %s, %s, %s, %s, %s, %s, %s, 32, 16, 2, 5)"
    with psycopg.connect(plain(empty_database_url)) as old:
        ids = [old.execute(publisher, (worker,)).fetchone()[0] for worker in "ab"]
        places = [(ids[0], "GPU", 0, ""), (ids[0], "CPU", 3, "peer"), (ids[1], "GPU", 0, "")]
        values = [(b"\1" * 8, 10, 9, 8), (b"wide hash", -1, None, None)]
        for place in places:
            for value in values:
                old.execute(residency, (*place, *value))
        old.execute("INSERT INTO ghosts VALUES (%s, '\\x07', 1, 1, 1)", (ids[1],))
    with engine.begin() as connection:
        migrate(connection)
    engine.dispose()
    columns = "publisher_id, medium, group_idx, owner, engine_hash, content_key, parent_key, local_hash"
    with psycopg.connect(plain(empty_database_url)) as new:
        rows = new.execute(
            f"SELECT {columns}, position, block_tokens, reference_count, cohort"
            " FROM residencies JOIN holders USING (holder_id)".encode()
        ).fetchall()
        ghosts = new.execute("SELECT * FROM ghosts").fetchall()
    assert set(rows) == {(*place, *value, 32, 16, 2, 5) for place in places for value in values}
    assert len(rows) == 6
    assert ghosts == [(ids[1], b"\7", 1, 1, 1)]


def test_several_services_may_migrate_at_once(empty_database_url: str) -> None:
    async def scenario() -> None:
        stores = [Store(empty_database_url) for _ in range(4)]
        await asyncio.gather(*(store.open(wait=False) for store in stores))
        await asyncio.gather(*(store.close() for store in stores))

    asyncio.run(scenario())


def test_a_migration_waits_for_the_lock_of_another(empty_database_url: str) -> None:
    """Another process holds the lock and has not finished: ours waits, then finds the work done."""

    async def scenario() -> None:
        with psycopg.connect(plain(empty_database_url)) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", (0x6B76_696E_6465_78,))
            store = Store(empty_database_url)
            opening = asyncio.create_task(store.open(wait=False))
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            deadline = time.monotonic() + 20
            while other.execute(waiting).fetchone() != (1,):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            assert not opening.done()
            other.commit()
            await opening
            await store.close()

    asyncio.run(scenario())


def test_a_schema_of_a_newer_version_is_refused(database_url: str) -> None:
    with psycopg.connect(plain(database_url)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")

    async def scenario() -> None:
        store = Store(database_url)
        with pytest.raises(StoreUnusable, match="newer version"):
            await store.open(wait=True)
        await store.close()

    asyncio.run(scenario())


def test_an_unreachable_database_is_named_without_the_password() -> None:
    async def scenario() -> None:
        store = Store("postgres://someone:hunter2@127.0.0.1:1/name")
        with pytest.raises(StoreUnavailable) as caught:
            await store.open(wait=False)
        assert "database 'name' on 127.0.0.1 port 1" in str(caught.value)
        assert "refused" in str(caught.value)
        assert "hunter2" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not store.is_reachable
        assert store.last_error == str(caught.value)
        await store.close()

    asyncio.run(scenario())


def test_open_waits_for_a_database_if_asked_to(postgres_server: PostgresServer, empty_database_url: str) -> None:
    async def scenario() -> None:
        missing = re.sub(r"/test_\w+", "/test_not_yet", empty_database_url)
        store = Store(missing, retry_max_s=0.1)
        opening = asyncio.create_task(store.open(wait=True))
        deadline = time.monotonic() + 20
        while store.last_error is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert not opening.done()
        postgres_server.execute("CREATE DATABASE {}", "test_not_yet")
        await opening
        assert store.is_reachable
        await store.close()
        postgres_server.drop_database(missing)

    asyncio.run(scenario())


def test_registrations_survive_and_conflicts_are_named(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            options = {
                "eagle": True,
                "eagle_groups": [1],
                "attention_chunk_size": {"0": 64},
                "no_removals": {"expire_after_s": 3_600.0, "blocks_max": 9},
                "lora_aliases": {"é": "b"},
                "engine_hash": {"algorithm": "sha256", "seed": None},
                "later": [None],
            }
            full = registration(
                replay_endpoint="tcp://[::1]:5558", tenant="t", engine="sglang", block_size=64, options=options
            )
            saved = await store.save(full)
            other_rank = await store.save(registration(dp_rank=1))
            assert saved.publisher_id > 0
            assert await store.save(full) == saved
            with pytest.raises(PublisherConflict) as caught:
                await store.save(registration(tenant="t", engine="sglang", model="model-b"))
            assert caught.value.field == "model"
            assert await store.registrations() == [saved, other_rank]

    asyncio.run(scenario())


def test_lookups_use_their_indexes(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            publisher = StandInPublisher(await store.save(registration()))
            for number in range(5_000):
                publisher.store(GPU, number, row(number, parent_key=number or None))
            await write(store, publisher)

    asyncio.run(scenario())
    with psycopg.connect(plain(database_url)) as connection:
        connection.execute("ANALYZE residencies")
        for condition, index in (
            ("parent_key = 77 AND local_hash = 78", "ix_residencies_parent_key_local_hash"),
            ("parent_key IS NULL AND local_hash = 78", "ix_residencies_parent_key_local_hash"),
            ("content_key = 77", "ix_residencies_content_key"),
        ):
            plan = connection.execute(f"EXPLAIN SELECT * FROM residencies WHERE {condition}".encode()).fetchall()
            assert any(index in line for (line,) in plan), plan


def test_audit_finds_nothing_and_then_each_planted_difference(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = StandInIndex()
            publisher = index.add_publisher(await store.save(registration()))
            for number in range(40):
                publisher.store(GPU, number, row(number))
            await write(store, publisher)
            report = await store.audit(index)
            assert report.is_equal
            assert (report.publishers, report.residencies_in_memory, report.residencies_in_store) == (1, 40, 40)
            await plant(
                "UPDATE residencies SET reference_count = 9 WHERE content_key = 3",
                "UPDATE residencies SET content_key = 99 WHERE content_key = 4",
                "DELETE FROM residencies WHERE content_key = 5",
                "INSERT INTO holders (publisher_id, medium, group_idx, owner)"
                " SELECT publisher_id, 'CPU', 0, '' FROM holders",
                "UPDATE residencies SET holder_id = (SELECT max(holder_id) FROM holders) WHERE content_key = 6",
                "INSERT INTO ghosts VALUES (1, '\\x01', 1, 1, 1)",
                "UPDATE publishers SET fingerprint = 8",
            )
            report = await store.audit(index)
            assert not report.is_equal
            assert report.differences_total == 7
            found = {(d.kind, d.where.partition(" ")[0], d.in_memory, d.in_store) for d in report.differences}
            assert (
                "residency",
                "medium=GPU",
                "content_key=3 reference_count=1",
                "content_key=3 reference_count=9",
            ) in found
            assert ("residency", "medium=GPU", "content_key=5 reference_count=1", None) in found
            assert ("residency", "medium=CPU", None, "content_key=6 reference_count=1") in found
            await plant("DELETE FROM residencies")
            report = await store.audit(index)
            assert report.differences_total == 42
            assert len(report.differences) == 20
            index.remove_publisher(publisher.registration.key)
            report = await store.audit(index)
            assert [d.kind for d in report.differences] == ["publisher"]

    async def plant(*statements: str) -> None:
        with psycopg.connect(plain(database_url)) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    asyncio.run(scenario())
