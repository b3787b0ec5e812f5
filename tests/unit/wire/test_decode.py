from __future__ import annotations

import base64
import gzip
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from indexer.wire.decode import BAD_EVENTS_MAX, decode_batch, decode_event
from indexer.wire.errors import WireError
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.engine_events import cleared, decoded, decoded_one, numbers, payload, removed, stored

CAPTURES = Path(__file__).parents[2] / "conformance" / "captures"


def u32(*token_ids: int) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def stored_one(event: Any) -> BlockStored:
    only = decoded_one(event)
    assert isinstance(only, BlockStored)
    return only


def bad_events(*events: Any) -> dict[str, int]:
    return dict(decoded(*events).bad_events)


# ---------------------------------------------------------------------- golden bytes


def test_golden_bytes_of_a_map_encoded_batch() -> None:
    golden = (
        b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x91"  # [1.5, [
        b"\x88\xa4type\xabBlockStored"
        b"\xacblock_hashes\x92\xcd\x03\xe8\xcf\xff\xff\xff\xff\xff\xff\xff\xff"  # [1000, 2^64 - 1]
        b"\xb1parent_block_hash\xc0"
        b"\xa9token_ids\x94\x01\xcc\xc8\xcd\x01\x2c\xce\x00\x01\x11\x70"  # [1, 200, 300, 70000]
        b"\xaablock_size\x02"
        b"\xa7lora_id\xc0"
        b"\xa6medium\xa3GPU"
        b"\xa9lora_name\xc0"
        b"\x03"  # rank 3
    )
    batch = decode_batch(golden)
    assert (batch.timestamp, batch.data_parallel_rank, batch.payload) == (1.5, 3, golden)
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [1000, 2**64 - 1]
    assert event.tokens == u32(1, 200, 300, 70000)
    assert (event.token_count, event.block_size, event.medium, event.parent_block_hash) == (4, 2, "GPU", None)


def test_golden_bytes_of_an_array_encoded_batch() -> None:
    golden = (
        b"\x92\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x93"
        b"\x96\xabBlockStored\x91\xd0\xff\x05\x92\x01\x02\x02\xc0"  # [-1], parent 5, tokens [1, 2], size 2
        b"\x92\xacBlockRemoved\x91\xd3\x80\x00\x00\x00\x00\x00\x00\x00"  # [-2^63]
        b"\x91\xb0AllBlocksCleared"
    )
    batch = decode_batch(golden)
    assert batch.data_parallel_rank is None
    store, remove, clear = batch.events
    assert isinstance(store, BlockStored)
    assert (store.block_hashes, store.parent_block_hash, store.tokens) == ([2**64 - 1], 5, u32(1, 2))
    assert (store.medium, store.lora_name, store.extra_keys, store.group_idx) == (None, None, None, None)
    assert isinstance(remove, BlockRemoved)
    assert remove.block_hashes == [2**63]
    assert isinstance(clear, AllBlocksCleared)


# ---------------------------------------------------------------------- the batch


@pytest.mark.parametrize(
    ("outer", "rank"),
    [
        ([1.5, [], 2], 2),
        ([1.5, []], None),
        ([1.5, [], None], None),
        ([1.5, [], 1, "a later field"], 1),
        ({"ts": 1.5, "events": [], "data_parallel_rank": 1}, 1),
        ({"events": [], "ts": 1.5}, None),
        ({"ts": 1.5, "events": [], "epoch": {"new": "field"}}, None),
    ],
)
def test_the_batch_may_be_an_array_or_a_map(outer: Any, rank: int | None) -> None:
    batch = decode_batch(msgspec.msgpack.encode(outer))
    assert (batch.timestamp, batch.events, batch.data_parallel_rank) == (1.5, [], rank)


def test_map16_and_array32_headers_are_the_same_batch() -> None:
    empty = b"\xdd\x00\x00\x00\x00"
    for golden in (
        b"\xde\x00\x02\xa2ts\x01\xa6events" + empty,
        b"\xdf\x00\x00\x00\x02\xa6events" + empty + b"\xa2ts\x01",
        b"\xdc\x00\x02\x01" + empty,
        b"\xdd\x00\x00\x00\x02\x01" + empty,
    ):
        batch = decode_batch(golden)
        assert (batch.timestamp, batch.events) == (1.0, [])


@pytest.mark.parametrize("ts", [None, "now", True, float("nan"), float("inf"), [1]])
def test_a_timestamp_that_is_no_time_is_zero(ts: Any) -> None:
    assert decode_batch(payload(cleared(), ts=ts)).timestamp == 0.0


@pytest.mark.parametrize("rank", ["0", 1.5, True, [0]])
def test_a_rank_that_is_no_number_is_unknown(rank: Any) -> None:
    assert decode_batch(payload(rank=rank)).data_parallel_rank is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated_batch"),
        (b"\x93\x01", "truncated_batch"),
        (b"\xc1", "truncated_batch"),
        (b"\x01", "not_a_batch"),
        (b"\xc0", "not_a_batch"),
        (b"\xa4text", "not_a_batch"),
        (b"\x90", "not_a_batch"),
        (b"\x91\x01", "not_a_batch"),
        (b"\x92\x01\x02", "not_a_batch"),
        (b"\x81\xa2ts\x01", "not_a_batch"),
    ],
)
def test_bytes_that_are_no_batch_are_refused_by_reason(data: bytes, reason: str) -> None:
    with pytest.raises(WireError) as refused:
        decode_batch(data)
    assert refused.value.reason == reason


def first_payload(capture: str) -> bytes:
    """The largest of a capture's first payloads."""
    with gzip.open(CAPTURES / capture, "rt") as lines:
        frames = [r for r, _ in zip((json.loads(line) for line in lines), range(40), strict=False)]
    return max((base64.b64decode(r["payload_b64"]) for r in frames if r["type"] == "frame"), key=len)


@pytest.mark.parametrize(
    "capture",
    [
        "vllm-0.33.0-dense-lora-salt-mm-s0.jsonl.gz",
        "vllm-0.32.0+skipped-skipped-s0.jsonl.gz",
        "vllm-0.23.0-dense-gpu16-s1.jsonl.gz",
        "sglang-0.5.19-array-s0.jsonl.gz",
    ],
)
def test_a_batch_cut_short_at_any_byte_is_refused(capture: str) -> None:
    whole = first_payload(capture)
    assert decode_batch(whole).events
    for length in range(len(whole)):
        with pytest.raises(WireError):
            decode_batch(whole[:length])


@pytest.mark.parametrize("capture", ["vllm-0.33.0-dense-lora-salt-mm-s0.jsonl.gz", "sglang-0.5.19-array-s0.jsonl.gz"])
def test_a_batch_with_any_one_byte_changed_raises_nothing_else(capture: str) -> None:
    whole = first_payload(capture)[:4000]
    for i in range(len(whole)):
        for byte in (0x00, 0x91, 0xC1, 0xFF, whole[i] ^ 0x80):
            try:
                decode_batch(whole[:i] + bytes([byte]) + whole[i + 1 :])
            except WireError:
                continue


# ---------------------------------------------------------------------- events as arrays

FULL_ARRAY: list[Any] = [
    "BlockStored",
    [7],
    6,
    [1, 2],
    2,
    None,
    "GPU",
    "lora",
    [["lora"]],
    1,
    "sliding_window",
    64,
    "LOCAL",
    "tier-1",
    "session",
]


@pytest.mark.parametrize("length", range(5, 16))
def test_a_tagged_array_of_any_length_is_read(length: int) -> None:
    event = stored_one(FULL_ARRAY[:length])
    assert (event.block_hashes, event.parent_block_hash, event.tokens, event.block_size) == ([7], 6, u32(1, 2), 2)
    expected = [*FULL_ARRAY[5:length], *[None] * (15 - length)]
    assert [
        event.lora_id,
        event.medium,
        event.lora_name,
        event.extra_keys,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.locality,
        event.ownership,
        event.session_id,
    ] == expected


@pytest.mark.parametrize("surplus", [[None], ["text"], [{"a": 1}, 5, [[]]], [1.5] * 40])
def test_surplus_elements_of_an_array_are_ignored(surplus: list[Any]) -> None:
    event = stored_one([*FULL_ARRAY, *surplus])
    assert (event.block_hashes, event.ownership) == ([7], "tier-1")


def test_lookahead_is_the_sixteenth_element_where_it_is_one() -> None:
    assert stored_one([*FULL_ARRAY, [[3]]]).lookahead_token_ids == [[3]]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_an_array_without_its_required_elements_is_counted(length: int) -> None:
    assert bad_events(FULL_ARRAY[:length]) == {"missing_field": 1}


@pytest.mark.parametrize("length", range(2, 7))
def test_a_removal_array_of_any_length_is_read(length: int) -> None:
    event = decoded_one(["BlockRemoved", [1, b"x" * 32], "CPU", 2, "REMOTE", "owner", "surplus"][:length])
    assert isinstance(event, BlockRemoved)
    assert event.block_hashes == [1, b"x" * 32]
    values = [event.medium, event.group_idx, event.locality, event.ownership]
    assert values == [*["CPU", 2, "REMOTE", "owner"][: length - 2], *[None] * (6 - length)]


def test_sglang_arrays_with_an_inner_map_carry_the_salt_where_vllm_has_the_lora_name() -> None:
    event = stored_one(["BlockStored", [-5], None, [1, 2], 2, None, "GPU", {"cache_salt": "s"}])
    assert (event.block_hashes, event.cache_salt, event.lora_name) == ([2**64 - 5], "s", None)


def test_an_inner_map_may_name_the_adapter_and_fields_unknown_today() -> None:
    event = stored_one(["BlockStored", [1], None, [1, 2], 2, None, "GPU", {"lora_name": "l", "new": [1]}])
    assert (event.cache_salt, event.lora_name) == (None, "l")


def test_an_inner_map_with_a_salt_that_is_no_text_is_counted() -> None:
    assert bad_events(["BlockStored", [1], None, [1, 2], 2, None, "GPU", {"cache_salt": 5}]) == {"wrong_type": 1}


# ---------------------------------------------------------------------- events as maps


def test_missing_optional_fields_of_a_map_have_their_defaults() -> None:
    event = stored_one({"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1})
    assert (event.parent_block_hash, event.medium, event.lora_name, event.extra_keys) == (None, None, None, None)
    remove = decoded_one({"type": "BlockRemoved", "block_hashes": [1]})
    assert isinstance(remove, BlockRemoved)
    assert (remove.medium, remove.group_idx, remove.locality, remove.ownership) == (None, None, None, None)


def test_unknown_fields_of_a_map_are_ignored() -> None:
    event = stored_one(stored([1], None, [1], 1, shiny={"deep": [[[1.5]]]}, other=b"bytes"))
    assert event.block_hashes == [1]


def test_the_tag_may_come_last() -> None:
    fields = stored([1], None, [1], 1)
    tag = fields.pop("type")
    assert stored_one({**fields, "type": tag}).block_hashes == [1]


def test_arrays_and_maps_are_mixed_in_one_batch() -> None:
    batch = decoded(stored([1], None, [1], 1), ["BlockRemoved", [1]], cleared(), ["AllBlocksCleared"])
    assert isinstance(batch.events[0], BlockStored)
    assert isinstance(batch.events[1], BlockRemoved)
    assert isinstance(batch.events[2], AllBlocksCleared)
    assert isinstance(batch.events[3], AllBlocksCleared)
    assert not batch.bad_events


@pytest.mark.parametrize(
    "event",
    [
        {"type": "TierBlocksCleared", "medium": "CPU"},
        ["TierBlocksCleared", "CPU"],
        cleared(medium="CPU"),
        ["AllBlocksCleared", "CPU"],
    ],
)
def test_a_clear_may_name_its_medium(event: Any) -> None:
    clear = decoded_one(event)
    assert isinstance(clear, AllBlocksCleared)
    assert clear.medium == "CPU"


def test_every_field_of_the_skipped_context_is_read_by_name() -> None:
    event = stored_one(
        stored(
            [3],
            2,
            [5, 6],
            2,
            skipped_parent_block_hash=-1,
            skipped_token_ids=[1, 2, 3, 4],
            skipped_extra_keys=[None, ["salt"]],
        )
    )
    assert event.skipped_parent_block_hash == 2**64 - 1
    assert event.skipped_tokens == u32(1, 2, 3, 4)
    assert event.skipped_extra_keys == [None, ["salt"]]


def test_the_fields_that_say_where_and_whose_a_block_is_are_read() -> None:
    event = stored_one(
        stored(
            [3],
            2,
            [5, 6],
            2,
            origin="REUSED",
            locality="REMOTE",
            ownership="o",
            session_id=["anything"],
            block_offsets=[0],
            block_parent_hashes=[-2],
            group_idx=4,
            kv_cache_spec_kind="mamba",
            cache_salt="s",
        )
    )
    assert (event.origin, event.locality, event.ownership) == ("REUSED", "REMOTE", "o")
    assert (event.block_offsets, event.block_parent_hashes) == ([0], [2**64 - 2])
    assert (event.group_idx, event.kv_cache_spec_kind, event.cache_salt) == (4, "mamba", "s")


@pytest.mark.parametrize("anything", [None, 5, "text", [1, [2]], {"a": {"b": 1}}, 1.5, b"x"])
def test_fields_without_a_meaning_for_us_may_hold_anything(anything: Any) -> None:
    assert stored_one(stored([1], None, [1], 1, lora_id=anything, session_id=anything)).block_hashes == [1]


# ---------------------------------------------------------------------- hashes


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        (b"\x64", 100),
        (b"\xcc\xff", 255),
        (b"\xcd\xff\xff", 65_535),
        (b"\xce\x00\x01\x11\x70", 70_000),
        (b"\xcf\x00\x00\x01\x00\x00\x00\x00\x00", 2**40),
        (b"\xcf\x80\x00\x00\x00\x00\x00\x00\x05", 2**63 + 5),
        (b"\xff", 2**64 - 1),
        (b"\xd0\x80", 2**64 - 128),
        (b"\xd1\x80\x00", 2**64 - 2**15),
        (b"\xd2\x80\x00\x00\x00", 2**64 - 2**31),
        (b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00", 2**63),
        (b"\xd3\x00\x00\x00\x00\x00\x00\x00\x07", 7),
        (b"\xc4\x01\xaa", b"\xaa"),
        (b"\xc4\x00", b""),
        (b"\xc4\x08\x00\x00\x00\x00\x00\x00\x01\x02", 258),
        (b"\xc5\x00\x20" + b"\x07" * 32, b"\x07" * 32),
        (b"\xc6\x00\x00\x00\x10" + b"\x07" * 16, b"\x07" * 16),
        (b"\xc4\x60" + b"\x09" * 96, b"\x09" * 96),
    ],
)
def test_a_hash_of_any_width_has_one_form(encoded: bytes, value: int | bytes) -> None:
    as_array = b"\x96\xabBlockStored\x92\x2a" + encoded + encoded + b"\x92\x01\x02\x01\xc0"
    event = decode_event(as_array)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [42, value]
    assert event.parent_block_hash == value
    remove = decode_event(b"\x82\xa4type\xacBlockRemoved\xacblock_hashes\x91" + encoded)
    assert isinstance(remove, BlockRemoved)
    assert remove.block_hashes == [value]


def test_ints_and_bytes_are_mixed_in_one_event() -> None:
    assert stored_one(stored([1, b"x" * 32, -1], None, [1, 2, 3], 1)).block_hashes == [1, b"x" * 32, 2**64 - 1]


def test_a_hash_longer_than_a_row_may_be_is_replaced_by_one_and_the_same_digest() -> None:
    first, again, other = (stored_one(stored([c * 5000], c * 5000, [1], 1)) for c in (b"x", b"x", b"y"))
    assert first.block_hashes == again.block_hashes == [first.parent_block_hash]
    assert first.block_hashes != other.block_hashes
    assert len(bytes(first.block_hashes[0])) < 100


# ---------------------------------------------------------------------- tokens


def test_tokens_that_fit_are_u32_little_endian() -> None:
    assert stored_one(stored([1], None, [0, 1, 2**32 - 1], 3)).tokens == u32(0, 1, 2**32 - 1)


def test_image_ids_up_to_2_to_the_63_are_kept_wide() -> None:
    event = stored_one(stored([1], None, [1, 2**32, 2**63 - 1], 3))
    assert event.tokens == array("Q", [1, 2**32, 2**63 - 1])
    assert event.token_count == 3


def test_pairs_are_their_first_elements_and_the_last_second_is_the_lookahead() -> None:
    event = stored_one(stored([1, 2], None, [[1, 2], [2, 3], [3, 4], [4, 5]], 2))
    assert (event.tokens, event.token_count, event.lookahead_token_ids) == (u32(1, 2, 3, 4), 4, [[3], [5]])


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([1, -1], "token_out_of_range"),
        ([2**63], "token_out_of_range"),
        ([2**64 - 1], "token_out_of_range"),
        ([1.0], "wrong_type"),
        (["1"], "wrong_type"),
        ([None], "wrong_type"),
        ([True], "wrong_type"),
        ([1, [1, 2]], "wrong_type"),
        ([2**33, [1, 2]], "wrong_type"),
        ([[1, 2], 3], "wrong_type"),
        ([[1, 2, 3]], "wrong_type"),
        ([[]], "wrong_type"),
        ([[1, 2], [1]], "wrong_type"),
        ([[-1, 2]], "token_out_of_range"),
        ([[1, -2]], None),
        ("text", "wrong_type"),
        ({}, "wrong_type"),
        (5, "wrong_type"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_token_that_is_none_costs_only_its_event(tokens: Any, reason: str | None, place: int) -> None:
    events = [stored([i], None, numbers(i, 1), 1) for i in (1, 2)]
    bad = stored([3], None, [], 1)
    bad["token_ids"] = tokens
    events.insert(place, bad)
    batch = decoded(*events)
    assert [event.block_hashes for event in batch.events if isinstance(event, BlockStored)] == [[1], [2]]
    assert sum(batch.bad_events.values()) == 1
    assert reason is None or dict(batch.bad_events) == {reason: 1}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"block_hashes": [1]}, "unknown_event"),
        ({"type": "BlockTeleported", "block_hashes": [1]}, "unknown_event"),
        (["BlockTeleported", [1]], "unknown_event"),
        ([], "missing_field"),
        ({}, "unknown_event"),
        ({"type": "BlockStored", "token_ids": [1], "block_size": 1}, "missing_field"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 1}, "missing_field"),
        ({"type": "BlockStored", "block_hashes": [1], "token_ids": [1]}, "missing_field"),
        ({"type": "BlockRemoved"}, "missing_field"),
        (["BlockRemoved"], "missing_field"),
        (stored([1.5], None, [1], 1), "wrong_type"),
        (stored(["hash"], None, [1], 1), "wrong_type"),
        (stored([None], None, [1], 1), "wrong_type"),
        (stored([1], [1], [1], 1), "wrong_type"),
        (stored([1], None, [1], -1), "bad_block_size"),
        (stored([1], None, [1], 2**31), "bad_block_size"),
        (stored([1], None, [1], 1) | {"block_size": 1.0}, "wrong_type"),
        (stored([1], None, [1], 1) | {"medium": 5}, "wrong_type"),
        (stored([1], None, [1], 1, group_idx="0"), "wrong_type"),
        (stored([1], None, [1], 1, group_idx=-1), "bad_group"),
        (stored([1], None, [1], 1, group_idx=2**40), "bad_group"),
        (stored([1], None, [1], 1, kv_cache_spec_sliding_window=-1), "bad_window"),
        (stored([1], None, [1], 1, kv_cache_spec_sliding_window=2**31), "bad_window"),
        (stored([1], None, [1], 1, medium="G\0PU"), "bad_name"),
        (stored([1], None, [1], 1, ownership="x" * 10_000), "bad_name"),
        (stored([1], None, [1], 1, kv_cache_spec_kind="full\0"), "bad_name"),
        (removed([1], "G\0PU"), "bad_name"),
        (stored([1], None, [1], 1, medium="x" * 10_000), "bad_name"),
        (removed([1], "x" * 10_000), "bad_name"),
        (removed([1], "GPU", locality="x" * 10_000), "bad_name"),
        (cleared(medium="x" * 10_000), "bad_name"),
        (removed([1], group_idx=-1), "bad_group"),
        (stored([1], None, [1], 1, extra_keys="lora"), "wrong_type"),
        (stored([1], None, [1], 1, lookahead_token_ids=[[-1]]), "bad_lookahead"),
        (stored([1], None, [1], 1, lookahead_token_ids=[[2**63]]), "bad_lookahead"),
        (stored([1], None, [1], 1, lookahead_token_ids=[numbers(0, 1000)]), "bad_lookahead"),
        (stored([1], None, [1], 1, skipped_token_ids=[-1]), "token_out_of_range"),
        (stored([1], None, [1], 1, skipped_token_ids=[[1, 2]]), "wrong_type"),
        (stored([1], None, [1], 1, block_offsets=["0"]), "wrong_type"),
        (removed([{}]), "wrong_type"),
        (5, "wrong_type"),
        (None, "wrong_type"),
        ("BlockStored", "wrong_type"),
        ([[["BlockStored"]]], "wrong_type"),
    ],
)
def test_an_event_that_cannot_be_read_is_counted_by_reason_and_costs_only_itself(event: Any, reason: str) -> None:
    batch = decoded(removed([8]), event, removed([9]))
    assert [e.block_hashes for e in batch.events if isinstance(e, BlockRemoved)] == [[8], [9]]
    assert dict(batch.bad_events) == {reason: 1}


def test_a_batch_of_nothing_but_garbage_is_given_up() -> None:
    most = BAD_EVENTS_MAX
    assert decode_batch(msgspec.msgpack.encode([1.0, [0] * most])).bad_events == {"wrong_type": most}
    with pytest.raises(WireError) as raised:
        decode_batch(msgspec.msgpack.encode([1.0, [0] * (most + 1)]))
    assert raised.value.reason == "too_many_bad_events"


def test_deeply_nested_garbage_costs_only_itself() -> None:
    deep = b"\x91" * 5000 + b"\xc0"
    good = msgspec.msgpack.encode(removed([9]))
    for event in (deep, b"\x82\xa4type\xabBlockStored\xa7lora_id" + deep):
        try:
            batch = decode_batch(b"\x92\x01\x92" + event + good)
        except WireError:
            continue  # so deep that the batch itself is unreadable
        assert sum(batch.bad_events.values()) == 1
        assert len(batch.events) == 1


def test_text_that_is_not_utf8_costs_only_its_event() -> None:
    broken = b"\x95\xabBlockStored\x91\x01\xc0\x91\x01\x01".replace(b"\x95", b"\x97") + b"\xc0\xa2\xff\xfe"
    batch = decode_batch(b"\x92\x01\x92" + broken + msgspec.msgpack.encode(removed([9])))
    assert sum(batch.bad_events.values()) == 1
    assert len(batch.events) == 1


def test_extra_keys_with_keys_that_cannot_be_hashed_raise_nothing() -> None:
    weird = b"\x91\x91\x81\x81\x01\x02\x03"  # [[{{1: 2}: 3}]]
    event = (
        b"\x85\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xa9token_ids\x91\x01\xaablock_size\x01\xaaextra_keys"
        + weird
    )
    try:
        batch = decode_batch(b"\x92\x01\x92" + event + msgspec.msgpack.encode(removed([9])))
    except WireError:
        return
    assert any(isinstance(e, BlockRemoved) for e in batch.events)
