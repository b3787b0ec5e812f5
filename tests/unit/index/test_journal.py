from __future__ import annotations

import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.journal import ENTRY_BYTES, Batch, Journal, Kind, Note
from indexer.index.journal_reading import Happening, read_page
from indexer.index.limits import IndexLimits
from indexer.index.state import CoverageReason, HolderKey
from tests.engine_events import Engine, G, cleared, numbers, removed, stored
from tests.explaining import all_of

PAYLOAD = b"x" * 100
SIZE = ENTRY_BYTES + len(PAYLOAD)


def add(journal: Journal, first: int, count: int) -> None:
    journal.add([(number, 0, PAYLOAD) for number in range(first, first + count)], float(first))


def numbers_in(journal: Journal, position: int = 0) -> list[int | None]:
    return [entry.sequence_number for entry in journal.entries(position)]


def test_the_oldest_entries_go_at_the_bound() -> None:
    journal = Journal(3 * SIZE)
    add(journal, 0, 2)
    assert (numbers_in(journal), journal.dropped, journal.dropped_last) == ([0, 1], 0, None)
    add(journal, 2, 1)
    add(journal, 3, 1)
    assert (numbers_in(journal), journal.dropped, journal.size_bytes) == ([2, 3], 2, 2 * SIZE)
    assert journal.dropped_last == Batch(1, 0.0, b"")


def test_not_many_more_go_than_have_to() -> None:
    journal = Journal(100 * SIZE)
    for number in range(1_000):
        add(journal, number, 1)
        assert number < 100 or 93 * SIZE <= journal.size_bytes <= 100 * SIZE
    assert numbers_in(journal) == list(range(journal.dropped, 1_000))


def test_positions_stay_what_they_are() -> None:
    journal = Journal(3 * SIZE)
    for number in range(5):
        add(journal, number, 1)
    assert (journal.dropped, len(journal), journal.end) == (2, 3, 5)
    assert numbers_in(journal, 0) == [2, 3, 4]
    assert numbers_in(journal, 3) == [3, 4]
    assert numbers_in(journal, journal.end) == []


def test_each_entry_has_its_time() -> None:
    journal = Journal(20 * SIZE)
    add(journal, 0, 3)
    journal.note(Note(Kind.RESTART, 2, 8.0))
    add(journal, 9, 2)
    assert [entry.at for entry in journal.entries(0)] == [0.0, 0.0, 0.0, 8.0, 9.0, 9.0]


def test_a_batch_that_is_too_large_by_itself_leaves_nothing() -> None:
    journal = Journal(SIZE - 1)
    add(journal, 0, 1)
    assert (len(journal), journal.size_bytes, journal.dropped) == (0, 0, 1)


def test_a_bound_of_0_keeps_nothing() -> None:
    journal = Journal(0)
    add(journal, 0, 1)
    journal.note(Note(Kind.RESTART, None, None))
    assert (len(journal), journal.dropped) == (0, 0)


def test_the_newest_entries_are_found_by_their_bytes() -> None:
    journal = Journal(10 * SIZE)
    add(journal, 0, 5)
    assert [entry.sequence_number for entry in journal.newest(2 * SIZE)] == [3, 4]
    assert len(journal.newest(10 * SIZE)) == 5


def test_blocks_named_by_a_note_count() -> None:
    journal = Journal(10 * SIZE)
    journal.note(Note(Kind.EXPIRED, 1, None, blocks=((HolderKey("CPU", 0, ""), 5),) * 3))
    assert ENTRY_BYTES < journal.size_bytes <= ENTRY_BYTES + 3 * 64


def test_publishers_share_what_all_journals_may_keep() -> None:
    index = ContentIndex(IndexLimits(journal_bytes_max=10_000, journals_bytes_max=20_000))
    engines = [Engine(index, f"w{i}") for i in range(2)]
    for engine in engines:
        for block in range(200):
            engine.send(stored([block], None, numbers(G * block, G)))
    assert all(8_500 < engine.publisher.journal.size_bytes <= 10_000 for engine in engines)
    engines += [Engine(index, f"w{i}") for i in range(2, 8)]
    assert engines[-1].publisher.journal.bytes_max == 2_500
    index.share_journals()
    assert all(engine.publisher.journal.size_bytes <= 2_500 for engine in engines)
    for engine in engines[1:]:
        index.remove_publisher(engine.publisher.registration.key)
    index.share_journals()
    assert engines[0].publisher.journal.bytes_max == 10_000


# ---------------------------------------------------------------------- what a page tells


def page_of(engine: Engine, position: int = 0, entries_max: int = 100) -> list[Happening]:
    return all_of(read_page(engine.publisher, position, entries_max)).happenings


def keys_of(engine: Engine, hashes: list[int]) -> list[int | None]:
    return list(engine.publisher.residents.keys_of(hashes))


def test_events_come_back_in_order_with_their_content() -> None:
    engine = Engine(ContentIndex())
    engine.send(stored([1, 2], None, numbers(0, 2 * G)), removed([2]))
    engine.send(cleared())
    happenings = page_of(engine)
    keys = keys_of(engine, [1, 2])
    assert happenings == [
        Happening(Kind.STORED, 0, None, "GPU", 0, "", [1, 2], keys, G),
        Happening(Kind.REMOVED, 0, None, "GPU", 0, "", [2], keys[1:]),
        Happening(Kind.CLEARED, 1, None),
    ]
    assert None not in keys


def test_a_page_ends_and_the_next_one_goes_on() -> None:
    engine = Engine(ContentIndex())
    for block in range(5):
        engine.send(stored([block + 1], None, numbers(G * block, G)))
    page = all_of(read_page(engine.publisher, 0, 2))
    assert ([h.sequence_number for h in page.happenings], page.next_position) == ([0, 1], 2)
    page = all_of(read_page(engine.publisher, 2, 10))
    assert ([h.sequence_number for h in page.happenings], page.next_position) == ([2, 3, 4], 5)
    assert all_of(read_page(engine.publisher, 5, 10)).happenings == []


def test_a_page_says_what_is_gone_before_it() -> None:
    engine = Engine(ContentIndex())
    engine.publisher.journal.bytes_max = 3 * (ENTRY_BYTES + 300)
    for block in range(9):
        engine.send(stored([block + 1], None, numbers(G * block, G)))
    page = all_of(read_page(engine.publisher, 0, 10))
    first = page.happenings[0].sequence_number
    assert first is not None
    assert page.dropped_last is not None
    assert page.dropped_last.sequence_number == first - 1
    assert all_of(read_page(engine.publisher, first, 10)).dropped_last is None


def test_hashes_that_nobody_explains_have_no_content() -> None:
    engine = Engine(ContentIndex())
    engine.send(stored([5], 4, numbers(0, G)), removed([99]))
    assert [happening.keys for happening in page_of(engine)] == [[None], [None]]


def test_a_store_tells_what_its_hashes_meant_when_nobody_remembers_them() -> None:
    engine = Engine(ContentIndex(IndexLimits(ghosts_max=0)))
    engine.send(stored([1, 2], None, numbers(0, 2 * G)))
    keys = keys_of(engine, [1, 2])
    engine.send(removed([2, 1]))
    assert keys_of(engine, [1, 2]) == [None, None]
    assert [list(happening.keys) for happening in page_of(engine)] == [keys, keys[::-1]]


def test_skipped_context_is_walked() -> None:
    skipped = {"skipped_parent_block_hash": None, "skipped_token_ids": numbers(0, G), "skipped_extra_keys": [None]}
    engine = Engine(ContentIndex(IndexLimits(ghosts_max=0)))
    engine.send(stored([2], 1, numbers(G, G), **skipped))
    keys = keys_of(engine, [2])
    engine.send(removed([2]))
    assert None not in keys
    assert [list(happening.keys) for happening in page_of(engine)] == [keys, keys]


@pytest.mark.parametrize(
    "event",
    [
        stored([1, 2], None, numbers(0, 2 * G), cache_salt="salt"),
        stored([1, 2], None, numbers(0, 2 * G), lora_name="adapter"),
        stored([1, 2], None, numbers(0, 2 * G), extra_keys=[["salt", ["image", 3]], None]),
        stored([1, 2], None, numbers(1 << 33, 2 * G)),
        stored([1, 2], None, numbers(0, 8 * G), 4 * G),
    ],
)
def test_stores_of_every_kind_tell_the_content_that_was_placed(event: dict[str, object]) -> None:
    engine = Engine(ContentIndex(IndexLimits(ghosts_max=0)), engine="sglang")
    engine.send(event)
    keys = keys_of(engine, [1, 2])
    engine.send(removed([1, 2]))
    assert None not in keys
    assert [list(happening.keys) for happening in page_of(engine)] == [keys, keys]


@pytest.mark.parametrize("hashes", [[b"a" * 32, b"b" * 32], [7, 8]])
def test_wide_hashes_are_told_too(hashes: list[int | bytes]) -> None:
    engine = Engine(ContentIndex())
    engine.send(stored(hashes, None, numbers(0, 2 * G)))
    engine.send(removed(hashes[1:]))
    happenings = page_of(engine)
    assert happenings[1].hashes == hashes[1:]
    assert list(happenings[1].keys) == list(happenings[0].keys)[1:]


def test_what_comes_by_no_event_is_noted() -> None:
    index = ContentIndex()
    engine = Engine(index)
    engine.send(stored([1], None, numbers(0, G)))
    engine.publisher.count_gap(1, 3, at=10.0)
    engine.publisher.skip(4, 4, "truncated_batch", at=11.0)
    engine.publisher.clear(12.0)
    engine.publisher.drop_residencies(13.0)
    engine.publisher.restart(14.0)
    told = [(h.kind, h.sequence_number, h.at, h.gap) for h in page_of(engine)]
    assert told == [
        (Kind.STORED, 0, None, None),
        (Kind.GAP, 0, 10.0, (1, 3)),
        (Kind.UNREADABLE, 4, 11.0, None),
        (Kind.CLEARED_BY_OPERATOR, 4, 12.0, None),
        (Kind.APPLIED_AGAIN, 4, 13.0, None),
        (Kind.RESTART, 4, 14.0, None),
    ]


def test_what_is_dropped_unproven_is_noted() -> None:
    index = ContentIndex()
    engine = Engine(index)
    engine.send(stored([1], None, numbers(0, G)))
    engine.publisher.count_gap(1, 1)
    index.expire_unverified(0.0, 10.0, 20.0)
    index.expire_unverified(100.0, 10.0, 21.0)
    assert [(h.kind, h.at) for h in page_of(engine)][-1] == (Kind.UNVERIFIED_DROPPED, 21.0)


def test_blocks_whose_lifetime_is_over_are_noted() -> None:
    index = ContentIndex()
    engine = Engine(index, options={"no_removals": {"expire_after_s": 5.0}})
    engine.send(stored([1], None, numbers(0, G)))
    keys = keys_of(engine, [1])
    index.expire_blocks(0.0, 50.0)
    index.expire_blocks(6.0, 56.0)
    last = page_of(engine)[-1]
    assert last == Happening(Kind.EXPIRED, 0, 56.0, "GPU", 0, "", [1], keys)


def test_blocks_beyond_a_bound_of_ours_are_noted() -> None:
    engine = Engine(ContentIndex(), options={"no_removals": {"blocks_max": 1}})
    engine.send(stored([1], None, numbers(0, G)))
    engine.send(stored([2], None, numbers(G, G)))
    last = page_of(engine)[-1]
    assert (last.kind, last.hashes) == (Kind.EVICTED, [1])


def test_times_are_those_at_which_batches_were_applied() -> None:
    engine = Engine(ContentIndex())
    engine.send(stored([1], None, numbers(0, G)))
    engine.publisher.set_coverage(engine.publisher.coverage, CoverageReason.PROVEN)
    assert [h.at for h in page_of(engine)] == [None]
