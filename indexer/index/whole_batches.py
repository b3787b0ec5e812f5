"""Applies batches of simple events by kernels: the same as one event after the other, without an object per block.

Purpose: nearly all traffic is engines of one group and one medium that store dense blocks and remove them. As long as a
publisher is of that kind and nothing of it waits, its batches are applied as columns. What is no plain case (a parent
that is not resident, a hash stored twice, several references ...) is handed over to `placing.py`, event by event.

Invariants: what is applied here has taught nothing new, so `groups` and granule are as they were; the order of events
is kept, also around those that are handed over; ghosts and aliases are noted before anybody looks at them.

If broken: the index would differ from the one that the same events make one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from indexer.index.columns import U64
from indexer.index.groups import Groups
from indexer.index.holder import Holder
from indexer.index.kernels import (
    ADDING,
    BLOCK,
    DONE,
    EVENT,
    GHOST_FILL,
    GHOST_WORDS,
    GHOSTS_FULL,
    HAND_OVER,
    HAS_ALIASES,
    HOLDER_FULL,
    LOG_FILL,
    LOG_FULL,
    NEEDED,
    PROGRESS_FIELDS,
    RUN_HEAD,
    SET_ID,
    SPACE_FULL,
    STAGE,
    STORED_KIND,
    UNKNOWN_REMOVALS,
    apply_events,
    links_note,
    mark_touching,
)
from indexer.index.placing import Placing, holder_key
from indexer.index.settling import Neighbours
from indexer.index.table import I64
from indexer.wire.batch_kernels import SHAPES_MAX
from indexer.wire.columns import BatchColumns
from indexer.wire.decode import decode_event
from indexer.wire.events import BlockRemoved, BlockStored, Event

GHOSTS_AT_ONCE = 1_024
PLANS_MAX = 256


class Plan(NamedTuple):
    """How batches of certain shapes are applied. `block_tokens`, `seeds`: per shape."""

    holder: Holder
    groups_version: int
    shapes: Sequence[BlockStored | BlockRemoved]
    has_removals: bool
    block_tokens: I64
    seeds: U64


class Scratch:
    """Buffers of the kernels, shared by all publishers of a scope: one batch is applied at a time."""

    def __init__(self) -> None:
        self.local_hashes = self.keys = self.aliases = np.empty(0, np.uint64)
        self.pair = np.empty(2, np.uint64)
        self.ghosts = np.empty(GHOSTS_AT_ONCE * GHOST_WORDS, np.uint64)
        self.progress = np.zeros(PROGRESS_FIELDS, np.int64)

    def prepare(self, granules: int, blocks: int) -> None:
        """Room for a batch of so many."""
        if granules > len(self.keys):
            self.local_hashes, self.keys = np.empty(2 * granules, np.uint64), np.empty(2 * granules, np.uint64)
        if blocks > len(self.aliases):
            self.aliases = np.empty(2 * blocks, np.uint64)
        self.progress[:] = 0


class WholeBatches:
    """Of one publisher. Cost: 0.3 us a block of 16 tokens, 20 us a batch."""

    def __init__(
        self,
        neighbours: Neighbours,
        placing: Placing,
        groups: Groups,
        scratch: Scratch,
        apply_event: Callable[[Event], None],
    ) -> None:
        self._neighbours = neighbours
        self._placing = placing
        self._residents = placing.residents
        self._groups = groups
        self._scratch = scratch
        self._apply_event = apply_event
        self._plans: dict[int, Plan] = {}

    def apply(self, columns: BatchColumns) -> int:
        """Apply the first of these batches; how many. 0: they, or this publisher, are not simple, and nothing happened.

        Where an event is handed over, its batch is the last: the next one may meet a publisher of another kind.
        """
        plan = self._plan(columns)
        if plan is None:
            return 0
        self._scratch.prepare(columns.token_count // plan.holder.space.granule, columns.hash_count)
        batches, events = columns.batches, columns.count
        if self._residents.is_proving:  # what one batch says is followed by proofs before the next one
            batches, events = 1, int(columns.batch_ends[0])
            if not events:
                return 0
        touching = self._touching(plan, columns)
        while (status := self._run(plan, columns, min(events, touching[-1]))) != DONE or touching[-1] < events:
            if status not in (DONE, HAND_OVER):
                self._provide(status, plan.holder, columns)
                continue
            event = int(self._scratch.progress[EVENT])
            last = columns.batch_of(event)
            batches, events = last + 1, int(columns.batch_ends[last])
            while touching[-1] <= event:
                touching.pop()
            if not self._hand_over(plan, columns, events):
                break
        self._note_output(plan.holder)
        self._note_links(plan.holder, columns, events)
        return batches

    # ------------------------------------------------------------------ what is not verified

    def _touching(self, plan: Plan, columns: BatchColumns) -> list[int]:
        """The events that name hashes which are not verified, the first one last, behind the number of events: those
        are handed over, and the kernel need not know of others than its holder."""
        lost = self._residents.unverified.of(plan.holder.key)
        if not lost:
            return [columns.count]
        touching = np.zeros(columns.count, np.bool_)
        for holder in lost:
            mark_touching(columns.count, columns.hash_ends, columns.hashes, *holder.table.arrays, touching)
        return [columns.count, *np.flatnonzero(touching)[::-1].tolist()]

    def _note_links(self, holder: Holder, columns: BatchColumns, events: int) -> None:
        links = self._placing.links_of(holder.key)
        if links is None:
            return
        links.table.make_room(columns.hash_count)
        where = columns.kinds, columns.parents, columns.has_parent, columns.hash_ends, columns.hashes
        links_note(events, *where, *holder.table.arrays, *links.table.arrays)
        links.table.let_go()
        for child in _children_of_zero(columns, events):
            if child in holder:
                links.add_run([child], 0)

    # ------------------------------------------------------------------ what is simple

    def _plan(self, columns: BatchColumns) -> Plan | None:
        if not columns.count or not self.is_simple:
            return None
        plan = self._plans.get(columns.shapes_seen)
        if plan is None or plan.shapes is not columns.shapes or not self._holds_good(plan):
            plan = self._make_plan(columns)
            if plan is not None:
                if len(self._plans) >= PLANS_MAX:
                    self._plans.clear()
                self._plans[columns.shapes_seen] = plan
        return plan

    @property
    def is_simple(self) -> bool:
        """One group, one place, and nothing that stores have to look at beside."""
        residents = self._residents
        return (
            len(residents.holders) == 1
            and self._placing.lifetimes is None
            and self._placing.takes_columns
            and not self._groups.is_coarse
            and len(self._groups.by_index) <= 1
            and not residents.lookahead_tokens
            and not residents.variants
            and not residents.waits
            and not self._neighbours.is_awaited
            and not residents.has_wide
        )

    def _holds_good(self, plan: Plan) -> bool:
        return plan.groups_version == self._groups.version and plan.holder in self._residents.holders.values()

    def _make_plan(self, columns: BatchColumns) -> Plan | None:
        """None if some shape is of another holder, or would teach something."""
        (holder,) = self._residents.holders.values()
        block_tokens, seeds = np.zeros(SHAPES_MAX, np.int64), np.zeros(SHAPES_MAX, np.uint64)
        has_removals = False
        for shape, event in enumerate(columns.shapes):
            if not columns.shapes_seen >> shape & 1:
                continue
            if holder_key(event) != holder.key:
                return None
            has_removals |= isinstance(event, BlockRemoved)
            if isinstance(event, BlockStored):
                if not self._is_known(event) or event.block_size % holder.space.granule:
                    return None
                block_tokens[shape], seeds[shape] = event.block_size, self._placing.seed_of(event)
        return Plan(holder, self._groups.version, columns.shapes, has_removals, block_tokens, seeds)

    def _is_known(self, event: BlockStored) -> bool:
        """Whether stores of this shape define content, and say nothing new about their group."""
        if event.block_size <= 0 or not self._placing.defines_content(event):
            return False
        if not self._placing.teaches_group(event):
            return True
        group = self._groups.by_index.get(event.group_idx or 0)
        kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        return (
            group is not None
            and kind in (None, group.kind)
            and window in (None, group.window)
            and event.block_size in group.sizes
        )

    # ------------------------------------------------------------------ the kernel and what it asks for

    def _run(self, plan: Plan, columns: BatchColumns, events: int) -> int:
        holder, scratch = plan.holder, self._scratch
        log, progress = holder.pending.log, scratch.progress
        progress[LOG_FILL : HAS_ALIASES + 1] = log.fill, 0, bool(holder.aliases)
        holder.table.expect(columns.hash_count)
        holder.space.table.expect(columns.hash_count)
        status: int = apply_events(
            events,
            columns.kinds,
            columns.shape_ids,
            columns.parents,
            columns.has_parent,
            columns.hash_ends,
            columns.token_ends,
            columns.hashes,
            columns.tokens,
            plan.block_tokens,
            plan.seeds,
            holder.space.granule,
            *holder.table.arrays,
            *holder.extra.arrays,
            *holder.space.arrays,
            holder.slot,
            scratch.local_hashes,
            scratch.keys,
            scratch.pair,
            log.chunk,
            scratch.ghosts,
            scratch.aliases,
            progress,
        )
        log.fill, entries = progress[LOG_FILL:HAS_ALIASES].tolist()
        log.entries += entries
        log.has_only_stores &= not plan.has_removals
        return status

    def _provide(self, status: int, holder: Holder, columns: BatchColumns) -> None:
        progress = self._scratch.progress
        needed = int(progress[NEEDED])
        if status == HOLDER_FULL:
            holder.table.make_room(needed)
        elif status == SPACE_FULL:
            holder.space.table.make_room(needed)
        elif status == LOG_FULL:
            holder.pending.log.provide(RUN_HEAD + 3 * needed)
        elif status == GHOSTS_FULL:
            self._note_ghosts()
        else:
            is_stored = columns.kinds[progress[EVENT]] == STORED_KIND
            holder.space.make_step(holder.slot, int(ADDING) if is_stored else 0, int(progress[SET_ID]))

    def _hand_over(self, plan: Plan, columns: BatchColumns, events: int) -> bool:
        """Apply the event that is no plain case, or what is left of it. False: all the others up to number `events`,
        too, since the publisher is not simple any more."""
        progress = self._scratch.progress
        self._note_output(plan.holder)
        event_number, block = int(progress[EVENT]), int(progress[BLOCK])
        event = decode_event(columns.event_bytes(event_number))
        if block:
            assert not isinstance(event, BlockStored), "stores are handed over whole"
            event.block_hashes = event.block_hashes[block:]  # type: ignore[union-attr]
        self._apply_event(event)
        event_number += 1
        if self.is_simple and self._holds_good(plan):
            progress[EVENT], progress[STAGE], progress[BLOCK] = event_number, 0, 0
            return True
        rest = [columns.event_bytes(i) for i in range(event_number, events)]
        for raw in rest:
            self._apply_event(decode_event(raw))
        return False

    def _note_output(self, holder: Holder) -> None:
        """What the kernel left to be noted, before anything else happens."""
        ghosts, aliases, unknown = self._scratch.progress[GHOST_FILL : UNKNOWN_REMOVALS + 1].tolist()
        if ghosts:
            self._note_ghosts()
        if aliases:
            holder.note_aliases(self._scratch.aliases[:aliases].tolist())
        if unknown:
            self._placing.count_unknown_removals(unknown)
        self._scratch.progress[GHOST_FILL : UNKNOWN_REMOVALS + 1] = 0
        holder.table.let_go()
        holder.space.table.let_go()

    def _note_ghosts(self) -> None:
        progress = self._scratch.progress
        filled = int(progress[GHOST_FILL])
        if filled:
            columns = self._scratch.ghosts[:filled].reshape(-1, GHOST_WORDS).T
            self._residents.ghosts.remember_all(*np.ascontiguousarray(columns))
            progress[GHOST_FILL] = 0


def _children_of_zero(columns: BatchColumns, events: int) -> list[int]:
    """Blocks that the first events stored after the block of hash 0, which is no value of a table."""
    first_of = np.concatenate(([0], columns.hash_ends[: events - 1])).astype(np.int64)
    stores = columns.kinds[:events] == STORED_KIND
    after_parent = first_of[stores & columns.has_parent[:events].astype(np.bool_) & (columns.parents[:events] == 0)]
    hashes = columns.hashes[: int(columns.hash_ends[events - 1])]
    within = np.flatnonzero(hashes[:-1] == 0) + 1
    is_stored = np.repeat(stores, np.diff(columns.hash_ends[:events], prepend=0))
    within = within[is_stored[within] & ~np.isin(within, first_of)]
    children: list[int] = hashes[np.concatenate((after_parent, within))].tolist()
    return children
