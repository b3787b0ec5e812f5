from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from indexer.index.columns import PublisherRows
from indexer.index.content_index import ContentIndex
from indexer.index.explain import RANGES_MAX, LastEvent, Parting, PublisherExplanation
from indexer.index.journal import ENTRY_BYTES
from indexer.index.limits import IndexLimits
from indexer.index.prefix_query import PrefixQuery
from tests.engine_events import MODEL, Engine, G, cleared, numbers, removed, stored
from tests.explaining import explained, last_events

TOKENS = numbers(0, 10 * G)
NEVER = LastEvent("never_seen")


def told_of(engine: Engine, tokens: list[int] = TOKENS, **query: Any) -> PublisherExplanation:
    (told,) = explained(engine.index, PrefixQuery(MODEL, tokens, **query), engine.publisher).publishers
    return told


def rules_of(told: PublisherExplanation) -> list[tuple[str, int, int]]:
    return [(step.rule, step.before, step.after) for step in told.steps]


def engine_with(blocks: int, **options: Any) -> Engine:
    engine = Engine(ContentIndex(), **options)
    engine.send(stored(range(1, blocks + 1), None, TOKENS[: blocks * G]))
    return engine


def test_a_prompt_that_is_all_there_is_limited_by_its_last_token() -> None:
    told = told_of(engine_with(10))
    assert (told.hit_tokens, told.resident_tokens, told.first_miss) == (144, 160, None)
    assert rules_of(told) == [("last_token", 160, 159), ("whole_blocks", 159, 144)]
    assert last_events(told) == [(0, 160, "held", None)]


def test_a_missing_block_limits_and_its_removal_is_named() -> None:
    engine = engine_with(10)
    engine.send(removed([4, 5]))
    engine.send(removed([9]))
    told = told_of(engine)
    assert told.hit_tokens == told.resident_tokens == 48
    assert told.limited_by is not None
    assert (told.limited_by.rule, told.limited_by.groups) == ("missing_block", [0])
    first, second = (LastEvent("removed", number, None, "GPU") for number in (1, 2))
    assert last_events(told) == [
        (0, 48, "held", None),
        (48, 80, "missing", first),
        (80, 128, "held", None),
        (128, 144, "missing", second),
        (144, 160, "held", None),
    ]
    assert told.first_miss is not None
    assert (told.first_miss.start, told.first_miss.last_event) == (48, first)
    key = int(told.first_miss.content_key, 16)
    assert engine.publisher.residents.keys_of([4]) == [key]


def test_blocks_that_nobody_ever_named_were_never_seen() -> None:
    told = told_of(engine_with(4))
    assert last_events(told) == [(0, 64, "held", None), (64, 160, "missing", NEVER)]
    assert told.journal.is_whole


@pytest.mark.parametrize("why", ["trimmed", "off", "joined late", "gap", "recovered"])
def test_never_seen_is_not_said_by_a_journal_that_does_not_have_all(why: str) -> None:
    engine = Engine(ContentIndex(IndexLimits(journal_bytes_max=0 if why == "off" else 1 << 20)))
    if why == "joined late":
        engine.sequence_number = 7
    if why == "trimmed":
        engine.publisher.journal.bytes_max = ENTRY_BYTES + 400
        engine.send(stored([100], None, numbers(5_000, G)))
    if why == "recovered":
        checkpoint = replace(engine.publisher.checkpoint, sequence_number=3)
        engine.publisher.load(PublisherRows(checkpoint, None))
    engine.send(stored(range(1, 5), None, TOKENS[: 4 * G]))
    if why == "gap":
        engine.publisher.count_gap(5, 6)
        engine.send(stored(range(1, 5), None, TOKENS[: 4 * G]))
    told = told_of(engine)
    assert last_events(told)[-1] == (64, 160, "missing", LastEvent("not_in_journal"))
    assert not told.journal.is_whole


def test_a_journal_says_how_far_it_reaches_back() -> None:
    engine = Engine(ContentIndex(IndexLimits(journal_bytes_max=2 * ENTRY_BYTES)))
    engine.send(stored(range(1, 5), None, TOKENS[: 4 * G]))
    engine.send(removed([4]))
    reach = told_of(engine).journal
    assert (reach.is_whole, reach.begins_at_number) == (False, 1)


@pytest.mark.parametrize("kind", ["cleared", "cleared_by_operator", "restart", "applied_again"])
def test_what_ends_all_is_the_last_event_of_what_was_held(kind: str) -> None:
    engine = engine_with(4)
    engine.send(removed([4]))
    match kind:
        case "cleared":
            engine.send(cleared())
        case "cleared_by_operator":
            engine.publisher.clear(5.0)
        case "restart":
            engine.publisher.restart(5.0)
        case _:
            engine.publisher.drop_residencies(5.0)
    told = last_events(told_of(engine))
    assert [(start, end, event.kind) for start, end, _, event in told if event] == [
        (0, 48, kind),
        (48, 64, "removed"),
        (64, 160, "never_seen"),
    ]


def test_blocks_from_before_a_gap_are_unverified_and_the_gap_is_named() -> None:
    engine = engine_with(4)
    engine.publisher.count_gap(1, 3, at=9.0)
    told = told_of(engine)
    assert (told.hit_tokens, told.unverified) == (0, 4)
    assert last_events(told)[0] == (0, 64, "unverified", LastEvent("gap", 0, 9.0, None))


def test_blocks_on_another_machine_are_held_but_do_not_count() -> None:
    engine = engine_with(4)
    engine.send(stored([4], None, [], 0, "CPU", locality="REMOTE", group_idx=0), removed([4]))
    told = told_of(engine)
    assert told.hit_tokens == 48
    assert [(part.start, part.state, part.tiers) for part in told.groups[0].ranges][1] == (48, "remote", ["CPU@REMOTE"])


def test_the_window_that_is_not_there_limits() -> None:
    kind = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 40, "group_idx": 1}
    engine = Engine(ContentIndex())
    engine.send(stored(range(1, 11), None, TOKENS, group_idx=0, kv_cache_spec_kind="full_attention"))
    engine.send(stored(range(1, 4), None, TOKENS[: 3 * G], **kind))
    told = told_of(engine)
    assert told.limited_by is not None
    assert (told.limited_by.rule, told.limited_by.groups, told.hit_tokens) == ("window", [1], 48)
    assert [(group.group, group.kind, group.window) for group in told.groups] == [
        (0, "full_attention", None),
        (1, "sliding_window", 40),
    ]


def test_an_eagle_engine_drops_a_block() -> None:
    told = told_of(engine_with(4, options={"eagle": True}))
    assert rules_of(told)[-2:] == [("missing_block", 144, 64), ("eagle_drop", 64, 48)]
    assert told.groups[0].drops


def test_hits_are_cut_to_the_alignment_of_groups() -> None:
    engine = Engine(ContentIndex())
    engine.send(stored(range(1, 10), None, TOKENS[: 9 * G], group_idx=0, kv_cache_spec_kind="full_attention"))
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 65}
    engine.send(stored([101, 102], None, TOKENS[: 8 * G], 4 * G, **window))
    told = told_of(engine)
    assert (told.alignment, told.hit_tokens) == (64, 128)
    assert ("alignment", 144, 128) in rules_of(told)


def test_what_a_connector_loads_makes_a_hit_longer() -> None:
    engine = engine_with(4)
    for block in range(5, 9):
        engine.send(stored([block], block - 1, TOKENS[(block - 1) * G : block * G]))
        engine.send(stored([block], None, [], 0, "CPU", group_idx=0))
    engine.send(removed([5, 6, 7, 8]))
    told = told_of(engine)
    assert rules_of(told)[-1] == ("connector_loads", 64, 128)
    assert told.limited_by is not None
    assert told.limited_by.rule == "missing_block"


def test_pools_make_a_hit_longer() -> None:
    index = ContentIndex()
    engine, pool = Engine(index, "w"), Engine(index, "store", engine="mooncake", is_pool=True)
    engine.send(stored(range(1, 5), None, TOKENS[: 4 * G]))
    pool.send(stored(range(21, 29), None, TOKENS[: 8 * G], medium="DISK"))
    told = told_of(engine)
    assert (told.pools, told.hit_tokens, rules_of(told)[-1]) == (["store"], 128, ("pools", 64, 128))
    assert told.first_miss is not None
    assert told.first_miss.start == 128
    assert told_of(pool).absent == "pool"


@pytest.mark.parametrize(
    ("query", "absent"), [({}, None), ({"model": "other"}, "other_model"), ({"tenant": "other"}, "other_tenant")]
)
def test_a_publisher_of_another_model_is_told_apart(query: dict[str, str], absent: str | None) -> None:
    engine = engine_with(4)
    asked = PrefixQuery(query.get("model", MODEL), TOKENS, tenant=query.get("tenant", "default"))
    (told,) = explained(engine.index, asked, engine.publisher).publishers
    assert (told.absent, told.model, told.tenant) == (absent, MODEL, "default")
    assert bool(told.groups) == (absent is None)


def test_a_publisher_that_does_not_count_or_has_said_nothing_is_told_apart() -> None:
    engine = engine_with(4)
    engine.publisher.set_credited(False)
    told = told_of(engine)
    assert (told.absent, told.hit_tokens) == ("not_credited", 0)
    assert last_events(told)[0][:3] == (0, 64, "held")
    assert told_of(Engine(engine.index, "silent")).absent == "nothing_announced"


def test_two_publishers_part_where_one_has_what_the_other_has_not() -> None:
    engine = engine_with(6)
    other = Engine(engine.index, "other")
    other.send(stored(range(1, 9), None, TOKENS[: 8 * G]))
    query = PrefixQuery(MODEL, TOKENS)
    found = explained(engine.index, query, engine.publisher, other.publisher)
    assert found.parting == Parting(96, "other", 0)
    assert [told.hit_tokens for told in found.publishers] == [96, 128]
    other.send(removed([7, 8]))
    assert explained(engine.index, query, engine.publisher, other.publisher).parting is None


def test_what_nobody_holds_in_between_does_not_end_the_ranges() -> None:
    """Queries stop at the first block that nobody has; explanations do not."""
    engine = engine_with(10)
    engine.send(removed([2]))
    assert [part[:3] for part in last_events(told_of(engine))] == [
        (0, 16, "held"),
        (16, 32, "missing"),
        (32, 160, "held"),
    ]


def test_there_are_no_more_ranges_than_a_bound_and_a_count_of_the_rest() -> None:
    blocks = 2 * RANGES_MAX + 4
    tokens = numbers(0, blocks * G)
    engine = Engine(ContentIndex())
    engine.send(stored(range(1, blocks + 1), None, tokens))
    engine.send(removed(range(2, blocks + 1, 2)))
    (group,) = told_of(engine, tokens).groups
    assert (len(group.ranges), group.ranges_left_out) == (RANGES_MAX, RANGES_MAX + 4)
