"""Whether a replica keeps, writes or compares: each situation, and what follows each event."""

from __future__ import annotations

import pytest

from indexer.index.state import Checkpoint, HolderChanges, HolderKey, PublisherChanges
from indexer.registration import PublisherKey
from indexer.store import standing as standing_module
from indexer.store.lease import Lease, StoredState
from indexer.store.standing import Standing, Step


def changes(number: int | None, generation: int = 1) -> PublisherChanges:
    holder = HolderChanges(HolderKey("GPU", 0, ""), cleared=True)
    point = Checkpoint(generation, number)
    return PublisherChanges(PublisherKey("w", 0), 1, point, 16, [holder], False, {}, None, None, None)


def writing(term: int = 3, flushes: int = 10) -> Standing:
    standing = Standing(flushes)
    standing.began(Lease(term, flushes))
    return standing


def test_without_a_lease_changes_are_kept() -> None:
    assert Standing(0).look(None) is Step.KEEP


def test_rows_that_nobody_else_wrote_are_written_at_once() -> None:
    assert Standing(7).look(Lease(1, 7)) is Step.WRITE
    assert Standing(7).look(Lease(9, 7)) is Step.WRITE, "others have claimed it and written nothing"


def test_rows_that_others_wrote_are_compared_first() -> None:
    assert Standing(7).look(Lease(1, 8)) is Step.COMPARE


def test_with_its_own_lease_it_goes_on_writing() -> None:
    assert writing(term=3, flushes=10).look(Lease(3, 10)) is Step.WRITE


def test_a_lease_claimed_anew_needs_no_comparison_whatever_it_wrote_meanwhile() -> None:
    assert writing(term=3, flushes=10).look(Lease(4, 10)) is Step.WRITE
    assert writing(term=3, flushes=10).look(Lease(4, 17)) is Step.WRITE


def test_but_it_does_if_somebody_came_between() -> None:
    assert writing(term=3, flushes=10).look(Lease(5, 10)) is Step.COMPARE


def test_after_a_refusal_it_keeps_and_looks_at_the_rows_when_it_comes_back() -> None:
    standing = writing(term=3, flushes=10)
    standing.refused()
    assert standing.term is None
    assert standing.look(None) is Step.KEEP
    assert standing.look(Lease(5, 11)) is Step.COMPARE


def test_what_was_kept_comes_back_newest_first_and_once() -> None:
    standing = Standing(0)
    for number in (1, 2, 3):
        assert standing.keep(changes(number))
    assert [c.checkpoint.sequence_number for c in standing.take_kept()] == [3, 2, 1]
    assert standing.take_kept() == []


def test_what_others_have_written_is_no_longer_kept() -> None:
    standing = Standing(5)
    for number in (None, 1, 2, 3):
        standing.keep(changes(number))
    standing.confirm(StoredState(1, 2, flushes=6))
    assert [c.checkpoint.sequence_number for c in standing.kept] == [3]
    standing.keep(changes(0, generation=2))
    standing.confirm(StoredState(2, 0, flushes=7))
    assert not standing.kept


@pytest.mark.parametrize("state", [StoredState(1, 9, flushes=5), StoredState(1, None, flushes=6)])
def test_rows_that_nobody_has_written_since_confirm_nothing(state: StoredState) -> None:
    standing = Standing(5)
    standing.keep(changes(1))
    standing.confirm(state)
    assert len(standing.kept) == 1


def test_beyond_the_bound_what_was_kept_is_dropped_and_rows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_module, "KEPT_CHANGES_MAX", 3)
    standing = Standing(5)
    assert [standing.keep(changes(number)) for number in range(4)] == [True, True, True, False]
    assert not standing.kept
    assert standing.look(Lease(1, 5)) is Step.COMPARE
    standing.began(Lease(1, 5))
    assert standing.look(Lease(1, 5)) is Step.WRITE


def test_the_number_of_flushes_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_module, "KEPT_FLUSHES_MAX", 2)
    standing = Standing(5)
    assert [standing.keep(changes(number)) for number in range(3)] == [True, True, False]
