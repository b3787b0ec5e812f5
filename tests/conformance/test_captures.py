"""Recorded engine streams: our answers are the engine's own, also across a recovery from the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance.player import Player, captures, limits, more_captures
from tests.sizes import some
from tests.store_stand_in import DictStore

FLUSH_EVERY = 40


def each(paths: Sequence[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name.removesuffix(".jsonl.gz"))


every_capture = each(captures() + more_captures())
some_captures = each(some(captures()) + some(more_captures()))
vllm_captures = each([path for path in captures() + more_captures() if path.name.startswith("vllm")])


def test_the_captures_are_there() -> None:
    assert len(captures()) >= 28
    assert len(more_captures()) >= 7


@every_capture
def test_answers_equal_the_engines_own(path: Path) -> None:
    player = Player(path)
    verdict = player.play()
    too_low, too_high = limits(path)
    assert verdict.exact > 50
    assert (verdict.too_low <= too_low, verdict.too_high <= too_high) == (True, True), verdict.first_wrong
    assert not player.bad_events()
    assert not verdict.tiers["low"]
    assert not verdict.tiers["high"]


@pytest.mark.parametrize("name", ["offload-chunk", "offload-placeholder", "offload-reset", "offload-self", "hicache"])
def test_the_reach_on_each_tier_is_compared_where_the_engine_knows_it(name: str) -> None:
    (path,) = (path for path in captures() if name in path.name)
    assert Player(path).play().tiers["exact"] > 800


@vllm_captures
def test_told_how_an_engine_hashes_answers_equal_its_own_where_no_event_explains_them(path: Path) -> None:
    verdict = Player(path, has_engine_hash=True).play()
    too_low, too_high = limits(path, has_engine_hash=True)
    assert (verdict.too_low <= too_low, verdict.too_high <= too_high) == (True, True), verdict.first_wrong


def flush_all(player: Player, stores: dict[str, DictStore]) -> None:
    for worker, publisher in player.publishers.items():
        store = stores.setdefault(worker, DictStore())
        store.flush(publisher)
        store.assert_equals(publisher)


@every_capture
def test_what_is_flushed_equals_what_is_held(path: Path) -> None:
    player, stores = Player(path), dict[str, DictStore]()
    for i, record in enumerate(player.records()):
        player.play_one(record)
        if i % FLUSH_EVERY == 0:
            flush_all(player, stores)
    flush_all(player, stores)
    assert any(store.rows for store in stores.values())


@some_captures
def test_a_failed_flush_is_made_up_for_by_the_next(path: Path) -> None:
    player, stores = Player(path), dict[str, DictStore]()
    for i, record in enumerate(player.records()):
        player.play_one(record)
        if i % FLUSH_EVERY == 0:
            flush_all(player, stores)
        elif i % 13 == 0:
            for worker, publisher in player.publishers.items():
                changes = publisher.take_changes()
                if changes is not None:
                    if i % 2:  # it was written all the same, but the answer got lost
                        stores.setdefault(worker, DictStore()).write(changes)
                    publisher.restore_changes(changes)
    flush_all(player, stores)


@some_captures
@pytest.mark.parametrize("part", [1 / 4, 1 / 2, 3 / 4])
def test_a_recovery_in_the_middle_changes_no_answer(path: Path, part: float) -> None:
    unbroken, broken = Player(path), Player(path)
    records = list(unbroken.records())
    next(broken.records())  # registers the workers
    cut = int(len(records) * part)
    for i, record in enumerate(records):
        if i == cut:
            for worker, publisher in list(broken.publishers.items()):
                store = DictStore()
                store.flush(publisher)
                broken.rebuild(worker, store.recover)
                store.assert_equals(broken.publishers[worker])
        unbroken.play_one(record)
        broken.play_one(record)
        if record["type"] == "probe":
            assert broken.answers(record) == unbroken.answers(record), f"record {i}, recovered at {cut}"
    assert broken.verdict.exact == unbroken.verdict.exact
    for worker, publisher in unbroken.publishers.items():
        assert sorted(map(repr, broken.publishers[worker].residencies())) == sorted(map(repr, publisher.residencies()))


@some_captures
def test_recovering_after_every_batch_changes_nothing(path: Path) -> None:
    unbroken, broken = Player(path), Player(path)
    records = list(unbroken.records())
    next(broken.records())  # registers the workers
    stores = {worker: DictStore() for worker in broken.publishers}
    for i, record in enumerate(records):
        unbroken.play_one(record)
        broken.play_one(record)
        if record["type"] == "frame":
            for worker, store in stores.items():
                store.flush(broken.publishers[worker])
            broken.rebuild_all({worker: store.recover for worker, store in stores.items()})
        elif record["type"] == "probe":
            assert broken.answers(record) == unbroken.answers(record), f"record {i}"
    assert broken.index.stats() == unbroken.index.stats()
