"""What is verified and what is not survives flushes, lost answers and kills: rows and memory say the same."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import numpy as np
import pytest

from indexer.errors import StoreUnavailable
from indexer.index.content_index import ContentIndex
from indexer.index.publisher import PublisherIndex
from indexer.index.state import HolderKey
from indexer.store.postgres import Store
from indexer.store.read_links import links_of, read_links
from indexer.store.writer import Writer
from tests.engine_events import G, cleared, decoded, removed, stored
from tests.integration.store.making import GPU, open_store, registration
from tests.integration.store.test_random_changes import Unsteady

WIDE = HolderKey("GPU", 1, "")


class Engine:
    """Chains of blocks that grow and shrink, in two groups of which one has wide hashes; some batches are lost."""

    def __init__(self, publisher: PublisherIndex, dice: random.Random) -> None:
        self.publisher = publisher
        self.dice = dice
        self.lengths = dict.fromkeys(range(5), 0)
        self.number = -1
        self.now = 0.0

    def step(self) -> None:
        events = [self.event(self.dice.randrange(5)) for _ in range(self.dice.randint(1, 3))]
        self.number += 1
        match self.dice.choices(("send", "lose", "skip", "clear", "time"), (80, 10, 4, 2, 8))[0]:
            case "send":
                self.publisher.apply(decoded(*events), self.number, self.number)
            case "lose":
                self.publisher.count_gap(self.number, self.number)
            case "skip":
                self.publisher.skip(self.number, self.number, "truncated_batch")
            case "clear":
                self.lengths = dict.fromkeys(range(5), 0)
                self.publisher.apply(decoded(*events, cleared()), self.number, self.number)
            case _:
                self.now += self.dice.choice((0.1, 5.0))
                self.publisher.apply(decoded(*events), self.number, self.number)
                self.publisher.expire_unverified(self.now, 10.0)

    def event(self, chain: int) -> object:
        group, length = chain % 2, self.lengths[chain]
        if length and self.dice.random() < 0.4:
            count = self.dice.randint(1, length)
            self.lengths[chain] -= count
            return removed([self.hash(chain, length - 1 - i) for i in range(count)], group_idx=group)
        count = self.dice.randint(1, 6)
        self.lengths[chain] += count
        tokens = [100 * chain + length + i // G for i in range(count * G)]
        parent = self.hash(chain, length - 1) if length else None
        hashes = [self.hash(chain, length + i) for i in range(count)]
        return stored(hashes, parent, tokens, group_idx=group, kv_cache_spec_kind="full_attention")

    def hash(self, chain: int, block: int) -> int | bytes:
        number = 1_000 * (chain + 1) + block
        return number.to_bytes(32, "big") if chain % 2 else number


async def loaded(store: Store, publisher: PublisherIndex) -> PublisherIndex:
    fresh = ContentIndex().add_publisher(publisher.registration)
    await store.recover(fresh)
    return fresh


def state_of(publisher: PublisherIndex) -> object:
    return publisher.checkpoint, set(publisher.residencies()), set(publisher.ghosts())


@pytest.mark.parametrize("seed", range(8))
def test_after_a_kill_it_is_as_it_was_at_the_last_flush(database_url: str, seed: int) -> None:
    async def scenario() -> None:
        dice = random.Random(seed)
        async with open_store(database_url) as reader:
            store = Unsteady(database_url)
            store.dice = dice
            index = ContentIndex()
            engine = Engine(index.add_publisher(await store.save(registration())), dice)
            writer = Writer(store, index)
            for _ in range(40):
                for _ in range(dice.choice((1, 1, 4, 12))):
                    engine.step()
                for key, links in engine.publisher.wanted_links():
                    links.learn(*await reader.links(engine.publisher.registration.publisher_id, key))
                    while engine.publisher.use_links(key, links):
                        pass
                try:
                    await writer.flush()
                except StoreUnavailable:
                    continue
                report = await reader.audit(index)
                assert report.is_equal, report.to_dict()
                fresh = await loaded(reader, engine.publisher)
                assert state_of(fresh) == state_of(engine.publisher)
                if dice.random() < 0.2:  # killed: go on with what was loaded
                    index.remove_publisher(engine.publisher.registration.key)
                    engine.publisher = index.add_publisher(engine.publisher.registration)
                    await reader.recover(engine.publisher)
                    assert (await reader.audit(index)).is_equal
            await store.close()

    asyncio.run(scenario())


def test_the_audit_tells_what_is_credited_on_one_side_alone(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = ContentIndex()
            engine = Engine(index.add_publisher(await store.save(registration())), random.Random(0))
            engine.publisher.apply(decoded(stored([1], None, [7] * G)), 0, 0)
            await Writer(store, index).flush()
            engine.publisher.residents.lose_trust()
            report = await store.audit(index)
            assert report.differences_total == 1
            assert "reference_count=0" in str(report.differences[0].in_memory)

    asyncio.run(scenario())


@pytest.mark.parametrize("query_rows", [1_000_000, 3])
def test_links_are_those_of_the_chains(database_url: str, query_rows: int) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            index = ContentIndex()
            publisher = index.add_publisher(await store.save(registration()))
            publisher.apply(decoded(stored(range(1, 9), None, [i // G for i in range(8 * G)])), 0, 0)
            publisher.apply(decoded(stored([20], 4, [99] * G)), 1, 1)
            await Writer(store, index).flush()
            read = partial(read_links, publisher_id=publisher.registration.publisher_id, query_rows=query_rows)
            hashes, parents = await store._call(partial(read, holder=GPU), reads_only=True)
            expected = {i: i - 1 for i in range(2, 9)} | {20: 4}
            assert dict(zip(hashes.tolist(), parents.tolist(), strict=True)) == expected
            assert [len(c) for c in await store._call(partial(read, holder=WIDE), reads_only=True)] == [0, 0]

    asyncio.run(scenario())


def test_a_parent_that_two_blocks_could_be_is_none() -> None:
    hashes, keys, parents = (np.array(c, np.uint64) for c in ([1, 2, 3, 4], [10, 10, 30, 40], [0, 0, 10, 30]))
    assert [c.tolist() for c in links_of(hashes, keys, parents)] == [[4], [3]]
