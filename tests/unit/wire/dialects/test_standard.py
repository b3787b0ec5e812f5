"""Events of RFC #1527, from bytes to events of ours."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from indexer.wire.decode import EventBatch, decode_batch
from indexer.wire.errors import WireError
from indexer.wire.events import Addressee, AllBlocksCleared, BlockRemoved, BlockStored, StandardStored
from tests.engine_events import payload

ME = Addressee("w0", "m", "default", 0)

STORED = (
    b"\x8d"
    b"\xaaevent_type\xa6stored"
    b"\xa8event_id\x07"
    b"\xa9timestamp\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"
    b"\xaamodel_name\xa1m"
    b"\xaablock_size\x02"
    b"\xafadditional_salt\xa0"
    b"\xa9lora_name\xa4lora"
    b"\xa9tenant_id\xa7default"
    b"\xaabackend_id\xa2w0"
    b"\xa6medium\xa3GPU"
    b"\xaaseq_hashes\x92\x05\xcf\xff\xff\xff\xff\xff\xff\xff\xff"  # [5, 2^64 - 1]
    b"\xabparent_hash\xc0"
    b"\xa9token_ids\x94\x01\xcc\xc8\xcd\x01\x2c\xce\x00\x01\x11\x70"  # [1, 200, 300, 70000]
)
REMOVED = b"\x83\xaaevent_type\xa7removed\xaaseq_hashes\x91\x05\xa6medium\xa3GPU"
CLEARED = b"\x82\xaaevent_type\xa7cleared\xa6medium\xa3CPU"


def standard(event_type: str = "stored", **fields: Any) -> dict[str, Any]:
    return {"event_type": event_type} | fields


def stored(**fields: Any) -> dict[str, Any]:
    return standard(
        **({"seq_hashes": [5, 6], "block_size": 2, "token_ids": [1, 2, 3, 4], "parent_hash": None} | fields)
    )


def batch_of(*events: Any, addressee: Addressee | None = ME) -> EventBatch:
    return decode_batch(payload(*events), addressee)


def one(event: Any) -> Any:
    batch = batch_of(event)
    assert not batch.bad_events, batch.bad_events
    (only,) = batch.events
    return only


def test_golden_bytes() -> None:
    batch = decode_batch(b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x93" + STORED + REMOVED + CLEARED + b"\x00", ME)
    assert not batch.bad_events
    store, remove, clear = batch.events
    assert type(store) is BlockStored
    assert (store.block_hashes, store.parent_block_hash, store.block_size) == ([5, 2**64 - 1], None, 2)
    assert (store.tokens, store.token_count) == (struct.pack("<4I", 1, 200, 300, 70000), 4)
    assert (store.lora_name, store.medium, store.ownership, store.cache_salt) == ("lora", "GPU", None, None)
    assert isinstance(remove, BlockRemoved)
    assert (remove.block_hashes, remove.medium, remove.ownership) == ([5], "GPU", None)
    assert isinstance(clear, AllBlocksCleared)
    assert clear.medium == "CPU"


@pytest.mark.parametrize("bare", [STORED, b"\x91" + STORED, b"\x92" + STORED + REMOVED, b"\xdc\x00\x01" + STORED])
def test_events_may_come_without_a_batch_around_them(bare: bytes) -> None:
    batch = decode_batch(bare, ME)
    assert isinstance(batch.events[0], BlockStored)
    assert (batch.timestamp, batch.data_parallel_rank, batch.bad_events) == (0.0, None, {})


@pytest.mark.parametrize(
    "bare", [b"\x81\xa1a\x01", b"\x92\x80\x80", b"\x91\x81\xa4type\x01", STORED[:-1], b"\x91" + STORED[:-3]]
)
def test_maps_that_are_no_events_are_no_batch(bare: bytes) -> None:
    with pytest.raises(WireError) as refused:
        decode_batch(bare, ME)
    assert refused.value.reason in ("not_a_batch", "truncated_batch")


# ---------------------------------------------------------------------- who is meant


@pytest.mark.parametrize("others", [{"model_name": "other"}, {"tenant_id": "other"}, {"dp_rank": 1}])
def test_events_for_others_are_left_out_and_counted_apart(others: dict[str, Any]) -> None:
    batch = batch_of(stored(**others), standard("removed", seq_hashes=[1], **others), stored())
    assert (len(batch.events), batch.for_others, batch.bad_events) == (1, 2, {})


def test_events_of_this_model_tenant_and_rank_are_taken() -> None:
    assert one(stored(model_name="m", tenant_id="default", dp_rank=0)).block_hashes == [5, 6]


@pytest.mark.parametrize(("backend", "owner"), [("w0", None), ("node-3", "node-3"), (7, "7"), (None, None)])
def test_a_backend_that_is_not_the_worker_is_the_owner(backend: Any, owner: str | None) -> None:
    for event in (stored(backend_id=backend), standard("removed", seq_hashes=[1], backend_id=backend)):
        assert one(event).ownership == owner


def test_empty_texts_say_nothing() -> None:
    texts = dict.fromkeys(("model_name", "tenant_id", "backend_id", "medium", "lora_name", "object_key"), "")
    event = one(stored(**texts))
    assert (event.block_hashes, event.ownership, event.medium, event.lora_name) == ([5, 6], None, None, None)


# ---------------------------------------------------------------------- where blocks lie


@pytest.mark.parametrize(
    ("position", "parent"),
    [
        ({"parent_hash": None}, None),
        ({"base_block_idx": 0}, None),
        ({"base_block_idx": 0, "parent_hash": None}, None),
        ({"parent_hash": 9}, 9),
        ({"parent_hash": 0}, 0),
        ({"base_block_idx": 4, "parent_hash": -1}, 2**64 - 1),
    ],
)
def test_a_position_is_told_by_the_parent_or_by_the_first_index(position: dict[str, Any], parent: int | None) -> None:
    event = one(standard(seq_hashes=[5], block_size=2, token_ids=[1, 2], **position))
    assert (event.parent_block_hash, event.token_count, event.block_size) == (parent, 2, 2)


@pytest.mark.parametrize(
    "position",
    [
        {},
        {"base_block_idx": 4},
        {"base_block_idx": 4, "parent_hash": None},
        {"parent_hash": None, "additional_salt": "s"},
    ],
)
def test_blocks_at_an_unknown_place_or_of_a_salted_scope_are_named_by_hash(position: dict[str, Any]) -> None:
    event = one(standard(seq_hashes=[5], block_size=2, token_ids=[1, 2], **position))
    assert (event.block_hashes, event.token_count, event.block_size) == ([5], 0, 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"base_block_idx": 0, "parent_hash": 9}, "bad_position"),
        ({"base_block_idx": -1}, "bad_position"),
        ({"base_block_idx": 2**30, "token_ids": None}, "bad_position"),
        ({"block_size": None}, "missing_field"),
        ({"block_size": 0}, "bad_block_size"),
        ({"block_size": -4, "token_ids": None}, "bad_block_size"),
        ({"seq_hashes": None}, "no_hashes"),
        ({"seq_hashes": [], "token_ids": None}, "no_hashes"),
        ({"seq_hashes": "text"}, "wrong_type"),
        ({"seq_hashes": ["text"]}, "wrong_type"),
        ({"token_ids": [-1, 2, 3, 4]}, "token_out_of_range"),
        ({"medium": "x" * 10_000}, "bad_name"),
        ({"backend_id": "x" * 10_000}, "bad_name"),
        ({"lora_name": "x" * 10_000}, "bad_name"),
        ({"event_type": "moved"}, "unknown_event"),
        ({"event_type": 5}, "wrong_type"),
        ({"object_key": "k", "token_ids": None, "seq_hashes": None}, "no_hashes"),
    ],
)
def test_events_that_make_no_sense_are_counted_by_reason_and_cost_nothing_else(
    fields: dict[str, Any], reason: str
) -> None:
    batch = batch_of(stored(), stored() | fields, standard("removed", seq_hashes=[5]))
    assert dict(batch.bad_events) == {reason: 1}
    assert len(batch.events) == 2


# ---------------------------------------------------------------------- standard hashes, objects


def test_hashes_without_tokens_are_content_keys() -> None:
    event = one(standard(seq_hashes=[7, -1], block_size=16, base_block_idx=3, parent_hash=6, medium="cpu"))
    assert isinstance(event, StandardStored)
    assert (event.block_hashes, event.content_keys) == ([7, 2**64 - 1], [7, 2**64 - 1])
    assert (event.hash_tokens, event.block_size, event.start_tokens, event.start_key) == (16, 16, 48, 6)


@pytest.mark.parametrize("fields", [{"additional_salt": "s"}, {"seq_hashes": [b"x" * 32]}])
def test_hashes_that_cannot_be_standard_are_names_only(fields: dict[str, Any]) -> None:
    event = one({"event_type": "stored", "seq_hashes": [7], "block_size": 16, "base_block_idx": 0} | fields)
    assert isinstance(event, StandardStored)
    assert event.content_keys == []


def test_an_object_goes_by_its_key_and_is_what_its_last_hash_says() -> None:
    store = one(standard(seq_hashes=[7, 8], block_size=16, base_block_idx=2, object_key="m@0@ff"))
    assert (store.block_hashes, store.content_keys) == ([b"object_key:m@0@ff"], [8])
    assert (store.block_size, store.hash_tokens, store.start_tokens) == (32, 16, 32)
    assert one(standard("removed", object_key="m@0@ff")).block_hashes == store.block_hashes


def test_an_object_with_tokens_is_one_block_of_them() -> None:
    event = one(stored(object_key="k", token_ids=list(range(32)), seq_hashes=[7, 8], block_size=16))
    assert (event.block_hashes, event.block_size, event.token_count) == ([b"object_key:k"], 32, 32)


def test_a_batch_cut_short_or_damaged_anywhere_raises_nothing_else() -> None:
    whole = b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x93" + STORED + REMOVED + CLEARED + b"\x00"
    for length in range(len(whole)):
        with pytest.raises(WireError):
            decode_batch(whole[:length], ME)
    for data in (whole, STORED, b"\x92" + STORED + REMOVED):
        for i in range(len(data)):
            for byte in (0x00, 0x91, 0xC1, 0xFF, data[i] ^ 0x80):
                try:
                    decode_batch(data[:i] + bytes([byte]) + data[i + 1 :], ME)
                except WireError:
                    continue


def test_without_an_addressee_everybody_is_meant() -> None:
    assert len(batch_of(stored(model_name="any"), addressee=None).events) == 1


def test_the_golden_event_is_what_it_is_written_down_as() -> None:
    assert msgspec.msgpack.decode(STORED)["parent_hash"] is None
