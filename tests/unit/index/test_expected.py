"""Blocks that routers expect: a hit that may come, apart from what is held."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from indexer.identity.chain import SEED, chain_keys, local_hashes
from indexer.index import expected
from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from indexer.index.prefix_query import Detail, PrefixQuery
from indexer.index.publisher import PublisherIndex
from tests.engine_events import MODEL, Engine, cleared, numbers, removed, stored
from tests.index_invariants import check_index

PROMPT = numbers(1, 4 * 16)
HASHES = numbers(2**40, 4)
UNTIL, BEFORE = 2.0, 1.0


def expect(engine: Engine, tokens: list[int] = PROMPT, until: float = UNTIL, **query: Any) -> int:
    return engine.index.expect(engine.publisher, PrefixQuery(MODEL, tokens, **query), until).blocks


def told(index: ContentIndex, tokens: list[int] = PROMPT, now: float = BEFORE, **query: Any) -> dict[str, Any]:
    """Hit tokens, and those that are only expected, by worker in the order of the answer."""
    answer = index.prefix_hits(PrefixQuery(MODEL, tokens, **{"expected": False, **query}), now)
    return {hit.worker_id: (hit.hit_tokens, getattr(hit, "expected_tokens", 0)) for hit in answer.hits}


def send_prompt(engine: Engine, blocks: int = 4, first: int = 0) -> None:
    parent = HASHES[first - 1] if first else None
    engine.send(stored(HASHES[first:blocks], parent, PROMPT[16 * first : 16 * blocks]))


def test_a_prompt_that_was_sent_to_a_worker_is_expected_there() -> None:
    index = ContentIndex()
    engine, _ = Engine(index, "a"), Engine(index, "b")
    assert told(index) == {}
    assert expect(engine) == 4
    longer = [*PROMPT, 7]
    assert told(index, longer) == {"a": (0, 64)}
    assert told(index, longer, expected=True) == {"a": (64, 64)}
    assert told(index, longer, expected=None) == {}
    assert told(index, PROMPT[:40]) == {"a": (0, 32)}
    assert told(index, PROMPT) == {"a": (0, 48)}, "a token is always computed"
    assert told(index, [*PROMPT[:32], *numbers(900, 40)]) == {"a": (0, 32)}
    assert told(index, numbers(900, 40)) == {}
    assert told(index, longer, workers=frozenset({"b"})) == {}
    (hit,) = index.prefix_hits(PrefixQuery(MODEL, longer, expected=True), BEFORE).hits
    assert (hit.resident_tokens, hit.tiers) == (0, {"GPU": 0, "CPU": 0})


def test_what_sets_prompts_apart_sets_expectations_apart() -> None:
    index = ContentIndex()
    expect(Engine(index, "a"), lora_name="x")
    assert told(index) == {}
    assert told(index, lora_name="x") == {"a": (0, 48)}
    expect(Engine(index, "b"))
    assert told(index, [], local_hashes=[*local_hashes(as_bytes(PROMPT[:16]), 16, SEED), 5]) == {"b": (0, 16)}


def test_real_events_take_the_place_of_what_is_expected() -> None:
    index = ContentIndex()
    engine = Engine(index, "a")
    expect(engine)
    longer = [*PROMPT, 7]
    send_prompt(engine, 2)
    assert told(index, longer) == {"a": (32, 32)}
    assert told(index, longer, expected=True) == {"a": (64, 32)}
    send_prompt(engine, 4, first=2)
    assert told(index, longer) == {"a": (64, 0)}
    assert index.expected_room.taken == 0
    engine.send(removed(HASHES[2:]))
    assert told(index, longer) == {"a": (32, 0)}, "it has gone again: nobody expects it any more"


def test_what_is_held_already_is_not_expected() -> None:
    index = ContentIndex()
    engine = Engine(index, "a")
    send_prompt(engine)
    assert expect(engine) == 0
    assert told(index, [*PROMPT, 7]) == {"a": (64, 0)}


def test_it_ends_with_its_time_and_a_later_time_holds() -> None:
    index = ContentIndex()
    engine = Engine(index, "a")
    expect(engine, PROMPT[:32])
    assert told(index, now=UNTIL) == {}
    expect(engine, until=UNTIL + 5)
    expect(engine, until=UNTIL - 1)
    assert told(index, now=UNTIL + 4) == {"a": (0, 48)}
    scope = index.scope("default", MODEL)
    assert scope is not None
    for _ in index.expire_expected(UNTIL + 4):
        pass
    assert index.expected_room.taken == 4
    for _ in index.expire_expected(UNTIL + 5):
        pass
    assert (index.expected_room.taken, scope.expected) == (0, None)


@pytest.mark.parametrize("how", ["restart", "clear", "cleared by the engine", "removed"])
def test_a_worker_that_lost_everything_is_expected_to_have_nothing(how: str) -> None:
    index = ContentIndex()
    engine, other = Engine(index, "a"), Engine(index, "b")
    expect(engine)
    expect(other)
    if how == "restart":
        engine.restart()
    elif how == "clear":
        engine.publisher.clear()
    elif how == "cleared by the engine":
        engine.send(cleared())
    else:
        index.remove_publisher(engine.publisher.registration.key)
    assert told(index) == {"b": (0, 48)}
    assert index.expected_room.taken == 4
    check_index(index)


def test_another_tier_that_is_cleared_leaves_what_is_expected() -> None:
    index = ContentIndex()
    engine = Engine(index, "a")
    engine.send(stored([1], None, numbers(500, 16)))
    expect(engine)
    engine.send(cleared(medium="CPU"))
    assert told(index) == {"a": (0, 48)}
    engine.send(cleared(medium="GPU"))
    assert told(index) == {}


def test_expiry_goes_on_in_steps_while_publishers_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "EXPIRY_WORK", 1)
    index = ContentIndex()
    engines = [Engine(index, name) for name in "abc"]
    for engine in engines:
        expect(engine)
    steps = index.expire_expected(UNTIL)
    next(steps)
    index.remove_publisher(engines[1].publisher.registration.key)
    expect(engines[0], until=UNTIL + 1)
    assert list(steps) == [None]
    assert told(index, now=UNTIL) == {"a": (0, 48)}
    assert index.expected_room.taken == 4


def test_who_no_longer_counts_is_not_expected_to_have_anything() -> None:
    index = ContentIndex()
    engine = Engine(index, "a")
    expect(engine)
    engine.publisher.set_credited(False)
    assert told(index) == {}


def test_at_the_bounds_the_first_blocks_of_a_prompt_are_taken() -> None:
    index = ContentIndex(IndexLimits(expected_blocks_max=3, expected_blocks_total_max=4))
    a, b = Engine(index, "a"), Engine(index, "b")
    assert expect(a) == 3
    assert expect(a) == 3, "those are expected already"
    assert expect(b) == 1
    assert told(index, [*PROMPT, 7]) == {"a": (0, 48), "b": (0, 16)}
    assert index.expected_room.taken == 4


def test_expected_blocks_have_the_size_of_the_workers_blocks() -> None:
    index = ContentIndex()
    engine = Engine(index, "a", block_size=16)
    engine.send(stored([5], None, numbers(500, 32), 32))
    assert expect(engine, PROMPT[:63]) == 1
    assert told(index, PROMPT[:63]) == {"a": (0, 32)}
    assert told(index, PROMPT[:31]) == {}


def test_an_engine_that_drops_a_block_drops_it_of_what_is_expected() -> None:
    index = ContentIndex()
    engine = Engine(index, "a", options={"eagle": True})
    send_prompt(engine, 1)
    expect(engine)
    assert told(index, [*PROMPT, 7]) == {"a": (0, 48)}


def test_states_are_expected_only_where_the_prompt_ends() -> None:
    index = ContentIndex()
    engine = Engine(index, "a")
    mamba = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    engine.send(
        stored([1], None, numbers(500, 16), group_idx=0, kv_cache_spec_kind="full_attention"),
        stored([2], None, numbers(500, 16), **mamba),
    )
    assert expect(engine) == 1
    assert told(index, [*PROMPT, 7]) == {"a": (0, 64)}
    assert told(index, [*PROMPT[:48], *numbers(800, 17)]) == {}


def test_it_is_what_a_plain_list_would_say() -> None:
    """Random prompts, stores, removals and times, beside sets of keys."""
    for seed in range(30):
        random = Random(seed)
        index = ContentIndex()
        engines = [Engine(index, name, block_size=16) for name in "ab"]
        plain: dict[tuple[PublisherIndex, int], float] = {}
        prompts = [[*PROMPT[: 16 * shared], *numbers(1_000 * (shared + 1), 16 * (4 - shared))] for shared in range(4)]
        now = 0.0
        for _ in range(60):
            engine, tokens = random.choice(engines), random.choice(prompts)[: random.choice([16, 40, 64])]
            keys = keys_of(tokens)
            now += random.random() / 4
            action = random.random()
            if action < 0.4:
                until = now + random.choice([0.5, 2.0])
                expect(engine, tokens, until)
                for key in set(keys) - held(engine):
                    known = plain.get((engine.publisher, key), 0.0)
                    plain[engine.publisher, key] = max(until, known)
            elif action < 0.6:
                engine.send(stored(keys, None, tokens[: 16 * len(keys)]))
            elif action < 0.8:
                engine.send(removed(keys[-1:]))
            else:
                for _ in index.expire_expected(now):
                    pass
            have = {e.publisher: held(e) for e in engines}
            plain = {(p, key): until for (p, key), until in plain.items() if until > now and key not in have[p]}
            for prompt in prompts:
                asked = [*prompt, 7]
                ends = list(enumerate(keys_of(prompt), 1))
                answers = told(index, asked, now)
                for e in engines:
                    deepest = max((16 * end for end, key in ends if (e.publisher, key) in plain), default=0)
                    hit, expected = answers.get(e.publisher.registration.worker_id, (0, 0))
                    assert expected == max(0, deepest - hit), seed
            assert index.expected_room.taken >= len(plain)


def as_bytes(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def keys_of(tokens: list[int]) -> list[int]:
    return chain_keys(None, local_hashes(as_bytes(tokens), 16, SEED))


def held(engine: Engine) -> set[int]:
    return {key for holder in engine.publisher.residents.holders.values() for _, key in holder.items()}


def test_a_publisher_of_which_something_is_only_expected_still_warns() -> None:
    index = ContentIndex()
    engine = Engine(index)
    expect(engine)
    answer = index.prefix_hits(PrefixQuery(MODEL, PROMPT, expected=False), BEFORE)
    assert [hit.hit_tokens for hit in answer.hits] == [0]
    assert "publisher_never_spoke" in [warning.code for warning in answer.warnings]


@pytest.mark.parametrize(
    ("detail", "field", "nothing"),
    [
        (Detail.INTERVALS, "spans", []),
        (Detail.GROUPS, "groups", []),
        (Detail.TIERS, "tier_tokens", {"GPU": 0, "CPU": 0}),
    ],
)
def test_what_is_only_expected_has_every_detail(detail: Detail, field: str, nothing: object) -> None:
    index = ContentIndex()
    expect(Engine(index))
    (hit,) = index.prefix_hits(PrefixQuery(MODEL, PROMPT, expected=False, detail=detail), BEFORE).hits
    assert getattr(hit, field) == nothing
