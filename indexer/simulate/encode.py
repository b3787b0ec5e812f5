"""What a cache did, as the bytes that one engine version would publish. Independent of `indexer.wire`, their reader.

Field order, always-present fields and omitted defaults are those of the engines:
* vLLM >= 0.24: tagged maps, optional fields omitted when unset; hashes are the unsigned low 64 bits of the digest.
* vLLM 0.23: tagged arrays with every field; hashes here are raw digests (its other setting).
* SGLang >= 0.5.20: tagged maps without groups; hashes are the signed first 64 bits of the digest.
* TensorRT-LLM's dictionaries: a stored event has a dictionary per block, and one per token in it.
* LMCache through vLLM's connector: vLLM's maps without group and extra keys, stores only.
* RFC #1527: standard maps with tokens and a parent; the Mooncake store master's: one per object, without tokens.
A batch is `[timestamp, events, data-parallel rank]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

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


Encoded: TypeAlias = msgspec.Struct | dict[str, object]
EncodeMutation: TypeAlias = Callable[[Mutation], Encoded]


def encode_batch(timestamp: float, events: Sequence[Encoded], dp_rank: int = 0) -> bytes:
    """The third frame of a message. `timestamp` in unix seconds."""
    return msgspec.msgpack.encode([timestamp, events, dp_rank])


def unsigned_hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def signed_hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def vllm_maps(block_size: int, groups: Sequence[GroupSpec], lora_ids: Mapping[str, int]) -> EncodeMutation:
    """Events of vLLM >= 0.24."""

    def encode(mutation: Mutation) -> Encoded:
        match mutation:
            case Stored():
                fields = _vllm_fields(mutation, unsigned_hash, block_size, groups, lora_ids)
                return VllmStored(**fields, session_id=mutation.prompt.session_id)
            case Removed():
                return VllmRemoved([unsigned_hash(digest) for digest in mutation.digests], MEDIUM, mutation.group)
            case _:
                return MapCleared()

    return encode


def vllm_arrays(block_size: int, groups: Sequence[GroupSpec], lora_ids: Mapping[str, int]) -> EncodeMutation:
    """Events of vLLM 0.23, with raw digests as hashes."""

    def encode(mutation: Mutation) -> Encoded:
        match mutation:
            case Stored():
                return ArrayStored(**_vllm_fields(mutation, bytes, block_size, groups, lora_ids))
            case Removed():
                return ArrayRemoved(list(mutation.digests), MEDIUM, mutation.group)
            case _:
                return ArrayCleared()

    return encode


def _vllm_fields(
    stored: Stored,
    hash_of: Callable[[bytes], WireHash],
    block_size: int,
    groups: Sequence[GroupSpec],
    lora_ids: Mapping[str, int],
) -> dict[str, Any]:
    """What a store says in every version, each block named by `hash_of` its digest."""
    group = groups[stored.group]
    return {
        "block_hashes": [hash_of(digest) for digest in stored.digests],
        "parent_block_hash": None if stored.parent is None else hash_of(stored.parent),
        "token_ids": list(stored.token_ids),
        "block_size": block_size,
        "lora_id": lora_ids.get(stored.prompt.lora_name or ""),
        "medium": MEDIUM,
        "lora_name": stored.prompt.lora_name,
        "extra_keys": list(stored.extra_keys),
        "group_idx": stored.group,
        "kv_cache_spec_kind": _spec_kind(group),
        "kv_cache_spec_sliding_window": group.window_tokens,
    }


def sglang_maps(page_size: int) -> EncodeMutation:
    """Events of SGLang >= 0.5.20."""

    def encode(mutation: Mutation) -> Encoded:
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


def lmcache_maps(chunk_size: int, lora_ids: Mapping[str, int]) -> EncodeMutation:
    """Events that LMCache's connector adds to an engine's."""

    def encode(mutation: Mutation) -> Encoded:
        assert isinstance(mutation, Stored), "nothing else is announced"
        return VllmStored(
            block_hashes=[unsigned_hash(digest) for digest in mutation.digests],
            parent_block_hash=None if mutation.parent is None else unsigned_hash(mutation.parent),
            token_ids=list(mutation.token_ids),
            block_size=chunk_size,
            lora_id=lora_ids.get(mutation.prompt.lora_name or ""),
            medium="cpu",
            lora_name=mutation.prompt.lora_name,
        )

    return encode


def trtllm_dictionaries(block_size: int, window_size: int) -> EncodeMutation:
    """What TensorRT-LLM's event API hands out."""
    numbers = count()

    def encode(mutation: Mutation) -> Encoded:
        return {"event_id": next(numbers), "data": data(mutation), "window_size": window_size}

    def data(mutation: Mutation) -> dict[str, object]:
        match mutation:
            case Stored():
                parent = None if mutation.parent is None else unsigned_hash(mutation.parent)
                return {"type": "stored", "parent_hash": parent, "blocks": blocks(mutation)}
            case Removed():
                return {"type": "removed", "block_hashes": [unsigned_hash(digest) for digest in mutation.digests]}
            case _:
                return {"type": "created", "num_blocks_per_cache_level": [1_000, 0]}

    def blocks(stored: Stored) -> list[dict[str, object]]:
        tokens = [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in stored.token_ids]
        return [
            {
                "type": "stored_block",
                "block_hash": unsigned_hash(digest),
                "tokens": tokens[i * block_size : (i + 1) * block_size],
                "cache_level": 0,
                "priority": 35,
            }
            for i, digest in enumerate(stored.digests)
        ]

    return encode


def standard_maps(block_size: int, model_name: str, medium: str, *, as_objects: bool = False) -> EncodeMutation:
    """Events of RFC #1527. `as_objects`: as the Mooncake store master sends them, of digests by the public rule."""
    numbers = count()
    ends: dict[bytes, int] = {}

    def encode(mutation: Mutation) -> Encoded:
        event: dict[str, object] = {"event_id": next(numbers), "model_name": model_name, "medium": medium}
        match mutation:
            case Stored():
                event |= {"event_type": "stored", "block_size": block_size, "lora_name": mutation.prompt.lora_name}
                return event | hashes(mutation) | (place(mutation) if as_objects else content(mutation))
            case Removed():
                return event | {"event_type": "removed"} | hashes(mutation)
            case _:
                return event | {"event_type": "cleared"}

    def hashes(mutation: Stored | Removed) -> dict[str, object]:
        names: dict[str, object] = {"seq_hashes": [unsigned_hash(digest) for digest in mutation.digests]}
        return names | {"object_key": f"{model_name}@{mutation.digests[0].hex()}"} if as_objects else names

    def content(stored: Stored) -> dict[str, object]:
        parent = None if stored.parent is None else unsigned_hash(stored.parent)
        return {"parent_hash": parent, "token_ids": list(stored.token_ids), "additional_salt": ""}

    def place(stored: Stored) -> dict[str, object]:
        first = 0 if stored.parent is None else ends[stored.parent]
        ends.update(zip(stored.digests, count(first + 1), strict=False))
        return {"base_block_idx": first}

    return encode


def _spec_kind(group: GroupSpec) -> str:
    return "full_attention" if group.window_tokens is None else "sliding_window"
