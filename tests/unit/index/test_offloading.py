"""Offloading connectors: what their events say, what the engine loads from them, and what resets of them leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.offloading import (
    CHUNK_BLOCKS_MAX,
    WATCHED_MAX,
    ChunkedGroup,
    Connector,
    chunked_groups,
    length_with_loads,
)
from indexer.index.reuse import ReuseRules, Spec
from tests.engine_events import Engine, cleared, numbers, removed, stored
from tests.index_invariants import check_index
from tests.naive_vllm_hash import numbers_of
from tests.store_stand_in import DictStore

PROMPT = numbers(1, 8 * 16)
HASHES = numbers(1_000, 8)
FULL = ChunkedGroup(0, 32, None, pops=False)


def chunk(first: int, count: int = 2, **fields: Any) -> dict[str, Any]:
    """A chunk that describes itself: blocks `first` ... of the prompt, on the CPU."""
    parent = HASHES[first - 1] if first else None
    tokens = PROMPT[first * 16 : (first + count) * 16]
    return stored(HASHES[first : first + count], parent, tokens, medium="CPU", group_idx=0, **fields)


def placeholder(block: int, **fields: Any) -> dict[str, Any]:
    return stored([HASHES[block]], None, [], 0, **{"medium": "CPU", "group_idx": 0} | fields)


def engine_with(blocks: int, **options: Any) -> Engine:
    """An engine that has so many blocks of the prompt on its GPU."""
    engine = Engine(ContentIndex(), options=options)
    engine.send(stored(HASHES[:blocks], None, PROMPT[: blocks * 16], group_idx=0))
    return engine


def tiers(engine: Engine, tokens: list[int] = PROMPT) -> dict[str, int]:
    hit = engine.hit(tokens)
    return hit.tiers if hit else {}


# ---------------------------------------------------------------------- what is loaded


def loads(*ends: int) -> Any:
    """Which chunks can be loaded, of whatever group."""
    return lambda group, end: end in ends


@pytest.mark.parametrize(
    ("local", "prompt", "ends", "length"),
    [
        (0, 100, [32, 64, 96], 96),  # three chunks
        (0, 100, [32, 96], 32),  # up to the first hole
        (16, 100, [32, 64], 64),  # the chunk that holds the end of the local hit is needed whole
        (16, 100, [64], 16),
        (48, 100, [64], 48),  # 16 tokens more are less than a chunk
        (48, 100, [64, 96], 96),
        (64, 64, [], 64),
        (0, 64, [32, 64], 63),  # the last token is computed
        (0, 31, [32], 0),  # no whole chunk in the prompt
    ],
)
def test_whole_chunks_are_loaded_on_top_of_the_local_hit(local: int, prompt: int, ends: list[int], length: int) -> None:
    assert length_with_loads([FULL], local, prompt, 1, loads(*ends)) == min(length, max(local, prompt - 1))


@pytest.mark.parametrize(
    ("prompt", "ends", "length"),
    [
        (100, [64, 96], 96),  # two chunks are the whole window
        (100, [32, 96], 32),  # the right-most run is too short, the one from the start counts however short it is
        (96, [64, 96], 95),  # with windows one token less is looked up, but its chunk still counts
        (100, [96], 0),
    ],
)
def test_a_window_needs_its_last_chunks_only(prompt: int, ends: list[int], length: int) -> None:
    window = ChunkedGroup(1, 32, 2, pops=False)
    assert length_with_loads([window], 0, prompt, 1, loads(*ends)) == length


def test_windows_are_looked_up_again_when_another_group_shortens_the_prefix() -> None:
    one, other = ChunkedGroup(1, 16, 1, pops=False), ChunkedGroup(2, 16, 1, pops=False)
    held = {1: (16, 64), 2: (16, 48)}
    assert length_with_loads([one, other], 0, 70, 1, lambda group, end: end in held[group.group]) == 16


def test_a_state_of_mamba_counts_where_it_lies_on_its_alignment() -> None:
    state = ChunkedGroup(1, 32, 1, pops=False)
    assert length_with_loads([FULL, state], 0, 100, 32, lambda group, end: group is FULL or end == 64) == 64


def test_draft_layers_do_not_take_the_last_chunk_found() -> None:
    draft = ChunkedGroup(0, 16, None, pops=True)
    assert length_with_loads([draft], 0, 64, 1, loads(16, 32, 48)) == 32
    assert length_with_loads([draft], 0, 64, 1, loads(16)) == 0
    window = ChunkedGroup(1, 16, 1, pops=True)
    assert length_with_loads([window], 0, 70, 1, loads(32, 48)) == 32  # two in a row, the last one popped
    assert length_with_loads([window], 0, 70, 1, loads(48)) == 0


def test_chunks_are_so_many_blocks_of_each_group() -> None:
    specs = (Spec("full_attention", 64, None, None, (0,)), Spec("sliding_window", 16, 40, None, (1, 2)))
    groups = chunked_groups(ReuseRules(specs, 64, 16), 2, frozenset({2}))
    assert groups == [
        ChunkedGroup(0, 128, None, pops=False),
        ChunkedGroup(1, 32, 2, pops=False),
        ChunkedGroup(2, 32, 2, pops=True),
    ]
    assert chunked_groups(ReuseRules((Spec("mamba", 64, None, None, (0,)),), 64, 16), 1, frozenset()) == [
        ChunkedGroup(0, 64, 1, pops=False)
    ]
    local = Spec("chunked_local_attention", 16, None, 64, (0,))
    assert chunked_groups(ReuseRules((local,), 16, 16), 1, frozenset()) is None


def test_the_hit_is_the_engines_own_and_whole_chunks_after_it() -> None:
    engine = engine_with(8)
    engine.send(chunk(0), chunk(2), chunk(4))
    engine.send(removed(HASHES[3:]))
    assert (engine.hit_tokens(PROMPT), tiers(engine)) == (96, {"GPU": 48, "CPU": 96})
    engine.send(removed(HASHES[2:4], "CPU", group_idx=0))
    # block 2 is on the GPU, but the chunk that holds the end of it is not on the CPU
    assert (engine.hit_tokens(PROMPT), tiers(engine)) == (48, {"GPU": 48, "CPU": 48})


def test_of_what_the_engine_may_have_itself_nothing_is_promised_to_be_loaded() -> None:
    """After a gap its own hit may end anywhere, also within the last chunk, which is then not loaded."""
    engine = engine_with(8)
    engine.send(chunk(0, 4), chunk(4, 4), removed(HASHES))
    assert engine.hit_tokens(PROMPT) == 127
    engine.publisher.count_gap(2, 2)
    engine.sequence_number = 3
    engine.send(chunk(0, 4), chunk(4, 4))
    assert engine.hit_tokens(PROMPT) == 128 - 48


# ---------------------------------------------------------------------- what the events say


def test_a_placeholder_of_a_known_hash_is_a_residency() -> None:
    engine = engine_with(1)
    engine.send(placeholder(0))
    assert engine.references() == {("GPU", 0, "", HASHES[0]): 1, ("CPU", 0, "", HASHES[0]): 1}


def test_a_placeholder_of_an_unknown_hash_waits_for_its_content() -> None:
    engine = Engine(ContentIndex())
    engine.send(stored([7], None, numbers(500, 16), group_idx=0), placeholder(0))
    assert (engine.publisher.status().unplaced, engine.resident(PROMPT)) == (1, 0)
    engine.send(stored(HASHES[:1], None, PROMPT[:16], group_idx=0), removed(HASHES[:1]))
    assert (engine.publisher.status().unplaced, tiers(engine)) == (0, {"GPU": 0, "CPU": 16})


def test_a_placeholder_stands_for_all_blocks_of_its_chunk_if_their_number_is_told() -> None:
    engine = engine_with(8, blocks_per_chunk=4)
    engine.send(placeholder(7), removed(HASHES))
    assert (engine.resident(PROMPT), engine.hit_tokens(PROMPT)) == (0, 0)  # the first chunk is missing
    engine.send(placeholder(3))
    assert tiers(engine) == {"GPU": 0, "CPU": 128}
    assert engine.hit_tokens(PROMPT) == 127
    check_index(engine.index)
    engine.send(removed([HASHES[7]], "CPU", group_idx=0))
    assert (tiers(engine), engine.hit_tokens(PROMPT)) == ({"GPU": 0, "CPU": 64}, 64)
    engine.send(removed([HASHES[3]], "CPU", group_idx=0))
    assert engine.publisher.status().residencies == 0
    check_index(engine.index)


def test_a_prompt_that_leaves_a_chunk_has_the_blocks_before() -> None:
    engine = engine_with(8, blocks_per_chunk=4)
    engine.send(placeholder(3), removed(HASHES))
    other = PROMPT[:48] + numbers(9_000, 16)
    assert (tiers(engine, other), engine.hit_tokens(other)) == ({"GPU": 0, "CPU": 48}, 0)


def test_the_blocks_of_a_chunk_are_recovered_and_go_with_it() -> None:
    engine, store = engine_with(8, blocks_per_chunk=4), DictStore()
    engine.send(placeholder(3), placeholder(3), removed(HASHES))
    engine.send(removed([HASHES[3]], "CPU", group_idx=0))
    store.flush(engine.publisher)
    recovered = Engine(ContentIndex(), options={"blocks_per_chunk": 4})
    store.recover(recovered.publisher)
    assert tiers(recovered) == tiers(engine) == {"GPU": 0, "CPU": 64}
    recovered.send(removed([HASHES[3]], "CPU", group_idx=0))
    assert recovered.publisher.status().residencies == 0


def test_without_being_told_a_placeholder_is_one_block() -> None:
    engine = engine_with(4)
    engine.send(placeholder(3), removed(HASHES[:4]))
    assert engine.references() == {("CPU", 0, "", HASHES[3]): 1}


@pytest.mark.parametrize("order", [(0, 2, 4), (4, 2, 0), (2, 0, 4)])
def test_chunks_that_describe_themselves_come_in_any_order(order: tuple[int, ...]) -> None:
    engine = engine_with(6)
    engine.send(*(chunk(first) for first in order), removed(HASHES[:6]))
    assert tiers(engine) == {"GPU": 0, "CPU": 96}
    assert engine.publisher.connector.blocks_per_chunk == 2


def test_a_chunk_counts_by_its_last_block_alone_where_nobody_holds_those_before_it() -> None:
    """It was announced before chunks had shown how long they are."""
    engine = engine_with(6)
    engine.send(placeholder(5))
    engine.send(chunk(0, 3), removed(HASHES[:3], "CPU", group_idx=0), removed(HASHES[3:6]))
    assert engine.hit_tokens(PROMPT) == 6 * 16


def test_overlapping_chunks_announce_shared_blocks_once_each() -> None:
    """Two chunks of four blocks, equal in the first two; each is removed by itself."""
    engine = Engine(ContentIndex())
    one, other = HASHES[:4], [*HASHES[:2], 2_002, 2_003]
    branch = [*PROMPT[:32], *numbers(7_000, 32)]
    engine.send(stored(one, None, PROMPT[:64], group_idx=0), stored(other[2:], one[1], branch[32:], group_idx=0))
    for hashes, tokens in ((one, PROMPT[:64]), (other, branch)):
        engine.send(stored(hashes, None, tokens, medium="CPU", group_idx=0))
    assert [engine.references()["CPU", 0, "", h] for h in (*one, *other[2:])] == [2, 2, 1, 1, 1, 1]
    engine.send(removed([*one, *other[2:]]), removed(other, "CPU", group_idx=0))
    assert [engine.references().get(("CPU", 0, "", h), 0) for h in (*one, *other[2:])] == [1, 1, 1, 1, 0, 0]
    assert (tiers(engine)["CPU"], tiers(engine, branch)["CPU"]) == (64, 32)


def test_a_chunk_never_says_what_its_hashes_mean() -> None:
    """A salted prompt's chunk looks like a plain one's."""
    engine = Engine(ContentIndex())
    salted = [["salt"], []]
    engine.send(chunk(0))
    assert (engine.resident(PROMPT), engine.publisher.status().unplaced) == (0, 2)
    engine.send(stored(HASHES[:2], None, PROMPT[:32], group_idx=0, extra_keys=salted), removed(HASHES[:2]))
    assert (engine.resident(PROMPT), engine.resident(PROMPT, cache_salt="salt")) == (0, 32)


def test_what_a_hash_means_is_known_as_long_as_any_tier_holds_it() -> None:
    engine = engine_with(2)
    engine.send(chunk(0), removed(HASHES[:2]))
    engine.publisher.residents.ghosts.clear()
    engine.send(stored(HASHES[2:3], HASHES[1], PROMPT[32:48], group_idx=0))
    assert tiers(engine) == {"GPU": 0, "CPU": 48}


def test_places_count_each_for_itself() -> None:
    engine = engine_with(1)
    engine.send(placeholder(0), placeholder(0, ownership="tier-1"), placeholder(0, medium="STORAGE"))
    engine.send(removed(HASHES[:1], "CPU", group_idx=0), removed([99], "CPU", group_idx=0))
    assert engine.references() == {
        ("GPU", 0, "", HASHES[0]): 1,
        ("CPU", 0, "tier-1", HASHES[0]): 1,
        ("STORAGE", 0, "", HASHES[0]): 1,
    }


# ---------------------------------------------------------------------- clears


def media_after(engine: Engine, *events: Any) -> set[str]:
    engine.send(*events)
    return {medium for medium, _, _, _ in engine.references()}


def test_a_clear_is_of_the_engines_own_blocks_once_a_connector_has_shown() -> None:
    engine = engine_with(4)
    assert media_after(engine, placeholder(0, ownership="a"), placeholder(0), cleared()) == {"CPU"}


@pytest.mark.parametrize(
    ("engine", "options", "left"),
    [
        ("vllm", {}, {"CPU"}),
        ("vllm", {"clear_scope": "all"}, set()),
        ("auto", {}, {"CPU"}),
        ("sglang", {}, set()),
        ("sglang", {"clear_scope": "device"}, {"CPU"}),
    ],
)
def test_the_scope_of_a_clear_is_an_option(engine: str, options: dict[str, object], left: set[str]) -> None:
    index = ContentIndex()
    publisher = Engine(index, engine=engine, options=options)
    publisher.send(stored(HASHES[:1], None, PROMPT[:16]), placeholder(0))
    assert media_after(publisher, cleared()) == left


def test_an_engine_that_nobody_named_and_that_tells_no_group_has_no_connector() -> None:
    """SGLang's host tier, which its clears empty."""
    engine = Engine(ContentIndex(), engine="auto")
    own, host = (stored(HASHES[:1], None, PROMPT[:16], medium=medium) for medium in ("GPU", "CPU_PINNED"))
    del own["lora_name"], host["lora_name"]  # never sent without one
    assert media_after(engine, own, host, cleared()) == set()
    assert not engine.publisher.connector.is_shown


def test_a_clear_of_one_medium_leaves_the_others() -> None:
    engine = engine_with(2)
    engine.send(chunk(0), placeholder(0, medium="STORAGE"))
    assert media_after(engine, cleared(type="TierBlocksCleared", medium="cpu")) == {"GPU", "STORAGE"}
    assert media_after(engine, cleared(medium="STORAGE")) == {"GPU"}


# ---------------------------------------------------------------------- resets that nobody announces


def reset_engine(**options: Any) -> Engine:
    """All four chunks are on the CPU, and the engine was cleared; perhaps the connector, too."""
    engine = engine_with(8, **options)
    engine.send(*(chunk(first) for first in (0, 2, 4, 6)), placeholder(7, medium="STORAGE"))
    engine.send(cleared(), stored(HASHES, None, PROMPT, group_idx=0))
    return engine


def on_cpu(engine: Engine) -> dict[int, int]:
    """References by number of block."""
    counts = engine.references()
    return {i: count for i, h in enumerate(HASHES) if (count := counts.get(("CPU", 0, "", h), 0))}


def test_a_chunk_stored_again_proves_that_its_tier_was_reset_with_the_last_clear() -> None:
    engine = reset_engine()
    engine.send(removed(HASHES), chunk(2))
    assert on_cpu(engine) == {2: 1, 3: 1}
    assert engine.publisher.counters["silent_connector_resets"] == 1
    assert engine.references()["STORAGE", 0, "", HASHES[7]] == 1  # stores only are announced of it: no proof
    check_index(engine.index)


def test_what_was_stored_since_the_clear_stays() -> None:
    """Two chunks share their first block: of its two references, the one from before goes."""
    engine = reset_engine()
    branch, hashes = [*PROMPT[:16], *numbers(7_000, 16)], [HASHES[0], 2_001]
    engine.send(stored(hashes[1:], HASHES[0], branch[16:], group_idx=0))
    engine.send(stored(hashes, None, branch, medium="CPU", group_idx=0))
    assert on_cpu(engine)[0] == 2
    engine.send(chunk(4))
    assert on_cpu(engine) == {0: 1, 4: 1, 5: 1}
    assert engine.references()["CPU", 0, "", 2_001] == 1
    assert engine.publisher.counters["silent_connector_resets"] == 1


def test_a_removal_of_what_was_there_before_proves_that_it_was_not_reset() -> None:
    engine = reset_engine()
    engine.send(removed(HASHES[6:], "CPU", group_idx=0), chunk(0))
    assert on_cpu(engine) == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
    assert not engine.publisher.counters["silent_connector_resets"]


def test_a_chunk_removed_and_stored_again_proves_nothing() -> None:
    engine = reset_engine()
    engine.send(stored([2_000], None, numbers(7_000, 16), group_idx=0))
    fresh = stored([2_000], None, [], 0, medium="CPU", group_idx=0)
    engine.send(fresh, removed([2_000], "CPU", group_idx=0), fresh, fresh)
    assert not engine.publisher.counters["silent_connector_resets"]
    assert len(on_cpu(engine)) == 8


def test_a_removal_of_very_many_blocks_proves_as_much_as_of_a_few() -> None:
    engine, many = engine_with(8), list(range(5_000, 5_100))
    tokens = numbers(7_000, 16 * len(many))
    engine.send(stored(many, None, tokens, group_idx=0), stored(many, None, tokens, medium="CPU", group_idx=0))
    engine.send(*(chunk(first) for first in (0, 2, 4, 6)), cleared(), stored(HASHES, None, PROMPT, group_idx=0))
    engine.send(removed(many, "CPU", group_idx=0), chunk(0))
    assert on_cpu(engine) == {0: 2, 1: 2, **dict.fromkeys(range(2, 8), 1)}
    assert not engine.publisher.counters["silent_connector_resets"]


def test_without_a_clear_nothing_is_proven() -> None:
    engine = engine_with(4)
    engine.send(chunk(0), chunk(2), chunk(0))
    assert on_cpu(engine) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_a_chunk_that_waits_for_its_content_proves_as_much() -> None:
    engine = Engine(ContentIndex())
    engine.send(placeholder(0), placeholder(1), cleared(), placeholder(2), placeholder(1))
    assert engine.publisher.counters["silent_connector_resets"] == 1
    engine.send(stored(HASHES[:3], None, PROMPT[:48], group_idx=0))
    assert on_cpu(engine) == {1: 1, 2: 1}


def test_a_lost_batch_may_have_been_the_removal() -> None:
    engine = reset_engine()
    engine.publisher.count_gap(2, 2)
    engine.send(stored(HASHES, None, PROMPT, group_idx=0), chunk(0))
    assert not engine.publisher.counters["silent_connector_resets"]


def test_what_was_stored_since_a_clear_survives_the_store() -> None:
    engine, store = reset_engine(), DictStore()
    engine.send(stored([2_000], None, numbers(7_000, 16), group_idx=0))
    engine.send(stored([2_000], None, [], 0, medium="CPU", group_idx=0))
    store.flush(engine.publisher)
    recovered = Engine(ContentIndex())
    store.recover(recovered.publisher)
    for each in (engine, recovered):
        each.send(chunk(0))
        assert on_cpu(each) == {0: 1, 1: 1}
        assert each.references()["CPU", 0, "", 2_000] == 1
        assert each.publisher.connector.blocks_per_chunk == 2


def test_what_is_watched_is_bounded() -> None:
    connector = Connector()
    engine = engine_with(1)
    engine.send(placeholder(0))
    key = next(key for key in engine.publisher.residents.holders if key.medium == "CPU")
    connector.note_clear([key])
    connector.note_stored(key, numbers(0, WATCHED_MAX))
    assert connector.was_reset(key, WATCHED_MAX)
    connector.note_stored(key, [WATCHED_MAX])
    assert not connector.was_reset(key, WATCHED_MAX + 1)


@pytest.mark.parametrize("options", [{"blocks_per_chunk": "4"}, {"eagle_groups": 3}, {"clear_scope": 1}])
def test_options_of_another_type_are_passed_over(options: dict[str, object]) -> None:
    assert Connector.from_options(options) == Connector()


def test_an_event_of_very_many_blocks_is_not_taken_for_a_chunk() -> None:
    connector = Connector()
    connector.show(CHUNK_BLOCKS_MAX + 1)
    assert (connector.is_shown, connector.blocks_per_chunk) == (True, 1)


def hashes_of(references: Iterable[tuple[str, int, str, Any]]) -> set[Any]:
    return {engine_hash for *_, engine_hash in references}


def test_a_removal_fans_out_to_every_block_of_a_chunk() -> None:
    engine = engine_with(4)
    engine.send(chunk(0), chunk(2), removed(HASHES[:4]), removed(HASHES[:2], "CPU", group_idx=0))
    assert hashes_of(engine.references()) == set(HASHES[2:4])
    engine.send(removed(HASHES[:4], "CPU", group_idx=0))
    assert (engine.references(), engine.publisher.counters["unknown_removals"]) == ({}, 2)


def test_what_waits_for_its_content_counts_on_its_tier_if_the_engines_own_hash_says_what_it_is() -> None:
    hashes = numbers_of(PROMPT)
    told = {"engine_hash": {"algorithm": "sha256"}, "blocks_per_chunk": 2}
    engine = Engine(ContentIndex(), options=told)
    engine.send(stored([1], None, numbers(9_000, 16), group_idx=0), stored([hashes[0]], 77, PROMPT[:16], group_idx=0))
    engine.send(stored([hashes[2]], None, [], 0, "CPU", group_idx=0))
    assert engine.hit_tokens(PROMPT) == 16
    engine.send(stored([hashes[3]], None, [], 0, "CPU", group_idx=0))
    assert engine.hit_tokens(PROMPT) == 16  # the chunk that holds the end of the local hit is missing
    engine.send(stored([hashes[1]], None, [], 0, "CPU", group_idx=0))
    assert engine.hit_tokens(PROMPT) == 64
