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
