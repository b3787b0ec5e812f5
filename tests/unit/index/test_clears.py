"""What a holder held ends at once for whoever asks; the memory of it is swept up bit by bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from indexer.compiled import IS_COMPILED
from indexer.index import key_space, publisher, table
from indexer.index.columns import StoredResidencies
from indexer.index.content_index import ContentIndex
from indexer.index.holder import Holder
from indexer.index.kernels import OLD_CAPACITY
from indexer.index.key_space import PLACES_AT_ONCE, STEP_WORK, SWEEP_WORK, KeySpace
from indexer.index.pending import Pending
from indexer.index.state import HolderKey, ResidencyRow
from tests.engine_events import MODEL, Engine, cleared, numbers, removed, stored
from tests.index_invariants import check_index, check_space
from tests.store_stand_in import DictStore

KEY = HolderKey("GPU", 0, "")
MANY = 300_000 if IS_COMPILED else 10_000
PROMPT = numbers(1, 32 * 16)
HASHES = numbers(1_000, 32)


def holder_of(space: KeySpace, count: int) -> Holder:
    holder = Holder(KEY, space, None, Pending(0))
    numbers_ = np.arange(1, count + 1, dtype=np.uint64)
    ones, cohorts = np.ones(count, np.uint32), np.zeros(count, np.int32)
    holder.load(StoredResidencies(KEY, numbers_, numbers_, numbers_ * 16, ones, cohorts))
    return holder


def swept(space: KeySpace) -> None:
    while space.sweeps:
        space.sweep(SWEEP_WORK)


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear sweeps one place of a table, and a batch another."""
    monkeypatch.setattr(key_space, "PLACES_AT_ONCE", 1)
    monkeypatch.setattr(key_space, "SWEEP_WORK", 1)
    monkeypatch.setattr(publisher, "SWEEP_WORK_PER_BATCH", 1)


@pytest.fixture
def index() -> ContentIndex:
    return ContentIndex()


@pytest.fixture
def engines(index: ContentIndex) -> tuple[Engine, Engine]:
    """Both hold the whole prompt."""
    both = Engine(index, "w0"), Engine(index, "w1")
    for engine in both:
        engine.send(stored(HASHES, None, PROMPT))
    return both


def sweeps_of(index: ContentIndex) -> list[int]:
    scope = index.scope("default", MODEL)
    return [] if scope is None else [sweep.slot for space in scope.spaces.values() for sweep in space.sweeps]


def test_a_clear_and_each_slice_look_at_a_bounded_number_of_places() -> None:
    space = KeySpace(16)
    holder = holder_of(space, MANY)
    left = [len(space)]
    holder.clear()
    left.append(len(space))
    while space.sweeps:
        space.sweep(SWEEP_WORK)
        left.append(len(space))
    assert max(before - after for before, after in pairwise(left)) <= SWEEP_WORK + PLACES_AT_ONCE
    assert MANY / SWEEP_WORK < len(left) < 5 * MANY / SWEEP_WORK
    assert (left[-1], space.held_keys) == (0, 0)


def test_a_slice_makes_a_bounded_number_of_steps() -> None:
    """Each key is held by another set of holders, so each one takes a step that was never made."""
    space = KeySpace(16)
    holder = holder_of(space, 4_096)
    for slot in [space.allocate("other") for _ in range(12)]:
        keys = np.array([key for key in range(4_096) if key >> (slot - 1) & 1 and key], np.uint64)
        space.add_run(slot, keys, np.ones(len(keys), np.int64))
    steps = space.steps_made
    holder.clear()
    assert 0 < space.steps_made - steps <= SWEEP_WORK // STEP_WORK + PLACES_AT_ONCE


@pytest.mark.parametrize("how", ["clear", "restart"])
def test_what_was_cleared_is_credited_no_more(
    slowly: None, index: ContentIndex, engines: tuple[Engine, Engine], how: str
) -> None:
    one, other = engines
    if how == "clear":
        one.send(cleared())
    else:
        one.restart()
    assert sweeps_of(index)
    assert (one.hit(PROMPT), other.resident(PROMPT)) == (None, len(PROMPT))
    assert one.publisher.status().residencies == 0
    assert {holder.worker_id for key in keys_of(other) for holder in index.block(key)} == {"w1"}
    check_index(index)
    other.restart()
    assert (one.hit(PROMPT), other.hit(PROMPT)) == (None, None)
    assert index.stats()["models"][0]["content_keys"] == 0  # type: ignore[index]
    assert not any(index.block(key) for key in keys_of(other))


def keys_of(engine: Engine) -> list[int]:
    return [content_key for _, _, content_key, _ in engine.publisher.residencies()]


def test_what_is_stored_right_after_counts_and_goes_on_to(
    slowly: None, index: ContentIndex, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    one.send(cleared(), stored(HASHES[:4], None, PROMPT[:64]))
    assert sweeps_of(index)
    assert one.resident(PROMPT) == 64
    one.send(stored(HASHES[4:8], HASHES[3], PROMPT[64:128]), removed(HASHES[6:8]))
    assert one.resident(PROMPT) == 96
    while index.sweep():
        check_index(index)
    assert one.resident(PROMPT) == 96
    check_index(index)


def test_batches_sweep_up_even_if_nobody_else_does(
    slowly: None, index: ContentIndex, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    one.restart()
    for _ in range(200):
        other.send(removed([]))
        check_index(index)
    assert not sweeps_of(index)


def test_clears_in_a_row_are_swept_one_after_the_other(
    slowly: None, index: ContentIndex, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    for _ in range(5):
        one.send(cleared(), stored(HASHES, None, PROMPT))
        check_index(index)
    assert len(sweeps_of(index)) == 5
    assert one.resident(PROMPT) == len(PROMPT)
    while index.sweep():
        check_index(index)
    assert one.resident(PROMPT) == len(PROMPT)


def test_at_the_bound_the_oldest_is_swept_in_one_go(
    slowly: None, monkeypatch: pytest.MonkeyPatch, index: ContentIndex, engines: tuple[Engine, Engine]
) -> None:
    monkeypatch.setattr(key_space, "RETIRED_MAX", 2)
    one, _ = engines
    for _ in range(10):
        one.send(cleared(), stored(HASHES, None, PROMPT))
        assert len(sweeps_of(index)) <= 2
    assert one.publisher.space is not None
    assert len(one.publisher.space.slots) <= 2 + 3


def test_a_publisher_may_leave_and_another_come_meanwhile(
    slowly: None, index: ContentIndex, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    one.restart()
    index.remove_publisher(other.publisher.registration.key)
    third = Engine(index, "w2")
    third.send(stored(HASHES[:2], None, PROMPT[:32]))
    assert len(sweeps_of(index)) == 2
    assert (one.hit(PROMPT), third.resident(PROMPT)) == (None, 32)
    while index.sweep():
        check_index(index)
    assert third.resident(PROMPT) == 32


def test_a_slot_is_free_again_once_it_is_swept(slowly: None) -> None:
    space = KeySpace(16)
    holder = holder_of(space, 40)
    holder.clear()
    assert holder.slot == 1
    swept(space)
    assert Holder(KEY, space, None, Pending(0)).slot == 0


def test_whatever_a_holder_held_is_swept(slowly: None) -> None:
    """Keys that several hashes mean, wide hashes, and keys that a table cannot hold."""
    space = KeySpace(16)
    holder = Holder(KEY, space, None, Pending(0))
    held = [(1, 10), (2, 10), (b"wide", 10), (3, 0), (b"wider", 2**64 - 1), (4, 11)]
    for engine_hash, key in held:
        holder.hold(engine_hash, ResidencyRow(key, None, key, 16, 0, 2), 1)  # type: ignore[arg-type]
    holder.clear()
    assert len(space) >= 3
    holder.hold(1, ResidencyRow(0, None, 0, 16, 0, 1), 1)
    swept(space)
    assert [(key, mask) for key, _, mask in space.entries()] == [(0, 1 << holder.slot)]
    check_space(space, {holder: {0}})


def test_a_table_that_grows_is_swept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of what it holds lies where it did before."""
    monkeypatch.setattr(table, "SMALL", 1_024)
    space = KeySpace(16)
    holder = holder_of(space, 3_000)
    holder.table.make_room(len(holder.table))
    assert holder.table.meta[OLD_CAPACITY]
    holder.clear()
    swept(space)
    assert len(space) == 0


def test_the_store_learns_of_a_clear_at_once(slowly: None, index: ContentIndex, engines: tuple[Engine, Engine]) -> None:
    one, _ = engines
    store = DictStore()
    store.flush(one.publisher)
    one.send(cleared(), stored(HASHES[:1], None, PROMPT[:16]))
    assert sweeps_of(index)
    store.flush(one.publisher)
    store.assert_equals(one.publisher)
    assert len(store.rows) == 1
