"""Ghosts in flat arrays beside ghosts in dicts: the same are kept, in the same order, and stored as the same rows."""

from __future__ import annotations

from random import Random
from typing import TypeVar
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexer.index import ghosts as flat_ghosts
from indexer.index import table
from indexer.index.ghosts import Ghosts
from indexer.index.state import EngineHash, GhostRow, GhostRows
from tests.plain_index.ghosts import Ghosts as PlainGhosts
from tests.sizes import examples

Rows = dict[EngineHash, GhostRow]
GhostsT = TypeVar("GhostsT", Ghosts, PlainGhosts)


def written(rows: Rows, cleared: bool, changes: GhostRows) -> None:
    """As a store writes them."""
    if cleared:
        rows.clear()
    for engine_hash, row in changes.items():
        if row is None:
            rows.pop(engine_hash, None)
        else:
            rows[engine_hash] = row


def ghosts_of(random: Random, count: int) -> list[tuple[EngineHash, int, int]]:
    """Of few hashes, so that they come again; edges, too; now and then wide ones."""
    numbers: list[EngineHash] = [0, 2**64 - 1, *range(1, 40)]
    wide: list[EngineHash] = [bytes([n]) * 32 for n in range(8)]
    chosen = random.choices(numbers + wide if random.random() < 0.3 else numbers, k=count)
    return [(h, random.choice([0, 2**64 - 1, random.getrandbits(64)]), random.randint(1, 2**32 - 1)) for h in chosen]


@given(st.integers(0, 2**32), st.sampled_from([0, 1, 7, 30, 200]))
@examples(150)
def test_they_remember_forget_and_store_the_same(seed: int, ghosts_max: int) -> None:
    with patch.object(flat_ghosts, "SMALLEST", 4), patch.object(table, "SMALLEST", 4):
        live_through(Random(seed), ghosts_max)


def live_through(random: Random, ghosts_max: int) -> None:
    flat, plain = Ghosts(ghosts_max), PlainGhosts(ghosts_max)
    flat_rows: Rows = {}
    plain_rows: Rows = {}
    for _ in range(80):
        roll = random.random()
        if roll < 0.6:
            remember(random, flat, plain)
        elif roll < 0.65:
            flat.clear()
            plain.clear()
        elif roll < 0.7:
            flat.allowance = plain.allowance = random.choice([0, 5, 20])
            flat.keep_bound()
            plain.keep_bound()
        elif roll < 0.75:
            flush(flat, plain, flat_rows, plain_rows)
            lowered = random.choice([ghosts_max, ghosts_max // 2])
            flat, plain = recovered(Ghosts(lowered), flat_rows), recovered(PlainGhosts(lowered), plain_rows)
        else:
            flush_with_changes_meanwhile(random, flat, plain, flat_rows, plain_rows)
        assert (list(flat.rows()), len(flat)) == (list(plain.rows()), len(plain))
        assert flat.forgotten == plain.forgotten
        assert all(flat.get(h) == plain.get(h) for h, _, _ in ghosts_of(random, 5))
    flush(flat, plain, flat_rows, plain_rows)


def remember(random: Random, flat: Ghosts, plain: PlainGhosts) -> None:
    some = ghosts_of(random, random.choice([1, 1, 3, 20]))
    if len(some) == 1:
        flat.remember(*some[0])
        plain.remember(*some[0])
    elif any(isinstance(engine_hash, bytes) for engine_hash, _, _ in some) or random.random() < 0.5:
        flat.remember_each(some)
        plain.remember_each(some)
    else:
        columns = np.array(list(zip(*some, strict=True)), np.uint64)
        flat.remember_all(*columns)
        plain.remember_all(*columns)


def flush(flat: Ghosts, plain: PlainGhosts, flat_rows: Rows, plain_rows: Rows) -> None:
    written(flat_rows, *flat.take_changes())
    written(plain_rows, *plain.take_changes())
    assert flat_rows == plain_rows
    assert (flat.changes_pending, plain.changes_pending) == (0, 0)
    by_ordinal = sorted(flat_rows.items(), key=lambda item: item[1].ordinal)
    assert [(h, row.content_key, row.end_granules) for h, row in by_ordinal] == list(flat.rows())


def flush_with_changes_meanwhile(
    random: Random, flat: Ghosts, plain: PlainGhosts, flat_rows: Rows, plain_rows: Rows
) -> None:
    """It is written, or fails, or nobody knows."""
    flat_taken, plain_taken = flat.take_changes(), plain.take_changes()
    for _ in range(random.randrange(3)):
        remember(random, flat, plain)
    how = random.randrange(4)
    if how > 0:
        written(flat_rows, *flat_taken)
        written(plain_rows, *plain_taken)
    if how < 2:
        flat.restore_changes(*flat_taken)
        plain.restore_changes(*plain_taken)
    if random.random() < 0.5:
        flush(flat, plain, flat_rows, plain_rows)


def recovered(ghosts: GhostsT, rows: Rows) -> GhostsT:
    ghosts.load(sorted(rows.items(), key=lambda item: item[1].ordinal))
    assert ghosts.changes_pending == len(rows) - len(ghosts)
    return ghosts
