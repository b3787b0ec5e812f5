"""What an engine is, from its events alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer.wire.decode import raw_events
from indexer.wire.dialects import standard, trtllm
from indexer.wire.dialects.recognition import EVENTS_LOOKED_AT, HASHES_LOOKED_AT, Recogniser, reader_of
from tests.engine_events import cleared, payload, removed, stored

SGLANG_STORED = {
    "type": "BlockStored",
    "block_hashes": [5],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
}
ARRAY = ["BlockStored", [5], None, [1, 2], 2, None, "GPU"]


def dialect_of(*batches: list[Any]) -> str | None:
    recogniser = Recogniser()
    for events in batches:
        recogniser.look([msgspec.msgpack.encode(event) for event in events])
    return recogniser.dialect


@pytest.mark.parametrize(
    ("event", "dialect"),
    [
        (stored([5], None, [1, 2], 2), "vllm"),
        (stored([5], None, [1, 2], 2, lora_name="l", extra_keys=[["l"]]), "vllm"),
        (removed([5], group_idx=0), "vllm"),
        (removed([b"x" * 32]), "vllm"),
        ([*ARRAY, None], "vllm"),
        (["BlockStored", [b"x" * 32], None, [1, 2], 2, None], "vllm"),
        (SGLANG_STORED, "sglang"),
        (SGLANG_STORED | {"medium": "GPU", "cache_salt": "s", "lora_name": "l"}, "sglang"),
        (SGLANG_STORED | {"token_ids": [[1, 2], [2, 3]], "lora_name": "l"}, "sglang"),
        (removed([-5], medium="GPU"), "sglang"),
        ([*ARRAY, {"cache_salt": "s"}], "sglang"),
        (["BlockStored", [-5], None, [1, 2], 2, None, "GPU"], "sglang"),
        (["BlockStored", [5], None, [[1, 2]], 1, None, "GPU"], "sglang"),
        ({"event_id": 0, "data": {"type": "created"}}, "trtllm"),
        ({"event_type": "stored", "seq_hashes": [5]}, "rfc1527"),
        ({"event_type": "removed", "object_key": "k"}, "mooncake"),
        ({"event_type": "cleared"}, None),
        (cleared(), None),
        (["AllBlocksCleared"], None),
        (ARRAY, None),
        (removed([5]), None),
        (SGLANG_STORED | {"lora_name": "l"}, None),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1}, None),
        (5, None),
        ([], None),
        ([[]], None),
        ({}, None),
        ({"type": "BlockStored", "block_hashes": 5, "token_ids": 5, "lora_name": {}}, None),
    ],
)
def test_an_event_tells_by_its_fields_what_it_is_of(event: Any, dialect: str | None) -> None:
    assert dialect_of([event]) == dialect


def test_what_the_first_event_does_not_tell_a_later_one_does() -> None:
    assert dialect_of([cleared(), ARRAY], [removed([5])], [removed([7, -8])]) == "sglang"


def test_hashes_none_of_which_is_negative_are_not_signed_ones() -> None:
    few = [["BlockRemoved", list(range(HASHES_LOOKED_AT - 1))]]
    assert dialect_of(few) is None
    assert dialect_of(few, [["BlockRemoved", [5]]]) == "vllm"


def test_what_was_found_or_said_stays() -> None:
    recogniser = Recogniser("sglang")
    recogniser.look([msgspec.msgpack.encode(stored([5], None, [1, 2], 2))])
    assert recogniser.dialect == "sglang"


def test_only_the_first_events_of_a_batch_are_looked_at() -> None:
    assert dialect_of([cleared()] * EVENTS_LOOKED_AT + [removed([-5])]) is None


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x05", b"\x92\x01", b"\x81\xa4data"])
def test_bytes_that_are_no_event_tell_nothing(raw: bytes) -> None:
    recogniser = Recogniser()
    recogniser.look([raw])
    assert recogniser.dialect is None
    assert reader_of(raw) is None


def test_events_of_other_forms_have_a_reader_each() -> None:
    assert reader_of(msgspec.msgpack.encode({"event_type": 5})) is standard.read
    assert reader_of(msgspec.msgpack.encode({"data": None})) is trtllm.read
    assert reader_of(msgspec.msgpack.encode(stored([1]))) is None
    assert raw_events(payload(stored([1]), cleared()))[1] == msgspec.Raw(msgspec.msgpack.encode(cleared()))
