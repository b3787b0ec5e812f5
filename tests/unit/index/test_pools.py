"""Pools own blocks for the workers that they serve; answers say where each part of a prefix lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from indexer.index.prefix_query import Detail, PrefixQuery, PublisherHit
from tests.engine_events import MODEL, Engine, cleared, numbers, removed, stored
from tests.index_invariants import check_index

PROMPT = numbers(1, 8 * 16)
HASHES = numbers(2**40, 8)
GPU, CPU = "GPU", "CPU"


def blocks(first: int, last: int, medium: str | None = GPU, size: int = 16, **fields: Any) -> dict[str, Any]:
    """Blocks of the prompt from number `first` to before `last`, each of `size` tokens."""
    ends = [(i + 1) * size // 16 - 1 for i in range(first, last)]
    parent = HASHES[first * size // 16 - 1] if first else None
    return stored([HASHES[end] for end in ends], parent, PROMPT[first * size : last * size], size, medium, **fields)


def pool_of(index: ContentIndex, name: str = "pool", **values: Any) -> Engine:
    return Engine(index, name, engine="mooncake", is_pool=True, **values)


def hits(index: ContentIndex, tokens: Sequence[int] = PROMPT, **query: Any) -> dict[str, PublisherHit]:
    return {hit.worker_id: hit for hit in index.prefix_hits(PrefixQuery(MODEL, tokens, **query)).hits}


def spans(hit: PublisherHit) -> list[tuple[int, int, str, str]]:
    assert isinstance(hit.spans, list)
    return [(span.start, span.end, span.tier, span.worker_id) for span in hit.spans]


# ---------------------------------------------------------------------- where a prefix lies


def test_spans_say_the_fastest_tier_of_each_part() -> None:
    """A faster tier further on counts for reach as it does without spans, and is shown."""
    index = ContentIndex()
    engine = Engine(index)
    engine.send(blocks(0, 7), removed(HASHES[2:4]), blocks(0, 3, CPU), blocks(3, 4, "DISK"))
    engine.send(blocks(0, 7, "XYZ"))
    hit = hits(index, detail=Detail.INTERVALS)["w0"]
    assert hit.tiers == {"GPU": 32, "CPU": 48, "STORAGE": 112, "XYZ": 112}
    assert spans(hit) == [(0, 32, GPU, "w0"), (32, 48, CPU, "w0"), (48, 64, "STORAGE", "w0"), (64, 112, GPU, "w0")]


def test_spans_end_with_the_reach_and_come_only_if_asked() -> None:
    index = ContentIndex()
    engine = Engine(index)
    engine.send(blocks(0, 8), removed(HASHES[4:5]))
    assert spans(hits(index, detail=Detail.INTERVALS)["w0"]) == [(0, 64, GPU, "w0")]
    assert not isinstance(hits(index)["w0"].spans, list)


def test_a_part_lies_where_all_groups_of_full_attention_have_it() -> None:
    index = ContentIndex()
    engine = Engine(index, engine="trtllm")
    full = {"kv_cache_spec_kind": "full_attention"}
    engine.send(blocks(0, 2, size=64, group_idx=0, **full), blocks(0, 6, group_idx=1, **full))
    engine.send(blocks(6, 8, CPU, group_idx=1, **full))
    hit = hits(index, detail=Detail.INTERVALS)["w0"]
    assert (hit.tiers, spans(hit)) == ({"GPU": 96, "CPU": 128}, [(0, 96, GPU, "w0"), (96, 128, CPU, "w0")])


def test_an_unknown_medium_is_a_tier_below_the_known_ones_unless_settings_know_it() -> None:
    for media, tiers in (({}, {"GPU": 16, "CPU": 16, "STORAGE": 32, "LUSTRE": 48}), ({"lustre": "cpu"}, None)):
        index = ContentIndex(IndexLimits(media=media))
        engine = Engine(index, engine="sglang")
        engine.send(blocks(0, 1), blocks(1, 2, "DISK"), blocks(2, 3, "Lustre"))
        assert hits(index)["w0"].tiers == (tiers or {"GPU": 16, "CPU": 16, "STORAGE": 48})


def test_a_medium_that_settings_call_the_gpus_is_the_engines_own_memory() -> None:
    index = ContentIndex(IndexLimits(media={"XPU": "GPU"}))
    engine = Engine(index)
    engine.send(blocks(0, 8, "xpu"))
    assert (engine.hit_tokens(PROMPT), engine.publisher.connector.is_shown) == (112, False)
    engine.send(cleared())
    assert engine.hit(PROMPT) is None


# ---------------------------------------------------------------------- pools


def test_a_pool_extends_the_reach_of_the_workers_it_serves_on_its_tier() -> None:
    index = ContentIndex()
    one, other = Engine(index, "one"), Engine(index, "other")
    pool = pool_of(index, serves=["one"])
    for engine in (one, other):
        engine.send(blocks(0, 2))
    pool.send(blocks(0, 6, "DISK"))
    found = hits(index, detail=Detail.INTERVALS)
    assert found.keys() == {"one", "other"}, "a pool is no routing target"
    assert (found["one"].hit_tokens, found["one"].resident_tokens, found["one"].pools) == (96, 96, ["pool"])
    assert found["one"].tiers == {"GPU": 32, "CPU": 32, "STORAGE": 96}
    assert spans(found["one"]) == [(0, 32, GPU, "one"), (32, 96, "STORAGE", "pool")]
    assert (found["other"].hit_tokens, found["other"].tiers) == (32, {"GPU": 32, "CPU": 32})
    assert not isinstance(found["other"].pools, list)
    pool.send(removed(HASHES[2:3], "DISK"))
    assert hits(index)["one"].resident_tokens == 32
    check_index(index)


def test_a_pool_that_names_nobody_serves_all_of_its_model() -> None:
    index = ContentIndex()
    Engine(index, "silent")
    pool = pool_of(index)
    pool.send(blocks(0, 4, CPU))
    hit = hits(index)["silent"]
    assert (hit.hit_tokens, hit.tiers, hit.pools) == (64, {"GPU": 0, "CPU": 64}, ["pool"])
    assert hits(index, PROMPT[:64])["silent"].hit_tokens == 48  # one token at least is computed


def test_what_a_pool_has_may_lie_between_what_a_worker_has() -> None:
    index = ContentIndex()
    engine, pool = Engine(index), pool_of(index)
    engine.send(blocks(0, 8), removed(HASHES[2:4]))
    pool.send(blocks(2, 4, CPU))
    hit = hits(index, detail=Detail.INTERVALS)["w0"]
    assert spans(hit) == [(0, 32, GPU, "w0"), (32, 64, CPU, "pool"), (64, 128, GPU, "w0")]
    assert hit.hit_tokens == 112


@pytest.mark.parametrize(("own", "pooled", "reach"), [(16, 64, 64), (64, 16, 128), (16, 32, 96), (32, 64, 64)])
def test_blocks_of_other_sizes_count_where_they_cover_a_worker_s(own: int, pooled: int, reach: int) -> None:
    """The pool has 128, 128, 96 and 64 tokens; a worker's own is the first block."""
    index = ContentIndex()
    engine, pool = Engine(index), pool_of(index)
    engine.send(blocks(0, 1, size=own))
    pool.send(blocks(0, reach // pooled, CPU, size=pooled))
    assert hits(index)["w0"].resident_tokens == reach


def test_a_pool_of_another_granule_counts_as_well() -> None:
    """A worker with pages of one token, and a pool of blocks of 16."""
    index = ContentIndex()
    engine, pool = Engine(index, engine="sglang"), pool_of(index)
    engine.send(stored(numbers(9_000, 100), None, PROMPT[:100], 1), removed(numbers(9_020, 10)))
    pool.send(blocks(0, 4, CPU))
    hit = hits(index, detail=Detail.INTERVALS)["w0"]
    assert (hit.hit_tokens, hit.resident_tokens, hit.tiers) == (100, 100, {"GPU": 20, "CPU": 100})
    assert spans(hit) == [(0, 20, GPU, "w0"), (20, 30, CPU, "pool"), (30, 100, GPU, "w0")]


def test_a_window_takes_blocks_from_a_pool_and_mamba_does_not() -> None:
    for kind, window, expected in (("sliding_window", 17, 64), ("mamba", None, 0)):
        index = ContentIndex()
        engine, pool = Engine(index), pool_of(index)
        engine.send(blocks(0, 8, group_idx=0, kv_cache_spec_kind="full_attention"), removed(HASHES[4:], group_idx=0))
        spec = {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}
        engine.send(blocks(0, 1, group_idx=1, **spec), removed(HASHES[:1], group_idx=1))
        pool.send(blocks(0, 8, CPU), removed(HASHES[4:], CPU))
        assert hits(index)["w0"].hit_tokens == expected


def test_blocks_of_several_sizes_in_one_pool_count_for_the_smallest() -> None:
    index = ContentIndex()
    Engine(index)
    pool = pool_of(index)
    pool.send(blocks(0, 2, CPU), blocks(1, 2, CPU, size=64))
    assert hits(index)["w0"].resident_tokens == 32


def test_a_pool_of_which_not_every_block_is_kept_counts_in_whole_steps() -> None:
    index = ContentIndex(IndexLimits(block_tokens_min=16))
    Engine(index)
    pool = pool_of(index)
    pool.send(stored(numbers(9_000, 40), None, PROMPT[:40], 1, CPU))
    assert hits(index)["w0"].resident_tokens == 32


def test_a_pool_may_know_blocks_by_the_hashes_of_those_who_stored_them() -> None:
    """Before or after the engine is heard of."""
    index = ContentIndex()
    engine, cold = Engine(index, "w0"), Engine(index, "cold")
    pool = Engine(index, "pool", is_pool=True)
    by_hash = [stored([engine_hash], None, [], 0, "cpu") for engine_hash in HASHES[:3]]
    pool.send(by_hash[2])
    engine.send(blocks(0, 3))
    pool.send(*by_hash[:2])
    assert pool.publisher.status().unplaced == 0
    hit = cold.hit(PROMPT)
    assert hit is not None
    assert (hit.hit_tokens, hit.pools) == (48, ["pool"])


def test_a_clear_of_a_pool_empties_it_and_a_pool_that_leaves_serves_nobody() -> None:
    index = ContentIndex()
    engine, pool = Engine(index), Engine(index, "pool", is_pool=True)
    engine.send(blocks(0, 2))
    for _ in range(2):
        pool.send(stored([HASHES[0]], None, [], 0, CPU, group_idx=0))
        assert hits(index)["w0"].tiers == {"GPU": 32, "CPU": 32}
        pool.send(cleared())
        assert pool.publisher.status().residencies == 0
    engine.send(removed(HASHES[:2]))
    other = pool_of(index, "other")
    other.send(blocks(0, 2, CPU))
    assert hits(index)["w0"].resident_tokens == 32
    index.remove_publisher(other.publisher.registration.key)
    assert hits(index) == {}


def test_of_pools_and_workers_that_do_not_count_nothing_is_answered() -> None:
    index = ContentIndex()
    engine, pool = Engine(index), pool_of(index)
    pool.send(blocks(0, 2, CPU))
    assert hits(index, workers=frozenset({"pool"})) == {}
    assert hits(index, workers=frozenset({"w0"})).keys() == {"w0"}
    pool.publisher.set_credited(False)
    assert hits(index) == {}
    pool.publisher.set_credited(True)
    engine.publisher.set_credited(False)
    assert hits(index) == {}


def test_a_connector_and_a_pool_help_each_by_itself() -> None:
    """The connector loads chunks that follow the engine's own blocks; the pool's count as the engine's."""
    index = ContentIndex()
    engine, pool = Engine(index), pool_of(index)
    engine.send(blocks(0, 6, group_idx=0), removed(HASHES[2:6], group_idx=0))
    engine.send(blocks(2, 4, CPU, group_idx=0))
    assert hits(index)["w0"].hit_tokens == 64
    pool.send(blocks(0, 5, "DISK"))
    assert hits(index)["w0"].hit_tokens == 80


def test_other_workers_of_the_model_are_answered_as_before() -> None:
    index = ContentIndex()
    engines = [Engine(index, f"w{i}") for i in range(3)]
    for i, engine in enumerate(engines):
        engine.send(blocks(0, 2 + i))
    before = hits(index)
    pool = pool_of(index, serves=["w9"])
    pool.send(blocks(0, 8, CPU))
    assert hits(index) == before
    assert engines[0].publisher.plain_holder is not None
