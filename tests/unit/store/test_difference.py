"""What is written so that rows become what memory says."""

from __future__ import annotations

import random

from indexer.index.columns import StoredResidencies
from indexer.index.state import CountChange, EngineHash, GhostRow, HolderKey, ResidencyRow
from indexer.store.difference import ghost_differences, residency_differences
from tests.store_stand_in import rows_of, stored_residencies

GPU, CPU = HolderKey("GPU", 0, ""), HolderKey("CPU", 0, "")

Rows = dict[tuple[HolderKey, EngineHash], tuple[int, int]]  # content key, reference count


def columns(rows: Rows) -> list[StoredResidencies]:
    return stored_residencies(
        (holder, h, ResidencyRow(key, None, None, 16, 16 * (h if isinstance(h, int) else 1), count))
        for (holder, h), (key, count) in rows.items()
    )


def written(stored: Rows, held: Rows) -> dict[tuple[HolderKey, EngineHash], ResidencyRow | CountChange | None]:
    return {
        (changes.holder, h): row
        for changes in residency_differences(columns(stored), columns(held))
        for h, row in rows_of(changes)
    }


def test_equal_rows_cost_nothing() -> None:
    rows: Rows = {(GPU, 1): (10, 1), (CPU, b"wide"): (11, 2)}
    assert written(rows, dict(reversed(rows.items()))) == {}
    assert written({}, {}) == {}


def test_only_what_differs_is_written() -> None:
    stored: Rows = {(GPU, h): (h, 1) for h in range(1, 6)}
    held: Rows = {(GPU, 1): (1, 1), (GPU, 2): (2, 7), (GPU, 3): (33, 1), (GPU, 6): (6, 2)}
    assert written(stored, held) == {
        (GPU, 2): CountChange(7),
        (GPU, 3): ResidencyRow(33, None, None, 0, 64, 1),
        (GPU, 4): None,
        (GPU, 5): None,
        (GPU, 6): ResidencyRow(6, None, None, 0, 112, 2),
    }


def test_wide_hashes_are_compared_as_well() -> None:
    stored: Rows = {(GPU, b"a"): (1, 1), (GPU, b"b"): (2, 1), (GPU, b"c"): (3, 1)}
    held: Rows = {(GPU, b"a"): (1, 2), (GPU, b"b"): (9, 1), (GPU, b"d"): (4, 1)}
    assert written(stored, held) == {
        (GPU, b"a"): CountChange(2),
        (GPU, b"b"): ResidencyRow(9, None, None, 0, 32, 1),
        (GPU, b"c"): None,
        (GPU, b"d"): ResidencyRow(4, None, None, 0, 32, 1),
    }


def test_holders_that_only_one_side_has() -> None:
    assert written({(GPU, 1): (1, 1)}, {(CPU, 1): (1, 1)}) == {
        (GPU, 1): None,
        (CPU, 1): ResidencyRow(1, None, None, 0, 32, 1),
    }


def test_after_writing_the_differences_nothing_differs() -> None:
    for seed in range(50):
        dice = random.Random(seed)
        stored, held = _random_rows(dice), _random_rows(dice)
        rows = dict(stored)
        for place, row in written(stored, held).items():
            if row is None:
                del rows[place]
            elif isinstance(row, CountChange):
                rows[place] = (rows[place][0], row.reference_count)
            else:
                rows[place] = (row.content_key, row.reference_count)
        assert rows == held, f"seed {seed}"


def _random_rows(dice: random.Random) -> Rows:
    hashes: list[EngineHash] = [*range(1, 40), *(bytes([n]) * 9 for n in range(5))]
    chosen = dice.sample(hashes, dice.randint(0, 30))
    return {(dice.choice((GPU, CPU)), h): (dice.randint(1, 3), dice.randint(1, 3)) for h in chosen}


def test_ghosts_that_differ_are_written_and_others_forgotten() -> None:
    stored = [(1, GhostRow(1, 1, 1)), (2, GhostRow(2, 1, 2)), (b"x", GhostRow(3, 1, 3))]
    held = {2: GhostRow(2, 1, 2), 1: GhostRow(1, 1, 9), 4: GhostRow(4, 1, 10)}
    assert ghost_differences(stored, held) == {1: GhostRow(1, 1, 9), 4: GhostRow(4, 1, 10), b"x": None}
