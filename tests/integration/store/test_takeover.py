"""Two replicas on a real Postgres: the one that takes over has kept what the other had not written; nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.publisher import PublisherIndex
from indexer.store.lease import Lease, LeaseTable, StoredState, shard_of
from indexer.store.postgres import Store
from indexer.store.writer import Writer
from indexer.stream.follower import fingerprint_of
from indexer.wire.decode import decode_batch
from tests.integration.store.making import open_store, registration
from tests.stream_stand_ins import CLEARED, payload, removed, stored

BLOCKS = 60


class Replica:
    """An index that is fed by hand, its leases, its writer. `claim` is what the lease keeper does with the lock."""

    def __init__(self, store: Store, database_url: str) -> None:
        self.store = store
        self.index = ContentIndex()
        self.leases = LeaseTable()
        self.writer = Writer(store, self.index, leases=self.leases)
        self._url = database_url.replace("+psycopg", "")

    async def start(self) -> Replica:
        for saved in await self.store.registrations():
            publisher = self.index.add_publisher(saved)
            self.writer.note_loaded(saved.publisher_id, await self.store.recover(publisher))
        return self

    @property
    def publisher(self) -> PublisherIndex:
        return self.index.publishers()[0]

    def claim(self) -> None:
        publisher_id = self.publisher.registration.publisher_id
        with psycopg.connect(self._url) as connection:
            claimed = connection.execute("UPDATE publishers SET term = term + 1 RETURNING term, flushes").fetchone()
        assert claimed is not None
        self.leases.locked([shard_of(publisher_id)])
        self.leases.claimed(publisher_id, Lease(*claimed))

    def confirm(self) -> None:
        with psycopg.connect(self._url) as connection:
            found = connection.execute("SELECT publisher_id, generation, sequence_number, flushes FROM publishers")
            self.writer.confirm({i: StoredState(*columns) for i, *columns in found})

    def apply(self, batches: list[bytes]) -> None:
        number = self.publisher.checkpoint.sequence_number
        for n in range(0 if number is None else number + 1, len(batches)):
            self.publisher.apply(decode_batch(batches[n]), n, fingerprint_of(batches[n]))


@asynccontextmanager
async def two_replicas(database_url: str) -> AsyncIterator[tuple[Replica, Replica]]:
    """The first has the lease."""
    async with open_store(database_url) as store:
        await store.save(registration(engine="vllm"))
        first, second = [await Replica(store, database_url).start() for _ in range(2)]
        first.claim()
        yield first, second


def located_rows(database_url: str) -> list[tuple[object, ...]]:
    """Rows with what memory does not keep."""
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        wanted = "SELECT medium, engine_hash, content_key, parent_key, local_hash, position, reference_count"
        source = "FROM residencies JOIN holders USING (holder_id) ORDER BY medium, engine_hash"
        return connection.execute(f"{wanted} {source}".encode()).fetchall()


def some_batches(dice: random.Random, count: int, media: tuple[str, ...] = ("GPU", "CPU")) -> list[bytes]:
    batches = []
    for _ in range(count):
        medium, first = dice.choice(media), dice.randrange(1, BLOCKS)
        hashes = range(first, first + dice.randint(1, 6))
        events = [stored(*hashes, medium=medium), removed(first + 1, medium=medium)]
        batches.append(payload(*(events if dice.random() < 0.95 else [CLEARED])))
    return batches


def test_what_the_killed_writer_had_not_written_is_written_by_the_next_one(database_url: str) -> None:
    async def scenario() -> None:
        batches = some_batches(random.Random(1), 40, ("GPU",))
        async with two_replicas(database_url) as (first, second):
            for replica in (first, second):
                replica.apply(batches[:20])
            await first.writer.flush()
            await second.writer.flush()
            assert first.writer.pending == second.writer.pending == 0
            assert second.writer.kept > 0
            for replica in (first, second):
                replica.apply(batches)
            await second.writer.flush()  # and the first one dies before it has written
            second.claim()
            await second.writer.flush()
            assert second.writer.takeovers == 1
            assert second.writer.kept == 0
            assert (await second.store.audit(second.index)).is_equal
            assert second.writer.rows_reconciled == 0, "both have followed the same stream"
            found = located_rows(database_url)
            await first.writer.flush()
            assert first.writer.fenced_flushes == 1
            assert first.leases.lease(first.publisher.registration.publisher_id) is None
            assert located_rows(database_url) == found
            assert all(local is not None for _, _, _, _, local, _, _ in found)

    asyncio.run(scenario())


def test_what_others_have_written_is_not_kept(database_url: str) -> None:
    async def scenario() -> None:
        batches = some_batches(random.Random(2), 20)
        async with two_replicas(database_url) as (first, second):
            for end in (5, 10, 20):
                for replica in (first, second):
                    replica.apply(batches[:end])
                    await replica.writer.flush()
            second.confirm()
            assert second.writer.kept == 0

    asyncio.run(scenario())


def test_rows_that_nobody_else_wrote_need_no_comparison(database_url: str) -> None:
    async def scenario() -> None:
        batches = some_batches(random.Random(3), 20)
        async with two_replicas(database_url) as (_, second):
            second.apply(batches)
            await second.writer.flush()
            second.claim()
            await second.writer.flush()
            assert second.writer.takeovers == 0
            assert (await second.store.audit(second.index)).is_equal

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_rows_are_they_become_what_the_new_writer_holds(database_url: str, seed: int) -> None:
    """One of them lost batches, so that they differ; leases change hands again and again."""

    async def scenario() -> None:
        dice = random.Random(seed)
        batches = some_batches(dice, 120)
        async with two_replicas(database_url) as replicas:
            for end in range(20, 121, 20):
                for replica in replicas:
                    number = replica.publisher.checkpoint.sequence_number
                    if dice.random() < 0.5:
                        lost = 0 if number is None else number + 1
                        replica.publisher.count_gap(lost, lost)
                        replica.publisher.skip(lost, fingerprint_of(batches[lost]), "lost")
                    if dice.random() < 0.1:
                        replica.publisher.restart()
                        replica.publisher.skip(end - 2, 1, "lost")
                    replica.apply(batches[:end])
                    await replica.writer.flush()
                writer = dice.choice(replicas)
                writer.claim()
                await writer.writer.flush()
                report = await writer.store.audit(writer.index)
                assert report.is_equal, report.to_dict()
            again = await Replica(replicas[0].store, database_url).start()
            assert sorted(again.publisher.residencies(), key=str) == sorted(writer.publisher.residencies(), key=str)
            assert list(again.publisher.ghosts()) == list(writer.publisher.ghosts())

    asyncio.run(scenario())
