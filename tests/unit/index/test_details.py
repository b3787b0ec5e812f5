"""What hits say of tiers and groups, if asked."""

from __future__ import annotations

from typing import Any

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import Detail, DetailedHit, PrefixQuery
from tests.engine_events import MODEL, Engine, numbers, removed, stored

TOKENS = numbers(1, 96)
HASHES = [100 + i for i in range(6)]  # of 16 tokens each


def blocks(first: int, last: int, medium: str = "GPU", **fields: Any) -> dict[str, Any]:
    parent = HASHES[first - 1] if first else None
    return stored(HASHES[first:last], parent, TOKENS[16 * first : 16 * last], 16, medium, **fields)


def hit_of(engine: Engine, detail: Detail) -> DetailedHit:
    (hit,) = engine.index.prefix_hits(PrefixQuery(MODEL, [*TOKENS, 1], detail=detail)).hits
    assert isinstance(hit, DetailedHit)
    return hit


def reaches(engine: Engine) -> list[tuple[int, str, int]]:
    groups = hit_of(engine, Detail.GROUPS).groups
    assert isinstance(groups, list)
    return [(group.group, group.kind, group.held_tokens) for group in groups]


def test_each_token_counts_on_the_fastest_tier_that_has_it() -> None:
    engine = Engine(ContentIndex(), engine="sglang")
    engine.send(blocks(0, 3), blocks(2, 5, "CPU_PINNED"), blocks(5, 6, "DISK"))
    hit = hit_of(engine, Detail.TIERS)
    assert hit.tier_tokens == {"GPU": 48, "CPU": 32, "STORAGE": 16}
    assert hit.tiers == {"GPU": 48, "CPU": 80, "STORAGE": 96}
    engine.send(removed(HASHES[1:2]))  # what is behind the hole is no prefix
    assert hit_of(engine, Detail.TIERS).tier_tokens == {"GPU": 16, "CPU": 0, "STORAGE": 0}


def test_of_full_attention_a_group_is_held_up_to_its_first_hole() -> None:
    engine = Engine(ContentIndex())
    full = {"kv_cache_spec_kind": "full_attention"}
    engine.send(blocks(0, 6, group_idx=0, **full), blocks(0, 6, group_idx=1, **full))
    engine.send(removed(HASHES[2:3], group_idx=1))
    assert reaches(engine) == [(0, "full_attention", 96), (1, "full_attention", 32)]
    assert hit_of(engine, Detail.GROUPS).hit_tokens == 32


def test_a_window_needs_only_what_it_reaches_back_to() -> None:
    engine = Engine(ContentIndex())
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33}
    engine.send(blocks(0, 6, group_idx=0, kv_cache_spec_kind="full_attention"), blocks(0, 6, group_idx=1, **window))
    engine.send(removed([*HASHES[:2], *HASHES[4:]], group_idx=1))
    assert reaches(engine) == [(0, "full_attention", 96), (1, "sliding_window", 64)]
    groups = hit_of(engine, Detail.GROUPS).groups
    assert isinstance(groups, list)
    assert [group.window for group in groups] == [None, 33]
    engine.send(removed(HASHES[2:3], group_idx=1))  # a block less than the window has
    assert (0, "full_attention", 96) in reaches(engine)
    assert (1, "sliding_window", 0) in reaches(engine)


def test_of_mamba_one_state_is_enough() -> None:
    engine = Engine(ContentIndex())
    engine.send(blocks(0, 6, group_idx=0, kv_cache_spec_kind="full_attention"))
    engine.send(blocks(0, 6, group_idx=1, kv_cache_spec_kind="mamba"))
    engine.send(removed([*HASHES[:3], *HASHES[4:]], group_idx=1))
    assert reaches(engine) == [(0, "full_attention", 96), (1, "mamba", 64)]


def test_what_eagle_drops_is_held_all_the_same() -> None:
    engine = Engine(ContentIndex(), options={"eagle": True})
    engine.send(blocks(0, 6))
    assert reaches(engine) == [(0, "unknown", 96)]
    assert hit_of(engine, Detail.GROUPS).hit_tokens == 80
