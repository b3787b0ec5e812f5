from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from indexer.wire.batch_kernels import SHAPES_MAX
from indexer.wire.columns import BatchColumns, PayloadReader, rank_of, read_batch
from indexer.wire.decode import decode_batch, decode_event
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


def test_payloads_are_read_together_up_to_the_first_that_is_not_simple(reader: PayloadReader) -> None:
    simple = [payload(stored([n], None, numbers(0, 16)), removed([n])) for n in range(1, 4)]
    odd = payload(removed([9]), stored([b"wide"], None, numbers(0, 16)))
    columns = reader.read(*simple[:2], odd, simple[2])
    assert columns is not None
    assert (columns.batches, columns.batch_ends[:2].tolist(), columns.count) == (2, [2, 4], 4)
    assert columns.hashes[:4].tolist() == [1, 1, 2, 2]
    assert [columns.batch_of(event) for event in range(4)] == [0, 0, 1, 1]
    assert [decode_event(columns.event_bytes(event)) for event in range(4)] == [
        event for data in simple[:2] for event in decode_batch(data).events
    ]
    assert reader.read(odd, simple[0]) is None
    both = reader.read(simple[0], simple[1])
    assert both is not None
    assert both.batches == 2


def test_shapes_of_a_payload_that_is_not_simple_are_not_seen(reader: PayloadReader) -> None:
    columns = reader.read(payload(removed([1], "GPU")), payload(removed([2], "CPU"), removed([b"wide"])))
    assert columns is not None
    assert columns.batches == 1
    assert columns.shapes[0].medium == "GPU"
    assert columns.shapes_seen == 1


def test_payloads_that_have_too_many_shapes_together_are_read_apart(reader: PayloadReader) -> None:
    payloads = [payload(*(removed([1], f"medium {k} of {i}") for k in range(40))) for i in range(3)]
    columns = reader.read(*payloads)
    assert columns is not None
    assert columns.batches == 1
    assert [columns.shapes[k].medium for k in columns.shape_ids[:40]] == [f"medium {k} of 0" for k in range(40)]


@pytest.mark.parametrize(("rank", "is_simple"), [(None, True), (0, True), (127, True), (128, False), (-1, False)])
def test_a_rank_of_more_than_a_byte_is_no_simple_case(reader: PayloadReader, rank: int | None, is_simple: bool) -> None:
    data = payload(removed([1]), rank=rank)
    columns = reader.read(data)
    assert (columns is not None) == is_simple
    assert not is_simple or rank_of(data) == rank


def test_the_buffers_hold_as_many_events_as_fit_into_a_payload(reader: PayloadReader) -> None:
    shortest = [["BlockRemoved", [1]]] * 10_000
    columns = columns_of(reader, *shortest)
    assert columns is not None
    assert columns.count == 10_000 <= len(columns.event_ends)
    assert reader.read(payload(*shortest)[:-1]) is None


def test_buffers_take_eighteen_bytes_for_each_of_a_payload(reader: PayloadReader) -> None:
    columns = columns_of(reader, *[removed([1])] * 10_000)
    assert columns is not None
    columns_bytes = sum(column.nbytes for column in astuple(columns) if isinstance(column, np.ndarray))
    assert columns_bytes <= 18 * len(columns.data)
