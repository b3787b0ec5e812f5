from __future__ import annotations

import numpy as np
import pytest

from indexer.identity.chain import chain_keys
from indexer.index import change_log
from indexer.index.change_log import ChangeLog
from indexer.index.state import CountChange, EngineHash, HolderChanges, HolderKey, ResidencyRow
from tests.store_stand_in import rows_of

ROW = ResidencyRow(10, 9, 8, 16, 64, 1)
U64 = np.uint64


@pytest.fixture
def log() -> ChangeLog:
    return ChangeLog()


def comes_to(log: ChangeLog) -> dict[EngineHash, ResidencyRow | CountChange | None]:
    return dict(rows_of(HolderChanges(HolderKey("GPU", 0, ""), columns=log.folded())))


def flushed(log: ChangeLog) -> ChangeLog:
    """The log after a flush of this one failed, or may have."""
    after = ChangeLog()
    after.put_before(log)
    return after


def add_run(log: ChangeLog, hashes: list[int], parent_key: int | None, locals_: list[int], position: int) -> list[int]:
    keys = chain_keys(parent_key, locals_)
    log.add_run(np.array(hashes, U64), np.array(keys, U64), parent_key, np.array(locals_, U64), 16, position)
    return keys


def test_an_empty_log_comes_to_nothing(log: ChangeLog) -> None:
    assert (len(log), len(log.folded()), comes_to(log)) == (0, 0, {})


@pytest.mark.parametrize("engine_hash", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("parent_key", [None, 0, 2**64 - 1])
@pytest.mark.parametrize("local_hash", [None, 0, 2**64 - 1])
def test_a_row_is_what_it_was(log: ChangeLog, engine_hash: int, parent_key: int | None, local_hash: int | None) -> None:
    row = ResidencyRow(2**64 - 1, parent_key, local_hash, 2**31 - 1, 2**40, 2**31)
    log.add_row(engine_hash, row)
    assert comes_to(log) == {engine_hash: row}
    assert comes_to(flushed(log)) == {engine_hash: row}
    assert comes_to(ChangeLog.of(log.folded())) == {engine_hash: row}


def test_blocks_of_a_run_follow_each_other(log: ChangeLog) -> None:
    a, b, c = add_run(log, [1, 2, 3], None, [5, 6, 7], 0)
    (d,) = add_run(log, [4], c, [8], 48)
    assert comes_to(log) == {
        1: ResidencyRow(a, None, 5, 16, 0, 1),
        2: ResidencyRow(b, a, 6, 16, 16, 1),
        3: ResidencyRow(c, b, 7, 16, 32, 1),
        4: ResidencyRow(d, c, 8, 16, 48, 1),
    }


def test_what_is_stored_and_evicted_between_two_flushes_comes_to_nothing(log: ChangeLog) -> None:
    log.add_row(1, ROW)
    log.add_count(1, 2)
    add_run(log, [2, 3], None, [5, 6], 0)
    for engine_hash in (3, 1, 2):
        log.add_gone(engine_hash)
    log.add_row(1, ROW)
    log.add_gone(1)
    assert (comes_to(log), len(log.folded())) == ({}, 0)


def test_it_is_deleted_all_the_same_if_a_flush_may_have_written_it(log: ChangeLog) -> None:
    log.add_row(1, ROW)
    log.add_gone(1)
    assert comes_to(flushed(log)) == {1: None}
    stored = ChangeLog()
    stored.add_row(1, ROW)
    after = flushed(stored)
    after.add_gone(1)
    assert comes_to(after) == {1: None}


def test_what_the_store_has_is_deleted(log: ChangeLog) -> None:
    log.add_gone(1)
    assert comes_to(log) == {1: None}
    log.add_row(1, ROW)
    assert comes_to(log) == {1: ROW}
    log.add_gone(1)
    assert comes_to(log) == {1: None}


def test_a_count_is_by_itself_only_if_its_row_is_stored(log: ChangeLog) -> None:
    log.add_row(1, ROW)
    log.add_count(1, 2)
    log.add_count(2, 3)
    log.add_count(2, 4)
    assert comes_to(log) == {1: ROW._replace(reference_count=2), 2: CountChange(4)}
    log.add_gone(2)
    assert comes_to(log) == {1: ROW._replace(reference_count=2), 2: None}


@pytest.mark.parametrize("is_folded", [False, True])
def test_newer_changes_win_over_those_of_a_failed_flush(log: ChangeLog, is_folded: bool) -> None:
    for engine_hash in (1, 2, 3, 4):
        log.add_row(engine_hash, ROW._replace(content_key=engine_hash))
    log.add_count(5, 2)
    after = ChangeLog()
    after.add_count(1, 7)
    after.add_gone(2)
    after.add_gone(3)
    after.add_row(3, ROW)
    after.add_count(5, 3)
    after.put_before(ChangeLog.of(log.folded()) if is_folded else log)
    assert comes_to(after) == {
        1: ROW._replace(content_key=1, reference_count=7),
        2: None,
        3: ROW,
        4: ROW._replace(content_key=4),
        5: CountChange(3),
    }


def test_two_flushes_that_failed_are_kept_in_their_order(log: ChangeLog) -> None:
    log.add_row(1, ROW)
    second = flushed(log)
    second.add_count(1, 2)
    third = flushed(second)
    third.add_count(1, 3)
    assert comes_to(third) == {1: ROW._replace(reference_count=3)}


def test_folding_leaves_the_log_as_it_is(log: ChangeLog) -> None:
    log.add_row(1, ROW)
    first = comes_to(log)
    log.add_row(2, ROW)
    assert (first, comes_to(log)) == ({1: ROW}, {1: ROW, 2: ROW})
    assert len(log) == 2


@pytest.mark.parametrize("words", [1, 7, 8, 64])
def test_a_log_of_many_chunks_forgets_nothing(log: ChangeLog, monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    monkeypatch.setattr(change_log, "CHUNK_WORDS_MIN", words)
    monkeypatch.setattr(change_log, "CHUNK_WORDS_MAX", words)
    expected: dict[EngineHash, ResidencyRow | CountChange | None] = {}
    for i in range(50):
        log.add_row(i, ROW._replace(content_key=i))
        log.add_count(1_000 + i, i + 1)
        add_run(log, list(range(2_000 + 30 * i, 2_030 + 30 * i)), None, list(range(30)), 0)
        expected[i], expected[1_000 + i] = ROW._replace(content_key=i), CountChange(i + 1)
    result = comes_to(log)
    assert {h: row for h, row in result.items() if isinstance(h, int) and h < 2_000} == expected
    assert (len(result), len(log)) == (1_600, 1_600)
