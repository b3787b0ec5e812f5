"""Columns give the bytes that their rows give one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from indexer.index.columns import ResidencyColumns
from indexer.index.state import CountChange, ResidencyRow
from indexer.store.copy_columns import count_rows, removal_rows, residency_rows
from indexer.store.copy_format import (
    CHUNK_BYTES,
    COUNT_COLUMNS,
    RESIDENCY_COLUMNS,
    RESIDENCY_KEY_COLUMNS,
    count_field,
    hash_field,
    holder_prefix,
    residency_fields,
)
from tests.residency_columns import columns_of, u64

PREFIX = holder_prefix(RESIDENCY_COLUMNS, 2**31 - 1)
EDGES = (0, 1, 255, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
SHAPES = [(parent, local) for parent in (True, False) for local in (True, False)]


def some_rows(count: int, shapes: list[tuple[bool, bool]]) -> dict[int, ResidencyRow]:
    return dict(_some_rows(random.Random(count), count, shapes))


def _some_rows(dice: random.Random, count: int, shapes: list[tuple[bool, bool]]) -> Iterator[tuple[int, ResidencyRow]]:
    hashes = [*EDGES, *(dice.getrandbits(64) for _ in range(count))][:count]
    for engine_hash in hashes:
        has_parent, has_local = dice.choice(shapes)
        yield (
            engine_hash,
            ResidencyRow(
                dice.choice((dice.getrandbits(64), *EDGES)),
                dice.choice((dice.getrandbits(64), *EDGES)) if has_parent else None,
                dice.choice((dice.getrandbits(64), *EDGES)) if has_local else None,
                dice.choice((16, 2**31 - 1)),
                dice.choice((dice.randrange(2**30), 2**63 - 1)),
                dice.choice((1, 2, 2**31 - 1)),
                dice.choice((0, 3, 2**31 - 1)),
            ),
        )


def one_by_one(prefix: bytes, rows: dict[int, ResidencyRow]) -> list[bytes]:
    return [prefix + hash_field(engine_hash) + residency_fields(row) for engine_hash, row in rows.items()]


@pytest.mark.parametrize(("has_parent", "has_local"), SHAPES)
@pytest.mark.parametrize("count", [1, 7, 3_000])
def test_residencies_of_one_shape_are_packed_as_one_by_one(has_parent: bool, has_local: bool, count: int) -> None:
    rows = some_rows(count, [(has_parent, has_local)])
    assert b"".join(residency_rows(PREFIX, columns_of(rows))) == b"".join(one_by_one(PREFIX, rows))


def test_residencies_of_all_shapes_come_together_by_shape() -> None:
    rows = some_rows(2_000, SHAPES)
    expected = []
    for has_parent, has_local in SHAPES:
        alike = {
            engine_hash: row
            for engine_hash, row in rows.items()
            if (row.parent_key is not None, row.local_hash is not None) == (has_parent, has_local)
        }
        expected.extend(one_by_one(PREFIX, alike))
    assert b"".join(residency_rows(PREFIX, columns_of(rows))) == b"".join(expected)


def test_removals_and_counts_are_packed_as_one_by_one() -> None:
    removals, counts = (holder_prefix(columns, 7) for columns in (RESIDENCY_KEY_COLUMNS, COUNT_COLUMNS))
    assert b"".join(removal_rows(removals, u64(EDGES))) == b"".join(removals + hash_field(edge) for edge in EDGES)
    numbers = np.array([1, 2, 3, 4, 5, 2**31 - 1, 0], np.uint32)
    cohorts = np.arange(len(EDGES), dtype=np.int32)
    changes = map(CountChange, numbers.tolist(), cohorts.tolist())
    expected = (counts + hash_field(edge) + count_field(c) for edge, c in zip(EDGES, changes, strict=True))
    assert b"".join(count_rows(counts, u64(EDGES), numbers, cohorts)) == b"".join(expected)


def test_no_rows_give_no_bytes() -> None:
    assert list(removal_rows(PREFIX, u64(()))) == []
    assert list(count_rows(PREFIX, u64(()), np.array([], np.uint32), np.array([], np.int32))) == []
    assert list(residency_rows(PREFIX, columns_of({}))) == []


def test_portions_are_bounded() -> None:
    portions = list(removal_rows(PREFIX, u64(range(20_000))))
    assert len(portions) > 5
    assert max(map(len, portions)) <= CHUNK_BYTES


@pytest.mark.parametrize(
    ("column", "bad"),
    [
        ("positions", np.array([0, 2**63], np.uint64)),
        ("block_tokens", np.array([2**31, 0], np.uint32)),
        ("reference_counts", np.array([0, 2**32 - 1], np.uint32)),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_before_any_row(column: str, bad: np.ndarray) -> None:
    rows: ResidencyColumns = replace(columns_of(some_rows(2, SHAPES)), **{column: bad})
    with pytest.raises(ValueError, match="is above"):
        next(residency_rows(PREFIX, rows))


def test_a_count_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference_count 2147483648 is above"):
        next(count_rows(PREFIX, u64((1,)), np.array([2**31], np.uint32), np.array([0], np.int32)))
