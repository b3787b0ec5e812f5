from __future__ import annotations

from typing import Any

import pytest

from indexer.index.ancestry import Ancestry
from indexer.index.ghosts import Ghosts
from indexer.index.state import EngineHash, GhostRow, HolderKey
from indexer.index.waiting import SparseRun, WaitingBlock, WaitingRoom
from tests.index_invariants import check_waiting

GPU = HolderKey("GPU", 0, "")
CPU = HolderKey("CPU", 0, "")


def orphan(parent: int, holder: HolderKey = GPU) -> WaitingBlock:
    return WaitingBlock(parent, [parent * 10], 1, 16, {holder: 1})


def unplaced(holder: HolderKey = GPU) -> WaitingBlock:
    return WaitingBlock(None, [], 0, 16, {holder: 1})


@pytest.fixture
def room() -> Any:
    room = WaitingRoom(orphans_max=4, unplaced_max=3, runs_max=2)
    yield room
    check_waiting(room)


def test_an_orphan_that_is_announced_again_gains_references(room: WaitingRoom) -> None:
    room.park(2, orphan(1))
    room.park(2, orphan(1))
    room.park(2, orphan(1, CPU))
    assert room.blocks[2].counts == {GPU: 2, CPU: 1}
    room.park(2, orphan(1), counts=False)
    assert room.blocks[2].counts == {GPU: 2, CPU: 1}
    assert (room.orphans, room.unplaced) == (1, 0)


def test_an_unplaced_block_may_become_an_orphan_and_keeps_its_references(room: WaitingRoom) -> None:
    room.park(2, unplaced(CPU))
    room.park(2, orphan(1))
    assert (room.orphans, room.unplaced, room.blocks[2].counts) == (1, 0, {CPU: 1, GPU: 1})
    room.park(2, unplaced())
    assert (room.orphans, room.blocks[2].counts) == (1, {CPU: 1, GPU: 2})


def test_at_each_bound_the_oldest_goes_and_is_counted(room: WaitingRoom) -> None:
    for i in range(6):
        room.park(100 + i, orphan(i))
        room.park(200 + i, unplaced())
    assert (list(room.orphan_order), list(room.unplaced_order)) == ([102, 103, 104, 105], [203, 204, 205])
    assert (room.dropped_orphans, room.dropped_unplaced) == (2, 3)


def test_a_removal_ends_one_reference_of_its_holder_only(room: WaitingRoom) -> None:
    room.park(2, orphan(1))
    room.park(2, orphan(1, CPU))
    assert room.release(2, GPU)
    assert not room.release(2, GPU)
    assert not room.release(9, GPU)
    assert 2 in room.blocks
    assert room.release(2, CPU)
    assert room.blocks == {}


def test_a_block_without_references_stays_while_others_wait_under_it(room: WaitingRoom) -> None:
    room.park(2, orphan(1))
    room.park(3, orphan(2))
    room.park(4, orphan(3))
    assert room.release(2, GPU)
    assert room.release(3, GPU)
    assert sorted(room.blocks) == [2, 3, 4]
    assert room.release(4, GPU)
    assert room.blocks == {}
    assert room.children == {}


def test_a_clear_takes_the_references_and_keeps_the_links_that_are_needed(room: WaitingRoom) -> None:
    room.park(2, orphan(1))
    room.park(3, orphan(2, CPU))
    room.park(5, orphan(4))
    room.clear({GPU})
    assert sorted(room.blocks) == [2, 3]
    assert room.blocks[2].counts == {}
    room.clear({CPU})
    assert room.blocks == {}


def test_blocks_that_wait_for_each_other_are_bounded_like_any(room: WaitingRoom) -> None:
    room.park(1, orphan(2))
    room.park(2, orphan(1))
    room.clear({GPU})
    for i in range(10):
        room.park(100 + i, orphan(50 + i))
    assert room.orphans == 4


def test_sparse_runs_are_bounded(room: WaitingRoom) -> None:
    runs = [SparseRun([i, i + 1], 0, 16) for i in range(4)]
    for run in runs:
        room.wait_for_anchor(run)
    assert list(room.run_order) == runs[2:]
    assert room.dropped_sparse_runs == 2
    room.end_run(runs[2])
    room.end_run(runs[3])
    assert room.runs == {}


def test_what_orphans_and_runs_hold_together_is_bounded_too(room: WaitingRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.index.waiting.LOCAL_HASHES_MAX", 25)
    monkeypatch.setattr("indexer.index.waiting.RUN_HASHES_MAX", 25)
    for i in range(3):
        room.park(100 + i, WaitingBlock(i, [7] * 10, 10, 160, {GPU: 1}))
        room.wait_for_anchor(SparseRun([(i + 1) * 100 + j for j in range(10)], 0, 16))
    assert (list(room.orphan_order), room.dropped_orphans) == ([101, 102], 1)
    assert (len(room.run_order), room.dropped_sparse_runs) == (2, 1)
    room.park(200, WaitingBlock(9, [7] * 26, 26, 416, {GPU: 1}))
    room.park(201, WaitingBlock(None, [7] * 26, 26, 416, {GPU: 1}))
    room.wait_for_anchor(SparseRun(list(range(26)), 0, 16))
    assert (room.orphans, room.dropped_orphans, room.local_hashes) == (0, 4, 0)
    assert (room.run_order, room.dropped_sparse_runs, room.run_hashes) == ({}, 4, 0)


def test_a_taken_block_waits_no_more(room: WaitingRoom) -> None:
    room.park(2, orphan(1))
    block = room.take(2)
    assert block is not None
    assert block.parent == 1
    assert room.take(2) is None
    assert not room


# ---------------------------------------------------------------------- ghosts


def changes_of(ghosts: Ghosts) -> tuple[bool, dict[EngineHash, GhostRow | None]]:
    cleared, changes = ghosts.take_changes()
    return cleared, dict(changes.items())


def test_the_oldest_ghost_is_forgotten_at_the_bound() -> None:
    ghosts = Ghosts(3)
    for engine_hash in (1, 2, 3, 1, 4):
        ghosts.remember(engine_hash, engine_hash * 10, 1)
    assert [h for h, _, _ in ghosts.rows()] == [3, 1, 4]
    assert (ghosts.get(2), ghosts.get(1), ghosts.forgotten) == (None, (10, 1), 1)


def test_many_ghosts_are_forgotten_at_once_the_oldest_first() -> None:
    ghosts = Ghosts(640)
    for engine_hash in range(641):
        ghosts.remember(engine_hash, engine_hash, 1)
    assert [h for h, _, _ in ghosts.rows()] == list(range(11, 641))
    assert ghosts.forgotten == 11


def test_ghosts_keep_64_bit_keys_and_long_positions() -> None:
    ghosts = Ghosts(3)
    ghosts.remember(b"x" * 32, 2**64 - 1, 2**32 - 1)
    assert ghosts.get(b"x" * 32) == (2**64 - 1, 2**32 - 1)


def test_a_ghost_that_came_and_went_between_two_flushes_costs_no_row() -> None:
    ghosts = Ghosts(1)
    ghosts.remember(1, 10, 1)
    ghosts.remember(2, 20, 1)
    assert changes_of(ghosts) == (False, {2: GhostRow(20, 1, 2)})
    ghosts.remember(3, 30, 1)
    assert changes_of(ghosts) == (False, {2: None, 3: GhostRow(30, 1, 3)})


def test_a_failed_flush_of_ghosts_is_merged_under_newer_changes() -> None:
    ghosts = Ghosts(2)
    ghosts.remember(1, 10, 1)
    ghosts.remember(2, 20, 1)
    cleared, rows = ghosts.take_changes()
    ghosts.remember(3, 30, 1)
    ghosts.restore_changes(cleared, rows)
    assert changes_of(ghosts) == (False, {1: None, 2: GhostRow(20, 1, 2), 3: GhostRow(30, 1, 3)})


def test_a_failed_clear_of_ghosts_is_cleared_again_and_an_older_failure_is_dropped() -> None:
    ghosts = Ghosts(5)
    ghosts.remember(1, 10, 1)
    before = ghosts.take_changes()
    ghosts.clear()
    ghosts.remember(2, 20, 1)
    ghosts.restore_changes(*before)
    taken = ghosts.take_changes()
    assert (taken[0], dict(taken[1].items())) == (True, {2: GhostRow(20, 1, 2)})
    ghosts.restore_changes(*taken)
    assert changes_of(ghosts) == (True, {2: GhostRow(20, 1, 2)})


def test_loaded_ghosts_go_on_in_their_order() -> None:
    ghosts = Ghosts(2)
    ghosts.load([(1, GhostRow(10, 1, 7)), (2, GhostRow(20, 2, 9))])
    assert ghosts.changes_pending == 0
    ghosts.remember(3, 30, 1)
    assert changes_of(ghosts) == (False, {1: None, 3: GhostRow(30, 1, 10)})


# ---------------------------------------------------------------------- ancestry


def test_ancestry_goes_back_over_several_granules() -> None:
    ancestry = Ancestry(100)
    ancestry.add(None, [1, 2, 3], [11, 12, 13])
    ancestry.add(3, [4], [14])
    assert ancestry.back(4, 1) == (3, [14])
    assert ancestry.back(4, 3) == (1, [12, 13, 14])
    assert ancestry.back(4, 4) == (None, [11, 12, 13, 14])
    assert ancestry.back(4, 5) is None
    assert ancestry.back(9, 1) is None


def test_the_oldest_links_go_at_the_bound() -> None:
    ancestry = Ancestry(3)
    ancestry.add(None, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    assert (len(ancestry), ancestry.forgotten) == (3, 2)
    assert ancestry.back(5, 3) == (2, [13, 14, 15])
    assert ancestry.back(5, 4) is None


def test_many_links_are_forgotten_at_once() -> None:
    ancestry = Ancestry(640)
    for key in range(641):
        ancestry.add(key, [key + 1], [7])
    assert (len(ancestry), ancestry.forgotten) == (630, 11)
    assert ancestry.back(641, 630) == (11, [7] * 630)


def test_the_newest_links_survive_the_store() -> None:
    ancestry, restored = Ancestry(10), Ancestry(10)
    ancestry.add(None, [2**64 - 1, 2, 3], [11, 2**64 - 2, 13])
    restored.restore(ancestry.newest(10))
    assert restored.back(3, 3) == (None, [11, 2**64 - 2, 13])
    restored = Ancestry(10)
    restored.restore(ancestry.newest(1))
    assert (restored.back(3, 1), restored.back(3, 2)) == ((2, [13]), None)
