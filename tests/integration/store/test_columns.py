"""Changes as columns reach the rows, and rows come back as columns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import psycopg
import pytest

from indexer.index.columns import ColumnChanges
from indexer.index.state import Checkpoint, EngineHash, HolderChanges, HolderKey, PublisherChanges, ResidencyRow
from indexer.registration import Registration
from indexer.store import merge
from indexer.store.engine import ValueRefused
from indexer.store.postgres import Store
from tests.integration.store.making import CPU, GPU, open_store, recovered, registration, row
from tests.integration.store.stand_in import StandInPublisher
from tests.residency_columns import changes_of

PEER = HolderKey("CPU", 3, "peer")
EDGES = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)
ROOT, WITHOUT_LOCAL = row(1), row(2, parent_key=1)._replace(local_hash=None)


async def write(
    store: Store, saved: Registration, *holders: HolderChanges, checkpoint: Checkpoint | None = None
) -> int:
    changes = PublisherChanges(
        publisher=saved.key,
        publisher_id=saved.publisher_id,
        checkpoint=checkpoint or Checkpoint(),
        granule=16,
        holders=list(holders),
        ghosts_cleared=False,
        ghosts={},
        expired=None,
        groups=None,
        side_state=None,
    )
    return (await store.write([changes])).rows


async def write_columns(store: Store, saved: Registration, columns: ColumnChanges) -> int:
    return await write(store, saved, HolderChanges(GPU, columns=columns))


async def rows_of(store: Store, saved: Registration) -> dict[HolderKey, dict[EngineHash, ResidencyRow]]:
    return (await recovered(store, StandInPublisher(saved))).rows


def test_columns_come_back_as_rows_of_every_shape(database_url: str) -> None:
    rows = {edge: row(edge, parent_key=edge, count=2**31 - 1, position=2**40) for edge in EDGES}
    rows |= {7: ROOT, 8: WITHOUT_LOCAL, 9: ROOT._replace(local_hash=None, block_tokens=2**31 - 1)}

    async def scenario() -> None:
        async with open_store(database_url) as store:
            saved = await store.save(registration())
            assert await write_columns(store, saved, changes_of(upserted=rows)) == len(rows) + 1
            assert await rows_of(store, saved) == {GPU: rows}

    asyncio.run(scenario())


def test_columns_and_rows_of_several_holders_are_written_together(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            saved = await store.save(registration())
            holders = (
                HolderChanges(GPU, False, {b"wide": row(5), b"gone": None}, changes_of(upserted={1: ROOT})),
                HolderChanges(PEER, True, {}, changes_of(upserted={1: WITHOUT_LOCAL})),
                HolderChanges(CPU, columns=changes_of()),
            )
            await write(store, saved, *holders)
            await write(store, saved, *holders)
            assert await rows_of(store, saved) == {GPU: {1: ROOT, b"wide": row(5)}, PEER: {1: WITHOUT_LOCAL}}

    asyncio.run(scenario())


def test_a_block_removed_and_stored_again_in_one_flush_is_there(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            saved = await store.save(registration())
            await write_columns(store, saved, changes_of(upserted={1: ROOT, 2: ROOT, 3: ROOT}))
            changes = changes_of(removed=[1, 2, 99], upserted={2: WITHOUT_LOCAL, 4: ROOT}, counted={3: 5, 1: 7, 98: 1})
            for _ in range(2):
                await write_columns(store, saved, changes)
                assert await rows_of(store, saved) == {
                    GPU: {2: WITHOUT_LOCAL, 3: ROOT._replace(reference_count=5), 4: ROOT}
                }

    asyncio.run(scenario())


def test_only_what_the_store_may_have_is_merged(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []
    stage_and_merge = merge._stage_and_merge

    def noted(cursor: psycopg.Cursor, staged: str, *others: Any) -> int:
        count = stage_and_merge(cursor, staged, *others)
        if staged == "residencies":
            merged.append(count)
        return count

    monkeypatch.setattr(merge, "_stage_and_merge", noted)

    async def scenario() -> None:
        async with open_store(database_url) as store:
            saved = await store.save(registration())
            first = changes_of(upserted={1: ROOT, 2: ROOT})
            again = changes_of(removed=[1], upserted={1: WITHOUT_LOCAL, 3: ROOT})
            for changes, verified_since, merged_rows in (
                (first, None, 0),
                (first, None, 2),
                (again, None, 0),
                (again, 1, 2),
            ):
                checkpoint = Checkpoint(sequence_number=1, verified_since=verified_since)
                await write(store, saved, HolderChanges(GPU, columns=changes), checkpoint=checkpoint)
                assert merged.pop() == merged_rows
            await write(
                store, saved, HolderChanges(GPU, rows={b"wide": row(5)}, columns=changes_of(upserted={4: ROOT}))
            )
            assert merged.pop() == 1
            assert await rows_of(store, saved) == {GPU: {1: WITHOUT_LOCAL, 2: ROOT, 3: ROOT, 4: ROOT, b"wide": row(5)}}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("column", "bad"), [("positions", 2**63), ("block_tokens", 2**31), ("reference_counts", 2**31)]
)
def test_a_column_that_does_not_fit_is_refused_and_nothing_is_written(database_url: str, column: str, bad: int) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            saved = await store.save(registration())
            changes = changes_of(upserted={1: ROOT, 2: ROOT})
            values = getattr(changes.upserted, column).copy()
            values[1] = bad
            with pytest.raises(ValueRefused, match="cannot be stored in residencies"):
                await write_columns(
                    store, saved, replace(changes, upserted=replace(changes.upserted, **{column: values}))
                )
            assert store.is_reachable
            assert await rows_of(store, saved) == {}

    asyncio.run(scenario())


def test_a_count_that_does_not_fit_is_refused(database_url: str) -> None:
    async def scenario() -> None:
        async with open_store(database_url) as store:
            saved = await store.save(registration())
            changes = replace(changes_of(counted={1: 1}), counts=np.array([2**32 - 1], np.uint32))
            with pytest.raises(ValueRefused, match="reference_count"):
                await write_columns(store, saved, changes)

    asyncio.run(scenario())


class Model:
    """One holder as a dict, and random changes of it."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.rows: dict[int, ResidencyRow] = {}

    def change(self) -> ColumnChanges:
        """Changes of some hashes, as ColumnChanges may name them: first removed, then upserted or counted."""
        removed, upserted, counted = (self._some() for _ in range(3))
        news = {engine_hash: self._row() for engine_hash in upserted}
        counts = {engine_hash: self._dice.randint(1, 9) for engine_hash in set(counted) - set(upserted)}
        self.rows = {h: old for h, old in self.rows.items() if h not in removed} | news
        for engine_hash, count in counts.items():
            if engine_hash in self.rows:
                self.rows[engine_hash] = self.rows[engine_hash]._replace(reference_count=count)
        return changes_of(removed, news, counts)

    def _some(self) -> Iterable[int]:
        return self._dice.sample((*EDGES, *range(2, 60)), self._dice.choice((0, 1, 20)))

    def _row(self) -> ResidencyRow:
        key, parent, local = (self._dice.getrandbits(64) for _ in range(3))
        may_be_null = (self._dice.choice((parent, None)), self._dice.choice((local, None)))
        return ResidencyRow(key, *may_be_null, 16, self._dice.getrandbits(63), self._dice.randint(1, 5))


@pytest.mark.parametrize("seed", range(4))
def test_random_columns_in_random_flushes_equal_a_dict(database_url: str, seed: int) -> None:
    async def scenario() -> None:
        dice = random.Random(seed)
        models = {holder: Model(dice) for holder in (GPU, CPU, PEER)}
        async with open_store(database_url) as store:
            saved = await store.save(registration())
            for _ in range(25):
                changed = dice.sample(list(models), dice.randint(1, 3))
                await write(store, saved, *(HolderChanges(h, columns=models[h].change()) for h in changed))
                found = await rows_of(store, saved)
                assert found == {holder: model.rows for holder, model in models.items() if model.rows}

    asyncio.run(scenario())
