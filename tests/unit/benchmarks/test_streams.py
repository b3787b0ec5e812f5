"""The streams that benchmarks send, and which prompts are held after how much of them."""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from indexer.identity import chain
from tests.benchmarks.http_load import content_length, encode_request, percentile
from tests.benchmarks.servers import Request, local_hashes
from tests.benchmarks.streams import (
    BLOCK_TOKENS,
    CHAIN_BLOCKS,
    DECODE,
    PREFILL,
    SHARED_BLOCKS,
    StreamPlan,
    chain_hashes,
    chain_tokens,
    messages,
)

CHURN = StreamPlan(PREFILL.name, 24_000, 2, seed=5, live_blocks=8_200)
PLANS = [
    StreamPlan(PREFILL.name, 9_000, 4),
    StreamPlan(DECODE.name, 9_000, 2),
    StreamPlan(PREFILL.name, 64 * 6, 6, copies=3),
    CHURN,
]


def held_after(plan: StreamPlan, blocks_max: int | None = None) -> tuple[dict[int, set[int]], int]:
    """Hashes held by worker after so many stored blocks, and how many were stored; no child comes before its parent."""
    held: dict[int, set[int]] = defaultdict(set)
    stored = 0
    for message in messages(plan):
        if blocks_max is not None and stored >= blocks_max:
            break
        counts = {"BlockStored": 0, "BlockRemoved": 0}
        events: list[list[Any]] = msgspec.msgpack.decode(message.payload)[1]
        for kind, hashes, *rest in events:
            counts[kind] += len(hashes)
            mine = held[message.worker]
            if kind == "BlockStored":
                parent, tokens, size = rest[:3]
                assert parent is None or parent in mine
                assert len(tokens) == size * len(hashes)
                assert mine.isdisjoint(hashes)
                mine.update(hashes)
            else:
                assert mine.issuperset(hashes)
                mine.difference_update(hashes)
        assert (message.stored, message.removed) == (counts["BlockStored"], counts["BlockRemoved"])
        stored += message.stored
    return held, stored


@pytest.mark.parametrize("plan", PLANS)
def test_a_stream_stores_what_its_plan_says_each_parent_first_and_nothing_twice(plan: StreamPlan) -> None:
    held, stored = held_after(plan)
    assert stored == plan.blocks // plan.workers * plan.workers
    assert len(held) == plan.workers


def test_churn_evicts_chains_so_that_about_the_live_blocks_stay() -> None:
    held, _ = held_after(CHURN)
    assert sum(map(len, held.values())) == pytest.approx(CHURN.live_blocks, rel=0.1)
    shared = set(chain_hashes(CHURN.seed, 0)[:SHARED_BLOCKS])
    assert all(blocks >= shared for blocks in held.values())


def test_workers_with_copies_hold_the_same_blocks() -> None:
    held, _ = held_after(StreamPlan(PREFILL.name, 64 * 6, 6, copies=3))
    assert held[0] == held[2] == held[4]
    assert held[1] == held[3] == held[5]
    assert len(held[0] & held[1]) == SHARED_BLOCKS


@pytest.mark.parametrize("blocks", [1_000, 5_000, 12_000, 20_000])
@pytest.mark.parametrize("depth", [32, 512])
def test_chains_said_to_be_within_a_part_of_the_stream_are_stored_by_then(blocks: int, depth: int) -> None:
    plan = StreamPlan(PREFILL.name, 20_000, 4)
    held, _ = held_after(plan, blocks)
    chains = plan.chains_within(blocks, depth)
    assert blocks < 4 * (depth + 256) or chains
    for number in chains:
        assert held[number % 4].issuperset(chain_hashes(plan.seed, number)[:depth])


def test_chains_share_their_first_blocks_and_no_more() -> None:
    first, second = chain_tokens(1, 0), chain_tokens(1, 1)
    shared = SHARED_BLOCKS * BLOCK_TOKENS
    assert len(first) == CHAIN_BLOCKS * BLOCK_TOKENS
    assert first[:shared] == second[:shared]
    assert first[shared : shared + BLOCK_TOKENS] != second[shared : shared + BLOCK_TOKENS]
    assert chain_tokens(1, 1, 3) == second[: 3 * BLOCK_TOKENS]


def test_hashes_for_queries_by_hash_are_ours_as_signed_numbers() -> None:
    tokens = chain_tokens(1, 0, 40)
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    signed = local_hashes([*tokens, 1, 2, 3])
    assert [value % (1 << 64) for value in signed] == chain.local_hashes(packed, BLOCK_TOKENS, chain.SEED)
    assert min(signed) < 0


def test_a_request_is_encoded_with_its_length() -> None:
    encoded = encode_request(80, Request("/query", "application/json", b"{}"))
    head, _, body = encoded.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /query HTTP/1.1\r\n")
    assert content_length(head) == len(body) == 2
    assert content_length(b"HTTP/1.1 204 No Content") == 0


def test_a_percentile_is_one_of_the_values() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 3.0, 5.0, 5.0]
