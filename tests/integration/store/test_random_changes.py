"""Random changes, flushed in random portions, equal a dict after recovery. A failure prints its seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest

from indexer.errors import StoreUnavailable
from indexer.index.state import GhostRow, HolderKey, PublisherChanges
from indexer.store.merge import WriteOutcome
from indexer.store.postgres import NO_TERMS, Store
from indexer.store.writer import Writer
from tests.integration.store.making import open_store, recovered, registration, row
from tests.integration.store.stand_in import StandInIndex, StandInPublisher

HOLDERS = (HolderKey("GPU", 0, ""), HolderKey("GPU", 1, ""), HolderKey("CPU", 0, ""), HolderKey("CPU", 0, "peer"))
HASHES = (*range(40), *(bytes([n]) * (1 + n % 7) for n in range(10)), 2**63, 2**64 - 1)


class Unsteady(Store):
    """Loses some calls before they are carried out, and for some the answer after they were."""

    dice: random.Random

    async def write(self, changes: Sequence[PublisherChanges], terms: Mapping[int, int] = NO_TERMS) -> WriteOutcome:
        fate = self.dice.random()
        if fate < 0.2:
            raise StoreUnavailable("lost before")
        outcome = await super().write(changes, terms)
        if fate < 0.4:
            raise StoreUnavailable("lost after")
        return outcome


def change(publisher: StandInPublisher, dice: random.Random) -> None:
    holder, engine_hash = dice.choice(HOLDERS), dice.choice(HASHES)
    held = publisher.rows.get(holder, {})
    match dice.choices(("store", "remove", "count", "clear", "ghost", "side"), (40, 25, 20, 2, 10, 2))[0]:
        case "store":
            key, parent = dice.getrandbits(64), dice.choice((None, dice.getrandbits(64)))
            publisher.store(holder, engine_hash, row(key, parent, dice.randint(1, 4), dice.randint(0, 2**40)))
        case "remove":
            publisher.remove(holder, engine_hash)
        case "count" if engine_hash in held:
            publisher.count(holder, engine_hash, dice.randint(1, 9))
        case "clear":
            publisher.clear(holder)
        case "ghost":
            ghost = GhostRow(dice.getrandbits(64), dice.randint(1, 9), publisher.checkpoint.sequence_number or 0)
            publisher.remember(engine_hash, dice.choice((ghost, ghost, None)))
        case "side":
            publisher.side_state = dice.randbytes(5)


@pytest.mark.parametrize("seed", range(12))
def test_random_changes_in_random_flushes_equal_a_dict(database_url: str, seed: int) -> None:
    async def scenario() -> None:
        dice = random.Random(seed)
        async with open_store(database_url) as reader:
            store = Unsteady(database_url)
            store.dice = dice
            index = StandInIndex()
            publishers = [index.add_publisher(await store.save(registration(f"worker-{n}"))) for n in range(3)]
            writer = Writer(store, index, flush_changes_max=dice.choice((1, 30, 1_000)))
            for _ in range(25):
                for _ in range(dice.choice((0, 1, 5, 60))):
                    change(dice.choice(publishers), dice)
                try:
                    await writer.flush()
                except StoreUnavailable:
                    continue
                if dice.random() < 0.3:
                    assert (await reader.audit(index)).is_equal
            store.dice = random.Random()
            store.dice.random = lambda: 1.0  # type: ignore[method-assign]
            await writer.flush()
            for publisher in publishers:
                assert (await recovered(reader, publisher)).state() == publisher.state()
            await store.close()

    asyncio.run(scenario())
