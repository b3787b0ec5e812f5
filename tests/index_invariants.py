"""What must hold of an index after every batch, whatever was sent."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from indexer.index.content_index import ContentIndex
from indexer.index.holder import Holder
from indexer.index.kernels import FILL, LIMIT
from indexer.index.key_space import KeySpace
from indexer.index.publisher import PublisherIndex
from indexer.index.scope import Scope
from indexer.index.state import HolderChanges, ResidencyRow
from indexer.index.table import Table
from indexer.index.waiting import WaitingRoom
from tests.engine_events import MODEL
from tests.store_stand_in import rows_of


def check_index(index: ContentIndex) -> None:
    scope = index.scope("default", MODEL)
    if scope is None:
        return
    for publisher in scope.publishers:
        check_publisher(publisher)
        check_waiting(publisher.waiting)
    for space in scope.spaces.values():
        check_space(space, scope)
    assert not scope.explained


def check_space(space: KeySpace, scope: Scope) -> None:
    """Entries are the union of the holders' keys; sets are counted; no slot is leaked."""
    expected: dict[int, int] = defaultdict(int)
    slots: set[int] = set()
    for publisher in scope.publishers:
        for holder in publisher.residents.holders.values():
            if holder.space is space:
                assert space.slots[holder.slot] is holder
                slots.add(holder.slot)
                for key in {key for _, key in holder.items()}:
                    expected[key] |= 1 << holder.slot
    assert {slot for slot, holder in enumerate(space.slots) if holder is not None} == slots
    assert {key: mask for key, _, mask in space.entries()} == expected
    uses = Counter(mask for _, _, mask in space.entries())
    used = {space.masks[i]: count for i, count in enumerate(space.uses.tolist()) if count}
    assert used == uses
    check_table(space.table)


def check_table(table: Table) -> None:
    """Every entry is found where it lies; there is room enough that probes end; empty old arrays are let go."""
    keys, values = table.items()
    assert len(set(keys.tolist())) == len(keys)
    assert [table.get(key) for key in keys.tolist()] == values.tolist()
    assert len(table) <= table.meta[LIMIT]
    assert table.meta[FILL] == np.count_nonzero(table.slots[1::2])


def check_publisher(publisher: PublisherIndex) -> None:
    residents = publisher.residents
    for key, holder in residents.holders.items():
        assert holder.key == key
        check_holder(holder)
    assert len(residents.ghosts) <= residents.ghosts.ghosts_max + residents.ghosts.allowance
    assert len(publisher.ancestry) <= publisher.ancestry.links_max
    assert len(residents.holders) <= residents.holders_max
    for _, _, _, count in publisher.residencies():
        assert count >= 1


def check_holder(holder: Holder) -> None:
    keys = dict(holder.items())
    assert len(keys) == len(holder)
    assert set(holder.extra) | holder.wide_extra.keys() <= keys.keys()
    shared = {key: count for key, count in Counter(keys.values()).items() if count > 1}
    assert holder.aliases == shared
    check_table(holder.table)
    check_table(holder.extra)
    changes = HolderChanges(holder.key, rows=holder.wide_changes, columns=holder.log.folded())
    for engine_hash, row in rows_of(changes):
        assert (row is None) == (engine_hash not in keys)
        if row is not None:
            assert row.reference_count == holder.reference_count(engine_hash)
        if isinstance(row, ResidencyRow):
            assert row.content_key == keys[engine_hash]
            assert row.position >= 0
            assert row.block_tokens >= 0


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
    assert room.run_hashes == sum(len(run.hashes) for run in room.run_order)
