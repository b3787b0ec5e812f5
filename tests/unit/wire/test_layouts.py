"""Each layout of vLLM's form that an engine version is known to send, as docs/engines.md lists them."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from indexer.wire.columns import PayloadReader, read_batch
from indexer.wire.decode import decode_batch
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored

DIGESTS = [b"\x11" * 32, b"\x22" * 32]
TOKENS = [1, 2, 3, 4]
PACKED = struct.pack("<4I", *TOKENS)

# (elements in the order of declaration, what they are read as besides hashes, parent, tokens and block size)
ARRAYS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "vllm 2025-04": ([[7, 8], 6, TOKENS, 2, None], {}),
    "vllm 2025-09, medium": ([[7, 8], 6, TOKENS, 2, None, "GPU"], {"medium": "GPU"}),
    "vllm 2025-12, LoRA name": ([[7, 8], 6, TOKENS, 2, 3, "GPU", "l"], {"medium": "GPU", "lora_name": "l"}),
    "vllm 2026-02, extra keys": (
        [[7, 8], 6, TOKENS, 2, 3, "GPU", "l", [["l"], ["l", ["img", -1]]]],
        {"lora_name": "l", "extra_keys": [["l"], ["l", ["img", -1]]]},
    ),
    "vllm 0.21, group": ([[7, 8], 6, TOKENS, 2, None, "GPU", None, [None, None], 1], {"group_idx": 1}),
    "vllm 0.22 and 0.23, kinds": (
        [[7, 8], 6, TOKENS, 2, None, "GPU", None, [None, None], 1, "sliding_window", 64],
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64},
    ),
    "sglang 0.5.9 and 0.5.15": ([[7, 8], 6, TOKENS, 2, None, "GPU"], {"medium": "GPU", "cache_salt": None}),
    "sglang without a medium": ([[7, 8], 6, TOKENS, 2, None], {"medium": None}),
    "sglang 0.5.19, salt": (
        [[7, 8], 6, TOKENS, 2, None, "GPU", {"cache_salt": "s"}],
        {"cache_salt": "s", "lora_name": None},
    ),
}

REQUIRED = {
    "block_hashes": [7, 8],
    "parent_block_hash": 6,
    "token_ids": TOKENS,
    "block_size": 2,
    "lora_id": None,
}
VLLM = REQUIRED | {"medium": "GPU", "lora_name": None}
GROUPS = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
MAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vllm 0.24": (VLLM | GROUPS | {"extra_keys": [None, ["salt"]]}, GROUPS | {"extra_keys": [None, ["salt"]]}),
    "vllm 0.26, locality": (VLLM | GROUPS | {"locality": "REMOTE", "medium": "FS"}, {"locality": "REMOTE"}),
    "vllm 0.29, ownership": (VLLM | GROUPS | {"ownership": "tier-1"}, {"ownership": "tier-1"}),
    "vllm 0.30, session": (VLLM | GROUPS | {"session_id": "s-1"}, {"session_id": "s-1"}),
    "vllm 0.33, lookahead": (VLLM | {"lookahead_token_ids": [[3], [5]]}, {"lookahead_token_ids": [[3], [5]]}),
    "vllm with skipped context": (
        VLLM | {"skipped_parent_block_hash": None, "skipped_token_ids": TOKENS, "skipped_extra_keys": [None, ["s"]]},
        {"skipped_parent_block_hash": None, "skipped_tokens": PACKED, "skipped_extra_keys": [None, ["s"]]},
    ),
    "sglang 0.5.20": (REQUIRED | {"medium": "GPU", "cache_salt": "s", "session_id": "x"}, {"cache_salt": "s"}),
    "sglang 0.5.23, LoRA": (REQUIRED | {"medium": "CPU_PINNED", "lora_name": "l"}, {"lora_name": "l"}),
    "trtllm, push path": (REQUIRED | {"medium": "GPU"}, {"medium": "GPU", "group_idx": None}),
    "lmcache, connector": (VLLM | {"medium": "cpu", "lora_name": "l"}, {"medium": "cpu", "extra_keys": None}),
}


def batches(event: Any) -> list[list[Any]]:
    """Of three elements, and of two as before 2025-06."""
    return [[1.5, [event], 0], [1.5, [event]]]


def check(event: Any, expected: dict[str, Any]) -> None:
    for batch in batches(event):
        payload = msgspec.msgpack.encode(batch)
        (store,) = decode_batch(payload).events
        assert isinstance(store, BlockStored)
        assert (store.block_hashes, store.parent_block_hash, store.block_size) == ([7, 8], 6, 2)
        assert (store.tokens, store.token_count, store.token_ids) == (PACKED, 4, [])
        assert {name: getattr(store, name) for name in expected} == expected
        columns = read_batch(payload, PayloadReader()).columns
        if columns is not None:  # of what has no meaning they tell nothing
            shape, told = columns.shapes[0], expected.keys() - {"session_id", "extra_keys"}
            assert {name: getattr(shape, name) for name in told} == {name: expected[name] for name in told}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    elements, expected = ARRAYS[name]
    check(["BlockStored", *elements], expected)


@pytest.mark.parametrize("name", MAPS)
def test_maps(name: str) -> None:
    fields, expected = MAPS[name]
    check({"type": "BlockStored"} | fields, expected)


def test_digests_of_vllm_are_kept_as_bytes_of_any_width() -> None:
    """32 bytes, 16 of xxHash, and k digests one after the other from 0.21 to 0.23."""
    for hashes in (DIGESTS, [b"\x11" * 16, b"\x22" * 16], [b"".join(DIGESTS), DIGESTS[0] * 2]):
        event = ["BlockStored", hashes, DIGESTS[0], TOKENS, 2, None, "GPU", None, None, 0, "full_attention", None]
        (store,) = decode_batch(msgspec.msgpack.encode([1.5, [event], 0])).events
        assert isinstance(store, BlockStored)
        assert (store.block_hashes, store.parent_block_hash) == (hashes, DIGESTS[0])


def test_pairs_of_sglang_are_tokens_and_a_lookahead() -> None:
    pairs = [[1, 2], [2, 3], [3, 4], [4, 9]]
    (store,) = decode_batch(
        msgspec.msgpack.encode([1.5, [{"type": "BlockStored"} | REQUIRED | {"token_ids": pairs}]])
    ).events
    assert isinstance(store, BlockStored)
    assert (store.tokens, store.lookahead_token_ids) == (PACKED, [[3], [9]])


def test_an_object_of_mooncakes_connector_is_one_hash_and_perhaps_no_tokens() -> None:
    fields = {"block_hashes": [7], "token_ids": [], "block_size": 16, "medium": "cpu", "group_idx": 2}
    (store,) = decode_batch(msgspec.msgpack.encode([1.5, [{"type": "BlockStored"} | VLLM | fields], 0])).events
    assert isinstance(store, BlockStored)
    assert (store.block_hashes, store.token_count, store.medium, store.group_idx) == ([7], 0, "cpu", 2)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (["BlockRemoved", [7]], (None, None, None, None)),
        (["BlockRemoved", [7], "GPU"], ("GPU", None, None, None)),
        (["BlockRemoved", [7], "GPU", 1], ("GPU", 1, None, None)),
        ({"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}, ("GPU", None, None, None)),
        (
            {
                "type": "BlockRemoved",
                "block_hashes": [7],
                "medium": "CPU",
                "group_idx": 1,
                "locality": "LOCAL",
                "ownership": "o",
            },
            ("CPU", 1, "LOCAL", "o"),
        ),
        ({"type": "BlockRemoved", "block_hashes": [7]}, (None, None, None, None)),
    ],
)
def test_removals(event: Any, expected: tuple[Any, ...]) -> None:
    (remove,) = decode_batch(msgspec.msgpack.encode([1.5, [event], 0])).events
    assert isinstance(remove, BlockRemoved)
    assert (remove.medium, remove.group_idx, remove.locality, remove.ownership) == expected


@pytest.mark.parametrize("event", [["AllBlocksCleared"], {"type": "AllBlocksCleared"}])
def test_clears(event: Any) -> None:
    (clear,) = decode_batch(msgspec.msgpack.encode([1.5, [event], 0])).events
    assert isinstance(clear, AllBlocksCleared)
    assert clear.medium is None
