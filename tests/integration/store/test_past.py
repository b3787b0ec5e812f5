"""Past answers, from rows that real flushes have written: equal to those that were given then."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from indexer.errors import PastOutOfReach
from indexer.index.content_index import ContentIndex
from indexer.index.explain import PublisherExplanation
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.registration import PublisherKey, Registration
from indexer.store.past import past_index
from indexer.store.postgres import Store
from indexer.store.writer import Writer
from tests.engine_events import MODEL, G, cleared, decoded, numbers, removed, stored
from tests.explaining import explained

BRANCHES = 3
DEPTH = 6
Prefix = tuple[int, ...]
Seen = tuple[Any, ...]


def tokens_of(prefix: Prefix) -> list[int]:
    return [1_000 * depth + 100 * branch + i for depth, branch in enumerate(prefix) for i in range(G)]


def hash_of(prefix: Prefix, *, is_wide: bool) -> Any:
    number = abs(hash(("block", *prefix))) + 1
    return number.to_bytes(32, "big") if is_wide else number


def seen_of(told: PublisherExplanation) -> Seen:
    """What an explanation says of holdings and hits; not of the journal, nor the number of the batch."""
    blocks = [
        (group.group, end, part.state, part.tiers)
        for group in told.groups
        for part in group.ranges
        for end in range(part.start + group.block_tokens, part.end + 1, group.block_tokens)
    ]
    trust = told.coverage, told.coverage_reason, told.coverage_at
    return told.hit_tokens, told.resident_tokens, told.tiers, told.absent, blocks, trust


@dataclass
class Moment:
    at: float
    query: PrefixQuery
    answers: dict[PublisherKey, Seen]


@dataclass
class World:
    store: Store
    random: Random
    index: ContentIndex = field(default_factory=ContentIndex)
    held: dict[PublisherKey, set[Prefix]] = field(default_factory=dict)
    numbers: dict[PublisherKey, int] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.writer = Writer(self.store, self.index)

    async def register(self, worker_id: str, **options: Any) -> None:
        registration = Registration(
            worker_id, 0, MODEL, f"tcp://h:{len(self.held) + 1}", engine="vllm", options=options
        )
        saved = await self.store.save(registration)
        self.index.add_publisher(saved)
        self.held[saved.key], self.numbers[saved.key] = set(), 0

    async def unregister(self, key: PublisherKey) -> None:
        publisher = self.publisher(key)
        self.index.remove_publisher(key)
        del self.held[key]
        await self.store.delete(publisher.registration.publisher_id)
        while await self.store.sweep():
            pass

    def publisher(self, key: PublisherKey) -> PublisherIndex:
        publisher = self.index.publisher(key)
        assert publisher is not None
        return publisher

    def send(self, key: PublisherKey, *events: Any) -> None:
        number = self.numbers[key]
        self.numbers[key] = number + 1
        self.publisher(key).apply(decoded(*events), number, number)

    def prefix(self) -> Prefix:
        return tuple(self.random.randrange(BRANCHES) for _ in range(self.random.randint(1, DEPTH)))

    def step(self) -> None:
        key = self.random.choice(sorted(self.held))
        held, roll = self.held[key], self.random.random()
        is_wide = key.worker_id == "wide"
        if roll < 0.6:
            prefix = self.prefix()
            for end in range(1, len(prefix) + 1):
                if prefix[:end] not in held:
                    held.add(prefix[:end])
                    parent = hash_of(prefix[: end - 1], is_wide=is_wide) if end > 1 else None
                    block = tokens_of(prefix)[(end - 1) * G : end * G]
                    medium = self.random.choice(["GPU", "GPU", "CPU"])
                    event = stored(
                        [hash_of(prefix[:end], is_wide=is_wide)], parent, block, medium=medium, extra_keys=[None]
                    )
                    self.send(key, event)
        elif roll < 0.85:
            for prefix in self.random.sample(sorted(held), min(3, len(held))):
                held.remove(prefix)
                hashes = [hash_of(prefix, is_wide=is_wide)]
                self.send(key, removed(hashes), removed(hashes, "CPU"))
        elif roll < 0.9:
            held.clear()
            self.send(key, cleared())
        elif roll < 0.94:
            held.clear()
            self.publisher(key).restart(123.0)
            self.numbers[key] = 0
        elif roll < 0.97:
            self.publisher(key).count_gap(self.numbers[key], self.numbers[key], 77.0)
            self.numbers[key] += 1
        else:
            held.clear()
            self.publisher(key).clear(55.0)

    async def note(self) -> None:
        """Flush, and remember what is answered now."""
        await self.writer.flush()
        query = PrefixQuery(MODEL, [*tokens_of(self.prefix()), 7])
        answers = {key: self.answer(self.index, query, key) for key in self.held}
        self.moments.append(Moment(await database_time(self.store), query, answers))

    def answer(self, index: ContentIndex, query: PrefixQuery, key: PublisherKey) -> Seen:
        publisher = index.publisher(key)
        assert publisher is not None
        return seen_of(explained(index, query, publisher).publishers[0])


async def database_time(store: Store) -> float:
    statement = text("SELECT extract(epoch FROM clock_timestamp())::float8")
    return float(await store.read_past(lambda connection: connection.execute(statement).scalar_one()))


async def past_answers(
    store: Store, live: ContentIndex, moment: Moment, keys: list[PublisherKey]
) -> dict[PublisherKey, Any]:
    answers: dict[PublisherKey, Any] = {}
    for key in keys:
        past = await past_index(store, live, moment.at, moment.query, [key])
        (publisher,) = past.publishers
        if publisher is not None:
            answers[key] = seen_of(explained(past.index, moment.query, publisher).publishers[0])
    return answers


@pytest.mark.parametrize("seed", range(3))
def test_past_answers_are_those_that_were_given_then(database_url: str, seed: int) -> None:
    async def run() -> None:
        store = Store(database_url)
        await store.open(wait=False)
        await store.keep_past(True)
        world = World(store, Random(seed))
        for worker_id in ("one", "wide", "gone"):
            await world.register(worker_id)
        for number in range(60):
            world.step()
            if number == 30:
                await world.unregister(PublisherKey("gone", 0))
            if number == 40:
                await world.register("gone", eagle=True)
            if world.random.random() < 0.7:
                await world.note()
        keys = [PublisherKey(worker_id, 0) for worker_id in ("one", "wide", "gone")]
        assert sum(bool(seen[1]) for moment in world.moments for seen in moment.answers.values()) > 30
        for moment in world.moments:
            assert await past_answers(store, world.index, moment, keys) == moment.answers
        await store.close()
        successor = Store(database_url)  # of a process that was killed: what is in memory is gone
        await successor.open(wait=False)
        await successor.keep_past(True)
        for moment in world.moments[::5]:
            assert await past_answers(successor, ContentIndex(), moment, keys) == moment.answers
        await successor.close()

    asyncio.run(run())


def run_with_store(database_url: str, work: Any) -> None:
    async def run() -> None:
        store = Store(database_url)
        await store.open(wait=False)
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(run())


QUERY = PrefixQuery(MODEL, numbers(0, 4 * G))
KEY = PublisherKey("w", 0)


async def with_one_block(store: Store) -> World:
    world = World(store, Random(0))
    await world.register("w")
    world.send(KEY, stored([1], None, numbers(0, G)))
    await world.writer.flush()
    return world


def test_without_it_nothing_is_noted_and_nothing_is_known(database_url: str) -> None:
    async def work(store: Store) -> None:
        await with_one_block(store)
        count = text("SELECT (SELECT count(*) FROM residency_changes) + (SELECT count(*) FROM publisher_states)")
        assert await store.read_past(lambda connection: connection.execute(count).scalar_one()) == 0
        with pytest.raises(PastOutOfReach) as raised:
            await past_index(store, ContentIndex(), await database_time(store), QUERY, [KEY])
        assert raised.value.begins_at is None

    run_with_store(database_url, work)


def test_what_was_held_when_it_began_is_known_and_what_was_before_is_not(database_url: str) -> None:
    async def work(store: Store) -> None:
        world = await with_one_block(store)
        before = await database_time(store)
        await store.keep_past(True)
        moment = await database_time(store)
        world.send(KEY, removed([1]))
        await world.writer.flush()
        await store.keep_past(True)  # again, as at each start
        past = await past_index(store, world.index, moment, QUERY, [KEY])
        assert [hit.hit_tokens for hit in past.index.prefix_hits(QUERY).hits] == [G]
        with pytest.raises(PastOutOfReach) as raised:
            await past_index(store, world.index, before, QUERY, [KEY])
        assert before < (raised.value.begins_at or 0) < moment
        await store.keep_past(False)
        with pytest.raises(PastOutOfReach):
            await past_index(store, world.index, moment, QUERY, [KEY])

    run_with_store(database_url, work)


def test_what_is_too_old_is_swept_and_the_rest_stays_true(database_url: str) -> None:
    async def work(store: Store) -> None:
        await store.keep_past(True)
        world = await with_one_block(store)
        world.send(KEY, removed([1]))
        await world.writer.flush()
        first = await database_time(store)
        age_s = text("UPDATE past_begins SET at = at - interval '1 hour'")
        older = text("UPDATE residency_changes SET at = at - interval '1 hour'")
        states = text("UPDATE publisher_states SET at = at - interval '1 hour'")
        for statement in (age_s, older, states):
            await store._call(lambda connection, statement=statement: connection.execute(statement))
        world.send(KEY, stored([2], None, numbers(0, G)))
        await world.writer.flush()
        assert not await store.sweep_past(600.0)
        count = text("SELECT count(*) FROM residency_changes")
        assert await store.read_past(lambda connection: connection.execute(count).scalar_one()) == 1
        past = await past_index(store, world.index, first, QUERY, [KEY])
        assert past.publishers[0] is not None
        assert not past.index.prefix_hits(QUERY).hits
        with pytest.raises(PastOutOfReach):
            await past_index(store, world.index, first - 1_000, QUERY, [KEY])

    run_with_store(database_url, work)


def test_a_publisher_of_another_tenant_is_not_there(database_url: str) -> None:
    async def work(store: Store) -> None:
        await store.keep_past(True)
        world = await with_one_block(store)
        other = msgspec.structs.replace(QUERY, tenant="other")
        past = await past_index(store, world.index, await database_time(store), other, [KEY])
        assert past.publishers == [None]

    run_with_store(database_url, work)
