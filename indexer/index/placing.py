"""Placing blocks: from engine hashes, tokens and parents to content keys that holders have.

Purpose: for one publisher, know what each engine hash means, and let every residency begin and end where its content
is. Dense events (tokens align with hashes one to one) are chained from their parent; skipped context is walked first,
with its extra keys; sparse events are placed by hash, or from an anchor; what cannot be placed without guessing waits.

Invariants: an orphan is never a root; a hash in a holder is resolvable; what is placed under one hash stays under it.

If broken: a prompt would match blocks of another prompt.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

from indexer.identity.chain import block_local_hash, chain_keys, chain_seed, local_hashes, lookahead_key, salted_seed
from indexer.identity.extra_keys import NO_EXTRA_KEYS, ExtraKeys, from_event
from indexer.index.ancestry import Ancestry
from indexer.index.ghosts import Ghosts
from indexer.index.groups import Groups
from indexer.index.holder import Holder
from indexer.index.state import EngineHash, HolderKey, ResidencyRow
from indexer.index.tiers import GPU, canonical_medium
from indexer.index.waiting import SparseRun, WaitingBlock, WaitingRoom
from indexer.wire.errors import WireError
from indexer.wire.events import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from indexer.index.key_space import KeySpace
    from indexer.index.publisher import PublisherIndex

WIDE_HASH = 1 << 32  # below, an engine hash may be a mere counter: it means nothing to another publisher
DIGEST_BYTES = frozenset({16, 32})
CARRIED_MAX = 4_096  # at the bound the oldest goes: an identifier carried on from there is taken for a new item
VARIANTS_MAX = 4_096


class Point(NamedTuple):
    """Where a chain stands: its content key (None at the root) and the granules up to there."""

    key: int | None
    granules: int


ROOT = Point(None, 0)


class Namespace(NamedTuple):
    """What an event says of the prompt its blocks belong to. Engines may leave it out of their hashes."""

    lora_name: str | None
    cache_salt: str | None


class Run(NamedTuple):
    """Consecutive blocks of one event: their hashes, and the local hashes of every granule that they span."""

    hashes: Sequence[EngineHash]
    local_hashes: list[int]
    granules: int  # per block
    block_tokens: int
    namespace: Namespace
    lookaheads: list[tuple[list[int], bytes]] | None = None
    counts: bool = True  # False: where it is resident already, this adds no reference


class Placing:
    """All block state of one publisher in one granule."""

    def __init__(
        self, owner: PublisherIndex, groups: Groups, ghosts: Ghosts, waiting: WaitingRoom, ancestry: Ancestry
    ) -> None:
        self.holders: dict[HolderKey, Holder] = {}
        self.ghosts = ghosts
        self.waiting = waiting
        self.ancestry = ancestry
        self.counters: Counter[str] = Counter()
        self.lookahead_tokens = 0
        self.counts_as_set = False
        self.holders_max = 256
        self.content_from_any_medium = False
        self.granule = 0
        self._owner = owner
        self._groups = groups
        self._space: KeySpace | None = None
        self._carried: dict[EngineHash, frozenset[str]] = {}
        # one hash with several contents: the first is kept under the hash, the others under made-up hashes
        # (bounded: the oldest are forgotten, and their residencies end with the next clear)
        self.variants: dict[EngineHash, dict[EngineHash, Namespace]] = {}
        self.variants_are_changed = False

    # ------------------------------------------------------------------ events

    def store(self, event: BlockStored) -> None:
        """A BlockStored. Raises WireError if the event contradicts itself; nothing of it is applied then."""
        if not event.block_hashes:
            return  # a span of which no block was kept: it taught us the group
        _refuse_cycles(event)
        medium = canonical_medium(event.medium, event.locality)
        holder = self.holder(HolderKey(medium, event.group_idx or 0, event.ownership or ""))
        if not event.block_size or not event.token_count or not self.defines_content(event):
            self._store_by_hash(holder, event.block_hashes, event.block_size, counts=self._counts(event))
        elif event.token_count == len(event.block_hashes) * event.block_size:
            self._store_dense(holder, event)
        elif event.block_offsets is not None or event.block_parent_hashes is not None:
            self._store_located(holder, event)
        else:
            self._store_sparse(holder, event)

    def remove(self, event: BlockRemoved) -> None:
        """A BlockRemoved: one reference of each hash ends; an unknown one is a counted no-op."""
        key = HolderKey(canonical_medium(event.medium, event.locality), event.group_idx or 0, event.ownership or "")
        holder = self.holders.get(key)
        for engine_hash in event.block_hashes:
            if self.variants and engine_hash in self.variants and holder is not None:
                self._release_variants(holder, engine_hash)
            if holder is not None and engine_hash in holder.keys:
                self._release(holder, engine_hash)
            elif not self.waiting.release(engine_hash, key):
                self.counters["unknown_removals"] += 1

    def clear(self, medium: str | None) -> None:
        """Everything on this medium is gone, or (None) on every medium. What the hashes mean stays known."""
        keys = {k for k in self.holders if medium is None or k.medium == medium}
        for key in keys:
            holder = self.holders[key]
            kept = max(0, len(holder.keys) - self.ghosts.ghosts_max)  # the rest would be forgotten at once
            for engine_hash, content_key in islice(holder.keys.items(), kept, None):
                self._remember_resident(engine_hash, content_key)
            holder.clear()
        self._forget_variants()
        waiting = {k for k, _, _ in self.waiting.residencies() if medium is None or k.medium == medium}
        self.waiting.clear(keys | waiting)

    def change_granule(self, granule: int, space: KeySpace) -> None:
        """Content keys of another granule mean nothing: forget them all, and what hashes meant."""
        held_before = list(self.holders)
        for holder in self.holders.values():
            holder.clear()
            holder.space.release(holder.slot)
        self.granule, self._space = granule, space
        self.holders = {}
        for key in held_before:
            self.holder(key).cleared = True
        if len(self.ghosts):
            self.ghosts.clear()
        self.waiting.forget_all()
        self.ancestry.clear()
        self._carried.clear()
        self.variants.clear()

    # ------------------------------------------------------------------ what a hash means

    def resolve(self, engine_hash: EngineHash) -> Point | None:
        """Where the chain stands after this block, if any holder or ghost knows it."""
        if self.lookahead_tokens:
            return self._ghost(engine_hash)  # residencies have lookahead keys there, chains go on from plain ones
        resident = self._resident(engine_hash)
        return resident if resident is not None else self._ghost(engine_hash)

    def _ghost(self, engine_hash: EngineHash) -> Point | None:
        ghost = self.ghosts.get(engine_hash)
        return None if ghost is None else Point(*ghost)

    def _resident(self, engine_hash: EngineHash) -> Point | None:
        for holder in self.holders.values():
            key = holder.keys.get(engine_hash)
            if key is not None:
                return Point(key, holder.space.entries[key] >> 32)
        return None

    def _resolve_parent(self, engine_hash: EngineHash | None, namespace: Namespace) -> Point | None:
        """The same for a parent: None is the root; a wide hash may be known to another publisher of the scope."""
        if engine_hash is None:
            return ROOT
        if self.variants and engine_hash in self.variants:
            engine_hash = self._variant_of(engine_hash, namespace)
        point = self.resolve(engine_hash)
        if point is None and is_wide(engine_hash):
            point = self._owner.resolve_elsewhere(engine_hash)
            if point is not None and point.key is not None:
                self.counters["parents_from_other_publishers"] += 1
                self.ghosts.remember(engine_hash, point.key, point.granules)
        return point

    def _remember_resident(self, engine_hash: EngineHash, key: int) -> None:
        if self.lookahead_tokens:
            return  # it is one since it was placed
        assert self._space is not None
        self.ghosts.remember(engine_hash, key, self._space.entries[key] >> 32)

    # ------------------------------------------------------------------ stores

    def defines_content(self, event: BlockStored) -> bool:
        """Offloading connectors publish no extra keys, so a salted prompt would turn plain: take only their hashes."""
        medium = canonical_medium(event.medium, event.locality)
        return medium == GPU or self.content_from_any_medium or event.extra_keys is not None

    def _store_dense(self, holder: Holder, event: BlockStored) -> None:
        start = self._start(event)
        parent: EngineHash | None = event.parent_block_hash
        if start is None and event.skipped_tokens and event.skipped_parent_block_hash is not None:
            # The context hangs in the air as well: the first block waits under the context's parent.
            run = self._run(event, at_root=False)
            context = self._context_hashes(event, at_root=False)
            self._place_or_wait(holder, run, event.skipped_parent_block_hash, context)
            return
        run = self._run(event, at_root=start is not None and start.granules == 0)
        if start is None:
            self._place_or_wait(holder, run, parent, [])
            return
        self._place(holder, run, start)

    def _counts(self, event: BlockStored) -> bool:
        """Whether this store is one more reference: not of reused blocks, nor from a source that repeats itself."""
        return not (self.counts_as_set or (event.origin is not None and event.origin.upper() == "REUSED"))

    def _start(self, event: BlockStored) -> Point | None:
        """Where the event's tokens start: at its parent, or at the end of the skipped context, which is walked."""
        has_context = event.skipped_tokens or event.skipped_parent_block_hash is not None
        if event.parent_block_hash is None and not has_context:
            return ROOT
        if event.parent_block_hash is not None:
            point = self._resolve_parent(event.parent_block_hash, _namespace(event))
            if point is not None:
                return point
        if not has_context:
            return None
        start = self._resolve_parent(event.skipped_parent_block_hash, _namespace(event))
        if start is None:
            return None
        locals_ = self._context_hashes(event, at_root=start.granules == 0)
        keys = chain_keys(start.key, locals_)
        self._link(start.key, keys, locals_)
        point = Point(keys[-1], start.granules + len(keys)) if keys else start
        if event.parent_block_hash is not None and point.key is not None:
            self._learn(event.parent_block_hash, point)
        return point

    def _context_hashes(self, event: BlockStored, *, at_root: bool) -> list[int]:
        """Local hashes of the skipped context; its extra keys come one list per skipped block."""
        tokens = len(event.skipped_tokens) // (1 if isinstance(event.skipped_tokens, array) else 4)
        blocks = len(event.skipped_extra_keys or ())
        block_tokens = tokens // blocks if blocks else tokens
        if tokens % self.granule or (blocks and tokens % blocks):
            raise WireError("bad_skipped_context", "skipped_token_ids are not whole blocks, one per skipped_extra_keys")
        extra = from_event(
            event.skipped_extra_keys,
            lora_name=_lora(event),
            block_tokens=block_tokens,
            granule=self.granule,
            at_root=at_root,
        )
        return self._local_hashes(event, event.skipped_tokens, extra, at_root=at_root)

    def _run(self, event: BlockStored, *, at_root: bool) -> Run:
        extra = self._extra_keys(event, at_root=at_root)
        locals_ = self._local_hashes(event, event.tokens, extra, at_root=at_root)
        lookaheads = None
        if event.lookahead_token_ids:
            tokens = event.lookahead_token_ids
            if len(tokens) != len(event.block_hashes):
                raise WireError("bad_lookahead", "lookahead_token_ids and block_hashes differ in length")
            lookaheads = [(ids, extra.lookahead.get(i, b"")) for i, ids in enumerate(tokens)]
            self._learn_lookahead(max(map(len, tokens)))
        step, counts = event.block_size // self.granule, self._counts(event)
        return Run(event.block_hashes, locals_, step, event.block_size, _namespace(event), lookaheads, counts)

    def _learn_lookahead(self, tokens: int) -> None:
        """From now on chains go on from ghosts alone, so all that is resident becomes one."""
        if tokens <= self.lookahead_tokens:
            return
        if not self.lookahead_tokens:
            for holder in self.holders.values():
                for engine_hash, content_key in holder.keys.items():
                    self._remember_resident(engine_hash, content_key)
        self.lookahead_tokens = tokens
        self.waiting.is_changed = True  # the store keeps it in the same blob

    def _extra_keys(self, event: BlockStored, *, at_root: bool) -> ExtraKeys:
        if not event.extra_keys:
            return NO_EXTRA_KEYS
        parent = event.parent_block_hash
        extra = from_event(
            event.extra_keys,
            lora_name=_lora(event),
            block_tokens=event.block_size,
            granule=self.granule,
            at_root=at_root,
            carried=self._carried.get(parent, frozenset()) if parent is not None else frozenset(),
        )
        if extra.carried and event.block_hashes:
            self._carried[event.block_hashes[-1]] = extra.carried
            if len(self._carried) > CARRIED_MAX:
                del self._carried[next(iter(self._carried))]
                self.counters["forgotten_carried_identifiers"] += 1
        return extra

    def _local_hashes(self, event: BlockStored, tokens: object, extra: ExtraKeys, *, at_root: bool) -> list[int]:
        seed = chain_seed(_lora(event))
        first_seed = salted_seed(seed, extra.cache_salt or event.cache_salt) if at_root else None
        return local_hashes(tokens, self.granule, seed, first_seed=first_seed, items=extra.items)  # type: ignore[arg-type]

    def _place(self, holder: Holder, run: Run, start: Point) -> None:
        """Every block of the run gets its key, from where the chain stands."""
        keys = chain_keys(start.key, run.local_hashes)
        self._link(start.key, keys, run.local_hashes)
        step = run.granules
        ends = keys if step == 1 else keys[step - 1 :: step]
        if step == 1:
            locals_ = run.local_hashes
        else:
            locals_ = [block_local_hash(run.local_hashes[i : i + step]) for i in range(0, len(keys), step)]
        resident_keys = ends if run.lookaheads is None else _lookahead_keys(run, ends)
        parents = [start.key, *ends[:-1]]
        if self.lookahead_tokens:
            for i, engine_hash in enumerate(run.hashes):
                self.ghosts.remember(engine_hash, ends[i], start.granules + (i + 1) * step)
        if not run.counts and self.waiting:
            for engine_hash in run.hashes:
                self.waiting.release(engine_hash, holder.key)  # the reference that waits is the one placed here
        position = start.granules * self.granule
        if not holder.hold_run(run.hashes, resident_keys, parents, locals_, run.block_tokens, position):
            for i, engine_hash in enumerate(run.hashes):
                at = position + i * run.block_tokens
                row = ResidencyRow(resident_keys[i], parents[i], locals_[i], run.block_tokens, at, 1)
                self._hold(holder, engine_hash, row, start.granules + (i + 1) * step, run.counts, run.namespace)
        if step > 1 and type(run.hashes[0]) is bytes:
            for i, engine_hash in enumerate(run.hashes):
                self._learn_concatenated(engine_hash, keys[i * step : (i + 1) * step], start.granules + i * step)
        if self.waiting or self._owner.is_awaited:
            points = [Point(key, start.granules + (i + 1) * step) for i, key in enumerate(ends)]
            self._settle(list(zip(run.hashes, points, strict=True)))

    def _hold(
        self,
        holder: Holder,
        engine_hash: EngineHash,
        row: ResidencyRow,
        end: int,
        counts: bool = True,
        namespace: Namespace | None = None,
    ) -> None:
        """One more reference of a block whose content is known."""
        known = holder.keys.get(engine_hash)
        if known is None:
            holder.hold(engine_hash, row, end)
        elif known == row.content_key:
            if counts:
                holder.refer(engine_hash, row.reference_count)
        elif namespace is not None:
            self.counters["hashes_with_several_contents"] += 1
            variant = _variant_hash(engine_hash, row.content_key)
            self.variants.setdefault(engine_hash, {})[variant] = namespace
            self.variants_are_changed = True
            if len(self.variants) > VARIANTS_MAX:
                del self.variants[next(iter(self.variants))]
                self.counters["forgotten_variants"] += 1
            self._hold(holder, variant, row, end, counts)

    def _variant_of(self, engine_hash: EngineHash, namespace: Namespace) -> EngineHash:
        """The hash under which this namespace's content is kept: the newest of its variants, else the hash itself."""
        variants = self.variants[engine_hash]
        return next((v for v in reversed(variants) if variants[v] == namespace), engine_hash)

    def _release_variants(self, holder: Holder, engine_hash: EngineHash) -> None:
        """Which content a removal means is unknown, so one reference of each ends: no answer is too high."""
        self.variants_are_changed = True
        for variant in list(self.variants[engine_hash]):
            if variant in holder.keys:
                self._release(holder, variant)
            elif self.resolve(variant) is None:
                del self.variants[engine_hash][variant]
        if not self.variants[engine_hash]:
            del self.variants[engine_hash]

    def _forget_variants(self) -> None:
        """After a clear: those that are neither resident nor ghosts mean nothing any more."""
        for engine_hash, by_hash in list(self.variants.items()):
            known = {v: namespace for v, namespace in by_hash.items() if self.resolve(v) is not None}
            self.variants_are_changed = True
            if known:
                self.variants[engine_hash] = known
            else:
                del self.variants[engine_hash]

    def _release(self, holder: Holder, engine_hash: EngineHash) -> None:
        if engine_hash not in holder.extra:
            self._remember_resident(engine_hash, holder.keys[engine_hash])
        holder.release(engine_hash)

    def _store_by_hash(self, holder: Holder, hashes: Sequence[EngineHash], block_tokens: int, *, counts: bool) -> None:
        """Blocks named by their hash alone: resident where the hash is known, else they wait for their content."""
        for engine_hash in hashes:
            if not self._hold_known(holder, engine_hash, block_tokens, counts=counts):
                block = WaitingBlock(None, [], 0, block_tokens, {holder.key: 1})
                self.waiting.park(engine_hash, block, counts=counts)

    def _hold_known(self, holder: Holder, engine_hash: EngineHash, block_tokens: int, *, counts: bool) -> bool:
        if engine_hash in holder.keys:
            if counts:
                holder.refer(engine_hash)
            return True
        point = self._resident(engine_hash) or (None if self.lookahead_tokens else self._ghost(engine_hash))
        if point is None or point.key is None:
            return False
        self._hold_at(holder, engine_hash, point, block_tokens, 1)
        return True

    def _hold_at(
        self, holder: Holder, engine_hash: EngineHash, point: Point, block_tokens: int, references: int
    ) -> None:
        assert point.key is not None
        if block_tokens > point.granules * self.granule:
            block_tokens = 0  # no block is longer than the prefix that it ends: its size is unknown
        granules, rest = divmod(block_tokens, self.granule)
        before = self.ancestry.back(point.key, granules) if granules and not rest else None
        parent_key, locals_ = before if before else (None, [])
        row = ResidencyRow(
            point.key,
            parent_key,
            block_local_hash(locals_) if locals_ else None,
            block_tokens,
            point.granules * self.granule - block_tokens,
            references,
        )
        self._hold(holder, engine_hash, row, point.granules)

    # ------------------------------------------------------------------ sparse stores

    def _store_located(self, holder: Holder, event: BlockStored) -> None:
        """`block_offsets` say which block of the span each hash is; the skipped blocks' extra keys are unknown.

        So only blocks whose parent is known, or that follow the event's parent without a hole, are placed.
        """
        offsets, parents = _located(event)
        tokens = event.tokens
        width = event.block_size * (1 if isinstance(tokens, array) else 4)
        for i, engine_hash in enumerate(event.block_hashes):
            offset = i if offsets is None else offsets[i]
            parent = parents[i] if parents is not None else None
            if parents is None:
                follows = offset == 0 or (i > 0 and offsets is not None and offsets[i - 1] == offset - 1)
                parent = event.parent_block_hash if offset == 0 else event.block_hashes[i - 1] if follows else None
                if not follows:
                    self._store_by_hash(holder, [engine_hash], event.block_size, counts=self._counts(event))
                    continue
            block = BlockStored(
                block_hashes=[engine_hash],
                parent_block_hash=parent,
                token_ids=[],
                block_size=event.block_size,
                lora_name=event.lora_name,
                cache_salt=event.cache_salt,
                extra_keys=None if event.extra_keys is None else event.extra_keys[i : i + 1],
                origin=event.origin,
            )
            block.tokens = tokens[offset * width : (offset + 1) * width]
            if parents is not None and offset == 0 and parent is None and event.parent_block_hash is not None:
                block.parent_block_hash = event.parent_block_hash
            if block.parent_block_hash is None and offset:
                # no root is in the midst of a span
                self._store_by_hash(holder, [engine_hash], event.block_size, counts=self._counts(event))
                continue
            self._store_dense(holder, block)

    def _store_sparse(self, holder: Holder, event: BlockStored) -> None:
        """Fewer hashes than the span has blocks, at unknown positions: by hash, then from anchors; never by guess."""
        if len(event.block_hashes) == -(-event.token_count // event.block_size):
            self._store_short_last(holder, event)
            return
        self.counters["sparse_stores"] += 1
        self._store_by_hash(holder, event.block_hashes, event.block_size, counts=self._counts(event))
        group = self._groups.by_index.get(holder.key.group)
        if group is not None and group.is_window and any(h in self.waiting.blocks for h in event.block_hashes):
            run = SparseRun(list(event.block_hashes), holder.key.group, event.block_size)
            self.waiting.wait_for_anchor(run)
            self._settle([], run)

    def _store_short_last(self, holder: Holder, event: BlockStored) -> None:
        """The last page is shorter than the others (SGLang allows it): the full ones are dense, the last one waits."""
        full = len(event.block_hashes) - 1
        rest = event.block_hashes[full:]
        if full:
            width = 1 if isinstance(event.tokens, array) else 4
            event.block_hashes = event.block_hashes[:full]
            event.tokens = event.tokens[: full * event.block_size * width]
            event.token_count = full * event.block_size
            if event.lookahead_token_ids:
                event.lookahead_token_ids = event.lookahead_token_ids[:full]
            self._store_dense(holder, event)
        self._store_by_hash(holder, rest, 0, counts=self._counts(event))

    def _before_anchors(self, run: SparseRun) -> list[tuple[EngineHash, Point]]:
        """Where the blocks are that precede each anchor: a hash of the run that is known at an aligned position.

        Kept window blocks form runs that end on the alignment; of the blocks before an anchor fewer than the window
        needs are kept with it. What lies before the anchor is read from the chain that announced it.
        """
        group = self._groups.by_index[run.group]
        alignment = self._groups.alignment // self.granule
        step = run.block_tokens // self.granule
        learned: list[tuple[EngineHash, Point]] = []
        for i, engine_hash in enumerate(run.hashes):
            anchor = self.resolve(engine_hash)
            if anchor is None or anchor.key is None or anchor.granules % alignment:
                continue
            key = anchor.key
            for back in range(1, min(group.window_blocks, i + 1)):
                before = self.ancestry.back(key, step)
                other = run.hashes[i - back]
                if before is None or before[0] is None or self.resolve(other) is not None:
                    break
                key = before[0]
                learned.append((other, Point(key, anchor.granules - back * step)))
        return learned

    def _learn_concatenated(self, engine_hash: EngineHash, keys: list[int], start: int) -> None:
        """vLLM 0.21 to 0.23: the hash of a block of k hash units is the k digests one after the other (bytes form)."""
        if not isinstance(engine_hash, bytes):
            return
        count = len(keys)
        for k in range(count, 1, -1):
            size, rest = divmod(len(engine_hash), k)
            if not rest and size in DIGEST_BYTES and count % k == 0 and self._has_size(count // k * self.granule):
                per = count // k
                for i in range(k):
                    digest = engine_hash[i * size : (i + 1) * size]
                    self._learn(digest, Point(keys[(i + 1) * per - 1], start + (i + 1) * per))
                return

    def _has_size(self, tokens: int) -> bool:
        return any(tokens in group.sizes for group in self._groups.by_index.values())

    # ------------------------------------------------------------------ waiting and settling

    def _place_or_wait(self, holder: Holder, run: Run, parent: EngineHash | None, context: list[int]) -> None:
        """A run whose start is unknown: if one of its hashes is known all the same, place the others around it."""
        step = run.granules
        for i, engine_hash in enumerate(run.hashes):
            local = run.local_hashes[i * step : (i + 1) * step]
            block = WaitingBlock(parent, context + local, step, run.block_tokens, {holder.key: 1})
            if not self._hold_known(holder, engine_hash, run.block_tokens, counts=run.counts):
                self.waiting.park(engine_hash, block, counts=run.counts)
            elif parent is not None and parent in self.waiting.blocks:
                self._learn_backwards(parent, engine_hash, len(context) + step)
            point = self.resolve(engine_hash)
            parent, context = engine_hash, []
            if point is not None and i + 1 < len(run.hashes):
                rest = run._replace(
                    hashes=run.hashes[i + 1 :],
                    local_hashes=run.local_hashes[(i + 1) * step :],
                    lookaheads=None if run.lookaheads is None else run.lookaheads[i + 1 :],
                )
                self._place(holder, rest, point)
                return
        self.counters["orphaned_runs"] += 1
        if run.hashes[0] in self.waiting.blocks:
            first = self.waiting.blocks[run.hashes[0]].parent
            if first is not None and is_wide(first):
                self._owner.await_elsewhere(first)

    def _learn_backwards(self, parent: EngineHash, child: EngineHash, granules: int) -> None:
        point = self.resolve(child)
        before = None if point is None or point.key is None else self.ancestry.back(point.key, granules)
        if point is not None and before is not None and before[0] is not None:
            self._learn(parent, Point(before[0], point.granules - granules))

    def _learn(self, engine_hash: EngineHash, point: Point) -> None:
        """A hash turned out to mean this, though no event stored it here."""
        assert point.key is not None
        if self.resolve(engine_hash) is None:
            self.ghosts.remember(engine_hash, point.key, point.granules)
        if self.waiting:
            self._settle([(engine_hash, point)])

    def learn_from_elsewhere(self, engine_hash: EngineHash, point: Point) -> None:
        """Another publisher of the scope explained a hash that orphans wait under."""
        self._learn(engine_hash, point)

    def _settle(self, learned: list[tuple[EngineHash, Point]], new_run: SparseRun | None = None) -> None:
        """Place everything that waited for these hashes, and for what becomes known thereby."""
        runs: dict[SparseRun, None] = {} if new_run is None else {new_run: None}
        anchored: set[EngineHash] = set()
        while learned or runs:
            if not learned:
                learned = self._settle_run(runs.popitem()[0], anchored)
                continue
            engine_hash, point = learned.pop()
            if self._owner.is_awaited:
                self._owner.explain_elsewhere(engine_hash, point)
            block = self.waiting.take(engine_hash)
            if block is not None:
                self._settle_block(engine_hash, point, block)
                if block.parent is not None and block.granules == len(block.local_hashes):
                    self._settle_parent(block, point, learned)
            for child in list(self.waiting.children.get(engine_hash, ())):
                waiting = self.waiting.blocks[child]
                keys = chain_keys(point.key, waiting.local_hashes)
                self._link(point.key, keys, waiting.local_hashes)
                learned.append((child, Point(keys[-1], point.granules + len(keys))))
            runs.update(dict.fromkeys(self.waiting.runs.get(engine_hash, ())))

    def _settle_run(self, run: SparseRun, anchored: set[EngineHash]) -> list[tuple[EngineHash, Point]]:
        """What is newly known of a sparse run; `anchored`: what was before, so that each is told once."""
        if run not in self.waiting.run_order:
            return []
        learned = [(h, point) for h, point in self._before_anchors(run) if h not in anchored]
        anchored.update(h for h, _ in learned)
        if not learned and not any(h in self.waiting.blocks for h in run.hashes):
            self.waiting.end_run(run)
        return learned

    def _settle_block(self, engine_hash: EngineHash, point: Point, block: WaitingBlock) -> None:
        self.counters["settled_blocks"] += 1
        for key, references in block.counts.items():
            self._hold_at(self.holder(key), engine_hash, point, block.block_tokens, references)
        if self.resolve(engine_hash) is None and point.key is not None:
            self.ghosts.remember(engine_hash, point.key, point.granules)

    def _settle_parent(self, block: WaitingBlock, point: Point, learned: list[tuple[EngineHash, Point]]) -> None:
        assert block.parent is not None
        assert point.key is not None
        before = self.ancestry.back(point.key, block.granules)
        if before is None or before[0] is None or self.resolve(block.parent) is not None:
            return
        parent = Point(before[0], point.granules - block.granules)
        self.ghosts.remember(block.parent, before[0], parent.granules)
        learned.append((block.parent, parent))

    def _link(self, parent_key: int | None, keys: Sequence[int], locals_: Sequence[int]) -> None:
        if len(self._groups.by_index) > 1 or len(self.holders) > 1:
            self.ancestry.add(parent_key, keys, locals_)

    def holder(self, key: HolderKey) -> Holder:
        holder = self.holders.get(key)
        if holder is None:
            if len(self.holders) >= self.holders_max and not self._drop_empty_holder():
                raise WireError("too_many_holders", "more groups, media and owners than a publisher may have")
            assert self._space is not None, "a granule is known before the first holder"
            holder = self.holders[key] = Holder(key, self._space, self._owner)
        return holder

    def _drop_empty_holder(self) -> bool:
        """Make room for a new holder: drop one that holds nothing and has nothing to tell the store."""
        waiting = {key for key, _, _ in self.waiting.residencies()}
        for key, holder in self.holders.items():
            if not holder.keys and not holder.changes_pending and key not in waiting:
                holder.space.release(holder.slot)
                del self.holders[key]
                return True
        return False


def _lookahead_keys(run: Run, ends: Sequence[int]) -> list[int]:
    """What is resident of these blocks; their plain keys, from which children go on, are kept as ghosts."""
    assert run.lookaheads is not None
    return [lookahead_key(key, *lookahead) for key, lookahead in zip(ends, run.lookaheads, strict=True)]


def _lora(event: BlockStored) -> str | None:
    return event.lora_name if isinstance(event.lora_name, str) else None


def _namespace(event: BlockStored) -> Namespace:
    return Namespace(_lora(event), event.cache_salt)


def _variant_hash(engine_hash: EngineHash, content_key: int) -> bytes:
    """A hash that no engine publishes, for a further content under one that it does."""
    data = engine_hash if isinstance(engine_hash, bytes) else engine_hash.to_bytes(8, "big")
    return data + b"#" + content_key.to_bytes(8, "big")


def is_wide(engine_hash: EngineHash) -> bool:
    return len(engine_hash) > 8 if isinstance(engine_hash, bytes) else engine_hash >= WIDE_HASH


def _refuse_cycles(event: BlockStored) -> None:
    hashes = event.block_hashes
    if len(hashes) == 1:
        if hashes[0] == event.parent_block_hash:
            raise WireError("self_reference", "a block is its own parent")
        return
    distinct = set(hashes)
    if len(distinct) < len(hashes) or event.parent_block_hash in distinct:
        raise WireError("self_reference", "a block hash occurs twice in one chain")


def _located(event: BlockStored) -> tuple[list[int] | None, list[EngineHash | None] | None]:
    """Offsets and parents of an event that says where its blocks lie. Raises WireError if they contradict it."""
    count = len(event.block_hashes)
    blocks = event.token_count // event.block_size
    offsets, parents = event.block_offsets, event.block_parent_hashes
    if offsets is not None:
        ascending = all(a < b for a, b in pairwise(offsets))
        if len(offsets) != count or not ascending or not all(0 <= o < blocks for o in offsets):
            raise WireError("bad_block_offsets", "block_offsets do not fit block_hashes and token_ids")
    elif count != blocks:
        raise WireError("bad_block_offsets", "block_parent_hashes without block_offsets need one hash per block")
    if parents is not None and len(parents) != count:
        raise WireError("bad_block_offsets", "block_parent_hashes and block_hashes differ in length")
    if parents is not None and any(h == p for h, p in zip(event.block_hashes, parents, strict=True)):
        raise WireError("self_reference", "a block is its own parent")
    return offsets, parents
