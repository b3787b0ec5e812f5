"""What must hold of an index after every batch, whatever was sent."""

from __future__ import annotations

from collections import Counter, defaultdict

from indexer.index.content_index import ContentIndex
from indexer.index.holder import Holder
from indexer.index.key_space import SET_MASK, KeySpace
from indexer.index.publisher import PublisherIndex
from indexer.index.scope import Scope
from indexer.index.waiting import WaitingRoom
from tests.engine_events import MODEL


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
                for key in set(holder.keys.values()):
                    expected[key] |= 1 << holder.slot
    assert {slot for slot, holder in enumerate(space.slots) if holder is not None} == slots
    assert {key: space.masks[entry & SET_MASK] for key, entry in space.entries.items()} == expected
    uses = Counter(entry & SET_MASK for entry in space.entries.values())
    assert {i: count for i, count in enumerate(space.uses) if count} == uses
    assert space.unused == sum(1 for count in space.uses[1:] if not count)


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
    assert holder.extra.keys() <= holder.keys.keys()
    assert all(extra >= 1 for extra in holder.extra.values())
    shared = {key: count for key, count in Counter(holder.keys.values()).items() if count > 1}
    assert holder.aliases == shared
    assert holder.added.keys() <= holder.keys.keys()
    assert not holder.added.keys() & holder.changed.keys()
    for engine_hash, row in holder.changed.items():
        assert (row is None) == (engine_hash not in holder.keys)
    for engine_hash, added in holder.added.items():
        assert added.content_key == holder.keys[engine_hash]
        assert added.reference_count == holder.reference_count(engine_hash)
        assert added.position >= 0
        assert added.block_tokens >= 0


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
