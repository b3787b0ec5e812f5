"""Faults that users of such indexes met in public, each as bytes from an engine and the answer that is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from tests.engine_events import Engine, cleared, numbers, payload, removed, stored
from tests.index_invariants import check_index

TOKENS = numbers(100, 16 * 12)
LONGER = [*TOKENS, 1]  # one more token: the last block of TOKENS is a hit, not only resident


@pytest.fixture
def index() -> ContentIndex:
    return ContentIndex()


def blocks(first: int, count: int, size: int = 16) -> list[int]:
    """The tokens of `count` blocks of TOKENS from block `first` on."""
    return TOKENS[first * size : (first + count) * size]


def chain(
    first: int, count: int, *, parent: Any = "before", size: int = 16, base: int = 1000, **fields: Any
) -> dict[str, Any]:
    """A store of blocks `first`.. of TOKENS under the hashes base + first.., after the block before them."""
    hashes = [base + first + i for i in range(count)]
    if parent == "before":
        parent = base + first - 1 if first else None
    return stored(hashes, parent, blocks(first, count, size), size, **fields)


# ---------------------------------------------------------------------- counting references


def test_two_copies_of_a_block_need_two_removals(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 3))
    engine.send(chain(2, 1))  # a second physical copy of the last block
    engine.send(chain(3, 4))
    engine.send(removed([1002]))
    assert engine.hit_tokens(LONGER) == 7 * 16
    engine.send(removed([1002]))
    assert engine.hit_tokens(LONGER) == 2 * 16


def test_an_offloaded_block_of_two_chunks_stays_until_both_are_gone(index: ContentIndex) -> None:
    engine = Engine(index, engine="tensorrt-llm")
    other = numbers(5000, 32)
    engine.send(stored([1, 2, 3, 4], None, blocks(0, 4), medium="CPU"))
    engine.send(stored([1, 2, 5, 6], None, [*blocks(0, 2), *other], medium="CPU"))
    engine.send(removed([1, 2, 3, 4], "CPU"))
    hit = engine.hit([*blocks(0, 2), *other, 1])
    assert hit is not None
    assert (hit.tiers["GPU"], hit.tiers["CPU"]) == (0, 64)


def test_by_default_a_repeated_announcement_counts(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 1), chain(0, 1), removed([1000]))
    assert engine.hit_tokens(LONGER) == 16


def test_a_source_that_repeats_itself_can_be_counted_as_a_set(index: ContentIndex) -> None:
    engine = Engine(index, options={"counting": "set"})
    engine.send(chain(0, 1), chain(0, 1))
    engine.send(removed([1000]))
    assert engine.hit_tokens(LONGER) == 0
    assert engine.references() == {}


def test_as_a_set_a_block_that_waits_for_its_parent_is_counted_once_too(index: ContentIndex) -> None:
    engine = Engine(index, options={"counting": "set"})
    engine.send(chain(1, 1), chain(1, 1))
    engine.send(stored([1001], None, [], 0, medium="GPU"))
    engine.send(chain(0, 1))
    assert engine.references() == {("GPU", 0, "", 1000): 1, ("GPU", 0, "", 1001): 1}
    engine.send(chain(1, 1))
    engine.send(removed([1001]))
    assert engine.hit_tokens(LONGER) == 16


@pytest.mark.parametrize("first", ["placed", "waiting", "unplaced"])
def test_an_announcement_of_reused_blocks_does_not_count(index: ContentIndex, first: str) -> None:
    engine = Engine(index)
    reused = chain(1, 1, origin="REUSED")
    if first == "placed":
        engine.send(chain(0, 2), reused)
    elif first == "waiting":
        engine.send(chain(1, 1), reused, chain(0, 1))
    else:
        engine.send(stored([1001], None, [], 0), chain(0, 1), reused)
    assert engine.references()["GPU", 0, "", 1001] == 1
    assert engine.hit_tokens(LONGER) == 32
    engine.send(removed([1001]))
    assert engine.hit_tokens(LONGER) == 16


def test_an_announcement_of_reused_blocks_restores_a_lost_residency(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 2), removed([1001]))
    engine.send(chain(1, 1, origin="REUSED"))
    assert engine.references()["GPU", 0, "", 1001] == 1


# ---------------------------------------------------------------------- domains and tiers


def test_an_owners_copies_and_the_engines_own_are_counted_apart(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 1))
    engine.send(stored([1000], None, [], 0, medium="CPU", ownership="X"), stored([1000], None, [], 0, medium="CPU"))
    engine.send(removed([1000], "CPU", ownership="X"))
    assert engine.references() == {("GPU", 0, "", 1000): 1, ("CPU", 0, "", 1000): 1}
    engine.send(removed([1000], "CPU", ownership="X"))
    assert engine.publisher.status().counters["unknown_removals"] == 1
    assert engine.hit_tokens(LONGER) == 16


def test_an_unknown_hash_among_removals_does_not_keep_the_others(index: ContentIndex) -> None:
    engine, other = Engine(index), Engine(index, "w0", dp_rank=1)
    for each in (engine, other):
        each.send(chain(0, 3), stored([1000, 1001, 1002], None, [], 0, medium="CPU"))
    engine.send(removed([77, 1000, 1001, 1002], "CPU"), removed([b"never" * 8], "DISK", ownership="nobody"))
    assert {medium for medium, *_ in engine.references()} == {"GPU"}
    assert engine.publisher.status().counters["unknown_removals"] == 2
    assert {medium for medium, *_ in other.references()} == {"GPU", "CPU"}


def test_ranks_of_one_worker_own_their_blocks_apart(index: ContentIndex) -> None:
    rank0, rank1 = Engine(index, dp_rank=0), Engine(index, dp_rank=1)
    rank0.send(chain(0, 1))
    rank1.send(chain(0, 1))
    rank1.send(removed([1000]))
    assert (rank0.hit_tokens(LONGER), rank1.hit_tokens(LONGER)) == (16, 0)


def test_a_clear_empties_one_engine_and_its_counts(index: ContentIndex) -> None:
    engine, other = Engine(index), Engine(index, "w1")
    for each in (engine, other):
        each.send(chain(0, 1), chain(0, 1))
    engine.send(cleared())
    assert (engine.hit_tokens(LONGER), other.hit_tokens(LONGER)) == (0, 16)
    engine.send(chain(0, 1), removed([1000]))
    assert engine.references() == {}


def test_vllms_clear_leaves_connector_tiers_alone(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 1), stored([1000], None, [], 0, medium="CPU"))
    engine.send(cleared())
    hit = engine.hit(LONGER)
    assert hit is not None
    assert hit.tiers == {"GPU": 0, "CPU": 16}


def test_sglangs_clear_empties_every_tier(index: ContentIndex) -> None:
    engine = Engine(index, engine="sglang")
    engine.send(chain(0, 1), chain(0, 1, medium="CPU_PINNED"))
    engine.send(cleared())
    assert engine.hit(LONGER) is None


@pytest.mark.parametrize("event", [{"type": "TierBlocksCleared", "medium": "cpu"}, cleared(medium="CPU")])
def test_a_clear_that_names_a_medium_empties_only_that(index: ContentIndex, event: Any) -> None:
    engine = Engine(index)
    engine.send(chain(0, 1), stored([1000], None, [], 0, medium="CPU"))
    engine.send(event)
    hit = engine.hit(LONGER)
    assert hit is not None
    assert hit.tiers["GPU"] == hit.resident_tokens == 16
    assert {medium for medium, *_ in engine.references()} == {"GPU"}


def test_a_block_without_tokens_lives_as_long_as_any_tier_holds_its_hash(index: ContentIndex) -> None:
    engine = Engine(index)
    bare = stored([1000], None, [], 0, medium="CPU")
    engine.send(chain(0, 1), bare, removed([1000]))
    hit = engine.hit(LONGER)
    assert hit is not None
    assert (hit.tiers, hit.hit_tokens) == ({"GPU": 0, "CPU": 16}, 16)
    engine.send(removed([1000], "CPU"))
    assert engine.hit(LONGER) is None
    engine.send(bare)  # the hash is a ghost: it still means what it did
    assert engine.hit_tokens(LONGER) == 16


def test_a_hash_that_never_had_tokens_is_unplaced_and_counted() -> None:
    engine = Engine(ContentIndex())
    engine.send(stored([5], None, [], 0, medium="CPU"))
    status = engine.publisher.status()
    assert (status.unplaced, status.residencies) == (1, 0)
    engine.send(removed([5], "CPU"))
    assert engine.publisher.status().unplaced == 0


def test_a_turnover_of_the_device_leaves_the_hosts_blocks(index: ContentIndex) -> None:
    engine = Engine(index, engine="sglang")
    engine.send(chain(0, 1), chain(0, 1, medium="CPU_PINNED"), removed([1000]))
    hit = engine.hit(LONGER)
    assert hit is not None
    assert hit.tiers == {"GPU": 0, "CPU": 16}


@pytest.mark.parametrize(
    ("fields", "tiers", "hit_tokens"),
    [
        ({"medium": "gpu"}, {"GPU": 16, "CPU": 16}, 16),
        ({"medium": None}, {"GPU": 16, "CPU": 16}, 16),
        ({"medium": "Cpu"}, {"GPU": 0, "CPU": 16}, 16),
        ({"medium": "CPU_TIER1"}, {"GPU": 0, "CPU": 16}, 16),
        ({"medium": "cpu_pinned"}, {"GPU": 0, "CPU": 16}, 16),
        ({"medium": "STORAGE"}, {"GPU": 0, "CPU": 0, "STORAGE": 16}, 16),
        ({"medium": "DISK"}, {"GPU": 0, "CPU": 0, "STORAGE": 16}, 16),
        ({"medium": "XYZ"}, {"GPU": 0, "CPU": 0, "XYZ": 16}, 16),
        ({"medium": ""}, {"GPU": 0, "CPU": 0, "UNNAMED": 16}, 16),
        ({"medium": "STORAGE", "locality": "REMOTE"}, None, 0),
        ({"medium": "GPU", "locality": "remote"}, None, 0),
        ({"medium": "STORAGE", "locality": "LOCAL"}, {"GPU": 0, "CPU": 0, "STORAGE": 16}, 16),
    ],
)
def test_every_medium_is_its_own_tier_and_another_machines_is_not_credited(
    index: ContentIndex, fields: dict[str, Any], tiers: dict[str, int] | None, hit_tokens: int
) -> None:
    engine = Engine(index, engine="tensorrt-llm")
    engine.send(chain(5, 1, parent=None, base=500))  # teaches the group; holds nothing of the prompt
    engine.send(chain(0, 1, **fields))
    hit = engine.hit(LONGER)
    assert (hit.tiers if hit else None) == tiers
    assert (hit.hit_tokens if hit else 0) == hit_tokens
    assert len(engine.references()) == 2


# ---------------------------------------------------------------------- prefixes


def test_who_holds_only_a_later_block_holds_no_prefix(index: ContentIndex) -> None:
    whole, holed = Engine(index, "whole"), Engine(index, "holed")
    whole.send(chain(0, 3))
    holed.send(chain(0, 3), removed([1000]))
    assert (whole.hit_tokens(LONGER), holed.hit_tokens(LONGER)) == (48, 0)


def test_within_one_event_each_block_is_the_next_ones_parent(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 3))
    assert engine.hit_tokens(LONGER) == 48


def test_an_evicted_first_block_breaks_the_prefix_until_it_is_back(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 1), chain(1, 1), chain(2, 1), removed([1000]))
    assert engine.hit_tokens(LONGER) == 0
    engine.send(chain(0, 1))
    assert engine.hit_tokens(LONGER) == 48


def test_at_least_one_token_is_always_computed(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 3))
    hit = engine.hit(blocks(0, 3))
    assert hit is not None
    assert (hit.hit_tokens, hit.resident_tokens) == (32, 48)


def test_a_short_last_page_never_makes_the_answer_longer_than_the_prompt(index: ContentIndex) -> None:
    engine = Engine(index, engine="sglang")
    engine.send(stored([1, 2, 3], None, TOKENS[:40], 16))
    assert engine.hit_tokens(TOKENS[:40]) == 32
    assert engine.resident(TOKENS[:40]) == 32
    assert engine.hit_tokens(LONGER) == 32


def test_blocks_of_unlike_size_are_the_same_content(index: ContentIndex) -> None:
    small, large = Engine(index, "small", engine="tensorrt-llm"), Engine(index, "large")
    tokens = numbers(0, 256)
    small.send(stored(range(1, 65), None, tokens, 4, medium="CPU"))
    small.send(stored([900], 64, numbers(900, 4), 4))
    large.send(stored([1], None, tokens, 256))
    assert small.resident(tokens) == large.resident(tokens) == 256
    assert small.hit_tokens([*tokens, 1]) == large.hit_tokens([*tokens, 1]) == 256


def test_one_worker_may_announce_blocks_of_unlike_size_per_medium(index: ContentIndex) -> None:
    engine = Engine(index, engine="tensorrt-llm")
    tokens = numbers(0, 256)
    engine.send(stored([1], None, tokens, 256))
    engine.send(stored(range(101, 165), None, tokens, 4, medium="CPU"))
    engine.send(removed([1]))
    hit = engine.hit([*tokens, 1])
    assert hit is not None
    assert (hit.tiers, hit.hit_tokens) == ({"GPU": 0, "CPU": 256}, 256)


# ---------------------------------------------------------------------- restarts


def test_a_restarted_engine_holds_nothing_of_before_and_keeps_what_hashes_mean(index: ContentIndex) -> None:
    engine = Engine(index)
    for i in range(12):
        engine.send(chain(i, 1))
    assert engine.hit_tokens(LONGER) == 192
    engine.restart()
    assert engine.publisher.generation == 2
    assert engine.hit(LONGER) is None
    engine.send(chain(1, 1))
    assert engine.references() == {("GPU", 0, "", 1001): 1}
    assert engine.hit_tokens(LONGER) == 0
    engine.send(chain(0, 1))
    assert engine.hit_tokens(LONGER) == 32


# ---------------------------------------------------------------------- orphans


def test_orphans_are_placed_when_their_parent_becomes_known(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(1, 1), chain(2, 1))
    assert engine.publisher.status().orphans == 2
    assert engine.hit(LONGER) is None
    engine.send(chain(0, 1))
    assert engine.publisher.status().orphans == 0
    assert engine.hit_tokens(LONGER) == 48
    check_index(index)


def test_an_orphan_is_no_root(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(3, 1))
    assert engine.hit([*blocks(3, 1), 1]) is None


def test_an_orphan_goes_with_its_removal_and_its_clear(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(1, 2), removed([1002]))
    engine.send(chain(0, 1))
    assert engine.hit_tokens(LONGER) == 32
    engine.send(chain(5, 1), cleared(), chain(4, 1))
    engine.send(chain(0, 4))
    assert engine.hit_tokens(LONGER) == 80


@pytest.mark.parametrize("wide", [2**40, 2**63])
def test_a_parent_stored_elsewhere_places_a_block_without_lending_its_prefix(index: ContentIndex, wide: int) -> None:
    prefill, decode = Engine(index, "prefill"), Engine(index, "decode")
    prefill.send(chain(0, 2, base=wide))
    decode.send(chain(2, 1, base=wide))
    assert decode.publisher.status().orphans == 0
    assert (prefill.hit_tokens(LONGER), decode.hit_tokens(LONGER)) == (32, 0)
    key = next(key for *_, key, _ in decode.publisher.residencies())
    assert [(h.worker_id, h.end_tokens) for h in index.block(key)] == [("decode", 48)]


def test_a_parent_stored_elsewhere_later_places_the_orphans_that_wait_for_it(index: ContentIndex) -> None:
    prefill, decode = Engine(index, "prefill"), Engine(index, "decode")
    decode.send(chain(2, 1, base=2**40))
    assert decode.publisher.status().orphans == 1
    prefill.send(chain(0, 2, base=2**40))
    assert decode.publisher.status().orphans == 0
    decode.send(chain(0, 2, base=2**40))
    assert decode.hit_tokens(LONGER) == 48


def test_a_small_hash_means_nothing_to_another_publisher(index: ContentIndex) -> None:
    one, other = Engine(index, "one"), Engine(index, "other")
    one.send(chain(0, 2))
    other.send(chain(2, 1))
    assert other.publisher.status().orphans == 1


# ---------------------------------------------------------------------- identity


def test_an_adapters_blocks_match_its_requests(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(
        stored(
            [1],
            None,
            numbers(0, 64),
            64,
            lora_id=117,
            lora_name="adapter-116",
            extra_keys=[["adapter-116"]],
            group_idx=0,
        )
    )
    assert engine.hit_tokens(numbers(0, 65), lora_name="adapter-116") == 64
    assert engine.hit(numbers(0, 65)) is None


def test_the_base_model_and_an_adapter_share_nothing(index: ContentIndex) -> None:
    base, adapted = Engine(index, "base"), Engine(index, "adapted")
    base.send(chain(0, 2))
    adapted.send(chain(0, 2, lora_name="x", extra_keys=[["x"], ["x"]]))
    assert (base.hit_tokens(LONGER), adapted.hit_tokens(LONGER)) == (32, 0)
    assert (base.hit_tokens(LONGER, lora_name="x"), adapted.hit_tokens(LONGER, lora_name="x")) == (0, 32)


@pytest.mark.parametrize("entry", [["uuid-A"], [["uuid-A", 0]]])
def test_another_image_is_another_content(index: ContentIndex, entry: Sequence[Any]) -> None:
    engine = Engine(index)
    placeholders = [151655] * 16
    text = numbers(0, 16)
    engine.send(stored([1, 2], None, [*text, *placeholders], extra_keys=[None, entry]))
    prompt = [*text, *placeholders, 1]
    assert engine.hit_tokens(prompt, multimodal=[("uuid-A", 16, 16)]) == 32
    assert engine.hit_tokens(prompt, multimodal=[("uuid-B", 16, 16)]) == 16
    assert engine.hit_tokens(prompt) == 16


@pytest.mark.parametrize("none", [None, [], [None], [[]], [()]])
def test_every_way_to_say_no_extra_keys_is_one_content(index: ContentIndex, none: Any) -> None:
    one, other = Engine(index, "one"), Engine(index, "other")
    one.send(chain(0, 1))
    other.send(chain(0, 1, extra_keys=none))
    assert one.hit_tokens(LONGER) == other.hit_tokens(LONGER) == 16


def test_a_salt_separates_the_whole_prompt(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 2, extra_keys=[["s"], None]))
    assert engine.hit_tokens(LONGER, cache_salt="s") == 32
    assert engine.hit(LONGER) is None
    assert engine.hit(LONGER, cache_salt="t") is None


def test_connector_events_never_turn_a_salted_prompt_into_a_plain_one(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 1, medium="CPU"))  # tokens without extra keys
    assert engine.hit(LONGER) is None
    assert engine.publisher.status().unplaced == 1
    engine.send(chain(0, 1, extra_keys=[["s"]]))
    hit = engine.hit(LONGER, cache_salt="s")
    assert hit is not None
    assert hit.tiers == {"GPU": 16, "CPU": 16}
    assert engine.hit(LONGER) is None


def test_one_hash_with_two_contents_answers_for_both(index: ContentIndex) -> None:
    engine = Engine(index, engine="sglang")
    engine.send(chain(0, 2), chain(0, 2, lora_name="x"))
    assert engine.hit_tokens(LONGER) == engine.hit_tokens(LONGER, lora_name="x") == 32
    engine.send(removed([1000, 1001]))
    assert engine.hit(LONGER) is None
    assert engine.hit(LONGER, lora_name="x") is None


# ---------------------------------------------------------------------- wire


@pytest.mark.parametrize("engine_hash", [100, 70_000, 2**40, 2**63 + 5, -1, b"\x01" * 32])
def test_hashes_of_any_width_are_stored_and_removed(index: ContentIndex, engine_hash: Any) -> None:
    engine = Engine(index)
    engine.send(stored([engine_hash], None, blocks(0, 1)))
    assert engine.hit_tokens(LONGER) == 16
    engine.send(removed([engine_hash]))
    assert engine.references() == {}


def test_minus_one_and_all_bits_set_are_one_hash(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([-1], None, blocks(0, 1)), stored([5], 2**64 - 1, blocks(1, 1)))
    assert engine.hit_tokens(LONGER) == 32
    engine.send(removed([2**64 - 1]))
    assert engine.hit_tokens(LONGER) == 0


def test_an_event_whose_chain_bites_its_tail_is_refused_alone(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 1), stored([7, 8, 7], None, blocks(0, 3)), chain(1, 1), stored([9], 9, blocks(2, 1)))
    assert engine.hit_tokens(LONGER) == 32
    assert engine.publisher.status().bad_events == {"self_reference": 2}


@pytest.mark.parametrize(
    "bad",
    [
        stored([1], None, [-1] * 16),
        stored([1], None, [2**63] * 16),
        {"type": "BlockExploded", "block_hashes": [1]},
        {"type": "BlockStored", "token_ids": [1], "block_size": 1},
        stored([1], None, numbers(0, 16), extra_keys=[5]),
        stored([1], None, numbers(0, 16), lookahead_token_ids=[[1], [2]]),
    ],
)
def test_a_bad_event_costs_only_itself(index: ContentIndex, bad: Any) -> None:
    engine = Engine(index)
    engine.send(chain(0, 1), bad, chain(1, 1))
    engine.send(chain(2, 1))
    assert engine.hit_tokens(LONGER) == 48
    assert sum(engine.publisher.status().bad_events.values()) == 1


def test_ids_of_2_to_the_32_and_more_are_content_like_any_other(index: ContentIndex) -> None:
    engine = Engine(index, engine="sglang")
    image = [2**61 + i % 4 for i in range(16)]
    engine.send(stored([1, 2, 3], None, [*blocks(0, 1), *image, *blocks(1, 1)]))
    assert engine.hit_tokens([*blocks(0, 1), *image, *blocks(1, 1), 1]) == 48
    assert engine.hit_tokens([*blocks(0, 1), *numbers(9, 32), 1]) == 16


def test_trailing_fields_may_be_left_out(index: ContentIndex) -> None:
    engine = Engine(index, engine="sglang")
    engine.send(["BlockStored", [1, 2], None, blocks(0, 2), 16])
    assert engine.hit_tokens(LONGER) == 32
    engine.send(["BlockRemoved", [2]])
    hit = engine.hit(LONGER)
    assert hit is not None
    assert (hit.hit_tokens, hit.tiers) == (16, {"GPU": 16, "CPU": 16})


def test_arrays_and_maps_of_one_batch_build_one_chain(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(["BlockStored", [1], None, blocks(0, 1), 16, None, "GPU", None], stored([2], 1, blocks(1, 1)))
    assert engine.hit_tokens(LONGER) == 32


# ---------------------------------------------------------------------- skipped blocks


MAMBA: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
LONG = numbers(0, 528 * 4)


def test_fewer_hashes_than_blocks_without_context_are_not_guessed(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([3], None, LONG[: 528 * 3], 528, extra_keys=[None], **MAMBA))
    status = engine.publisher.status()
    assert (status.unplaced, status.residencies, status.counters["sparse_stores"]) == (1, 0, 1)
    assert [(g.group, g.kind, g.block_tokens) for g in status.groups] == [(1, "mamba", 528)]
    assert all(engine.hit(LONG[start:]) is None for start in (0, 528, 1056))


def test_a_sparse_block_is_placed_when_another_group_explains_its_hash(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([3], None, LONG[: 528 * 3], 528, extra_keys=[None], **MAMBA))
    engine.send(stored([1, 2, 3], None, LONG[: 528 * 3], 528, **FULL))
    assert engine.hit_tokens(LONG) == 528 * 3
    assert engine.publisher.status().unplaced == 0


def test_skipped_context_places_a_block_and_makes_none_of_the_skipped_resident(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(
        stored(
            [3],
            2,
            LONG[1056:1584],
            528,
            extra_keys=[None],
            skipped_token_ids=LONG[:1056],
            skipped_extra_keys=[["salt"], [["img", 5]]],
            **MAMBA,
        )
    )
    query: dict[str, Any] = {"cache_salt": "salt", "multimodal": [("img", 533, 9)]}
    assert engine.hit_tokens(LONG, **query) == 1584
    assert engine.hit(LONG) is None
    assert len(engine.references()) == 1
    engine.send(stored([4], 3, LONG[1584:], 528, **MAMBA), stored([9], 2, LONG[1056:1584], 528, **FULL))
    assert len(engine.references()) == 3
    assert engine.resident(LONG, **query) == 0  # the full group lacks the first two


@pytest.mark.parametrize("tokens", [1055, 1040 + 8])
def test_skipped_context_that_is_no_whole_blocks_is_refused(index: ContentIndex, tokens: int) -> None:
    engine = Engine(index)
    engine.send(
        stored(
            [3],
            2,
            LONG[1056:1584],
            528,
            skipped_token_ids=LONG[:tokens],
            skipped_extra_keys=[None, None],
            **MAMBA,
        )
    )
    assert engine.publisher.status().bad_events == {"bad_skipped_context": 1}
    assert engine.references() == {}


def test_a_partial_block_waits_until_its_ancestry_is_known(index: ContentIndex) -> None:
    engine = Engine(index)
    prompt = numbers(0, 1793)
    engine.send(stored(range(1, 13), None, prompt[:1536], 128, **MAMBA))
    engine.send(stored([1792], 1664, prompt[1664:1792], 128, **MAMBA))
    assert engine.publisher.status().orphans == 1
    assert engine.hit_tokens(prompt) == 1536
    engine.send(
        stored(
            [1792],
            1664,
            prompt[1664:1792],
            128,
            skipped_parent_block_hash=12,
            skipped_token_ids=prompt[1536:1664],
            skipped_extra_keys=[None],
            **MAMBA,
        )
    )
    assert engine.publisher.status().orphans == 0
    assert engine.hit_tokens(prompt) == 1792
    assert ("GPU", 1, "", 1664) not in engine.references()


def test_a_known_block_after_skipped_context_explains_the_contexts_parent(index: ContentIndex) -> None:
    """That parent lies the whole context back, not one block."""
    engine = Engine(index)
    second: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    engine.send(chain(3, 1, **second))  # 1003 waits under 1002
    engine.send(chain(0, 7, base=2000, **FULL))
    engine.send(
        stored(
            [2006],
            1005,
            blocks(6, 1),
            skipped_parent_block_hash=1003,
            skipped_token_ids=blocks(4, 2),
            skipped_extra_keys=[None, None],
            **second,
        )
    )
    assert engine.publisher.status().orphans == 0
    names = {(holder.group, h): key for holder, h, key, _ in engine.publisher.residencies()}
    assert (names[1, 1003], names[1, 2006]) == (names[0, 2003], names[0, 2006])


def test_a_block_after_context_in_the_air_waits_for_the_contexts_parent(index: ContentIndex) -> None:
    engine = Engine(index)
    context: dict[str, Any] = {"skipped_token_ids": blocks(1, 2), "skipped_extra_keys": [None, None]}
    engine.send(chain(3, 1, skipped_parent_block_hash=1000, **context))
    assert engine.publisher.status().orphans == 1
    engine.send(chain(0, 1), stored([9, 10], 1000, blocks(1, 2)))
    assert engine.publisher.status().orphans == 0
    assert engine.hit_tokens(LONGER) == 64


def test_full_window_and_mamba_groups_must_agree_on_one_length(index: ContentIndex) -> None:
    engine = Engine(index)
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 32,
    }
    mamba: dict[str, Any] = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}
    engine.send(
        chain(0, 10, **FULL),
        chain(0, 2, **window),
        chain(6, 2, **window),
        chain(3, 1, **mamba),
        chain(7, 1, **mamba),
    )
    assert engine.hit_tokens(LONGER) == 8 * 16


def test_a_state_saved_later_restores_no_earlier_point(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(chain(0, 8, **FULL), chain(8, 2, **FULL), removed([1008, 1009], group_idx=0))
    engine.send(chain(9, 1, group_idx=1, kv_cache_spec_kind="mamba"))
    assert engine.hit_tokens(LONGER) == 0
    assert engine.resident(LONGER) == 8 * 16


# ---------------------------------------------------------------------- memory


def test_what_is_stored_and_removed_leaves_nothing_behind() -> None:
    limits = IndexLimits(ghosts_max=100, links_max=100)
    engine = Engine(ContentIndex(limits))
    engine.send(chain(0, 2))
    space = engine.publisher.residents.holders[("GPU", 0, "")].space  # type: ignore[index]
    for i in range(2_000):
        tokens = numbers(10_000 + 32 * i, 32)
        engine.send(stored([2 * i + 10**6, 2 * i + 10**6 + 1], 1001, tokens))
        engine.send(removed([2 * i + 10**6, 2 * i + 10**6 + 1]))
    assert len(space) == 2
    status = engine.publisher.status()
    assert (status.residencies, status.orphans, status.unplaced) == (2, 0, 0)
    assert 98 <= status.ghosts <= 100
    assert status.counters["forgotten_ghosts"] == 4_000 - status.ghosts
    assert len(space.masks) < 10
    assert engine.hit_tokens(LONGER) == 32
    check_index(engine.index)


def test_a_batch_keeps_its_bytes_only_while_the_tail_may_need_them() -> None:
    engine = Engine(ContentIndex(IndexLimits(tail_bytes_max=1_000)))
    for i in range(12):
        engine.send(chain(i, 1))
    assert len(payload(chain(0, 1))) * 12 > 1_000
    assert engine.hit_tokens(LONGER) == 192
