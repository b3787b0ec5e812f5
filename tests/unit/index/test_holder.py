from __future__ import annotations

import numpy as np
import pytest

from indexer.index.holder import Holder
from indexer.index.key_space import KeySpace
from indexer.index.pending import Pending
from indexer.index.state import CountChange, EngineHash, HolderChanges, HolderKey, ResidencyRow
from tests.store_stand_in import rows_of

KEY = HolderKey("GPU", 0, "")


def row(key: int, count: int = 1) -> ResidencyRow:
    return ResidencyRow(key, None, key, 16, 0, count)


@pytest.fixture
def holder() -> Holder:
    return Holder(KEY, KeySpace(16), None, Pending(0))


def rows(holder: Holder) -> dict[EngineHash, ResidencyRow | CountChange | None]:
    changes = holder.take_changes()
    return {} if changes is None else folded(changes)


def folded(changes: HolderChanges) -> dict[EngineHash, ResidencyRow | CountChange | None]:
    changes.fold()
    return dict(rows_of(changes))


def masks_of(holder: Holder, *keys: int) -> list[int]:
    return [holder.space.masks[set_id] for set_id in holder.space.look_up(np.array(keys, np.uint64)).tolist()]


def test_a_residency_ends_with_its_last_reference(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    holder.refer(1)
    holder.release(1)
    assert (holder.reference_count(1), masks_of(holder, 10)) == (1, [1])
    holder.release(1)
    assert (holder.reference_count(1), len(holder.space), len(holder)) == (0, 0, 0)


def test_two_hashes_of_one_key_hold_it_together(holder: Holder) -> None:
    for engine_hash in (1, 2, 3):
        holder.hold(engine_hash, row(10), 1)
    holder.end(2)
    holder.end(1)
    assert masks_of(holder, 10) == [1]
    assert holder.references_of_key(10) == 1
    holder.end(3)
    assert len(holder.space) == 0
    assert holder.aliases == {}


@pytest.mark.parametrize("engine_hash", [1, b"a" * 32])
@pytest.mark.parametrize("key", [10, 0, 2**64 - 1])
def test_a_residency_that_ends_takes_its_references_along(holder: Holder, engine_hash: EngineHash, key: int) -> None:
    holder.hold(engine_hash, row(key, 3), 1)
    holder.end(engine_hash)
    assert (len(holder), len(holder.extra), holder.wide_extra) == (0, 0, {})
    holder.hold(engine_hash, row(key), 1)
    assert holder.reference_count(engine_hash) == 1


def test_clear_ends_everything_at_once(holder: Holder) -> None:
    for engine_hash, key in ((1, 10), (2, 10), (3, 11)):
        holder.hold(engine_hash, row(key), 1)
    holder.refer(3, 4)
    holder.clear()
    assert (len(holder), len(holder.extra), holder.aliases, len(holder.space)) == (0, 0, {}, 0)


def hold_run(
    holder: Holder, hashes: list[int], keys: list[int], parent_key: int | None, local_hashes: list[int], position: int
) -> bool:
    columns = np.array(keys, np.uint64), parent_key, np.array(local_hashes, np.uint64)
    return holder.hold_run(hashes, *columns, 16, position)


def test_a_run_is_refused_whole_if_one_of_it_is_there(holder: Holder) -> None:
    holder.hold(2, row(11), 2)
    assert not hold_run(holder, [1, 2], [10, 11], None, [5, 6], 0)
    assert (list(holder.items()), [key for key, _, _ in holder.space.entries()]) == ([(2, 11)], [11])
    assert hold_run(holder, [3, 4], [11, 12], 10, [6, 7], 16)
    assert rows(holder)[4] == ResidencyRow(12, 11, 7, 16, 32, 1)
    holder.end(2)
    assert masks_of(holder, 11, 12) == [1, 1]


def test_what_began_and_ended_between_two_flushes_costs_no_row(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    holder.end(1)
    assert rows(holder) == {}
    assert holder.changes_pending == 0


def test_a_row_carries_its_newest_count(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    holder.refer(1, 2)
    assert rows(holder) == {1: row(10, 3)}


def test_later_only_the_count_is_written(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    holder.take_changes()
    holder.refer(1)
    assert rows(holder) == {1: CountChange(2)}
    holder.release(1)
    holder.release(1)
    assert rows(holder) == {1: None}


def test_what_the_store_has_and_began_again_is_a_whole_row(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    holder.take_changes()
    holder.end(1)
    holder.hold(1, row(11), 1)
    holder.refer(1)
    assert rows(holder) == {1: row(11, 2)}


def test_a_clear_forgets_the_changes_before_it(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    holder.clear()
    holder.hold(2, row(11), 1)
    changes = holder.take_changes()
    assert changes is not None
    assert (changes.cleared, folded(changes)) == (True, {2: row(11)})


def test_a_failed_flush_is_merged_under_newer_changes(holder: Holder) -> None:
    for engine_hash in (1, 2, 3, 4):
        holder.hold(engine_hash, row(engine_hash * 10), 1)
    failed = holder.take_changes()
    assert failed is not None
    holder.refer(1)
    holder.end(2)
    holder.end(3)
    holder.hold(3, row(33), 1)
    holder.hold(5, row(50), 1)
    holder.restore_changes(failed)
    assert rows(holder) == {1: row(10, 2), 2: None, 3: row(33), 4: row(40), 5: row(50)}


def test_a_failed_flush_from_before_a_clear_is_dropped(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    failed = holder.take_changes()
    assert failed is not None
    holder.clear()
    holder.hold(2, row(20), 1)
    holder.restore_changes(failed)
    changes = holder.take_changes()
    assert changes is not None
    assert (changes.cleared, folded(changes)) == (True, {2: row(20)})


def test_a_failed_clear_is_cleared_again(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    holder.take_changes()
    holder.clear()
    holder.hold(2, row(20), 1)
    failed = holder.take_changes()
    assert failed is not None
    holder.refer(2)
    holder.restore_changes(failed)
    changes = holder.take_changes()
    assert changes is not None
    assert (changes.cleared, folded(changes)) == (True, {2: row(20, 2)})


def test_what_a_failed_flush_may_have_written_is_deleted_for_sure(holder: Holder) -> None:
    holder.hold(1, row(10), 1)
    failed = holder.take_changes()
    assert failed is not None
    holder.restore_changes(failed)
    holder.end(1)
    assert rows(holder) == {1: None}


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_some_items_are_as_many_of_all_items(holder: Holder, count: int) -> None:
    for engine_hash in (1, 2, b"wide", b"wider"):
        holder.hold(engine_hash, row(10), 1)
    hashes, keys, others = holder.some_items(count)
    assert [*zip(hashes.tolist(), keys.tolist(), strict=True), *others] == list(holder.items())[:count]
