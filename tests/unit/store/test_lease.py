"""Which locks and leases a replica has: what each input does in each state."""

from __future__ import annotations

import pytest

from indexer.store.lease import SHARDS, Lease, LeaseTable, replica_name

FIRST, SECOND = 1, 2  # publishers of two shards
FAR = FIRST + SHARDS  # of the same shard as FIRST


def with_locks(*shards: int) -> LeaseTable:
    table = LeaseTable()
    table.locked(shards)
    return table


def with_lease(publisher_id: int = FIRST, term: int = 5) -> LeaseTable:
    table = with_locks(publisher_id % SHARDS)
    table.claimed(publisher_id, Lease(term, 0))
    return table


def test_at_first_every_lock_is_missing_and_nothing_can_be_claimed() -> None:
    table = LeaseTable()
    assert table.missing_locks == list(range(SHARDS))
    assert table.to_claim({FIRST, SECOND}) == []
    assert table.lease(FIRST) is None


def test_publishers_of_locked_shards_are_to_be_claimed() -> None:
    table = with_locks(FIRST)
    assert FIRST not in table.missing_locks
    assert SECOND in table.missing_locks
    assert table.to_claim({FIRST, SECOND, FAR}) == [FIRST, FAR]


def test_what_is_claimed_is_leased_and_not_claimed_again() -> None:
    table = with_lease(term=5)
    assert table.lease(FIRST) == Lease(5, 0)
    assert table.to_claim({FIRST, FAR}) == [FAR]
    assert len(table) == 1


def test_claiming_without_the_lock_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        LeaseTable().claimed(FIRST, Lease(1, 0))


def test_a_lost_session_costs_the_locks_but_not_the_leases() -> None:
    table = with_lease()
    table.session_lost()
    assert table.missing_locks == list(range(SHARDS))
    assert table.lease(FIRST) == Lease(5, 0)
    assert table.to_claim({FIRST}) == []


def test_with_its_lock_back_a_publisher_is_claimed_anew() -> None:
    table = with_lease()
    table.session_lost()
    table.locked([FIRST])
    assert table.to_claim({FIRST}) == [FIRST]
    table.claimed(FIRST, Lease(6, 3))
    assert table.lease(FIRST) == Lease(6, 3)
    assert table.to_claim({FIRST}) == []


def test_a_refused_flush_ends_the_lease() -> None:
    table = with_lease(term=5)
    table.refused(FIRST, 5)
    assert table.lease(FIRST) is None
    assert table.to_claim({FIRST}) == [FIRST]


def test_a_flush_refused_for_an_older_term_does_not_end_a_newer_lease() -> None:
    table = with_lease(term=6)
    table.refused(FIRST, 5)
    assert table.lease(FIRST) == Lease(6, 0)
    assert table.to_claim({FIRST}) == []


def test_a_refusal_without_a_lease_changes_nothing() -> None:
    table = with_locks(FIRST)
    table.refused(FIRST, 5)
    assert table.to_claim({FIRST}) == [FIRST]


def test_who_is_no_longer_registered_is_forgotten() -> None:
    table = with_lease()
    assert table.to_claim(set()) == []
    assert table.lease(FIRST) is None


def test_names_of_replicas_differ_and_fit_what_postgres_keeps() -> None:
    names = {replica_name() for _ in range(10)}
    assert len(names) == 10
    assert all(len(name.encode()) <= 63 for name in names)
