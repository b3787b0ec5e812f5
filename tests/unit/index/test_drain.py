"""What only one worker holds."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.drain import DrainImpact
from indexer.index.heat import Heat, WeighedKeys, weigh, weights_of
from indexer.index.prefix_query import PrefixQuery
from tests.engine_events import MODEL, Engine, numbers, stored

PROMPT = numbers(1, 6 * 16)
HASHES = numbers(2**40, 6)


def send(engine: Engine, first: int, last: int, **fields: Any) -> None:
    parent = HASHES[first - 1] if first else None
    engine.send(stored(HASHES[first:last], parent, PROMPT[16 * first : 16 * last], **fields))


def impact(index: ContentIndex, worker_id: str, heat: dict[int, WeighedKeys] | None = None) -> DrainImpact:
    scope = index.scope("default", MODEL)
    assert scope is not None
    found = DrainImpact(scope, worker_id)
    for _ in found.steps(heat or {}):
        pass
    return found


def only_here(index: ContentIndex, worker_id: str) -> tuple[int, int]:
    """Tokens held, and held here only."""
    found = impact(index, worker_id)
    return found.held_tokens, found.only_here_tokens


def test_what_another_worker_holds_too_is_not_lost() -> None:
    index = ContentIndex()
    a, b = Engine(index, "a"), Engine(index, "b")
    send(a, 0, 6)
    send(b, 0, 2)
    assert only_here(index, "a") == (96, 64)
    assert only_here(index, "b") == (32, 0)
    assert only_here(index, "nobody") == (0, 0)
    assert (impact(index, "a").held_blocks, impact(index, "a").only_here_blocks) == (6, 4)


def test_ranks_of_a_worker_go_together() -> None:
    index = ContentIndex()
    send(Engine(index, "a"), 0, 3)
    send(Engine(index, "a", dp_rank=1), 0, 6)
    assert only_here(index, "a") == (96, 96)


def test_a_block_counts_once_whatever_tiers_and_groups_it_is_in() -> None:
    index = ContentIndex()
    a, b = Engine(index, "a"), Engine(index, "b")
    send(a, 0, 2)
    send(a, 0, 2, medium="CPU")
    send(b, 1, 2, medium="CPU", parent_block_hash=HASHES[0])
    assert only_here(index, "a")[0] == 32


def test_a_pool_of_others_keeps_blocks_and_one_of_its_own_does_not() -> None:
    for serves, lost in ((None, 32), (["b"], 32), (["a", "b"], 32), (["a"], 96)):
        index = ContentIndex()
        a, pool = Engine(index, "a"), Engine(index, "p", engine="mooncake", is_pool=True, serves=serves)
        send(a, 0, 6)
        send(pool, 0, 4)
        assert only_here(index, "a") == (96, lost), serves


def test_who_does_not_count_in_answers_keeps_nothing() -> None:
    index = ContentIndex()
    a, b, c = (Engine(index, name) for name in "abc")
    for engine in (a, b, c):
        send(engine, 0, 6)
    b.publisher.set_credited(False)
    assert only_here(index, "a") == (96, 0)
    c.publisher.count_gap(1, 2)
    assert only_here(index, "a") == (96, 96)
    assert only_here(index, "c") == (0, 0)


def test_blocks_have_their_own_size() -> None:
    index = ContentIndex()
    a = Engine(index, "a", block_size=16)
    a.send(stored(HASHES[:3], None, PROMPT, 32))
    found = impact(index, "a")
    assert (found.only_here_blocks, found.only_here_tokens) == (3, 96)


def test_what_was_cleared_is_not_held_before_it_is_swept() -> None:
    index = ContentIndex()
    a, b = Engine(index, "a"), Engine(index, "b")
    for engine in (a, b):
        send(engine, 0, 6)
    b.publisher.clear()
    assert only_here(index, "a") == (96, 96)


def test_queries_weigh_what_is_lost() -> None:
    index = ContentIndex()
    a, b = Engine(index, "a"), Engine(index, "b")
    send(a, 0, 6)
    send(b, 0, 2)
    for tokens in (PROMPT, PROMPT, PROMPT[:32], numbers(900, 32)):
        query = PrefixQuery(MODEL, [*tokens, 7])
        index.note_heat(query, 0.0)
    samples = index.heat.samples("default", MODEL)
    assert [len(s.keys) for s in samples] == [6, 6, 2, 0]
    weights = weights_of(samples, 1, 0.0, 10.0)
    heat = {16: weigh(samples, weights, 16)}
    found = impact(index, "a", heat)
    assert (found.queried_tokens, found.queried_only_here_tokens) == (2 * 96 + 32, 2 * 64)
    assert impact(index, "b", heat).queried_only_here_tokens == 0


def test_what_a_query_leaves_out_is_heat_all_the_same() -> None:
    index = ContentIndex()
    send(Engine(index, "a"), 0, 6)
    for only in ({"workers": frozenset({"nobody"})}, {"min_hit_tokens": 1_000}):
        index.note_heat(PrefixQuery(MODEL, [*PROMPT, 7], **only), 0.0)
    assert [len(sample.keys) for sample in index.heat.samples("default", MODEL)] == [6, 6]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_counting_every_key_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.index.drain.SETS_AT_ONCE", 2)
    monkeypatch.setattr("indexer.index.drain.SLOTS_AT_ONCE", 2)
    random = Random(seed)
    index = ContentIndex()
    engines = [Engine(index, f"w{number % 4}", dp_rank=number // 4) for number in range(6)]
    for _ in range(30):
        engine = random.choice(engines)
        family = random.randrange(5)
        tokens = [*PROMPT[: 16 * family], *numbers(1_000 * (family + 1), 96 - 16 * family)]
        length = random.randint(1, 6)
        hashes = [hash((tuple(tokens[: 16 * (end + 1)]),)) & (2**63 - 1) for end in range(length)]
        engine.send(stored(hashes, None, tokens[: 16 * length], medium=random.choice(["GPU", "CPU"])))
    holders: dict[int, set[str]] = defaultdict(set)
    for engine in engines:
        for _, _, key, _ in engine.publisher.residencies():
            holders[key].add(engine.publisher.registration.worker_id)
    for worker in ("w0", "w1", "w2", "w3"):
        held = [names for names in holders.values() if worker in names]
        assert only_here(index, worker) == (16 * len(held), 16 * sum(names == {worker} for names in held))


def test_each_step_takes_no_more_than_its_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the rest as well: with many sets that would be quadratic."""
    monkeypatch.setattr("indexer.index.drain.SETS_AT_ONCE", 2)
    index = ContentIndex()
    for length in range(1, 6):
        send(Engine(index, f"w{length}"), 0, length)
    scope = index.scope("default", MODEL)
    assert scope is not None
    (space,) = scope.spaces.values()
    taken: list[int] = []

    class Uses(list[int]):
        def __getitem__(self, part: Any) -> Any:
            taken.append(len(super().__getitem__(part)))
            return super().__getitem__(part)

    uses = space.uses
    monkeypatch.setattr(space, "uses", SimpleNamespace(tolist=lambda: Uses(uses.tolist())))
    assert impact(index, "w5").held_blocks == 5
    assert len(taken) >= 3
    assert max(taken) == 2


def test_an_index_that_samples_nothing_has_no_heat() -> None:
    assert Heat(0, 10).samples("default", MODEL) == []
