"""What a cache did, as the bytes that one engine version would publish. Independent of `indexer.wire`, their reader.

Field order, always-present fields and omitted defaults are those of the engines:
* vLLM >= 0.24: tagged maps, optional fields omitted when unset; hashes are the unsigned low 64 bits of the digest.
* vLLM 0.23: tagged arrays with every field; hashes here are raw digests (its other setting).
* SGLang >= 0.5.20: tagged maps without groups; hashes are the signed first 64 bits of the digest.
A batch is `[timestamp, events, data-parallel rank]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from indexer.simulate.cache import ExtraKey, Mutation, Removed, Stored
from indexer.simulate.pool import GroupSpec

WireHash: TypeAlias = int | bytes
WireExtraKeys: TypeAlias = "list[tuple[ExtraKey, ...] | None]"

MEDIUM = "GPU"


class VllmStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    """All fields of 0.33. Unused ones matter too: with 16 keys declared, msgspec writes the long form of a map head."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: WireExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class VllmRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None


class ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: WireExtraKeys | None
    group_idx: int | None
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None


class ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None


class ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class SglangStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class SglangRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str | None = None


class MapCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


EncodeMutation: TypeAlias = Callable[[Mutation], msgspec.Struct]


def encode_batch(timestamp: float, events: Sequence[msgspec.Struct], dp_rank: int = 0) -> bytes:
    """The third frame of a message. `timestamp` in unix seconds."""
    return msgspec.msgpack.encode([timestamp, events, dp_rank])


def unsigned_hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def signed_hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def vllm_maps(block_size: int, groups: Sequence[GroupSpec], lora_ids: Mapping[str, int]) -> EncodeMutation:
    """Events of vLLM >= 0.24."""

    def encode(mutation: Mutation) -> msgspec.Struct:
        match mutation:
            case Stored():
                return VllmStored(
                    block_hashes=[unsigned_hash(digest) for digest in mutation.digests],
                    parent_block_hash=None if mutation.parent is None else unsigned_hash(mutation.parent),
                    token_ids=list(mutation.token_ids),
                    block_size=block_size,
                    lora_id=lora_ids.get(mutation.prompt.lora_name or ""),
                    medium=MEDIUM,
                    lora_name=mutation.prompt.lora_name,
                    extra_keys=list(mutation.extra_keys),
                    group_idx=mutation.group,
                    kv_cache_spec_kind=_spec_kind(groups[mutation.group]),
                    kv_cache_spec_sliding_window=groups[mutation.group].window_tokens,
                    session_id=mutation.prompt.session_id,
                )
            case Removed():
                return VllmRemoved([unsigned_hash(digest) for digest in mutation.digests], MEDIUM, mutation.group)
            case _:
                return MapCleared()

    return encode


def vllm_arrays(block_size: int, groups: Sequence[GroupSpec], lora_ids: Mapping[str, int]) -> EncodeMutation:
    """Events of vLLM 0.23, with raw digests as hashes."""

    def encode(mutation: Mutation) -> msgspec.Struct:
        match mutation:
            case Stored():
                return ArrayStored(
                    block_hashes=list(mutation.digests),
                    parent_block_hash=mutation.parent,
                    token_ids=list(mutation.token_ids),
                    block_size=block_size,
                    lora_id=lora_ids.get(mutation.prompt.lora_name or ""),
                    medium=MEDIUM,
                    lora_name=mutation.prompt.lora_name,
                    extra_keys=list(mutation.extra_keys),
                    group_idx=mutation.group,
                    kv_cache_spec_kind=_spec_kind(groups[mutation.group]),
                    kv_cache_spec_sliding_window=groups[mutation.group].window_tokens,
                )
            case Removed():
                return ArrayRemoved(list(mutation.digests), MEDIUM, mutation.group)
            case _:
                return ArrayCleared()

    return encode


def sglang_maps(page_size: int) -> EncodeMutation:
    """Events of SGLang >= 0.5.20."""

    def encode(mutation: Mutation) -> msgspec.Struct:
        match mutation:
            case Stored():
                return SglangStored(
                    block_hashes=[signed_hash(digest) for digest in mutation.digests],
                    parent_block_hash=None if mutation.parent is None else signed_hash(mutation.parent),
                    token_ids=list(mutation.token_ids),
                    block_size=page_size,
                    lora_id=None,
                    medium=MEDIUM,
                    cache_salt=mutation.prompt.cache_salt,
                    session_id=mutation.prompt.session_id,
                    lora_name=mutation.prompt.lora_name,
                )
            case Removed():
                return SglangRemoved([signed_hash(digest) for digest in mutation.digests], MEDIUM)
            case _:
                return MapCleared()

    return encode


def _spec_kind(group: GroupSpec) -> str:
    return "full_attention" if group.window_tokens is None else "sliding_window"
