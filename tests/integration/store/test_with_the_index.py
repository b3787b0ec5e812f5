"""The real index through the store and back: same residencies, same ghosts, same answers."""

from __future__ import annotations

import asyncio
import random

import msgspec

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.store.postgres import Store
from indexer.store.writer import Writer
from indexer.wire.decode import decode_batch
from tests.integration.store.making import open_store, registration

BLOCK_TOKENS = 16


class Engine:
    """Publishes stores of whole prompts and random removals; engine hashes are numbers it makes up."""

    def __init__(self, publisher: PublisherIndex, dice: random.Random) -> None:
        self._publisher = publisher
        self._dice = dice
        self._number = -1
        self._names: dict[tuple[int, ...], int] = {}
        self._held: list[int] = []

    def publish(self, *events: list[object]) -> None:
        self._number += 1
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self._publisher.apply(decode_batch(payload), self._number, self._dice.getrandbits(64))

    def store(self, tokens: list[int]) -> None:
        ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        names = [self._names.setdefault(tuple(tokens[:end]), self._dice.getrandbits(64)) for end in ends]
        self._held += names
        self.publish(["BlockStored", names, None, tokens[: len(names) * BLOCK_TOKENS], BLOCK_TOKENS, None, "GPU"])

    def remove_some(self) -> None:
        self._dice.shuffle(self._held)
        cut = self._dice.randint(0, min(5, len(self._held)))
        removed, self._held = self._held[:cut], self._held[cut:]
        self.publish(["BlockRemoved", removed, "GPU"])

    def clear(self) -> None:
        self._held = []
        self.publish(["AllBlocksCleared"])


def prompt(dice: random.Random) -> list[int]:
    """Prompts share prefixes."""
    shared = random.Random(dice.randint(0, 3))
    return [shared.randint(0, 99) for _ in range(BLOCK_TOKENS * dice.randint(1, 6))]


def contents(index: ContentIndex) -> dict[str, object]:
    return {
        publisher.registration.worker_id: (
            publisher.checkpoint,
            publisher.granule,
            sorted(publisher.residencies(), key=str),
            list(publisher.ghosts()),
        )
        for publisher in index.publishers()
    }


def test_an_index_that_was_written_and_recovered_is_the_same(database_url: str) -> None:
    async def scenario() -> None:
        dice = random.Random(3)
        async with open_store(database_url) as store:
            index = ContentIndex()
            engines = [
                Engine(index.add_publisher(await store.save(registration(f"worker-{n}"))), dice) for n in range(3)
            ]
            writer = Writer(store, index)
            for turn in range(120):
                engine = dice.choice(engines)
                engine.store(prompt(dice))
                engine.remove_some()
                if turn % 37 == 36:
                    engine.clear()
                if dice.random() < 0.3:
                    await writer.flush()
                    report = await store.audit(index)
                    assert report.is_equal, report.to_dict()
            await writer.flush()
            for again in (await recovered(store), await recovered_together(store)):
                assert contents(again) == contents(index)
                for _ in range(20):
                    query = PrefixQuery(model="model-a", token_ids=prompt(dice))
                    assert again.prefix_hits(query) == index.prefix_hits(query)
                assert (await store.audit(again)).is_equal

    asyncio.run(scenario())


def test_a_few_of_many_are_recovered_alike(database_url: str) -> None:
    async def scenario() -> None:
        dice = random.Random(4)
        async with open_store(database_url) as store:
            index = ContentIndex()
            saved = [await store.save(registration(f"worker-{n}")) for n in range(5)]
            for one in saved:
                Engine(index.add_publisher(one), dice).store(prompt(dice))
            await Writer(store, index).flush()
            for some in (saved[1:3], saved[1:4], []):
                again = ContentIndex()
                flushes = await store.recover_all([again.add_publisher(one) for one in some])
                assert flushes == {one.publisher_id: 1 for one in some}
                expected = {one.worker_id for one in some}
                assert contents(again) == {w: c for w, c in contents(index).items() if w in expected}

    asyncio.run(scenario())


async def recovered_together(store: Store) -> ContentIndex:
    """As the service does."""
    index = ContentIndex()
    await store.recover_all([index.add_publisher(saved) for saved in await store.registrations()])
    return index


async def recovered(store: Store) -> ContentIndex:
    index = ContentIndex()
    for saved in await store.registrations():
        await store.recover(index.add_publisher(saved))
    return index
