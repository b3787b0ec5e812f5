"""Event streams for measuring: pre-encoded vLLM batches, so that the sender costs as little as it can."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

BLOCK_TOKENS = 16
CHAIN_BLOCKS = 512
VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Shape:
    """`blocks_per_event` blocks in each event, `events_per_batch` events in each message."""

    name: str
    blocks_per_event: int
    events_per_batch: int


PREFILL = Shape("32-block events", 32, 8)
DECODE = Shape("one-block events", 1, 32)


def encode_stream(shape: Shape, blocks: int, seed: int = 1) -> list[bytes]:
    """Payloads of a stream that stores about `blocks` blocks of 16 tokens, in chains of 512, none twice."""
    source = random.Random(seed)
    vocabulary = [source.randrange(VOCABULARY) for _ in range(1 << 16)]
    payloads, events, stored, parent, left = [], [], 0, None, 0
    while stored < blocks:
        if left <= 0:
            parent, left = None, CHAIN_BLOCKS
        hashes = [source.getrandbits(64) for _ in range(shape.blocks_per_event)]
        events.append(_store(hashes, parent, _tokens(source, vocabulary, len(hashes) * BLOCK_TOKENS)))
        parent, left, stored = hashes[-1], left - len(hashes), stored + len(hashes)
        if len(events) == shape.events_per_batch:
            payloads.append(msgspec.msgpack.encode([0.0, events, 0]))
            events = []
    if events:
        payloads.append(msgspec.msgpack.encode([0.0, events, 0]))
    return payloads


def _tokens(source: random.Random, vocabulary: list[int], count: int) -> list[int]:
    start = source.randrange(len(vocabulary) - count)
    tokens = vocabulary[start : start + count]
    tokens[:2] = source.randrange(VOCABULARY), source.randrange(VOCABULARY)
    return tokens


def _store(hashes: list[int], parent: int | None, tokens: list[int]) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def stored_prompt(payloads: list[bytes], tokens: int) -> list[int]:
    """The first `tokens` tokens of the stream's first chain."""
    prompt: list[int] = []
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            prompt.extend(event["token_ids"])
            if len(prompt) >= tokens:
                return prompt[:tokens]
    raise ValueError("the stream's first chain is shorter than that")
