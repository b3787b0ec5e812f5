"""A trace becomes prompts; engines with a bounded pool serve them; routers choose between engines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.benchmarks.trace import (
    LruEngine,
    TraceRequest,
    know_all,
    parse_request,
    play,
    read_trace,
    soonest,
    take_turns,
    tokens_of_page,
)


def request(*pages: int, tokens: int | None = None, at_s: float = 0.0) -> TraceRequest:
    return TraceRequest(at_s, 512 * len(pages) if tokens is None else tokens, pages)


def test_a_line_becomes_a_request() -> None:
    line = '{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}'
    assert parse_request(line) == TraceRequest(1.5, 700, (0, 7))


def test_only_the_first_requests_of_a_trace_are_read_compressed_or_not(tmp_path: Path) -> None:
    lines = "".join(
        json.dumps({"timestamp": n, "input_length": 5, "output_length": 1, "hash_ids": [n]}) + "\n" for n in range(4)
    )
    plain, compressed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.gz"
    plain.write_text(lines)
    compressed.write_bytes(gzip.compress(lines.encode()))
    assert read_trace(plain, 2) == read_trace(compressed, 2) == [TraceRequest(n / 1e3, 5, (n,)) for n in range(2)]


def test_equal_ids_give_equal_tokens_and_the_last_page_is_cut() -> None:
    first, second = request(1, 2, tokens=700).token_ids(), request(1, 3).token_ids()
    assert (len(first), len(second)) == (700, 1_024)
    assert first[:512] == second[:512] == tokens_of_page(1)
    assert first[512:] == tokens_of_page(2)[:188]
    assert first[512:] != second[512:700]


def test_an_engine_holds_whole_blocks_and_never_skips_the_last_token() -> None:
    engine = LruEngine(1_000)
    engine.serve(request(1, 2, tokens=700))
    assert engine.blocks == 32 + 11
    assert engine.resident_tokens(request(1, 2, tokens=700)) == 688
    assert engine.resident_tokens(request(1, 3)) == 512
    assert engine.hit_tokens(request(1)) == 496
    assert engine.hit_tokens(request(9)) == 0


def test_events_continue_the_chain_and_say_nothing_of_what_was_held() -> None:
    engine = LruEngine(1_000)
    (first,) = engine.serve(request(1))
    (second,) = engine.serve(request(1, 2, tokens=512 + 40))
    assert (first[0], first[2], len(first[1])) == ("BlockStored", None, 32)  # type: ignore[arg-type]
    assert second[2] == first[1][-1]  # type: ignore[index]
    assert (len(second[1]), second[3]) == (2, tokens_of_page(2)[:32])  # type: ignore[arg-type]
    assert engine.serve(request(1)) == []


def test_the_least_recently_used_page_goes_first_and_a_tail_before_its_head() -> None:
    engine = LruEngine(4 * 32)
    engine.serve(request(1, 2))
    engine.serve(request(3, 4))
    engine.serve(request(1))
    events = engine.serve(request(5))
    assert [event[0] for event in events] == ["BlockRemoved", "BlockStored"]
    assert engine.resident_tokens(request(1, 2)) == 512
    engine.serve(request(6))
    assert engine.resident_tokens(request(3, 4)) == 512
    assert engine.blocks == 4 * 32


def test_a_prompt_larger_than_the_pool_is_kept_in_part_and_the_bound_holds() -> None:
    engine = LruEngine(2 * 32)
    engine.serve(request(9))
    engine.serve(request(1, 2, 3))
    assert engine.blocks == 2 * 32
    assert engine.resident_tokens(request(1, 2, 3)) == 1_024


def test_pages_in_use_by_a_prompt_are_not_evicted_for_its_own_tail() -> None:
    engine = LruEngine(3 * 32)
    engine.serve(request(1, 2))
    engine.serve(request(8))
    engine.serve(request(1, 2, 3))
    assert engine.resident_tokens(request(1, 2, 3)) == 3 * 512


def test_the_engine_that_is_done_first_is_chosen_and_ties_go_to_the_least_busy() -> None:
    engines = [LruEngine(1_000), LruEngine(1_000)]
    prompt = request(1, 2)
    assert soonest(prompt, engines, [0, 512]) == 1
    engines[1].free_at_s = 1_000.0
    assert soonest(prompt, engines, [0, 1_023]) == 0
    engines[0].free_at_s, engines[1].free_at_s = 512 / 12_000, 0.0
    assert soonest(prompt, engines, [512, 0]) == 1


def test_routing_to_where_a_prefix_is_beats_taking_turns() -> None:
    requests = [
        request(group, group + 100, number + 1_000, at_s=number * 1.0) for number in range(40) for group in (1, 2, 3)
    ]
    engines = [[LruEngine(200) for _ in range(2)] for _ in range(2)]
    published: list[int] = []
    turns = play(requests, engines[0], take_turns(), lambda engine, events: published.append(engine))
    known = play(requests, engines[1], know_all)
    assert published == [0, 1] * 60
    assert known.hit_rate >= turns.hit_rate > 0
    assert len(known.waits_s) == len(requests)
    assert min(known.waits_s) > 0
