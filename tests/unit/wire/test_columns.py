from __future__ import annotations

from typing import Any

import pytest

from indexer.wire.batch_kernels import SHAPES_MAX
from indexer.wire.columns import BatchColumns, PayloadReader, read_batch
from indexer.wire.events import BlockStored
from tests.engine_events import numbers, payload, removed, stored


@pytest.fixture
def reader() -> PayloadReader:
    return PayloadReader()


def columns_of(reader: PayloadReader, *events: Any) -> BatchColumns | None:
    return read_batch(payload(*events), reader).columns


@pytest.mark.parametrize("extra_keys", [[], [None], [[]], [None, []]])
def test_extra_keys_that_say_nothing_are_told_from_none(reader: PayloadReader, extra_keys: list[Any]) -> None:
    columns = columns_of(
        reader,
        stored([1], None, numbers(0, 16), medium="CPU", extra_keys=extra_keys),
        stored([2], None, numbers(0, 16), medium="CPU", extra_keys=None),
        stored([3], None, numbers(0, 16), medium="CPU", extra_keys=extra_keys),
    )
    assert columns is not None
    shapes = [columns.shapes[i] for i in columns.shape_ids[:3]]
    assert [isinstance(shape, BlockStored) and shape.extra_keys is None for shape in shapes] == [False, True, False]


@pytest.mark.parametrize("extra_keys", [[[None]], [[], [None]], [["a"]], [0], [""], [{}], {}, 0])
def test_extra_keys_that_say_something_or_are_none_are_no_simple_case(reader: PayloadReader, extra_keys: Any) -> None:
    assert columns_of(reader, stored([1], None, numbers(0, 16), extra_keys=extra_keys)) is None


def test_the_last_shape_is_told_from_the_first_and_one_too_many_begins_again(reader: PayloadReader) -> None:
    for i in range(SHAPES_MAX):
        assert columns_of(reader, removed([1], f"medium {i}")) is not None
    columns = columns_of(reader, removed([1], f"medium {SHAPES_MAX - 1}"), removed([2], "medium 0"))
    assert columns is not None
    assert columns.shapes_seen == 1 << (SHAPES_MAX - 1) | 1
    assert [columns.shapes[i].medium for i in columns.shape_ids[:2]] == [f"medium {SHAPES_MAX - 1}", "medium 0"]
    known = columns.shapes
    columns = columns_of(reader, removed([1], "one more"))
    assert columns is not None
    assert columns.shapes is not known
    assert [shape.medium for shape in columns.shapes] == ["one more"]


def test_a_batch_with_more_shapes_than_there_may_be_is_no_simple_case(reader: PayloadReader) -> None:
    assert columns_of(reader, *(removed([1], f"medium {i}") for i in range(SHAPES_MAX + 1))) is None
    assert columns_of(reader, *(removed([1], f"medium {i}") for i in range(SHAPES_MAX))) is not None
