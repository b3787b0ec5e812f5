"""What must hold of an index after every batch, whatever was sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from indexer.index.change_log import ChangeLog
from indexer.index.columns import U64
from indexer.index.content_index import ContentIndex
from indexer.index.holder import Holder
from indexer.index.kernels import _GOLDEN, CAPACITY, CURSOR, FILL, LIMIT, OLD_CAPACITY, U32
from indexer.index.key_space import KeySpace
from indexer.index.publisher import PublisherIndex
from indexer.index.residents import Residents
from indexer.index.state import CountChange, Coverage, EngineHash, HolderChanges, HolderKey, ResidencyRow
from indexer.index.table import Table
from indexer.index.waiting import WaitingRoom
from tests.engine_events import MODEL
from tests.store_stand_in import rows_of


def check_index(index: ContentIndex) -> None:
    scope = index.scope("default", MODEL)
    if scope is None:
        return
    keys: dict[Holder, set[int]] = {}
    for publisher in scope.publishers:
        check_publisher(publisher)
        check_waiting(publisher.waiting)
        for holder in publisher.residents.all_holders():
            keys[holder] = check_holder(holder)
        check_pending(publisher)
    for space in scope.spaces.values():
        check_space(space, {holder: held for holder, held in keys.items() if holder.space is space})
    numbers = scope.numbers.array[[p.number_row for p in scope.publishers]].tolist()
    assert numbers == [-1 if (n := p.checkpoint.sequence_number) is None else n for p in scope.publishers]
    assert len({p.number_row for p in scope.publishers}) == len(scope.publishers)
    assert not scope.explained
    not_complete = [p.registration.key for p in scope.publishers if p.coverage is not Coverage.COMPLETE]
    assert scope.not_complete == sorted(not_complete)


def check_space(space: KeySpace, held: dict[Holder, set[int]]) -> None:
    """Entries are the union of the holders' keys; sets are counted; no slot is leaked. `held`: the keys of each.

    Retired slots may be in any set; a set of nothing else is as good as none.
    """
    expected: dict[int, int] = defaultdict(int)
    for holder, keys in held.items():
        assert space.slots[holder.slot] is holder
        for key in keys:
            expected[key] |= 1 << holder.slot
    retired = {sweep.slot: sweep for sweep in space.sweeps}
    assert all(space.slots[slot] is sweep for slot, sweep in retired.items())
    assert space.retired == sum(1 << slot for slot in retired)
    taken = {slot for slot, holder in enumerate(space.slots) if holder is not None}
    assert taken == {h.slot for h in held} | retired.keys()
    words = space.mask_words.tobytes()[: 8 * space.words * len(space.masks)]
    assert words == b"".join(mask.to_bytes(8 * space.words, "little") for mask in space.masks)
    masks = {key: mask for key, _, mask in space.entries()}
    assert all(masks.values())
    assert {key: live for key, mask in masks.items() if (live := mask & ~space.retired)} == expected
    assert space.held_keys == len(expected)
    used = {space.masks[i]: count for i, count in enumerate(space.uses.tolist()) if count}
    assert used == Counter(masks.values())
    check_table(space.table)


def check_table(table: Table) -> dict[int, int]:
    """Every entry is found where it lies, and there is no empty slot between its home and it; there is room enough that
    probes end."""
    keys, values = (column.tolist() for column in table.items())
    entries = dict(zip(keys, values, strict=True))
    assert len(entries) == len(keys) == len(table) <= table.meta[LIMIT]
    assert [table.get(key) for key in keys] == values
    is_taken = table.slots[1::2] != 0
    assert table.meta[FILL] == np.count_nonzero(is_taken)
    taken = np.flatnonzero(is_taken)
    homes = homes_of(table, table.slots[::2][taken])
    empty_before = np.concatenate(([0], np.cumsum(~is_taken)))
    assert (homes <= taken).all()
    assert (empty_before[homes] == empty_before[taken]).all(), "a probe ends before it comes to the entry"
    assert len(is_taken) >= table.meta[CAPACITY] + table.meta[LIMIT] + 1
    walk, seen = table.walk(), set()
    while walk:
        seen.update(walk.entries(1 + len(is_taken) // 3)[0].tolist())
    assert seen == entries.keys()
    return entries


def homes_of(table: Table, keys: U64) -> npt.NDArray[np.int64]:
    """Where these belong now."""
    capacity, old_capacity, cursor = (np.uint64(table.meta[field]) for field in (CAPACITY, OLD_CAPACITY, CURSOR))
    places = (keys * _GOLDEN) >> U32
    homes, old_homes = (places * capacity) >> U32, (places * old_capacity) >> U32
    are_old = (old_homes < cursor) == (old_capacity < capacity) if old_capacity else np.zeros(len(keys), np.bool_)
    now: npt.NDArray[np.int64] = np.where(are_old, old_homes, homes).astype(np.int64)
    return now


def check_publisher(publisher: PublisherIndex) -> None:
    residents = publisher.residents
    assert all(key == holder.key for key, holder in residents.holders.items())
    assert len(residents.ghosts) <= residents.ghosts.ghosts_max + residents.ghosts.allowance
    assert len(publisher.ancestry) <= publisher.ancestry.links_max
    assert len(residents.holders) <= residents.holders_max
    check_unverified(residents)


def check_unverified(residents: Residents) -> None:
    unverified = residents.unverified
    assert len(unverified) <= unverified.entries_max
    numbers = [cohort.number for cohort in unverified.cohorts]
    assert numbers == sorted(set(numbers))
    for holder in unverified.holders():
        assert not holder.is_verified
        assert not holder.is_credited
        assert holder.key in residents.holders
    assert all(holder.is_verified for holder in residents.holders.values())


def check_holder(holder: Holder) -> set[int]:
    """Its tables, counts and pending changes agree. Returns its content keys."""
    narrow, extra = check_table(holder.table), check_table(holder.extra)
    assert narrow.keys().isdisjoint(holder.wide)
    keys: dict[EngineHash, int] = {**narrow, **holder.wide}
    assert len(keys) == len(holder)
    assert extra.keys() <= narrow.keys()
    assert holder.wide_extra.keys() <= holder.wide.keys()
    assert all(count >= 1 for count in holder.wide_extra.values())
    shared = {key: count for key, count in Counter(keys.values()).items() if count > 1} if keys else {}
    assert holder.aliases == shared
    references = {engine_hash: 1 + more for engine_hash, more in (extra | holder.wide_extra).items()}
    assert holder.is_verified or not references
    return set(keys.values())


def check_pending(publisher: PublisherIndex) -> None:
    """What the store is told is what is held; no hash is held twice in one place."""
    for place, verified in publisher.residents.holders.items():
        holders = [verified, *publisher.residents.unverified.of(place)]
        pending = verified.pending
        assert all(holder.pending is pending for holder in holders)
        keys = {h: (key, holder) for holder in holders for h, key in holder.items()}
        assert len(keys) == sum(len(holder) for holder in holders)
        logged = rows_in(pending.log, pending.log.entries, pending.log.is_uncertain) if pending.log.entries else ()
        expired = publisher.residents.unverified.expired
        for engine_hash, row in (*logged, *pending.wide_changes.items()):
            if engine_hash not in keys:
                assert row is None or (expired is not None and row.cohort <= expired)
                continue
            assert row is not None
            key, holder = keys[engine_hash]
            assert not holder.is_verified or row.reference_count == holder.reference_count(engine_hash)
            if isinstance(row, ResidencyRow):
                assert row.content_key == key
                assert row.position >= 0
                assert row.block_tokens >= 0


@lru_cache(maxsize=256)
def rows_in(
    log: ChangeLog, entries: int, is_uncertain: bool
) -> tuple[tuple[EngineHash, ResidencyRow | CountChange | None], ...]:
    """What a log comes to. It only grows, so it is folded once for each number of entries."""
    assert (log.entries, log.is_uncertain) == (entries, is_uncertain)
    return tuple(dict(rows_of(HolderChanges(HolderKey("", 0, ""), columns=log.folded()))).items())


def check_waiting(room: WaitingRoom) -> None:
    orphans = {h for h, block in room.blocks.items() if block.parent is not None}
    assert set(room.orphan_order) == orphans
    assert set(room.unplaced_order) == room.blocks.keys() - orphans
    assert (room.orphans <= room.orphans_max, room.unplaced <= room.unplaced_max) == (True, True)
    assert len(room.run_order) <= room.runs_max
    children: dict[object, set[object]] = defaultdict(set)
    for engine_hash, block in room.blocks.items():
        assert all(count >= 1 for count in block.counts.values())
        if block.parent is not None:
            assert block.local_hashes
            children[block.parent].add(engine_hash)
    assert {parent: set(waiting) for parent, waiting in room.children.items()} == children
    for parent, waiting in room.children.items():
        assert len(waiting) == len(set(waiting)), parent
    runs = {(h, id(run)) for run in room.run_order for h in run.hashes}
    assert {(h, id(run)) for h, waiting in room.runs.items() for run in waiting} == runs
    assert room.local_hashes == sum(len(block.local_hashes) for block in room.blocks.values())
    assert room.run_hashes == sum(len(run.hashes) + len(run.local_hashes) for run in room.run_order)
