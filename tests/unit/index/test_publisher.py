"""Granules, recovery, long chains of consequences, and lookahead hashes of one publisher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from indexer.index import residents, runs, scope
from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from indexer.index.names_seen import NamesSeen
from indexer.index.options import EngineOptions
from indexer.index.publisher import ApplyOutcome
from indexer.index.runs import RunReader
from indexer.index.state import Coverage, CoverageReason, Trust
from indexer.registration import PublisherKey
from indexer.wire.batch_kernels import SHAPES_MAX
from indexer.wire.columns import PayloadReader, read_batch
from indexer.wire.decode import decode_batch
from indexer.wire.errors import WireError
from indexer.wire.events import BlockStored
from tests.engine_events import Engine, G, cleared, decoded, numbers, payload, removed, stored
from tests.index_invariants import check_index
from tests.store_stand_in import DictStore

TOKENS = numbers(100, 16 * 40)
LONGER = [*TOKENS, 1]


@pytest.fixture
def index() -> ContentIndex:
    return ContentIndex()


def rebuilt(engine: Engine) -> None:
    """The service was killed after a flush: the publisher is loaded from its rows."""
    store = DictStore()
    store.flush(engine.publisher)
    registration = engine.publisher.registration
    engine.index.remove_publisher(registration.key)
    engine.publisher = engine.index.add_publisher(registration)
    store.recover(engine.publisher)
    store.assert_equals(engine.publisher)
    check_index(engine.index)


# ---------------------------------------------------------------------- granule


@pytest.mark.parametrize(
    ("registered", "sizes", "granule"),
    [
        (None, [16], 16),
        (None, [64], 16),
        (None, [528], 16),
        (None, [24], 8),
        (64, [64], 64),
        (64, [64, 16], 16),
        (None, [5], 1),
    ],
)
def test_the_granule_divides_every_block(registered: int | None, sizes: list[int], granule: int) -> None:
    engine = Engine(ContentIndex(), block_size=registered)
    for i, size in enumerate(sizes):
        engine.send(stored([i], None, numbers(size * 1000, size), size))
    assert engine.publisher.granule == granule


def test_a_placeholder_without_a_size_may_come_first(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, [], 0, medium="CPU"))
    assert engine.publisher.status().unplaced == 1
    engine.send(stored([1], None, TOKENS[:64], 64))
    assert engine.publisher.granule == 16
    hit = engine.hit(LONGER)
    assert hit is not None
    assert hit.tiers == {"GPU": 64, "CPU": 64}


def test_a_finer_block_rebuilds_the_publisher_from_its_own_batches(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1, 2], None, TOKENS[:32]), stored([3], 99, TOKENS[48:64]), {"type": "Nonsense"})
    engine.send(removed([2]), stored([2], 1, TOKENS[16:32]), stored([2], 1, TOKENS[16:32]))
    assert engine.send(stored([7], None, TOKENS[:8], 8, group_idx=1)) is ApplyOutcome.APPLIED
    status = engine.publisher.status()
    assert (status.granule, status.orphans, status.counters["granule_refinements"]) == (8, 1, 1)
    assert status.bad_events == {"unknown_event": 1}
    assert engine.references()["GPU", 0, "", 2] == 2
    assert engine.resident([*TOKENS[:32], 5]) == 8
    check_index(index)


def test_without_its_batches_a_finer_block_asks_for_a_replay() -> None:
    engine = Engine(ContentIndex(IndexLimits(tail_bytes_max=10)))
    engine.send(stored([1, 2], None, TOKENS[:32]))
    assert engine.send(stored([3], 2, TOKENS[32:40], 8)) is ApplyOutcome.NEEDS_REPLAY
    assert engine.publisher.coverage is Coverage.DEGRADED
    assert engine.references() == {}
    assert engine.publisher.status().orphans == 1
    engine.publisher.drop_residencies()
    engine.sequence_number = 0
    engine.send(stored([1, 2], None, TOKENS[:32]))
    engine.send(stored([3], 2, TOKENS[32:40], 8))
    assert len(engine.references()) == 3


def test_a_recovered_publisher_with_a_finer_block_asks_for_a_replay(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]))
    rebuilt(engine)
    assert engine.send(stored([3], 1, TOKENS[16:24], 8)) is ApplyOutcome.NEEDS_REPLAY


def test_rows_of_the_coarser_granule_are_cleared_from_the_store(index: ContentIndex) -> None:
    engine, store = Engine(index), DictStore()
    engine.send(stored([1, 2], None, TOKENS[:32]), removed([2]))
    store.flush(engine.publisher)
    engine.send(stored([3], 1, TOKENS[16:24], 8))
    store.flush(engine.publisher)
    store.assert_equals(engine.publisher)


def test_publishers_of_unlike_granules_answer_beside_each_other(index: ContentIndex) -> None:
    coarse, fine = Engine(index, "coarse"), Engine(index, "fine")
    coarse.send(stored([1, 2], None, TOKENS[:32]))
    fine.send(stored([1, 2, 3], None, TOKENS[:24], 8))
    assert (coarse.hit_tokens(LONGER), fine.hit_tokens(LONGER)) == (32, 24)


# ---------------------------------------------------------------------- recovery


def test_what_waits_survives_a_recovery(index: ContentIndex) -> None:
    engine = Engine(index)
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 40,
    }
    engine.send(stored([1], None, TOKENS[:16], group_idx=0))
    engine.send(stored([2], 77, TOKENS[16:32]), stored([2], 77, TOKENS[16:32]))
    engine.send(stored([8, 9], 7, TOKENS[64:128], **window))
    rebuilt(engine)
    status = engine.publisher.status()
    assert (status.orphans, status.unplaced) == (1, 2)
    engine.send(stored([77], None, TOKENS[:16]))
    assert engine.references()["GPU", 0, "", 2] == 2
    engine.send(stored([21, 22, 23, 24, 25, 26, 8, 9], None, TOKENS[:128], group_idx=0))
    assert ("GPU", 1, "", 8) in engine.references()
    rebuilt(engine)


def test_orphans_of_a_recovered_publisher_still_hear_from_others(index: ContentIndex) -> None:
    engine, other = Engine(index, "w0"), Engine(index, "w1")
    engine.send(stored([2**40 + 1], 2**40, TOKENS[16:32]))
    rebuilt(engine)
    other.send(stored([2**40], None, TOKENS[:16]))
    assert engine.publisher.status().orphans == 0
    assert len(engine.references()) == 1


def test_orphans_under_a_block_that_waits_itself_still_hear_from_others(index: ContentIndex) -> None:
    engine, other = Engine(index, "w0"), Engine(index, "w1")
    engine.send(stored([2**40], None), stored([2**40 + 1], 2**40, TOKENS[16:32]))
    assert (engine.publisher.status().orphans, engine.publisher.status().unplaced) == (1, 1)
    rebuilt(engine)
    other.send(stored([2**40], None, TOKENS[:16]))
    assert engine.resident(LONGER) == 32


def test_what_was_told_after_the_last_flush_is_told_again(index: ContentIndex) -> None:
    """The two publishers were stored in different transactions, and the service was killed between them."""
    engine, other, store = Engine(index, "w0"), Engine(index, "w1"), DictStore()
    engine.send(stored([2**40 + 1], 2**40, TOKENS[16:32]))
    store.flush(engine.publisher)
    other.send(stored([2**40], None, TOKENS[:16]))
    assert engine.publisher.status().orphans == 0
    for first, second in ((engine, other), (other, engine)):
        stores = {engine: store, other: DictStore()}
        stores[other].flush(other.publisher)
        for recovered in (engine, other):
            index.remove_publisher(recovered.publisher.registration.key)
        for recovered in (first, second):
            recovered.publisher = index.add_publisher(recovered.publisher.registration)
            stores[recovered].recover(recovered.publisher)
            recovered.publisher.catch_up_with_others()
        assert engine.publisher.status().orphans == 0
        assert len(engine.references()) == 1
        check_index(index)
        other.publisher.drop_residencies()
        other.send(stored([2**40], None, TOKENS[:16]))


def test_others_hear_of_a_parent_known_from_its_skipped_context(index: ContentIndex) -> None:
    engine, other = Engine(index, "w0"), Engine(index, "w1")
    engine.send(stored([2**40 + 1], 2**40, TOKENS[16:32]))
    context = {"skipped_token_ids": TOKENS[:16], "skipped_parent_block_hash": None}
    other.send(stored([2**40 + 5], 2**40, TOKENS[64:80], **context))
    assert engine.publisher.status().orphans == 0


def test_a_medium_without_residencies_is_not_listed(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]), removed([1]))
    before = index.stats()
    rebuilt(engine)
    assert index.stats() == before


def test_holders_of_waiting_blocks_have_their_place_after_a_recovery() -> None:
    engine = Engine(ContentIndex(IndexLimits(holders_max=2)))
    engine.send(stored([5], 4, TOKENS[16:32], ownership="a"), stored([6], 4, TOKENS[16:32], ownership="b"))
    rebuilt(engine)
    engine.send(stored([7], None, TOKENS[:16], ownership="c"), stored([4], None, TOKENS[:16], ownership="a"))
    assert engine.publisher.status().bad_events == {"too_many_holders": 1}
    assert len(engine.references()) == 3


def test_the_checkpoint_is_what_was_applied_last(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]))
    engine.publisher.count_gap(1, 3)
    engine.publisher.apply(decoded(cleared()), 4, 99)
    rebuilt(engine)
    checkpoint = engine.publisher.checkpoint
    assert (checkpoint.sequence_number, checkpoint.fingerprint, checkpoint.coverage) == (4, 99, Coverage.DEGRADED)
    engine.publisher.restart()
    assert (engine.publisher.generation, engine.publisher.checkpoint.sequence_number) == (2, None)
    assert engine.publisher.coverage is Coverage.COMPLETE


def trust_of(engine: Engine) -> tuple[str, str, float | None]:
    coverage, reason, at = engine.publisher.trust
    return str(coverage), str(reason), at


def test_every_hit_says_why_and_since_when(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]))
    engine.publisher.count_gap(1, 3, at=7.5)
    engine.send(stored([1], None, TOKENS[:16]))
    hit = engine.hit(TOKENS[:17])
    assert hit is not None
    assert (hit.coverage, hit.coverage_reason, hit.coverage_at) == ("degraded", "gap", 7.5)
    engine.publisher.show(Trust(Coverage.DISCONNECTED, CoverageReason.CONNECTION_LOST, 8.0))
    hit = engine.hit(TOKENS[:17])
    assert hit is not None
    assert (hit.coverage, hit.coverage_reason, hit.coverage_at) == ("disconnected", "connection_lost", 8.0)
    engine.publisher.show(None)
    assert trust_of(engine) == ("degraded", "gap", 7.5)


def test_what_is_shown_meanwhile_is_never_stored(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.publisher.show(Trust(Coverage.RECOVERING, CoverageReason.REPLAYING, 1.0))
    engine.send(stored([1], None, TOKENS[:16]))
    assert trust_of(engine) == ("recovering", "replaying", 1.0)
    assert engine.publisher.checkpoint.coverage is Coverage.COMPLETE


@pytest.mark.parametrize("medium", ["GPU", "CPU"], ids=["plain", "by its own rules"])
def test_one_that_is_not_credited_has_no_hits_until_it_is(index: ContentIndex, medium: str) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]), stored([1], None, TOKENS[:16], medium=medium))
    for _ in range(2):
        assert engine.hit(TOKENS[:17]) is not None
        engine.publisher.set_credited(False)
        assert engine.hit(TOKENS[:17]) is None
        engine.publisher.set_credited(True)
    assert engine.hit(TOKENS[:17]) is not None


def test_a_doubt_is_settled_but_nothing_worse_is(index: ContentIndex) -> None:
    publisher = Engine(index).publisher
    publisher.doubt(CoverageReason.CONTINUITY_UNPROVEN, 1.0)
    publisher.doubt(CoverageReason.CLOCK_WENT_BACK, 2.0)
    assert publisher.trust == (Coverage.DEGRADED, CoverageReason.CLOCK_WENT_BACK, 2.0)
    publisher.prove(3.0)
    assert publisher.trust == (Coverage.COMPLETE, CoverageReason.PROVEN, 3.0)
    publisher.set_coverage(Coverage.SINCE, CoverageReason.JOINED_LATE, 4.0, since=7)
    publisher.doubt(CoverageReason.CONTINUITY_UNPROVEN, 5.0)
    publisher.prove(6.0)
    assert publisher.trust == (Coverage.SINCE, CoverageReason.PROVEN, 6.0)
    assert publisher.checkpoint.since == 7
    publisher.count_gap(8, 9, 7.0)
    publisher.doubt(CoverageReason.CONTINUITY_UNPROVEN, 8.0)
    publisher.prove(9.0)
    assert publisher.trust == (Coverage.DEGRADED, CoverageReason.GAP, 7.0)


@pytest.mark.parametrize(("reason", "shown"), [("truncated_batch", "unreadable_batch"), ("poisonous_batch",) * 2])
def test_a_batch_that_is_skipped_says_so(index: ContentIndex, reason: str, shown: str) -> None:
    engine = Engine(index)
    engine.publisher.skip(3, 1, reason, 2.5)
    assert trust_of(engine) == ("degraded", shown, 2.5)


def test_a_cleared_publisher_goes_on_from_where_it_is(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]))
    engine.publisher.count_gap(1, 3, 1.0)
    engine.publisher.clear(2.0)
    assert engine.references() == {}
    assert trust_of(engine) == ("since", "cleared", 2.0)
    assert engine.publisher.checkpoint.since == (engine.publisher.checkpoint.sequence_number or 0) + 1
    engine.send(stored([2], 1, TOKENS[16:32]), stored([1], None, TOKENS[:16]))
    assert len(engine.references()) == 2


def test_nothing_is_taken_twice(index: ContentIndex) -> None:
    engine = Engine(index)
    assert engine.publisher.take_changes() is None
    engine.send(stored([1], None, TOKENS[:16]))
    assert engine.publisher.take_changes() is not None
    assert engine.publisher.take_changes() is None


# ---------------------------------------------------------------------- long chains


def test_a_long_chain_of_orphans_is_placed_at_once(index: ContentIndex) -> None:
    engine = Engine(index)
    tokens = numbers(0, 16 * 3_000)
    for i in range(2_999, 0, -1):
        engine.send(stored([i + 1], i, tokens[i * 16 : i * 16 + 16]))
    engine.send(stored([1], None, tokens[:16]))
    assert engine.resident(tokens) == len(tokens)
    check_index(index)


def test_orphans_that_explain_each_other_across_publishers_are_all_placed(index: ContentIndex) -> None:
    """However long the chain: consequences are worked off one after the other, not inside each other."""
    even, odd = Engine(index, "even"), Engine(index, "odd")
    tokens, base = numbers(0, 16 * 2_000), 2**40
    for i in range(1_999, 0, -1):
        engine = odd if i % 2 else even
        engine.send(stored([base + i], base + i - 1, tokens[i * 16 : i * 16 + 16]))
    even.send(stored([base], None, tokens[:16]))
    assert even.publisher.status().orphans == odd.publisher.status().orphans == 0
    assert len(even.references()) == len(odd.references()) == 1_000
    check_index(index)


def test_sparse_runs_that_anchor_each_other_are_all_placed() -> None:
    engine = Engine(ContentIndex())
    tokens, count = numbers(0, 16 * 900), 900
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 33,
    }
    engine.send(stored([10**6], None, numbers(10**6, 16), **window))
    engine.send(stored(range(1, count + 1), None, tokens, group_idx=0))  # its own names for the same content
    for i in range(count - 1):  # 10000 + i and the next, somewhere in a longer span
        engine.send(stored([10_000 + i, 10_001 + i], None, tokens[: 16 * 4], **window))
    engine.send(stored([10_000 + count - 1], count - 1, tokens[-16:], group_idx=0))
    placed = [h for (_, group, _, h) in engine.references() if group == 1 and h >= 10_000 and h < 10**6]
    assert len(placed) == count
    check_index(engine.index)


def test_hashes_that_orphans_wait_for_are_bounded(index: ContentIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "AWAITED_MAX", 10)
    engine, other = Engine(index), Engine(index, "w1")
    for i in range(50):
        engine.send(stored([i], 2**40 + i, TOKENS[:16]))
    found = index.scope("default", "m")
    assert found is not None
    assert len(found.awaited) == 10
    assert engine.publisher.status().counters["forgotten_awaited_hashes"] == 40
    other.send(stored([2**40 + 49], None, TOKENS[16:32]))
    assert engine.publisher.status().orphans == 49
    index.remove_publisher(PublisherKey("w0", 0))
    assert found.awaited == {}


def test_hashes_with_several_contents_are_bounded(index: ContentIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "VARIANTS_MAX", 3)
    engine = Engine(index)
    for i in range(5):
        engine.send(stored([i], None, TOKENS[:16]), stored([i], None, TOKENS[:16], lora_name="x"))
    assert len(engine.publisher.residents.variants) == 3
    assert engine.publisher.status().counters["forgotten_variants"] == 2
    engine.send(cleared())
    assert engine.hit(LONGER, lora_name="x") is None
    check_index(index)


def test_identifiers_carried_on_are_bounded(index: ContentIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CARRIED_MAX", 3)
    engine = Engine(index)
    for i in range(5):
        engine.send(stored([i], None, TOKENS[16 * i : 16 * i + 16], extra_keys=[["image", "salt"]]))
    assert engine.publisher.status().counters["forgotten_carried_identifiers"] == 2


# ---------------------------------------------------------------------- lookahead


def send_lookahead(engine: Engine, first: int, count: int, tokens: list[int] = LONGER) -> None:
    for i in range(first, first + count):
        block = tokens[i * 16 : i * 16 + 16]
        engine.send(stored([1000 + i], 999 + i if i else None, block, lookahead_token_ids=[[tokens[i * 16 + 16]]]))


def test_a_hash_with_lookahead_is_one_continuation_of_its_prefix(index: ContentIndex) -> None:
    engine = Engine(index)
    send_lookahead(engine, 0, 3)
    assert engine.hit_tokens(LONGER) == 48
    assert engine.hit_tokens([*TOKENS[:48], 5, 5]) == 32
    assert engine.hit_tokens(TOKENS[:48]) == 32


def test_lookahead_survives_a_recovery(index: ContentIndex) -> None:
    engine = Engine(index)
    send_lookahead(engine, 0, 3)
    rebuilt(engine)
    assert engine.hit_tokens(LONGER) == 48
    send_lookahead(engine, 3, 2)
    assert engine.hit_tokens(LONGER) == 80


def test_a_child_of_a_forgotten_lookahead_block_is_an_orphan_and_never_misplaced() -> None:
    engine = Engine(ContentIndex(IndexLimits(ghosts_max=2)))
    send_lookahead(engine, 0, 1)
    engine.send(removed([1000]))
    for i in range(3):
        engine.send(stored([3000 + i], None, numbers(6000 + 100 * i, 16), lookahead_token_ids=[[1]]))
        engine.send(removed([3000 + i]))
    engine.send(stored([2000], 1000, numbers(5000, 16), lookahead_token_ids=[[1]]))  # its parent's ghost is gone
    assert engine.publisher.status().orphans == 1
    send_lookahead(engine, 0, 4)
    assert engine.hit_tokens(LONGER) == 64


def test_settings_that_were_lowered_do_not_stop_a_recovery() -> None:
    engine = Engine(ContentIndex())
    for group in range(4):
        engine.send(stored([group], None, numbers(1000 * group, 16), group_idx=group))
    for group in range(3):
        engine.send(removed([group], group_idx=group))
    engine.send(*(stored([10 + group], None, numbers(1000 * group, 16), group_idx=group) for group in range(4)))
    store = DictStore()
    store.flush(engine.publisher)
    lowered = ContentIndex(IndexLimits(ghosts_max=1, holders_max=2)).add_publisher(engine.publisher.registration)
    store.recover(lowered)
    assert lowered.status().residencies == 5
    assert lowered.status().ghosts == 1


def test_a_resident_lookahead_block_can_be_extended_however_few_ghosts_are_kept() -> None:
    engine = Engine(ContentIndex(IndexLimits(ghosts_max=2)))
    send_lookahead(engine, 0, 4)
    engine.send(stored([2000], 1000, numbers(5000, 16), lookahead_token_ids=[[1]]))
    assert engine.publisher.status().orphans == 0


# ---------------------------------------------------------------------- located blocks


def test_block_offsets_place_what_follows_without_a_hole(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1, 2, 4], None, TOKENS[:64], block_offsets=[0, 1, 3]))
    assert engine.hit_tokens(LONGER) == 32
    assert engine.publisher.status().unplaced == 1


def test_a_parent_per_block_places_every_block_whose_parent_is_known(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1, 2, 3], None, TOKENS[:48], group_idx=0))
    engine.send(stored([11, 14], None, TOKENS[:64], group_idx=1, block_offsets=[0, 3], block_parent_hashes=[None, 3]))
    assert {(group, h) for _, group, _, h in engine.references()} == {(0, 1), (0, 2), (0, 3), (1, 11), (1, 14)}
    assert engine.publisher.status().unplaced == 0


def test_a_block_in_the_midst_of_a_span_is_no_root_whatever_it_says(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([4], 3, TOKENS[:64], block_offsets=[3], block_parent_hashes=[None]))
    assert engine.references() == {}
    assert engine.hit(TOKENS[48:]) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"block_offsets": [0]},
        {"block_offsets": [1, 0]},
        {"block_offsets": [0, 0]},
        {"block_offsets": [0, 4]},
        {"block_offsets": [-1, 0]},
        {"block_parent_hashes": [None, 1]},
        {"block_offsets": [0, 2], "block_parent_hashes": [None]},
    ],
)
def test_offsets_that_contradict_their_event_are_refused(index: ContentIndex, fields: dict[str, Any]) -> None:
    engine = Engine(index)
    engine.send(stored([1, 2], None, TOKENS[:64], **fields))
    assert engine.publisher.status().bad_events == {"bad_block_offsets": 1}
    assert engine.references() == {}


def test_located_blocks_followed_by_tokens_of_no_block_show_their_size(index: ContentIndex) -> None:
    engine = Engine(index, block_size=16)
    engine.send(stored([2, 3], None, TOKENS[:39], block_size=8, block_offsets=[0, 2]))
    assert engine.publisher.granule == 8
    assert {(group, h) for _, group, _, h in engine.references()} == {(0, 2)}
    assert engine.hit_tokens(TOKENS[:12]) == 8


def test_a_block_size_that_is_not_learned_places_nothing() -> None:
    reader = RunReader(Counter(), EngineOptions(), NamesSeen())
    reader.change_granule(16)
    event = decode_batch(payload(stored([1], None, TOKENS[:16]) | {"block_size": 24})).events[0]
    assert isinstance(event, BlockStored)
    with pytest.raises(WireError, match="multiple of the granule") as error:
        reader.read(event, at_root=True, counts=True)
    assert error.value.reason == "bad_block_size"


# ---------------------------------------------------------------------- whole batches


def test_offloaded_blocks_without_extra_keys_define_no_content_even_after_others_did(index: ContentIndex) -> None:
    engine = Engine(index)
    for block in range(3):
        engine.send(
            stored(
                [block],
                block - 1 if block else None,
                TOKENS[block * 16 : block * 16 + 16],
                medium="CPU",
                extra_keys=[[]],
            )
        )
    engine.send(stored([3], 2, TOKENS[48:64], medium="CPU", extra_keys=None))
    assert engine.resident(LONGER) == 48
    assert engine.publisher.status().unplaced == 1


def test_a_block_under_two_hashes_stays_until_both_are_gone_though_one_batch_says_all(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]))
    engine.send(stored([2], None, TOKENS[:16]), removed([1]))
    assert engine.resident(LONGER) == 16
    engine.send(stored([1], None, TOKENS[:16]), removed([2]), removed([1]))
    assert (engine.resident(LONGER), engine.references()) == (0, {})
    check_index(index)


def test_one_removal_alone_ends_every_content_of_its_hash(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]))
    engine.send(stored([1], None, TOKENS[16:32]))
    assert len(engine.references()) == 2
    engine.send(removed([1]))
    assert engine.references() == {}
    check_index(index)


def test_a_child_goes_on_from_the_newest_content_of_a_hash_that_had_several(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]))
    engine.send(stored([1], None, TOKENS[16:32]))
    engine.send(removed([1]))
    engine.send(stored([1], None, TOKENS[:16]))
    engine.send(stored([2], 1, TOKENS[32:48]))
    assert engine.resident([*TOKENS[:16], *TOKENS[32:48]]) == 16


def test_a_size_that_is_new_is_learned_though_all_else_is_plain(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16]))
    engine.send(stored([2], 1, TOKENS[16:48], 32))
    assert [state.sizes for state in engine.publisher.groups.states()] == [(16, 32)]


def test_extra_keys_that_cannot_be_read_are_counted_even_where_all_else_is_plain(index: ContentIndex) -> None:
    engine = Engine(index)
    engine.send(stored([1], None, TOKENS[:16], extra_keys=[None]))
    engine.send(stored([2], 1, TOKENS[16:32], extra_keys=[[None]]))
    assert engine.resident(LONGER) == 16
    assert engine.publisher.status().bad_events == {"bad_extra_keys": 1}


# ---------------------------------------------------------------------- bounds and removal


def test_a_block_longer_than_its_prefix_is_of_unknown_size(index: ContentIndex) -> None:
    engine, store = Engine(index), DictStore()
    engine.send(stored([1], None, TOKENS[:16]), stored([1], None, [], 64, medium="CPU"))
    store.flush(engine.publisher)
    assert all(row.position >= 0 for row in store.rows.values())
    assert len(engine.references()) == 2


def test_holders_of_one_publisher_are_bounded() -> None:
    engine = Engine(ContentIndex(IndexLimits(holders_max=3)))
    for i in range(5):
        engine.send(stored([i], None, TOKENS[:16], ownership=f"owner {i}"))
    assert engine.publisher.status().bad_events == {"too_many_holders": 2}
    assert len(engine.references()) == 3


def test_refusing_a_holder_does_not_look_through_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ContentIndex(IndexLimits(holders_max=3)))
    engine.send(*(stored([100 + i], 10**6 + i, TOKENS[:16], ownership=f"owner {i % 2}") for i in range(100)))
    engine.send(stored([1], None, TOKENS[:16], ownership="owner 2"))
    looked_at: list[object] = []
    waiting = list(engine.publisher.waiting.residencies())

    def residencies(_: object) -> Iterator[object]:
        for residency in waiting:
            looked_at.append(residency)
            yield residency

    monkeypatch.setattr("indexer.index.waiting.WaitingRoom.residencies", residencies)
    engine.send(stored([2], None, TOKENS[:16], ownership="owner 3"))
    assert engine.publisher.status().bad_events == {"too_many_holders": 1}
    assert len(looked_at) == 2


def test_a_removed_publisher_leaves_no_slot_and_no_key(index: ContentIndex) -> None:
    one, other = Engine(index, "one"), Engine(index, "other")
    for engine in (one, other):
        engine.send(stored([1, 2], None, TOKENS[:32]))
    index.remove_publisher(PublisherKey("one", 0))
    index.remove_publisher(PublisherKey("nobody", 0))
    check_index(index)
    assert other.hit_tokens(LONGER) == 32
    again = Engine(index, "one")
    again.send(stored([1], None, TOKENS[:16]))
    check_index(index)
    assert again.hit_tokens(LONGER) == 16


def test_two_publishers_of_one_key_are_refused(index: ContentIndex) -> None:
    Engine(index)
    with pytest.raises(ValueError, match="exists"):
        Engine(index)


def test_shapes_that_began_again_are_not_taken_for_those_before() -> None:
    engine, reader = Engine(ContentIndex()), PayloadReader()

    def send(event: dict[str, Any]) -> None:
        engine.publisher.apply(read_batch(payload(event), reader), engine.publisher.batches_applied, 0)

    store = DictStore()
    for i in range(3):
        send(stored([i + 1], i or None, TOKENS[16 * i : 16 * i + 16]))
    store.flush(engine.publisher)
    for i in range(SHAPES_MAX - 1):
        reader.read(payload(removed([1], f"medium {i}")))
    send(removed([3]))  # has the number that stores had
    assert len(reader.shapes) == 1
    store.flush(engine.publisher)
    store.assert_equals(engine.publisher)
    assert sorted(h for _, h, _, _ in engine.publisher.residencies()) == [1, 2]


def test_many_removals_of_one_event_end_the_same_as_one_by_one() -> None:
    """With hashes of two references, of one content, on another medium, and unknown ones among them."""
    count = 200
    tokens = [t for i in range(count) for t in numbers(100 * i, G)]
    at_once, one_by_one = Engine(ContentIndex()), Engine(ContentIndex())
    gone = [*range(1, count + 1), 5_000, *range(1_001, 1_021)]
    for engine in (at_once, one_by_one):
        engine.send(stored(range(1, count + 1), None, tokens))
        engine.send(stored([1_500], None, numbers(7, G), medium="CPU", extra_keys=[None]))
        engine.send(stored(range(1_001, 1_031), None, tokens[: 30 * G]))
        engine.send(stored(range(50, 61), 49, tokens[49 * G : 60 * G]))
    at_once.send(removed(gone))
    one_by_one.send(*(removed([engine_hash]) for engine_hash in gone))
    left = {("GPU", 0, "", h): 1 for h in [*range(50, 61), *range(1_021, 1_031)]} | {("CPU", 0, "", 1_500): 1}
    for engine in (at_once, one_by_one):
        assert engine.references() == left
        assert engine.publisher.status().counters["unknown_removals"] == 1
        check_index(engine.index)
    ghosts = [{(h, key, end) for h, key, end in engine.publisher.ghosts()} for engine in (at_once, one_by_one)]
    assert ghosts[0] == ghosts[1]
    store = DictStore()
    store.flush(at_once.publisher)
    store.assert_equals(at_once.publisher)
