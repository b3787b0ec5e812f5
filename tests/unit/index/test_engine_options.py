"""What is said of an engine at its registration, and what is assumed where nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.lifetimes import BLOCKS_MAX, Lifetimes
from indexer.index.options import EngineHash, EngineOptions, NoRemovals, read_options
from indexer.index.prefix_query import PrefixQuery
from indexer.index.state import HolderKey
from tests.engine_events import MODEL, Engine, G, cleared, numbers, removed, stored
from tests.store_stand_in import DictStore

PROMPT = numbers(1, 10 * G + 1)
FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
MAMBA: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
CHUNKED: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "chunked_local_attention"}


def window(tokens: int) -> dict[str, Any]:
    return {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": tokens}


def engine_with(options: dict[str, Any] | None = None, **other: Any) -> Engine:
    return Engine(ContentIndex(), options=options, **other)


def codes(engine: Engine, tokens: list[int] = PROMPT) -> list[str]:
    """Of the warnings of an answer."""
    return [warning.code for warning in engine.index.prefix_hits(PrefixQuery(MODEL, tokens)).warnings]


def assumptions(engine: Engine) -> list[str]:
    return [str(assumption) for assumption in engine.publisher.status().assumptions]


# ---------------------------------------------------------------------- reading


def test_options_are_read_by_name() -> None:
    assert read_options(
        {
            "eagle": True,
            "eagle_groups": [1, 2],
            "attention_chunk_size": {"0": 64},
            "counting": "set",
            "no_removals": {"expire_after_s": 60},
            "lora_aliases": {"a": "b"},
            "engine_hash": {"algorithm": "xxhash", "seed": "0"},
        }
    ) == EngineOptions(True, frozenset({1, 2}), {0: 64}, "set", NoRemovals(60), {"a": "b"}, EngineHash("xxhash", "0"))
    assert read_options({}) == EngineOptions()


def test_what_does_not_fit_counts_as_not_given() -> None:
    """As an older version may have saved it."""
    options: dict[str, object] = {
        "eagle": "yes",
        "eagle_groups": 3,
        "attention_chunk_size": [64],
        "counting": 7,
        "no_removals": True,
        "lora_aliases": {"a": 1},
        "engine_hash": {"algorithm": "md5"},
        "anything": None,
    }
    assert read_options(options) == EngineOptions()
    assert read_options({**options, "eagle": True}) == EngineOptions(eagle=True)


# ---------------------------------------------------------------------- EAGLE


def test_an_engine_with_eagle_computes_its_last_block_again() -> None:
    for options, expected in (({"eagle": True}, 32), ({"eagle_groups": [0]}, 32), ({"eagle": False}, 48), ({}, 48)):
        engine = engine_with(options)
        engine.send(stored([1, 2, 3], None, PROMPT[: 3 * G]))
        hit = engine.hit(PROMPT)
        assert hit is not None
        assert (hit.hit_tokens, hit.resident_tokens) == (expected, 48)


def test_hits_with_and_without_the_dropped_block_are_sorted_together() -> None:
    index = ContentIndex()
    for name, options in (("w0", {"eagle": True}), ("w1", {}), ("w2", {"eagle": True})):
        Engine(index, name, options=options).send(stored([1, 2], None, PROMPT[: 2 * G]))
    Engine(index, "w3").send(stored([1], None, PROMPT[:G]))
    hits = index.prefix_hits(PrefixQuery(MODEL, PROMPT)).hits
    assert [(hit.worker_id, hit.hit_tokens) for hit in hits] == [("w1", 32), ("w0", 16), ("w2", 16), ("w3", 16)]
    assert [hit.worker_id for hit in index.prefix_hits(PrefixQuery(MODEL, PROMPT, workers=frozenset({"w2"}))).hits] == [
        "w2"
    ]


def test_a_group_with_draft_layers_that_the_engine_does_not_have_drops_nothing() -> None:
    engine = engine_with({"eagle_groups": [3]})
    engine.send(stored([1, 2], None, PROMPT[: 2 * G]))
    assert engine.hit_tokens(PROMPT) == 32


def test_hashes_that_look_ahead_drop_nothing() -> None:
    engine = engine_with({"eagle": True})
    engine.send(stored([1, 2], None, PROMPT[: 2 * G], lookahead_token_ids=[[PROMPT[G]], [PROMPT[2 * G]]]))
    assert engine.hit_tokens(PROMPT) == 32


def test_only_the_groups_with_draft_layers_drop() -> None:
    for options, expected in (({"eagle": True}, 48), ({"eagle": True, "eagle_groups": [1]}, 48), ({}, 64)):
        engine = engine_with(options)
        engine.send(stored([1, 2, 3, 4], None, PROMPT[: 4 * G], **FULL))
        engine.send(stored([1, 2, 3, 4], None, PROMPT[: 4 * G], **window(2 * G)))
        assert engine.hit_tokens(PROMPT) == expected
    engine = engine_with({"eagle": True, "eagle_groups": [1]})
    engine.send(stored([1, 2, 3], None, PROMPT[: 3 * G], **FULL))
    engine.send(stored([1, 2, 3, 4], None, PROMPT[: 4 * G], **window(2 * G)))
    assert engine.hit_tokens(PROMPT) == 48  # full attention drops nothing, and the window has the block after it


def sparse_window(options: dict[str, Any], *, is_window_first: bool = False) -> Engine:
    """Full attention in blocks of 64 and a window of 24 in blocks of 16, as engines with EAGLE send it: the window
    keeps 48, 64 and 80, 112, 128 and 144."""
    engine = engine_with(options)
    events = [
        stored([4, 8], None, PROMPT[:128], 64, **FULL),
        stored([3, 4, 5, 7, 8, 9], None, PROMPT[:144], 16, **window(24)),
    ]
    engine.send(*(reversed(events) if is_window_first else events))
    return engine


@pytest.mark.parametrize("is_window_first", [False, True])
def test_the_window_block_after_an_anchor_is_placed_by_the_tokens_of_the_event(is_window_first: bool) -> None:
    engine = sparse_window({"eagle": True}, is_window_first=is_window_first)
    assert engine.hit_tokens(PROMPT) == 64  # full attention drops 128
    engine.send(stored([12], 8, numbers(129, 64), 64, **FULL))
    assert engine.hit_tokens(numbers(1, 200)) == 128
    assert engine.publisher.status().unplaced == 0


def test_without_eagle_nobody_knows_that_the_next_hash_follows_the_anchor() -> None:
    assert sparse_window({}).publisher.status().unplaced == 2


def test_nor_if_the_tokens_before_the_anchor_are_not_its_own() -> None:
    engine = engine_with({"eagle": True})
    engine.send(stored([4], None, PROMPT[:64], 64, **FULL))
    engine.send(stored([4, 5], None, numbers(9_000, 80), 16, **window(24)))
    assert engine.publisher.status().unplaced == 1


def test_an_item_that_begins_in_the_block_after_an_anchor_leaves_it_unplaced() -> None:
    engine = engine_with({"eagle": True})
    engine.send(stored([4], None, PROMPT[:64], 64, **FULL))
    engine.send(stored([4, 5], None, PROMPT[:80], 16, extra_keys=[None, [["image", 3]]], **window(24)))
    assert engine.publisher.status().unplaced == 1
    engine.send(stored([14], None, numbers(500, 64), 64, **FULL))
    engine.send(stored([14, 15], None, numbers(500, 80), 16, extra_keys=[None, [["image", -3]]], **window(24)))
    assert engine.publisher.status().unplaced == 1  # one that began before is in the anchor's key already


def test_a_span_that_waits_for_its_anchor_survives_a_recovery() -> None:
    engine, store = engine_with({"eagle": True}), DictStore()
    engine.send(stored([99], None, numbers(500, 64), 64, **FULL))
    engine.send(stored([3, 4, 5], None, PROMPT[:80], 16, **window(24)))
    store.flush(engine.publisher)
    again = engine_with({"eagle": True})
    store.recover(again.publisher)
    for each in (engine, again):
        each.send(stored([4, 8], None, PROMPT[:128], 64, **FULL))
        assert each.hit_tokens(PROMPT) == 64


# ---------------------------------------------------------------------- chunked local attention


def test_chunks_before_the_last_one_count_without_any_block() -> None:
    engine = engine_with({"attention_chunk_size": {"0": 64}})
    assert engine.hit(PROMPT) is None  # what groups it has is not known yet
    engine.send(stored([1], None, numbers(9_000, G), **CHUNKED))
    hit = engine.hit(PROMPT)
    assert hit is not None
    assert (hit.hit_tokens, hit.resident_tokens) == (128, 0)
    assert engine.hit(PROMPT[:64]) is None
    assert engine.hit_tokens(PROMPT[:65]) == 64
    engine.publisher.set_credited(False)
    assert engine.hit(PROMPT) is None


def test_a_publisher_that_waits_for_its_first_placed_block_is_asked_too() -> None:
    engine = engine_with({"attention_chunk_size": {"0": 64}})
    engine.send(stored([9], 8, PROMPT[128:144], **CHUNKED))
    assert engine.hit_tokens(PROMPT) == 128


# ---------------------------------------------------------------------- block sizes scaled by DCP


def test_attention_blocks_that_context_parallelism_scaled_stand_beside_mamba_blocks_that_it_did_not() -> None:
    """Blocks of 16 over four ranks are announced as 64; the Mamba group keeps 32. Hits are multiples of 64."""
    engine = engine_with()
    engine.send(stored([4, 8], None, PROMPT[:128], 64, **FULL))
    engine.send(stored([2, 4], None, PROMPT[:64], 32, **MAMBA))
    assert engine.hit_tokens(PROMPT) == 64
    engine.send(stored([6], 4, PROMPT[64:96], 32, **MAMBA))
    assert engine.hit_tokens(PROMPT) == 64
    engine.send(stored([8], 6, PROMPT[96:128], 32, **MAMBA))
    assert engine.hit_tokens(PROMPT) == 128


def test_a_registered_block_size_may_be_that_before_the_scaling() -> None:
    engine = engine_with(block_size=16)
    engine.send(stored([1, 2], None, PROMPT[:128], 64))
    assert (engine.publisher.granule, engine.hit_tokens(PROMPT)) == (16, 128)


# ---------------------------------------------------------------------- names of adapters


@pytest.mark.parametrize("is_simple", [True, False])
def test_an_adapter_is_found_by_the_name_that_prompts_have(is_simple: bool) -> None:
    engine = engine_with({"lora_aliases": {"sql-v7": "sql"}})
    engine.send(stored([90], None, numbers(9_000, G)))
    extra = {} if is_simple else {"extra_keys": [["sql-v7"], ["sql-v7"]]}
    engine.send(stored([1, 2], None, PROMPT[: 2 * G], lora_name="sql-v7", **extra))
    engine.send(stored([3], None, PROMPT[:G], lora_name="chat"))
    assert engine.hit_tokens(PROMPT, lora_name="sql") == 32
    assert engine.hit_tokens(PROMPT, lora_name="sql-v7") == 0
    assert engine.hit_tokens(PROMPT, lora_name="chat") == 16


def test_engines_with_other_names_for_one_adapter_share_its_prefixes() -> None:
    index = ContentIndex()
    first = Engine(index, "w0", options={"lora_aliases": {"/models/a": "a"}})
    second = Engine(index, "w1")
    first.send(stored([1], None, PROMPT[:G], lora_name="/models/a"))
    second.send(stored([7], None, PROMPT[:G], lora_name="a"))
    assert [engine.hit_tokens(PROMPT, lora_name="a") for engine in (first, second)] == [16, 16]


# ---------------------------------------------------------------------- sources that never remove


def test_the_blocks_that_were_stored_last_count() -> None:
    engine = engine_with({"no_removals": {"blocks_max": 2}})
    engine.send(stored([1], None, PROMPT[:G]), stored([2], 1, PROMPT[G : 2 * G]))
    assert engine.resident(PROMPT) == 32
    engine.send(stored([1], None, PROMPT[:G]))  # again: it is the newest now, and still has one reference
    engine.send(stored([9], None, numbers(9_000, G)))
    assert engine.resident(PROMPT) == 16
    engine.send(stored([10], None, numbers(9_100, G)))
    assert engine.hit(PROMPT) is None
    assert engine.publisher.counters["expired_blocks"] == 2


def test_a_block_counts_for_so_long_after_its_last_store() -> None:
    engine = engine_with({"no_removals": {"expire_after_s": 60}})
    engine.send(stored([1], None, PROMPT[:G]), stored([2], 1, PROMPT[G : 2 * G]))
    engine.index.expire_blocks(1_000.0)
    engine.send(stored([1], None, PROMPT[:G]))
    engine.index.expire_blocks(1_059.0)
    assert engine.resident(PROMPT) == 32
    engine.index.expire_blocks(1_060.0)
    assert engine.resident(PROMPT) == 16
    engine.index.expire_blocks(1_118.0)
    assert engine.resident(PROMPT) == 16
    engine.index.expire_blocks(1_119.0)
    assert engine.hit(PROMPT) is None


def test_what_waits_for_its_content_expires_too() -> None:
    engine = engine_with({"no_removals": {"blocks_max": 1}})
    engine.send(stored([2], 1, PROMPT[G : 2 * G]))
    engine.send(stored([9], None, numbers(9_000, G)))
    engine.send(stored([1], None, PROMPT[:G]))
    assert engine.resident(PROMPT) == 16
    assert engine.publisher.status().orphans == 0


def test_a_removal_or_a_clear_that_comes_all_the_same_is_heard() -> None:
    engine = engine_with({"no_removals": {"blocks_max": 2}})
    engine.send(stored([1], None, PROMPT[:G]), stored([2], 1, PROMPT[G : 2 * G]), removed([2]))
    assert engine.resident(PROMPT) == 16
    engine.send(cleared(), stored([1], None, PROMPT[:G]), stored([2], 1, PROMPT[G : 2 * G]))
    assert engine.resident(PROMPT) == 32


def test_after_a_recovery_time_begins_anew() -> None:
    engine, store = engine_with({"no_removals": {"expire_after_s": 60}}), DictStore()
    engine.send(stored([1], None, PROMPT[:G]))
    engine.index.expire_blocks(1_000.0)
    store.flush(engine.publisher)
    again = engine_with({"no_removals": {"expire_after_s": 60}})
    store.recover(again.publisher)
    again.index.expire_blocks(1_050.0)
    again.index.expire_blocks(1_109.0)
    assert again.resident(PROMPT) == 16
    again.index.expire_blocks(1_110.0)
    assert again.hit(PROMPT) is None
    store.flush(again.publisher)
    assert not store.rows


def test_an_age_alone_does_not_let_them_grow_without_bound() -> None:
    key = HolderKey("GPU", 0, "")
    lifetimes = Lifetimes(NoRemovals(expire_after_s=1.0))
    lifetimes.note(key, range(BLOCKS_MAX + 2))
    assert list(lifetimes.excess()) == [(key, 0), (key, 1)]
    assert len(lifetimes) == BLOCKS_MAX


# ---------------------------------------------------------------------- what is assumed


def test_a_plain_engine_is_assumed_to_drop_nothing_and_answers_do_not_say_so() -> None:
    engine = engine_with()
    engine.send(stored([1], None, PROMPT[:G]))
    assert (assumptions(engine), codes(engine)) == (["eagle_off"], [])
    for options in ({"eagle": False}, {"eagle": True}, {"eagle_groups": [0]}):
        assert assumptions(engine_with(options)) == []
    assert assumptions(engine_with(engine="sglang")) == []


def test_lookahead_says_that_nothing_is_dropped() -> None:
    engine = engine_with()
    engine.send(stored([1], None, PROMPT[:G], lookahead_token_ids=[[PROMPT[G]]]))
    assert assumptions(engine) == []


def resent(engine: Engine, count: int) -> None:
    """So many prompts with one cached start, of which the engine stores the last block again."""
    engine.send(stored([1, 2], None, PROMPT[: 2 * G]))
    for i in range(count):
        engine.send(stored([2, 100 + i], 1, PROMPT[G : 2 * G] + numbers(10_000 + 100 * i, G)))


def test_an_engine_that_stores_the_last_block_of_hits_again_is_suspected_of_eagle() -> None:
    engine = engine_with()
    resent(engine, 7)
    assert (assumptions(engine), codes(engine)) == (["eagle_off"], [])
    resent(engine, 8)
    assert (assumptions(engine), codes(engine)) == (["eagle_suspected"], ["eagle_suspected"])
    assert engine.hit_tokens(PROMPT) == 32  # it is no more than a suspicion
    assert codes(engine, numbers(77_000, 40)) == []  # no hit, nothing to warn of


def test_a_told_engine_is_not_suspected_nor_one_that_does_it_seldom() -> None:
    told = engine_with({"eagle": False})
    resent(told, 20)
    assert codes(told) == []
    seldom = engine_with()
    for i in range(500):
        seldom.send(stored([1_000 + i], None, numbers(100_000 + 100 * i, G)))
    resent(seldom, 8)
    assert (assumptions(seldom), codes(seldom)) == (["eagle_off"], [])


def test_a_chunk_size_that_nobody_told_is_named() -> None:
    engine = engine_with()
    engine.send(stored([1], None, PROMPT[:G], **CHUNKED))
    assert codes(engine) == ["chunk_size_unknown"]
    engine = engine_with({"attention_chunk_size": {"0": 64}})
    engine.send(stored([1], None, PROMPT[:G], **CHUNKED))
    assert codes(engine) == []


def test_answers_say_that_a_source_removes_nothing_and_name_the_first_five() -> None:
    index = ContentIndex()
    engines = [Engine(index, f"w{i}", options={"no_removals": {"blocks_max": 9}}) for i in range(7)]
    for engine in engines:
        engine.send(stored([1], None, PROMPT[:G]))
    (warning,) = index.prefix_hits(PrefixQuery(MODEL, PROMPT)).warnings
    assert warning.code == "no_removals"
    assert warning.message.startswith("w0 rank 0, w1 rank 0, w2 rank 0, w3 rank 0, w4 rank 0 and more: ")
    for engine in engines:
        index.remove_publisher(engine.publisher.registration.key)
    Engine(index, "w8").send(stored([1], None, PROMPT[:G]))
    assert index.prefix_hits(PrefixQuery(MODEL, PROMPT)).warnings == []
