"""Placing blocks: from a publisher's events to residencies of content keys.

Purpose: let every residency begin and end where its content is. Dense events (tokens align with hashes one to one) are
chained from their parent; skipped context is walked first, with its extra keys; events that only name hashes are placed
where those are known; sparse events (fewer hashes than their tokens have blocks) by hash, or from an anchor. What
cannot be placed without guessing waits.

Three layers, each calling only the next: this one decides per event, settling.py places what waited, residents.py
knows what hashes mean and who holds them. runs.py reads tokens and extra keys.

Invariants: an orphan is never a root; an event that contradicts itself changes nothing.

If broken: a prompt would match blocks of another prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from indexer.identity.chain import block_local_hash, chain_keys, lookahead_key
from indexer.index.ancestry import Ancestry
from indexer.index.groups import Groups
from indexer.index.holder import Holder
from indexer.index.journal import Kind
from indexer.index.key_space import KeySpace
from indexer.index.lifetimes import Block, Lifetimes
from indexer.index.names_seen import NamesSeen
from indexer.index.offloading import Connector
from indexer.index.options import EngineOptions
from indexer.index.parent_links import ParentLinks
from indexer.index.residents import Namespace, Point, Residents
from indexer.index.runs import Run, RunReader, first_blocks, located_blocks, namespace_of, refuse_cycles
from indexer.index.settling import Neighbours, Settling, is_wide
from indexer.index.state import EngineHash, HolderKey, ResidencyRow
from indexer.index.tiers import CPU, GPU, Media, canonical_medium
from indexer.index.waiting import SparseRun, WaitingBlock, WaitingRoom
from indexer.wire.events import REPEATED, BlockRemoved, BlockStored, RemovedEverywhere, StandardStored

ROOT = Point(None, 0)
ADOPTED_AT_ONCE = 64  # per batch of a pool


class Placing:
    """All block state of one publisher in one granule.

    `content_from_any_medium`: events of offloaded blocks are complete, too (SGLang). `drops`: whether this group drops
    the last block of a hit (EAGLE).
    `is_vllm`: what is on slower tiers is a connector's for sure. `is_pool`: it never is; hashes may be those of others.
    `note_ended`: told of blocks that ended though nobody removed them, why, and when.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        residents: Residents,
        groups: Groups,
        waiting: WaitingRoom,
        ancestry: Ancestry,
        counters: Counter[str],
        connector: Connector,
        media: Media,
        *,
        options: EngineOptions,
        content_from_any_medium: bool,
        drops: Callable[[int], bool],
        is_vllm: bool,
        is_pool: bool,
        names: NamesSeen,
        note_ended: Callable[[Kind, Sequence[Block], float | None], None],
    ) -> None:
        self.residents = residents
        self.settling = Settling(neighbours, self.residents, waiting, ancestry, groups, counters, connector)
        self.lifetimes = None if options.no_removals is None else Lifetimes(options.no_removals)
        self._runs = RunReader(counters, options, names)
        self._neighbours = neighbours
        self._groups = groups
        self._waiting = waiting
        self._ancestry = ancestry
        self._counters = counters
        self._connector = connector
        self._media = media
        self._counts_as_set = options.counts_as_set
        self._drops = drops
        self.content_from_any_medium = content_from_any_medium
        self.is_vllm = is_vllm
        self._is_pool = is_pool
        self._note_ended = note_ended

    def change_granule(self, granule: int, space: KeySpace) -> None:
        """Content keys of another granule mean nothing: forget them all, and what hashes meant."""
        self._runs.change_granule(granule)
        self.settling.granule = granule
        self.residents.change_space(space)
        self._waiting.forget_all()
        self._ancestry.clear()

    # ------------------------------------------------------------------ events

    def store(self, event: BlockStored) -> None:
        """A BlockStored. Raises WireError if the event contradicts itself; nothing of it is applied then."""
        if not event.block_hashes:
            return  # a span of which no block was kept: it taught us the group
        refuse_cycles(event)
        holder = self.residents.admit(holder_key(event))
        if self.is_from_connector(event):
            self._note_chunk(holder, event.block_hashes)
        if isinstance(event, StandardStored):
            self._store_standard(holder, event)
        elif not event.block_size or not event.token_count or not self.defines_content(event):
            self._store_by_hash(holder, event.block_hashes, event.block_size, counts=self._counts(event))
        elif event.token_count == len(event.block_hashes) * event.block_size:
            self._store_dense(holder, event)
        elif is_located(event):
            self._store_located(holder, event)
        elif len(event.block_hashes) == -(-event.token_count // event.block_size):
            self._store_short_last(holder, event)
        else:
            self._store_sparse(holder, event)
        if self.lifetimes is not None:
            self.lifetimes.note(holder.key, event.block_hashes)
            self.end(self.lifetimes.excess(), Kind.EVICTED, None)

    def remove(self, event: BlockRemoved) -> None:
        """A BlockRemoved: one reference of each hash ends; an unknown one is a counted no-op."""
        if isinstance(event, RemovedEverywhere):
            self._remove_everywhere(event)
            return
        key = holder_key(event)
        holder = self.residents.holders.get(key)
        hashes: Sequence[EngineHash] = event.block_hashes
        if holder is not None and not self._connector.is_shown:  # else each is looked at
            hashes = self.residents.release_run(holder, hashes)
        for engine_hash in hashes:
            is_released = holder is not None and self.residents.release(holder, engine_hash)
            if not is_released and not self._waiting.release(engine_hash, key):
                self._counters["unknown_removals"] += 1
            elif self._connector.is_shown:
                self._connector.note_removed(key, engine_hash)
                if holder is not None and self._connector.blocks_per_chunk > 1 and engine_hash not in holder:
                    self.residents.release_parts(key, engine_hash)

    def end(self, blocks: Iterable[Block], why: Kind, at: float | None) -> None:
        """These count no more, though nobody has removed them."""
        ended = []
        for key, engine_hash in blocks:
            holder = self.residents.holders.get(key)
            is_released = holder is not None and self.residents.release(holder, engine_hash)
            if is_released or self._waiting.release(engine_hash, key):
                ended.append((key, engine_hash))
        if ended:
            self._counters["expired_blocks"] += len(ended)
            self._note_ended(why, ended, at)

    def begin_lifetimes(self) -> None:
        """Recovery: the time of all that is held begins now."""
        if self.lifetimes is not None:
            for holder in self.residents.all_holders():
                self.lifetimes.note(holder.key, [engine_hash for engine_hash, _ in holder.items()])
            for key, engine_hash, _ in self._waiting.residencies():
                self.lifetimes.note(key, [engine_hash])

    def _remove_everywhere(self, event: BlockRemoved) -> None:
        """The same where nobody says on which medium, in a group whose stores count once."""
        group = event.group_idx or 0
        places = [(key, holder) for key, holder in self.residents.holders.items() if key.group == group]
        for engine_hash in event.block_hashes:
            released = [self.residents.release(holder, engine_hash) for _, holder in places]
            waited = [self._waiting.release(engine_hash, key) for key, _ in places]
            if not any(released) and not any(waited):
                self._counters["unknown_removals"] += 1

    def count_unknown_removals(self, count: int) -> None:
        """Removals of hashes that are neither resident nor wait, met by somebody else."""
        self._counters["unknown_removals"] += count

    def clear(self) -> None:
        """Everything is gone. What the hashes mean stays known, here and below."""
        self._clear(self._places())
        self._connector.forget_clear()

    def clear_medium(self, medium: str) -> None:
        """Everything on this medium is gone."""
        self._clear({key for key in self._places() if key.medium == medium})

    def clear_device(self) -> None:
        """The engine's own blocks are gone; slower places were emptied as well, or not: nobody says so."""
        places = self._places()
        self._clear({key for key in places if self._media.tier_of(key.medium) == GPU and not key.owner})
        # only of host memory removals are announced for sure
        self._connector.note_clear(key for key in places if self._media.tier_of(key.medium) == CPU)

    def _places(self) -> set[HolderKey]:
        return {*self.residents.holders, *(key for key, _, _ in self._waiting.residencies())}

    def _clear(self, places: set[HolderKey]) -> None:
        self.residents.clear(places)
        self._waiting.clear(places)
        if self.lifetimes is not None:
            self.lifetimes.forget(places)

    def defines_content(self, event: BlockStored) -> bool:
        """Offloading connectors publish no extra keys, so a salted prompt would turn plain: take only their hashes."""
        if self.content_from_any_medium or event.extra_keys is not None:
            return True
        return self.is_on_device(event)

    def is_on_device(self, event: BlockStored) -> bool:
        """Whether that is in the engine's own memory."""
        return self._media.tier_of(canonical_medium(event.medium, event.locality)) == GPU

    @property
    def takes_columns(self) -> bool:
        """Whether blocks may be placed without their links: nobody will ask for the blocks before one of a chunk."""
        return self._connector.blocks_per_chunk == 1

    def is_from_connector(self, event: BlockStored) -> bool:
        """Whether an offloading connector announces this: on a slower tier, without extra keys. Of an engine that
        nobody named, only if it says a group, or nothing but hashes."""
        is_told = self.is_vllm or event.group_idx is not None or not event.token_count
        return is_told and not self._is_pool and not self.defines_content(event)

    def _note_chunk(self, holder: Holder, hashes: Sequence[EngineHash]) -> None:
        """A connector stores a chunk, which its last block stands for. It never stores one that it has."""
        key, last = holder.key, hashes[-1]
        if self._connector.was_reset(key, last) and (last in holder or self._waiting.has(last, key)):
            self._reset_silently(key)
        self._connector.note_stored(key, hashes)

    def _reset_silently(self, place: HolderKey) -> None:
        """This place was emptied together with the last clear: only what was stored there since is left, all groups.

        Cost: some microseconds for each block of that; see WATCHED_MAX.
        """
        self._counters["silent_connector_resets"] += 1
        kept = [
            (place._replace(group=group), engine_hash, count, self.residents.held_content(engine_hash))
            for (group, engine_hash), count in (self._connector.since_clear.of(place) or {}).items()
        ]
        self._clear({key for key in self._places() if (key.medium, key.owner) == (place.medium, place.owner)})
        for key, engine_hash, count, point in kept:
            group = self._groups.by_index.get(key.group)
            tokens = group.block_tokens if group is not None else 0
            if point is None:
                self._waiting.park(engine_hash, WaitingBlock(None, [], 0, tokens, {key: count}))
            else:
                self.settling.hold_at(self.residents.holder(key), engine_hash, point, tokens, count)

    def seed_of(self, event: BlockStored) -> int:
        """The seed of the chain of its prompt."""
        return self._runs.seed_of(event)

    def teaches_group(self, event: BlockStored) -> bool:
        """Connectors may announce whole chunks as blocks, the engine's own are on its GPU. A store that knows no groups
        is believed as long as there is no engine."""
        if self._is_pool or self.is_on_device(event):
            return True
        return self.content_from_any_medium and event.group_idx is None and self._groups.are_of_a_store

    def _counts(self, event: BlockStored) -> bool:
        """Whether this store is one more reference: not of reused blocks, nor from a source that repeats itself."""
        return not (self._counts_as_set or (event.origin is not None and event.origin.upper() == REPEATED))

    # ------------------------------------------------------------------ dense stores

    def _store_dense(self, holder: Holder, event: BlockStored) -> None:
        namespace = namespace_of(event)
        start = self._start(event, namespace)
        run = self._runs.read(event, at_root=start is not None and start.granules == 0, counts=self._counts(event))
        self._prove_parent(holder, event)
        self._suspect_drop(holder, event)
        if run.lookaheads is not None and self.residents.learn_lookahead(max(len(ids) for ids, _ in run.lookaheads)):
            self._waiting.is_changed = True  # the store keeps it in the same blob
        if start is not None:
            self._place(holder, run, start)
        elif event.skipped_tokens and event.skipped_parent_block_hash is not None:
            # The context hangs in the air as well: the first block waits under the context's parent.
            context = self._runs.read_context(event, at_root=False)
            self._place_or_wait(holder, run, event.skipped_parent_block_hash, context)
        else:
            self._place_or_wait(holder, run, event.parent_block_hash, [])

    def _suspect_drop(self, holder: Holder, event: BlockStored) -> None:
        """A store that begins with one block that is there already: the last block of a hit, dropped for EAGLE?"""
        if len(event.block_hashes) > 1 and event.parent_block_hash is not None:
            first, second = event.block_hashes[:2]
            if first in holder and second not in holder:
                self._counters["stores_from_last_hit"] += 1

    def _prove_parent(self, holder: Holder, event: BlockStored) -> None:
        """Full attention goes on only from blocks that are there, whatever we know of their content."""
        links = self.links_of(holder.key)
        has_context = event.skipped_tokens or event.skipped_parent_block_hash is not None
        if links is not None and not has_context:
            self.residents.prove(holder, event.parent_block_hash)
            links.add_run(event.block_hashes, event.parent_block_hash)

    def links_of(self, key: HolderKey) -> ParentLinks | None:
        """If what is stored in this place shows that what it goes on from is there, too, and that is of interest."""
        links = self.residents.links.get(key)
        return links if links is not None and self._groups.is_full(key.group) else None

    def _start(self, event: BlockStored, namespace: Namespace) -> Point | None:
        """Where the event's tokens start: at its parent, or at the end of the skipped context, which is walked."""
        has_context = event.skipped_tokens or event.skipped_parent_block_hash is not None
        if event.parent_block_hash is not None or not has_context:
            point = self._resolve(event.parent_block_hash, namespace)
            if point is not None or not has_context:
                return point
        start = self._resolve(event.skipped_parent_block_hash, namespace)
        return None if start is None else self._walk_context(event, start)

    def _walk_context(self, event: BlockStored, start: Point) -> Point:
        """The end of the skipped context; its blocks are not resident, but where they end is known now."""
        locals_ = self._runs.read_context(event, at_root=start.granules == 0)
        keys = chain_keys(start.key, locals_)
        self.settling.link(start.key, keys, locals_)
        point = Point(keys[-1], start.granules + len(keys)) if keys else start
        if event.parent_block_hash is not None and point.key is not None:
            self.settling.learn(event.parent_block_hash, point)
        return point

    def _resolve(self, parent: EngineHash | None, namespace: Namespace) -> Point | None:
        """A parent: None is the root; a wide hash may be known to another publisher of the scope."""
        if parent is None:
            return ROOT
        point = self.residents.resolve_in(parent, namespace)
        if point is not None and self._groups.is_coarse:
            self.residents.remember_again(parent)
        if point is None and is_wide(parent):
            point = self._neighbours.resolve_elsewhere(parent)
            if point is not None:
                self._counters["parents_from_other_publishers"] += 1
                self.residents.remember(parent, point)
        return point

    def _place(self, holder: Holder, run: Run, start: Point) -> None:
        """Every block of the run gets its key, from where the chain stands."""
        keys = chain_keys(start.key, run.local_hashes)
        self.settling.link(start.key, keys, run.local_hashes)
        ends = keys if run.granules == 1 else keys[run.granules - 1 :: run.granules]
        if self.residents.lookahead_tokens:
            self.residents.remember_run((h, _end(run, ends, start, i)) for i, h in enumerate(run.hashes))
        if not run.counts and self._waiting:
            for engine_hash in run.hashes:
                self._waiting.release(engine_hash, holder.key)  # the reference that waits is the one placed here
        coarse = self._groups.coarse_tokens(holder.key.group, run.block_tokens) // self.settling.granule
        if coarse:
            self._hold_coarse(holder, run, ends, start, coarse)
        else:
            self._hold(holder, run, ends, start)
        if run.granules > 1 and isinstance(run.hashes[0], bytes):
            for i, engine_hash in enumerate(run.hashes):
                first = i * run.granules
                block_keys = keys[first : first + run.granules]
                self.settling.learn_concatenated(engine_hash, block_keys, start.granules + first)
        if self._waiting or self._neighbours.is_awaited:
            self.settling.settle([(h, _end(run, ends, start, i)) for i, h in enumerate(run.hashes)])

    def _hold(self, holder: Holder, run: Run, ends: Sequence[int], start: Point) -> None:
        """A residency, or one more reference, of every block of the run."""
        step, tokens = run.granules, run.block_tokens
        locals_ = run.local_hashes
        if step > 1:
            locals_ = [block_local_hash(locals_[i : i + step]) for i in range(0, len(locals_), step)]
        keys = ends if run.lookaheads is None else _lookahead_keys(run.lookaheads, ends)
        parents = [start.key, *ends[:-1]]
        position = start.granules * self.settling.granule
        is_new = not self.residents.is_unverified(holder.key, run.hashes)
        if len(run.hashes) > 1 and run.lookaheads is None and is_new:
            columns = np.array(keys, np.uint64), start.key, np.array(locals_, np.uint64)
            if holder.hold_run(run.hashes, *columns, tokens, position):
                return
        for i, engine_hash in enumerate(run.hashes):
            row = ResidencyRow(keys[i], parents[i], locals_[i], tokens, position + i * tokens, 1)
            end = start.granules + (i + 1) * step
            self.residents.hold(holder, engine_hash, row, end, run.counts, run.namespace)

    def _hold_coarse(self, holder: Holder, run: Run, ends: Sequence[int], start: Point, coarse: int) -> None:
        """The same for blocks that are too small to be kept each: those that end on a multiple of so many granules, as
        if they were that large. The others are ghosts at once, so that chains go on from them."""
        merged = coarse // run.granules
        first = (coarse - start.granules % coarse) // run.granules - 1
        kept = range(first, len(run.hashes), merged)
        between = np.ones(len(run.hashes), np.bool_)
        between[first::merged] = False
        self.residents.remember_between(run.hashes, ends, start.granules, run.granules, between)
        if not kept:
            return
        tokens = coarse * self.settling.granule
        lookaheads = None if run.lookaheads is None else run.lookaheads[first::merged]
        blocks = run._replace(
            hashes=run.hashes[first::merged], granules=coarse, block_tokens=tokens, lookaheads=lookaheads
        )
        if start.granules % coarse:  # where the first of them starts is in another run
            point = _end(run, ends, start, first)
            key = ends[first] if lookaheads is None else lookahead_key(ends[first], *lookaheads[0])
            row = ResidencyRow(key, None, None, tokens, point.granules * self.settling.granule - tokens, 1)
            self.residents.hold(holder, run.hashes[first], row, point.granules, run.counts, run.namespace)
            blocks, start, kept = blocks.after(1), point, kept[1:]
        if kept:
            locals_ = run.local_hashes[(kept[0] + 1) * run.granules - coarse : (kept[-1] + 1) * run.granules]
            self._hold(holder, blocks._replace(local_hashes=locals_), [ends[i] for i in kept], start)

    def _place_or_wait(self, holder: Holder, run: Run, parent: EngineHash | None, context: list[int]) -> None:
        """A run whose start is unknown: if one of its hashes is known all the same, place the others around it."""
        step = run.granules
        for i, engine_hash in enumerate(run.hashes):
            locals_ = context + run.local_hashes[i * step : (i + 1) * step]
            if not self._hold_known(holder, engine_hash, run.block_tokens, counts=run.counts):
                block = WaitingBlock(parent, locals_, step, run.block_tokens, {holder.key: 1})
                self._waiting.park(engine_hash, block, counts=run.counts)
            elif parent is not None and parent in self._waiting.blocks:
                self.settling.learn_parent_of(engine_hash, parent, len(locals_))
            point = self.residents.resolve(engine_hash)
            parent, context = engine_hash, []
            if point is not None and i + 1 < len(run.hashes):
                self._place(holder, run.after(i + 1), point)
                return
        self._counters["orphaned_runs"] += 1
        self._ask_neighbours(run.hashes[0])

    def _ask_neighbours(self, orphan: EngineHash) -> None:
        """Another publisher may explain the hash that this block waits under, later."""
        block = self._waiting.blocks.get(orphan)
        if block is not None and block.parent is not None and is_wide(block.parent):
            self._neighbours.await_elsewhere(block.parent)

    # ------------------------------------------------------------------ stores by hash, located and sparse

    def _store_by_hash(self, holder: Holder, hashes: Sequence[EngineHash], block_tokens: int, *, counts: bool) -> None:
        """Blocks named by their hash alone: resident where the hash is known, else they wait for their content."""
        for engine_hash in hashes:
            if not self._hold_known(holder, engine_hash, block_tokens, counts=counts):
                block = WaitingBlock(None, [], 0, block_tokens, {holder.key: 1})
                self._waiting.park(engine_hash, block, counts=counts)

    def _store_standard(self, holder: Holder, event: StandardStored) -> None:
        """Blocks whose hashes are content keys, if they were hashed by our granule; else they are named by hash."""
        start = self._standard_start(holder, event)
        if start is None:
            self._store_by_hash(holder, event.block_hashes, event.block_size, counts=self._counts(event))
            return
        step = event.block_size // self.settling.granule
        for i, (engine_hash, key) in enumerate(zip(event.block_hashes, event.content_keys, strict=True), 1):
            point = Point(key, start + i * step)
            if holder.space.end_granules(key) not in (None, point.granules):
                self._counters["contradicted_positions"] += 1
            elif not self._hold_known(holder, engine_hash, event.block_size, counts=self._counts(event)):
                self.settling.hold_at(holder, engine_hash, point, event.block_size, 1)
                self.settling.settle([(engine_hash, point)])

    def _standard_start(self, holder: Holder, event: StandardStored) -> int | None:
        """In granules; None if that, or the granule, is not ours to know."""
        granule = self.settling.granule
        if event.hash_tokens != granule or not event.content_keys:
            return None
        if event.start_tokens is not None:
            return event.start_tokens // granule
        return None if event.start_key is None else holder.space.end_granules(event.start_key)

    def _hold_known(self, holder: Holder, engine_hash: EngineHash, block_tokens: int, *, counts: bool) -> bool:
        """A residency, or one more reference, of a hash that is known. False if it is not."""
        if engine_hash in holder:
            if counts:
                holder.refer(engine_hash)
            return True
        point = self.residents.held_content(engine_hash)
        if point is None and self._is_pool:
            point = self._adopt(engine_hash)
        if point is None:
            return False
        self.settling.hold_at(holder, engine_hash, point, block_tokens, 1)
        return True

    def _adopt(self, engine_hash: EngineHash) -> Point | None:
        """A pool may know blocks by the hashes of those who stored them: what it means to another publisher."""
        point = self._neighbours.resolve_elsewhere(engine_hash) if is_wide(engine_hash) else None
        if point is not None:
            self.residents.remember(engine_hash, point)
        return point

    def adopt_waiting(self) -> None:
        """Ask again for some of what waits: whoever stored it may be heard of later than the pool."""
        for engine_hash in list(islice(self._waiting.unplaced_order, ADOPTED_AT_ONCE)):
            point = self._adopt(engine_hash)
            if point is not None:
                self.settling.settle([(engine_hash, point)])
            else:
                self._waiting.unplaced_order.move_to_end(engine_hash)

    def _store_located(self, holder: Holder, event: BlockStored) -> None:
        """Positions are told: only blocks whose parent is known, or that follow without a hole, can be placed."""
        for block in located_blocks(event):
            if isinstance(block, BlockStored):
                self._store_dense(holder, block)
            else:
                self._store_by_hash(holder, [block], event.block_size, counts=self._counts(event))

    def _store_short_last(self, holder: Holder, event: BlockStored) -> None:
        """The last page is shorter than the others (SGLang allows it): the full ones are dense, the last one waits."""
        full = len(event.block_hashes) - 1
        if full:
            self._store_dense(holder, first_blocks(event, full))
        else:
            self._counters["misfit_stores"] += 1
        self._store_by_hash(holder, event.block_hashes[full:], 0, counts=self._counts(event))

    def _store_sparse(self, holder: Holder, event: BlockStored) -> None:
        """Fewer hashes than the span has blocks, at unknown positions: by hash, then from anchors; never by guess."""
        is_whole = tells_block_size(event) and not event.token_count % event.block_size
        self._counters["sparse_stores" if is_whole else "misfit_stores"] += 1
        self._store_by_hash(holder, event.block_hashes, event.block_size, counts=self._counts(event))
        group = self._groups.by_index.get(holder.key.group)
        if (
            is_whole
            and group is not None
            and group.is_window
            and any(h in self._waiting.blocks for h in event.block_hashes)
        ):
            run = SparseRun(list(event.block_hashes), holder.key.group, event.block_size)
            if self._drops(holder.key.group) and not event.token_count % event.block_size:
                run.parent = event.parent_block_hash
                run.local_hashes, run.unclear = self._runs.read_span(event)
            self._waiting.wait_for_anchor(run)
            self.settling.settle([], run)


def tells_block_size(event: BlockStored) -> bool:
    """Whether blocks of its size can be what it is about: it has tokens for one at least, and enough for its hashes.
    Only the last one may be short, and only where blocks are located can tokens of no block follow."""
    if event.block_size <= 0 or isinstance(event, StandardStored):
        return event.block_size > 0
    blocks, rest = divmod(event.token_count, event.block_size)
    hashes = len(event.block_hashes)
    if rest and hashes == blocks + 1:
        return blocks > 0
    return 0 < blocks >= hashes and (not rest or is_located(event))


def is_located(event: BlockStored) -> bool:
    """Whether it says where in its span its blocks lie."""
    return event.block_offsets is not None or event.block_parent_hashes is not None


def holder_key(event: BlockStored | BlockRemoved) -> HolderKey:
    """The place of the publisher that an event is about."""
    medium = canonical_medium(event.medium, event.locality)
    return HolderKey(medium, event.group_idx or 0, event.ownership or "")


def _end(run: Run, ends: Sequence[int], start: Point, block: int) -> Point:
    return Point(ends[block], start.granules + (block + 1) * run.granules)


def _lookahead_keys(lookaheads: Sequence[tuple[list[int], bytes]], ends: Sequence[int]) -> list[int]:
    """What is resident of blocks whose hashes cover tokens after them."""
    return [lookahead_key(key, *lookahead) for key, lookahead in zip(ends, lookaheads, strict=True)]
