"""TensorRT-LLM's dictionaries, from bytes to events of ours."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from indexer.wire.decode import EventBatch, decode_batch
from indexer.wire.errors import WireError
from indexer.wire.events import Addressee, AllBlocksCleared, BlockRemoved, BlockStored, RemovedEverywhere
from tests.engine_events import payload

ME = Addressee("w0", "m", "default", 0)

TOKEN_1 = b"\x83\xa4type\xacunique_token\xa8token_id\x01\xaetoken_extra_id\x00"
TOKEN_300 = b"\x83\xa4type\xacunique_token\xa8token_id\xcd\x01\x2c\xaetoken_extra_id\x00"
STORED = (
    b"\x84\xa8event_id\x01\xa4data\x83\xa4type\xa6stored\xabparent_hash\xc0\xa6blocks\x91"
    b"\x85\xa4type\xacstored_block\xaablock_hash\xcf\x80\x00\x00\x00\x00\x00\x00\x05"  # 2^63 + 5
    b"\xa6tokens\x92" + TOKEN_1 + TOKEN_300 + b"\xabcache_level\x00\xa8priority\x23"
    b"\xabwindow_size\xcd\x10\x00\xb1attention_dp_rank\x00"
)
REMOVED = b"\x82\xa8event_id\x02\xa4data\x82\xa4type\xa7removed\xacblock_hashes\x91\xcf\x80\x00\x00\x00\x00\x00\x00\x05"
CREATED = b"\x82\xa8event_id\x00\xa4data\x82\xa4type\xa7created\xbanum_blocks_per_cache_level\x92\x64\x00"
GOLDEN = b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x93" + CREATED + STORED + REMOVED + b"\xc0"


def event(data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"event_id": 5, "data": data} | fields


def block(block_hash: Any, token_ids: list[int], level: int = 0, **fields: Any) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in token_ids]
    plain = {"type": "stored_block", "block_hash": block_hash, "tokens": tokens, "cache_level": level, "priority": 35}
    return plain | fields


def stored(*blocks: dict[str, Any], parent: Any = None, **fields: Any) -> dict[str, Any]:
    return event({"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **fields)


def batch_of(*events: Any, addressee: Addressee | None = ME) -> EventBatch:
    return decode_batch(payload(*events), addressee)


def stores(*events: Any, addressee: Addressee | None = ME) -> list[Any]:
    """(hashes, parent, tokens, block size, medium) of each."""
    batch = batch_of(*events, addressee=addressee)
    assert not batch.bad_events, batch.bad_events
    found: list[Any] = []
    for e in batch.events:
        assert isinstance(e, BlockStored)
        tokens = list(struct.unpack(f"<{e.token_count}I", e.tokens))
        found.append((e.block_hashes, e.parent_block_hash, tokens, e.block_size, e.medium))
    return found


def test_golden_bytes() -> None:
    batch = decode_batch(GOLDEN, ME)
    assert not batch.bad_events
    clear, store, remove = batch.events
    assert isinstance(clear, AllBlocksCleared)
    assert clear.medium is None
    assert isinstance(store, BlockStored)
    assert (store.block_hashes, store.parent_block_hash, store.block_size) == ([2**63 + 5], None, 2)
    assert (store.tokens, store.token_count) == (struct.pack("<2I", 1, 300), 2)
    assert (store.medium, store.group_idx, store.kv_cache_spec_kind) == ("GPU", 4096, None)
    assert isinstance(remove, RemovedEverywhere)
    assert (remove.block_hashes, remove.group_idx) == ([2**63 + 5], 0)


def test_a_run_on_one_level_is_one_event_and_goes_on_from_its_parent() -> None:
    run = stored(block(1, [1, 2]), block(-2, [3, 4]), parent=9)
    assert stores(run) == [([1, 2**64 - 2], 9, [1, 2, 3, 4], 2, "GPU")]


def test_a_run_is_divided_where_the_level_changes() -> None:
    run = stored(block(1, [1, 2]), block(2, [3, 4], 1), block(3, [5, 6], 1), block(4, [7, 8], 2))
    assert stores(run) == [
        ([1], None, [1, 2], 2, "GPU"),
        ([2, 3], 1, [3, 4, 5, 6], 2, "CPU"),
        ([4], 3, [7, 8], 2, "LEVEL_2"),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": 7},
        {"mm_keys": [{"type": "mm_key", "hash": "ff", "start_offset": 0}]},
        {"cache_salt": "s"},
        {"cache_salt_id": 5},
        {"tokens": [{"token_id": 3, "token_extra_id": 9}, {"token_id": 4}]},
        {"tokens": [{"token_id": 3}]},
        {"tokens": []},
    ],
)
def test_a_block_that_is_more_or_less_than_its_tokens_is_named_by_hash(fields: dict[str, Any]) -> None:
    run = stored(block(1, [1, 2]), block(2, [3, 4]) | fields, block(3, [5, 6]))
    assert stores(run) == [
        ([1], None, [1, 2], 2, "GPU"),
        ([2], None, [], 0, "GPU"),
        ([3], 2, [5, 6], 2, "GPU"),
    ]


@pytest.mark.parametrize("fields", [{"lora_id": None, "mm_keys": [], "cache_salt": None, "cache_salt_id": 0}, {}])
def test_keys_that_say_nothing_leave_a_block_plain(fields: dict[str, Any]) -> None:
    assert stores(stored(block(1, [1, 2], **fields))) == [([1], None, [1, 2], 2, "GPU")]


def test_a_single_block_that_is_partly_filled_is_named_by_hash() -> None:
    assert stores(stored(block(1, [1, 2, 3]))) == [([1], None, [], 0, "GPU")]
    knows_size = ME._replace(block_tokens=4)
    assert stores(stored(block(1, [1, 2])), addressee=knows_size) == [([1], None, [], 0, "GPU")]
    assert stores(stored(block(1, [1, 2, 3, 4])), addressee=knows_size) == [([1], None, [1, 2, 3, 4], 4, "GPU")]


def test_an_update_of_the_level_moves_the_block() -> None:
    moved = {"type": "updated", "block_hash": -1, "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1}}
    store, remove = batch_of(event(moved, window_size=64)).events
    assert isinstance(store, BlockStored)
    assert (store.block_hashes, store.medium, store.group_idx, store.origin) == ([2**64 - 1], "CPU", 64, "REUSED")
    assert type(remove) is BlockRemoved
    assert (remove.block_hashes, remove.medium, remove.group_idx) == ([2**64 - 1], "GPU", 64)


def test_an_update_of_the_priority_alone_says_nothing() -> None:
    priority = {"type": "event_diff", "old_value": 35, "new_value": 90}
    batch = batch_of(event({"type": "updated", "block_hash": 1, "cache_level": None, "priority": priority}))
    assert (batch.events, batch.bad_events) == ([], {})


def test_a_store_of_no_blocks_says_nothing() -> None:
    assert stores(stored()) == []


def test_another_attention_rank_is_not_ours() -> None:
    batch = batch_of(stored(block(1, [1, 2]), attention_dp_rank=1), stored(block(2, [1, 2]), attention_dp_rank=0))
    assert (len(batch.events), batch.for_others) == (1, 1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (event({"type": "evicted"}), "unknown_event"),
        (event({}), "unknown_event"),
        (event({"type": "removed"}), "missing_field"),
        ({"data": 5}, "wrong_type"),
        (stored(block("text", [1])), "wrong_type"),
        (stored(block(1, [1, 2], 2**40)), "bad_cache_level"),
        (stored(block(1, [1, 2], -1)), "bad_cache_level"),
        (stored(block(1, [1, -2])), "token_out_of_range"),
        (stored(block(1, [1, 2]), window_size=-5), "bad_window"),
        (stored(block(1, [1, 2]), window_size=2**40), "bad_window"),
    ],
)
def test_events_that_make_no_sense_are_counted_by_reason_and_cost_nothing_else(bad: Any, reason: str) -> None:
    batch = batch_of(stored(block(1, [1, 2])), bad, event({"type": "removed", "block_hashes": [1]}))
    assert len(batch.events) == 2
    assert dict(batch.bad_events) == {reason: 1}


def test_a_batch_cut_short_or_damaged_anywhere_raises_nothing_else() -> None:
    for length in range(len(GOLDEN)):
        with pytest.raises(WireError):
            decode_batch(GOLDEN[:length], ME)
    for data in (GOLDEN, STORED):
        for i in range(len(data)):
            for byte in (0x00, 0x91, 0xC1, 0xFF, data[i] ^ 0x80):
                try:
                    decode_batch(data[:i] + bytes([byte]) + data[i + 1 :], ME)
                except WireError:
                    continue
