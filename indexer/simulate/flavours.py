"""The engines that can be simulated, each a cache with its rules and an encoding with its version's habits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from indexer.simulate.cache import Cache
from indexer.simulate.encode import (
    EncodeMutation,
    lmcache_maps,
    sglang_maps,
    standard_maps,
    trtllm_dictionaries,
    vllm_arrays,
    vllm_maps,
)
from indexer.simulate.pool import GroupSpec, VllmCache
from indexer.simulate.shared import ChunkCache, ObjectCache, StandardCache
from indexer.simulate.tree import SglangCache

MODEL = "demo"
LORA_IDS = {"adapter-a": 1, "adapter-b": 2}
"""Adapters the simulated engines serve, with the number vLLM gives each."""

ADAPTERS, SALTS, IMAGES = "adapters", "salts", "images"

HYBRID_GROUPS = (GroupSpec(), GroupSpec(window_tokens=128))


@dataclass(frozen=True, slots=True)
class Flavour:
    """One kind of engine.

    `engine` as the service calls it. `make_cache` takes the engine process's own randomness: a restarted engine gets
    other hashes, unless its kind has none. `replay_with_topic`: vLLM >= 0.26 answers a replay request with the topic
    before each sequence number, vLLM before that and SGLang without. `held_steps`: see `Scheduler`. `takes`: what
    prompts may have beside tokens, so that its events tell all of it.
    """

    name: str
    engine: str
    make_cache: Callable[[random.Random], Cache]
    encode: EncodeMutation
    replay_with_topic: bool
    held_steps: int = 0
    takes: frozenset[str] = frozenset({ADAPTERS, SALTS, IMAGES})


def vllm(*, blocks: int = 512, block_size: int = 16) -> Flavour:
    """vLLM 0.33, full attention only."""
    return Flavour(
        "vllm",
        "vllm",
        lambda chance: VllmCache(blocks=blocks, block_size=block_size, none_hash=chance.randbytes(32)),
        vllm_maps(block_size, (GroupSpec(),), LORA_IDS),
        replay_with_topic=True,
    )


def vllm_hybrid(*, blocks: int = 700, block_size: int = 16, groups: tuple[GroupSpec, ...] = HYBRID_GROUPS) -> Flavour:
    """vLLM 0.33, full attention and a sliding window out of one pool."""
    return Flavour(
        "vllm-hybrid",
        "vllm",
        lambda chance: VllmCache(blocks=blocks, block_size=block_size, none_hash=chance.randbytes(32), groups=groups),
        vllm_maps(block_size, groups, LORA_IDS),
        replay_with_topic=True,
    )


def vllm_array(*, blocks: int = 512, block_size: int = 16) -> Flavour:
    """vLLM 0.23: arrays, raw digests as hashes, the older replay answer."""
    return Flavour(
        "vllm-array",
        "vllm",
        lambda chance: VllmCache(blocks=blocks, block_size=block_size, none_hash=chance.randbytes(32)),
        vllm_arrays(block_size, (GroupSpec(),), LORA_IDS),
        replay_with_topic=False,
    )


def sglang(*, pages: int = 256, page_size: int = 32) -> Flavour:
    """SGLang 0.5.23."""
    return Flavour(
        "sglang",
        "sglang",
        lambda chance: SglangCache(pages=pages, page_size=page_size, adapter_seed=chance.randbytes(16)),
        sglang_maps(page_size),
        replay_with_topic=False,
        held_steps=6,
        takes=frozenset({ADAPTERS, SALTS}),
    )


def trtllm(*, blocks: int = 256, block_size: int = 32) -> Flavour:
    """TensorRT-LLM's dictionaries, as somebody who polls its event API would publish them."""
    return Flavour(
        "trtllm",
        "trtllm",
        lambda chance: SglangCache(pages=blocks, page_size=block_size, adapter_seed=chance.randbytes(16)),
        trtllm_dictionaries(block_size, window_size=8_192),
        replay_with_topic=True,
        takes=frozenset(),
    )


def rfc1527(*, pages: int = 256, page_size: int = 32) -> Flavour:
    """An engine that publishes standard events with tokens."""
    return Flavour(
        "rfc1527",
        "rfc1527",
        lambda chance: StandardCache(pages=pages, page_size=page_size, adapter_seed=b""),
        standard_maps(page_size, MODEL, "GPU"),
        replay_with_topic=True,
        takes=frozenset({ADAPTERS}),
    )


def mooncake(*, objects: int = 1_024, page_size: int = 16) -> Flavour:
    """A Mooncake store, by its master: one event per object, whose hash is a standard one."""
    return Flavour(
        "mooncake",
        "mooncake",
        lambda chance: ObjectCache(pages=objects, page_size=page_size, adapter_seed=b""),
        standard_maps(page_size, MODEL, "cpu", as_objects=True),
        replay_with_topic=True,
        takes=frozenset({ADAPTERS}),
    )


def lmcache(*, chunks: int = 100_000, chunk_size: int = 128) -> Flavour:
    """LMCache behind an engine: what its connector announces, on the host."""
    return Flavour(
        "lmcache",
        "lmcache",
        lambda chance: ChunkCache(pages=chunks, page_size=chunk_size, adapter_seed=chance.randbytes(16)),
        lmcache_maps(chunk_size, LORA_IDS),
        replay_with_topic=True,
        takes=frozenset({ADAPTERS}),
    )


FLAVOURS: tuple[Callable[[], Flavour], ...] = (
    vllm,
    sglang,
    vllm_hybrid,
    vllm_array,
    trtllm,
    rfc1527,
    mooncake,
    lmcache,
)
"""The order in which a fleet takes them, again and again."""
