"""What a lost batch may have removed is not credited, not forgotten, and comes back when it is proven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from indexer.index import holder, parent_links, residents, unverified
from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from indexer.index.state import Coverage, CoverageReason, HolderKey
from tests.engine_events import Engine, G, cleared, numbers, removed, stored
from tests.index_invariants import check_index
from tests.store_stand_in import DictStore

PLACE = HolderKey("GPU", 0, "")


@pytest.fixture(params=[False, True], ids=["as columns", "event by event"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """With 6 blocks, hashes 1 to 6. A second place makes batches be applied event by event."""
    one = Engine(ContentIndex())
    if request.param:
        one.send(stored([99], None, numbers(9_000, G), medium="CPU", extra_keys=[None]))
    chain(one, 6)
    yield one
    check_index(one.index)


def chain(engine: Engine, blocks: int, first: int = 1) -> None:
    """One batch per block."""
    for i in range(first, first + blocks):
        engine.send(stored([i], i - 1 or None, block(i)))


def block(i: int) -> list[int]:
    return numbers(1_000 * i, G)


def prompt(blocks: int) -> list[int]:
    return [token for i in range(1, blocks + 1) for token in block(i)]


def lose(engine: Engine) -> None:
    engine.publisher.count_gap(engine.sequence_number, engine.sequence_number)
    engine.sequence_number += 1


def give_links(engine: Engine, store: DictStore | None = None) -> None:
    store = store or DictStore()
    store.flush(engine.publisher)
    store.give_links(engine.publisher)


def unverified_in(engine: Engine) -> int:
    return engine.publisher.status().unverified


def on_gpu(engine: Engine) -> dict[Any, int]:
    return {h: count for (medium, _, _, h), count in engine.references().items() if medium == "GPU"}


def test_after_a_gap_nothing_is_credited_and_everything_is_known(engine: Engine) -> None:
    lose(engine)
    assert engine.hit(prompt(6)) is None
    assert on_gpu(engine) == dict.fromkeys(range(1, 7), 0)


def test_a_store_proves_its_parent_and_with_links_all_ancestors(engine: Engine) -> None:
    lose(engine)
    engine.send(stored([7], 6, block(7)))
    assert on_gpu(engine) == {1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 1, 7: 1}
    give_links(engine)
    assert engine.resident(prompt(7)) == 7 * G
    assert on_gpu(engine) == dict.fromkeys(range(1, 8), 1)


def test_what_is_stored_after_a_gap_has_its_links_without_the_store(engine: Engine) -> None:
    lose(engine)
    engine.send(stored([20], None, block(20)))
    chain(engine, 3, first=21)
    lose(engine)
    engine.send(stored([24], 23, block(24)))
    assert engine.resident([*block(20), *block(21), *block(22), *block(23), *block(24)]) == 5 * G


def test_a_proof_goes_through_what_became_unverified_at_different_gaps(engine: Engine) -> None:
    with patch.object(unverified, "JOINED_MAX", -1), patch.object(holder, "CHAIN_MAX", 2):
        lose(engine)
        chain(engine, 3, first=7)
        lose(engine)
        assert len(engine.publisher.residents.unverified.cohorts) == 2
        chain(engine, 1, first=10)
        give_links(engine)
    assert engine.resident(prompt(10)) == 10 * G


def settle(engine: Engine) -> int:
    """Do all that a gap has left to be done; in how many steps."""
    steps = 0
    while engine.index.sweep():
        check_index(engine.index)
        steps += 1
        assert steps < 100
    return steps


def test_a_long_proof_goes_on_bit_by_bit(engine: Engine) -> None:
    lose(engine)
    with patch.object(residents, "PROVEN_AT_ONCE", 1):
        give_links(engine)
        engine.send(stored([7], 6, block(7)))
        assert engine.resident(prompt(7)) == 0
        assert on_gpu(engine)[1] == 0
        check_index(engine.index)
        assert settle(engine) > 1
    assert on_gpu(engine) == dict.fromkeys(range(1, 8), 1)


def test_a_gap_ends_a_proof_that_is_not_over(engine: Engine) -> None:
    lose(engine)
    with patch.object(residents, "PROVEN_AT_ONCE", 1):
        give_links(engine)
        engine.send(stored([7], 6, block(7)))
        lose(engine)
        settle(engine)
    assert set(on_gpu(engine).values()) == {0}


def test_what_is_removed_before_a_proof_comes_to_it_ends_it_there(engine: Engine) -> None:
    lose(engine)
    with patch.object(residents, "PROVEN_AT_ONCE", 1):
        give_links(engine)
        engine.send(stored([7], 6, block(7)))
        engine.send(removed([1]))
        settle(engine)
    assert 1 not in on_gpu(engine)
    assert engine.resident(prompt(7)) == 0


def test_what_became_unverified_at_two_gaps_is_merged_bit_by_bit(engine: Engine) -> None:
    lose(engine)
    chain(engine, 3, first=7)
    lose(engine)
    (cohort,) = engine.publisher.residents.unverified.cohorts
    assert [len(holder) for holder in cohort.places[PLACE]] == [5, 3 + 1]  # 6 was proven
    before = engine.references()
    with patch.object(unverified, "MERGED_AT_ONCE", 1):
        assert settle(engine) == 4
    assert [len(holder) for holder in cohort.places[PLACE]] == [9]
    assert engine.references() == before
    store = DictStore()
    store.flush(engine.publisher)
    store.assert_equals(engine.publisher)


def test_no_more_than_a_few_wait_to_be_merged(engine: Engine) -> None:
    with patch.object(unverified, "APART_MAX", 2):
        for gap in range(5):
            lose(engine)
            engine.send(stored([20 + gap], None, block(20 + gap)))
    (cohort,) = engine.publisher.residents.unverified.cohorts
    assert len(cohort.places[PLACE]) <= 2
    check_index(engine.index)
    settle(engine)
    assert len(on_gpu(engine)) == 6 + 5


def test_links_of_blocks_that_are_gone_are_forgotten_bit_by_bit(engine: Engine) -> None:
    with patch.object(parent_links, "SPARE", 0), patch.object(parent_links, "LOOKED_AT_ONCE", 8):
        lose(engine)
        give_links(engine)
        chain(engine, 20, first=7)
        links = engine.publisher.residents.links[PLACE]
        assert len(links) == 25
        engine.send(removed([*range(5, 27)]))
        engine.publisher.expire_unverified(0.0, 600.0)
        assert len(links) == 25
        settle(engine)
        assert {h for h in range(1, 27) if links.get(h)} == {2, 3, 4}


def test_a_store_of_the_block_itself_proves_it(engine: Engine) -> None:
    lose(engine)
    engine.send(stored([1, 2], None, prompt(2)))
    assert on_gpu(engine) == {1: 1, 2: 1, 3: 0, 4: 0, 5: 0, 6: 0}
    assert engine.resident(prompt(6)) == 2 * G


def test_counts_of_before_are_not_believed(engine: Engine) -> None:
    """Of two references one may have ended in what was lost: one is proven."""
    engine.send(stored([6], 5, block(6)))
    lose(engine)
    engine.send(stored([7], 6, block(7)))
    assert on_gpu(engine)[6] == 1
    engine.send(removed([6]))
    assert 6 not in on_gpu(engine)


@pytest.mark.parametrize("end", [removed([5, 6]), cleared()], ids=["removal", "clear"])
def test_what_ends_cannot_be_proven(engine: Engine, end: Any) -> None:
    lose(engine)
    engine.send(end)
    assert not on_gpu(engine).keys() & {5, 6}
    engine.send(stored([7], 6, block(7)))  # its parent is a ghost
    give_links(engine)
    assert engine.resident(prompt(7)) == 0


def test_a_restart_ends_everything(engine: Engine) -> None:
    lose(engine)
    engine.restart()
    assert engine.references() == {}
    assert engine.publisher.checkpoint.cohort == 1


def test_a_removal_of_what_is_unverified_is_no_unknown_one(engine: Engine) -> None:
    lose(engine)
    engine.send(removed([3]))
    assert "unknown_removals" not in engine.publisher.counters


def test_an_unreadable_batch_is_a_lost_one(engine: Engine) -> None:
    engine.publisher.skip(engine.sequence_number, 0, "truncated_batch")
    assert engine.hit(prompt(6)) is None


def test_what_waits_for_its_parent_is_forgotten_at_a_gap(engine: Engine) -> None:
    engine.send(stored([50], 49, block(50)))
    lose(engine)
    engine.send(stored([49], None, block(49)))
    assert engine.resident([*block(49), *block(50)]) == G


def test_only_groups_of_full_attention_prove_anything() -> None:
    engine = Engine(ContentIndex())
    kinds: list[dict[str, Any]] = [
        {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 100},
    ]
    for i in (1, 2):
        engine.send(*(stored([10 * (1 + k["group_idx"]) + i], None, block(i)) | k for k in kinds))
    lose(engine)
    engine.send(*(stored([10 * (1 + k["group_idx"]) + 3], 10 * (1 + k["group_idx"]) + 2, block(3)) | k for k in kinds))
    counts = {h: count for (_, _, _, h), count in engine.references().items()}
    assert counts == {11: 0, 12: 1, 13: 1, 21: 0, 22: 0, 23: 1}


def test_a_store_on_another_medium_proves_nothing(engine: Engine) -> None:
    lose(engine)
    engine.send(stored([7], 6, block(7), medium="CPU", extra_keys=[None]))
    assert on_gpu(engine) == dict.fromkeys(range(1, 7), 0)


def test_links_that_go_round_in_a_circle_end_a_proof(engine: Engine) -> None:
    lose(engine)
    engine.send(stored([1], 6, block(1)), stored([7], 1, block(7)))
    give_links(engine)
    check_index(engine.index)


# ---------------------------------------------------------------------- time, bound, coverage


def test_what_stays_unverified_is_dropped_after_its_time(engine: Engine) -> None:
    publisher = engine.publisher
    lose(engine)
    engine.send(stored([7], 6, block(7)))
    for now in (1_000.0, 1_600.0, 1_749.0):
        publisher.expire_unverified(now, 600.0)
        assert unverified_in(engine) >= 5
    publisher.expire_unverified(1_750.0, 600.0)
    assert unverified_in(engine) == 0
    assert on_gpu(engine) == {6: 1, 7: 1}
    assert publisher.status().counters["dropped_unverified"] >= 5


def test_what_became_unverified_later_is_dropped_later(engine: Engine) -> None:
    publisher = engine.publisher
    lose(engine)
    publisher.expire_unverified(0.0, 600.0)
    publisher.expire_unverified(200.0, 600.0)
    engine.send(stored([20], None, block(20)))
    lose(engine)
    publisher.expire_unverified(200.0, 600.0)
    publisher.expire_unverified(750.0, 600.0)
    assert on_gpu(engine) == {20: 0}
    publisher.expire_unverified(950.0, 600.0)
    assert on_gpu(engine) == {}


def test_gaps_in_a_row_share_a_cohort(engine: Engine) -> None:
    for i in range(7, 30):
        lose(engine)
        chain(engine, 1, first=i)
    assert len(engine.publisher.residents.unverified.cohorts) == 1


def test_at_the_bound_the_oldest_are_dropped() -> None:
    engine = Engine(ContentIndex(IndexLimits(unverified_max=5)))
    chain(engine, 6)
    lose(engine)
    assert (unverified_in(engine), engine.publisher.status().counters["dropped_unverified"]) == (0, 6)
    chain(engine, 5, first=1)
    lose(engine)
    assert unverified_in(engine) == 5


def test_coverage_heals_when_nothing_is_unverified_any_more(engine: Engine) -> None:
    publisher = engine.publisher
    lose(engine)
    first_after = engine.sequence_number
    engine.send(stored([7], 6, block(7)))
    assert publisher.coverage is Coverage.DEGRADED
    lose(engine)
    first_after = engine.sequence_number
    engine.send(stored([8], 7, block(8)))
    publisher.expire_unverified(0.0, 600.0, 1.0)
    assert publisher.trust.reason is CoverageReason.GAP
    publisher.expire_unverified(750.0, 600.0, 2.0)
    assert publisher.trust == (Coverage.SINCE, CoverageReason.HEALED, 2.0)
    assert publisher.checkpoint.since == first_after


def test_nothing_heals_that_has_another_cause(engine: Engine) -> None:
    lose(engine)
    engine.publisher.set_coverage(Coverage.DEGRADED, CoverageReason.GRANULE_REFINED)
    engine.send(cleared(), removed([99], medium="CPU"))
    engine.publisher.expire_unverified(0.0, 600.0)
    assert engine.publisher.checkpoint.reason is CoverageReason.GRANULE_REFINED


def test_links_are_kept_only_in_trouble(engine: Engine) -> None:
    publisher = engine.publisher
    assert not publisher.residents.links
    lose(engine)
    engine.send(stored([7], 6, block(7)))
    assert [key for key, _ in publisher.wanted_links()] == [PLACE]
    give_links(engine)
    assert publisher.wanted_links() == []
    for now in (0.0, 750.0, 1_400.0):
        publisher.expire_unverified(now, 600.0)
    assert not publisher.residents.links


# ---------------------------------------------------------------------- the store


def test_a_gap_costs_the_store_nothing_but_the_checkpoint(engine: Engine) -> None:
    store = DictStore()
    store.flush(engine.publisher)
    lose(engine)
    changes = engine.publisher.take_changes()
    assert changes is not None
    assert (changes.size, changes.checkpoint.cohort) == (0, 1)
    store.write(changes)
    store.assert_equals(engine.publisher)


def test_rows_from_before_and_after_a_gap_are_told_apart_in_one_flush(engine: Engine) -> None:
    store = DictStore()
    lose(engine)
    engine.send(stored([7], 6, block(7)), removed([2]))
    lose(engine)
    engine.send(stored([8], 7, block(8)), stored([3], 2, block(3)))
    store.flush(engine.publisher)
    store.assert_equals(engine.publisher)
    cohorts = {h: row.cohort for (place, h), row in store.rows.items() if place == PLACE}
    assert cohorts == {1: 0, 3: 2, 4: 0, 5: 0, 6: 2, 7: 2, 8: 2}


def test_a_block_that_was_unverified_and_ended_again_leaves_no_row(engine: Engine) -> None:
    store = DictStore()
    store.flush(engine.publisher)
    lose(engine)
    engine.send(stored([1], None, block(1)), removed([1]))
    store.flush(engine.publisher)
    store.assert_equals(engine.publisher)


def test_what_was_dropped_and_stored_again_before_a_flush_stays(engine: Engine) -> None:
    store = DictStore()
    lose(engine)
    for now in (0.0, 750.0):
        engine.publisher.expire_unverified(now, 600.0)
    engine.send(stored([1, 2], None, prompt(2)))
    store.flush(engine.publisher)
    store.assert_equals(engine.publisher)
    assert on_gpu(engine) == {1: 1, 2: 1}


def test_a_recovered_publisher_goes_on_where_the_other_was(engine: Engine) -> None:
    lose(engine)
    engine.send(stored([7], 6, block(7)))
    store = DictStore()
    store.flush(engine.publisher)
    index = ContentIndex()
    fresh = index.add_publisher(engine.publisher.registration)
    store.recover(fresh)
    store.assert_equals(fresh)
    assert set(fresh.residencies()) == set(engine.publisher.residencies())
    engine.publisher, engine.index = fresh, index
    engine.send(stored([8], 7, block(8)))
    give_links(engine, store)
    assert engine.resident(prompt(8)) == 8 * G


def test_a_gap_while_links_are_read_ends_what_they_were_to_prove(engine: Engine) -> None:
    """The store that proved block 6 was before that gap: whatever was lost since may have removed 1 to 5."""
    lose(engine)
    engine.send(stored([7], 6, block(7)))
    store = DictStore()
    store.flush(engine.publisher)
    ((key, links),) = engine.publisher.wanted_links()
    links.complete(engine.publisher.residents.holders[key])
    lose(engine)
    store.give_links(engine.publisher)
    assert not engine.publisher.residents.use_links(key, links)
    assert set(on_gpu(engine).values()) == {0}


@pytest.mark.parametrize("in_one_event", [True, False])
def test_a_block_of_hash_zero_is_proven_like_any_other(engine: Engine, in_one_event: bool) -> None:
    """Zero is no value of a table, so kernels leave its children's links out."""
    lose(engine)
    if in_one_event:
        engine.send(stored([8, 0, 51, 52], None, prompt(4)))
    else:
        engine.send(stored([8, 0], None, prompt(2)), stored([51, 52], 0, block(3) + block(4)))
    lose(engine)
    engine.send(stored([60], 52, block(5)))
    assert engine.resident(prompt(5)) == 5 * G
