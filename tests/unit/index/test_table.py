from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from mmap import PAGESIZE, mmap

import numpy as np
import numpy.typing as npt
import pytest

from indexer.index import table
from indexer.index.kernels import (
    CAPACITY,
    CURSOR,
    DONE,
    MOVED_AT_ONCE,
    OLD_CAPACITY,
    holder_insert,
    table_put,
    table_remove,
)
from indexer.index.table import VALUE_MAX, Table, fits
from tests.index_invariants import check_table

SMALL = 512  # slots, here
MANY = 4_000  # entries: a table of a dozen growths
PER_CHANGE = 3 * MOVED_AT_ONCE  # old homes: those of the change, and as many more as there are in a probe


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SMALL", SMALL)
    monkeypatch.setattr(table, "MAPPED", SMALL)


@pytest.fixture
def filled() -> Table:
    filled = Table()
    for key in range(MANY):
        filled.put(key, key + 1)
    filled.settle()
    filled.tidy()
    return filled


def left_to_move(table: Table) -> int:
    cursor, old_capacity = int(table.meta[CURSOR]), int(table.meta[OLD_CAPACITY])
    grows = old_capacity < table.meta[CAPACITY]
    return (cursor if grows else old_capacity - cursor) if old_capacity else 0


def moved_by(table: Table, change: Callable[[], object]) -> int:
    """How many old slots this change looked at."""
    before, capacity = left_to_move(table), int(table.meta[CAPACITY])
    change()
    if table.meta[CAPACITY] == capacity:
        return before - left_to_move(table)
    return before + capacity - left_to_move(table)  # it has begun to change again: that before had to be finished


def remove_by_kernel(table: Table, keys: range) -> None:
    """As whole batches do: nobody tidies up meanwhile."""
    for key in keys:
        table_remove(*table.arrays, np.uint64(key))
    table.let_go()


def rested(table: Table) -> Table:
    for _ in range(10):
        table.rest()
    return table


# ---------------------------------------------------------------------- what it holds


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("value", [1, 2**63, VALUE_MAX])
def test_any_key_may_have_any_value_that_fits(key: int, value: int) -> None:
    table = Table()
    assert (table.get(key), key in table) == (0, False)
    table.put(key, value)
    assert (table.get(key), key in table, len(table), list(table)) == (value, True, 1, [key])
    table.put(key, 7)
    assert (table.remove(key), table.remove(key), len(table)) == (7, 0, 0)


@pytest.mark.parametrize(("value", "expected"), [(0, False), (1, True), (2**64 - 1, True), (2**64, False)])
def test_what_means_something_or_is_too_large_does_not_fit(value: int, expected: bool) -> None:
    assert fits(value) == expected


def test_a_cleared_table_is_empty_and_small(filled: Table) -> None:
    filled.clear()
    assert (len(filled), filled.get(5), filled.nbytes) == (0, 0, Table().nbytes)
    filled.put(5, 6)
    assert filled.get(5) == 6


# ---------------------------------------------------------------------- how much it moves at once


def test_growing_moves_a_few_slots_with_every_change() -> None:
    table, most = Table(), 0
    for key in range(MANY):
        before = len(table)
        moved = moved_by(table, lambda key=key: table.put(key, 1))  # type: ignore[misc]
        if before > SMALL:
            most = max(most, moved)
    assert 0 < most <= PER_CHANGE


@pytest.mark.parametrize("kept", [0, 1, 10, 700])
def test_after_shrinking_no_change_moves_many_slots(filled: Table, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(table, "MOVED_AT_REST", 1)
    remove_by_kernel(filled, range(kept, MANY))
    filled.rest()
    most = max(moved_by(filled, lambda key=key: filled.put(key, 1)) for key in range(MANY, 2 * MANY))  # type: ignore[misc]
    assert most <= SMALL  # as many as a table that grows at once has
    assert len(filled) == MANY + kept
    check_table(filled)


def test_removing_one_by_one_moves_few_slots_with_every_change(filled: Table) -> None:
    most = max(moved_by(filled, lambda key=key: filled.remove(key)) for key in range(MANY))  # type: ignore[misc]
    assert 0 < most <= PER_CHANGE


def test_a_rest_moves_a_bounded_number_of_slots(filled: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOVED_AT_REST", 100)
    remove_by_kernel(filled, range(10, MANY))
    filled.rest()
    assert left_to_move(filled) > 200
    assert moved_by(filled, filled.rest) == 100
    assert [filled.get(key) for key in range(12)] == [*range(1, 11), 0, 0]


def test_a_rest_says_whether_there_is_more_to_move(filled: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOVED_AT_REST", 100)
    remove_by_kernel(filled, range(10, MANY))
    steps = 0
    while filled.rest():
        steps += 1
    assert steps > 2
    assert left_to_move(filled) == 0


# ---------------------------------------------------------------------- what it costs


def test_large_arrays_are_pages_of_their_own() -> None:
    grown = Table()
    for key in range(MANY):
        grown.put(key, key + 1)
    assert isinstance(grown.slots.base.obj, mmap)
    assert grown.slots.dtype == np.uint64
    assert check_table(grown) == {key: key + 1 for key in range(MANY)}


def test_the_memory_that_entries_move_to_is_made_ahead_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SMALL", 16_384)
    grown = Table()
    for key in range(60_000):
        grown.put(key, 1)
        if grown.meta[OLD_CAPACITY] > 65_536:
            break
    grown.expect(100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for key in range(60_000, 60_100):
        table_put(*grown.arrays, np.uint64(key), np.uint64(1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10
    grown.settle()
    check_table(grown)


def test_the_room_behind_the_last_home_takes_no_memory() -> None:
    grown = Table()
    grown.make_room(100_000)
    keys = np.arange(1, 100_001, dtype=np.uint64)
    assert holder_insert(*grown.arrays, keys, keys) == DONE
    is_made = made_pages(grown)
    homes = int(grown.meta[CAPACITY]) * table.SLOT_BYTES // PAGESIZE
    assert is_made[:homes].all()
    assert np.count_nonzero(is_made[homes + 2 :]) == 0
    assert len(is_made) > 1.5 * homes


def made_pages(table: Table) -> npt.NDArray[np.bool_]:
    """Which pages of its array there are."""
    count = -(-table.slots.nbytes // PAGESIZE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(table.slots.ctypes.data // PAGESIZE * 8)
        entries = np.frombuffer(file.read(8 * count), np.uint64)
    made: npt.NDArray[np.bool_] = entries >> np.uint64(63) != 0
    return made


def test_pages_that_somebody_looks_at_stay_where_they_are(filled: Table) -> None:
    looked_at, before = filled.slots, filled.items()
    filled.make_room(2 * MANY)
    assert filled.slots.base is not looked_at.base
    assert sorted(zip(*(column.tolist() for column in before), strict=True)) == sorted(check_table(filled).items())
    assert np.count_nonzero(looked_at[1::2]) == MANY


def test_without_pages_the_allocator_gives_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(table, "mmap", refuse)
    grown = Table()
    for key in range(MANY):
        grown.put(key, key + 1)
    assert check_table(grown) == {key: key + 1 for key in range(MANY)}
    for key in range(10, MANY):
        grown.remove(key)
    assert rested(grown).nbytes <= 16 * 2 * SMALL
    assert grown.slots.nbytes <= 1.8 * grown.nbytes
    assert check_table(grown) == {key: key + 1 for key in range(10)}


def test_a_system_that_makes_no_pages_ahead_makes_them_when_they_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MADV_POPULATE_WRITE", 9_999)
    grown = Table()
    for key in range(MANY):
        grown.put(key, 1)
        grown.expect(10)
    assert len(check_table(grown)) == MANY


def test_the_load_is_never_so_low_that_growth_is_wasted(filled: Table) -> None:
    assert MANY / filled.meta[CAPACITY] > 0.7 / 1.25 - 0.02
    assert filled.nbytes <= 16 * (filled.meta[CAPACITY] + 1)


def test_removals_that_nobody_tidied_up_after_leave_nothing_after_some_rests(filled: Table) -> None:
    remove_by_kernel(filled, range(10, MANY))
    assert rested(filled).nbytes <= 16 * 2 * SMALL
    assert filled.slots.nbytes <= 1.8 * filled.nbytes
    assert dict(zip(*(column.tolist() for column in filled.items()), strict=True)) == {k: k + 1 for k in range(10)}


def test_single_removals_leave_nothing_after_some_rests(filled: Table) -> None:
    for key in range(10, MANY):
        filled.remove(key)
    assert rested(filled).nbytes <= 16 * 2 * SMALL
    assert filled.slots.nbytes <= 1.8 * filled.nbytes
    check_table(filled)


def test_single_changes_alone_let_the_old_arrays_go(filled: Table) -> None:
    remove_by_kernel(filled, range(10, MANY))
    for key in range(MANY):
        filled.put(key % 50, 1)
        filled.remove(key % 50)
    assert filled.nbytes <= 16 * 2 * SMALL
    assert filled.slots.nbytes <= 1.8 * filled.nbytes


def test_coming_and_going_leaves_no_growth_behind(filled: Table) -> None:
    before = filled.nbytes
    for key in range(MANY, 3 * MANY):
        filled.remove(key - MANY)
        filled.put(key, 1)
    assert filled.nbytes == before
    check_table(filled)


def test_some_entries_come_from_all_over_the_table() -> None:
    """Where they lie in one table tells where they belong in another: neighbours would all want the same place."""
    filled = Table()
    for key in range(1, MANY + 1):
        filled.put(key, key)
    filled.settle()
    keys, values = filled.items(100)
    assert keys.tolist() == values.tolist()
    assert len(set(keys.tolist())) == 100
    places = {key: place for place, key in enumerate(filled.slots[::2].tolist()) if filled.slots[2 * place + 1]}
    quarters = Counter(4 * places[key] // int(filled.meta[CAPACITY]) for key in keys.tolist())
    assert min(quarters[i] for i in range(4)) > 10
