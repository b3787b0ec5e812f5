"""What engines publish, every dialect, as one set of typed events.

Field names are those of vLLM's `kv_events.py`; the declaration order up to `lookahead_token_ids` is the order of the
array form (vLLM <= 0.23, SGLang <= 0.5.19: shorter), the rest is only ever sent by name. Fields without meaning for us
(`lora_id`, `session_id`) are accepted with any value.

After decoding (`wire.decode`): hashes are unsigned 64-bit integers or bytes (see `canonical_hash`), and `tokens` holds
the token ids; `token_ids` has been emptied.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any, NamedTuple, TypeAlias

import msgspec

REPEATED = "REUSED"
"""The `origin` of a store that adds no reference to what is resident."""

EngineHash: TypeAlias = int | bytes
TokenIds: TypeAlias = "bytes | array[int]"
"""Token ids as u32 little-endian bytes, or, if one of them is 2^32 or more, as an array of u64."""


class _StoredFields(msgspec.Struct, kw_only=True, gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: list[int | list[int]]
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | dict[str, Any] | None = None  # a map of further fields in SGLang 0.5.19's arrays
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: Any = None
    lookahead_token_ids: list[list[int]] | None = None
    # by name only
    cache_salt: str | None = None  # SGLang >= 0.5.19: on every event of a salted chain
    origin: str | None = None  # proposed (vLLM PR 51699): "REUSED" announces blocks that were already stored
    skipped_parent_block_hash: int | bytes | None = None  # vLLM PR 44488 and its forks
    skipped_token_ids: list[int] | None = None
    skipped_extra_keys: list[Any] | None = None
    block_offsets: list[int] | None = None  # an intermediate form of it: which chunk of token_ids each hash is
    block_parent_hashes: list[int | bytes | None] | None = None


class BlockStored(_StoredFields, kw_only=True, tag_field="type", tag="BlockStored", gc=False):
    """Blocks became resident. Hash i is the block after hash i-1, if tokens align with hashes one to one."""

    tokens: Any = b""  # TokenIds
    skipped_tokens: Any = b""  # TokenIds
    token_count: int = 0


class BlockRemoved(msgspec.Struct, kw_only=True, tag_field="type", tag="BlockRemoved", gc=False):
    """One reference to each of these blocks ended."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, kw_only=True, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The engine's cache was reset; with a `medium` (TierBlocksCleared, a proposal), only that one."""

    medium: str | None = None


class TierBlocksCleared(AllBlocksCleared, kw_only=True, tag_field="type", tag="TierBlocksCleared", gc=False):
    """The proposed clear of one medium."""


class StandardStored(BlockStored, kw_only=True, tag_field="type", tag="StandardStored", gc=False):
    """Blocks without tokens whose hashes are content keys, if a granule has `hash_tokens` tokens; else by hash alone.

    `content_keys`: of the end of each block; empty: not known. The first block starts at token `start_tokens`, or where
    the prefix of `start_key` ends; neither: nobody knows. Made by `dialects.standard`, never sent as such.
    """

    content_keys: list[int] = []
    hash_tokens: int = 0
    start_tokens: int | None = None
    start_key: int | None = None


class RemovedEverywhere(BlockRemoved, kw_only=True, tag_field="type", tag="RemovedEverywhere", gc=False):
    """These blocks are gone from every medium of their group. Made by `dialects.trtllm`, never sent as such."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Addressee(NamedTuple):
    """Who reads a stream: events may name their model, tenant and rank. `block_tokens`: if it was registered."""

    worker_id: str
    model: str
    tenant: str
    dp_rank: int
    block_tokens: int | None = None

    def is_meant(self, model: str | None, tenant: str | None, dp_rank: int | None) -> bool:
        """What an event does not say goes without saying."""
        return model in (None, self.model) and tenant in (None, self.tenant) and dp_rank in (None, self.dp_rank)


class StoredArray(BlockStored, kw_only=True, array_like=True, tag="BlockStored", gc=False):
    """The same as a tagged array."""


class RemovedArray(BlockRemoved, kw_only=True, array_like=True, tag="BlockRemoved", gc=False):
    """The same as a tagged array."""


class ClearedArray(AllBlocksCleared, kw_only=True, array_like=True, tag="AllBlocksCleared", gc=False):
    """The same as a tagged array."""


class TierClearedArray(TierBlocksCleared, kw_only=True, array_like=True, tag="TierBlocksCleared", gc=False):
    """The same as a tagged array."""


HASH_BYTES_MAX = 1024
_MASK_64 = (1 << 64) - 1


def canonical_hash(engine_hash: int | bytes) -> EngineHash:
    """One form for one hash: integers as unsigned 64 bits, 8 bytes as the big-endian integer, other bytes as they are.

    Bytes longer than HASH_BYTES_MAX are replaced by their digest, so that a database index can hold them.
    SGLang publishes signed 64-bit integers, vLLM unsigned ones: -1 and 2^64 - 1 are the same bits, so the same hash.
    """
    if isinstance(engine_hash, int):
        return engine_hash & _MASK_64
    if len(engine_hash) == 8:
        return int.from_bytes(engine_hash, "big")
    if len(engine_hash) > HASH_BYTES_MAX:
        return b"sha256:" + hashlib.sha256(engine_hash).digest()
    return bytes(engine_hash)
