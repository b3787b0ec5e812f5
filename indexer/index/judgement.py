"""One publisher and one prompt: what of the look-up counts for it, and the hit that this makes.

Purpose: the publisher's groups, tiers, connector, pools and hashes decide which of the blocks that are held its engine
would load; reuse.py then says how far the engine gets with these.

Invariants: `hit_tokens` never counts a block that is unverified, remote, or not of every group that needs it; whatever
explains a hit comes from the same object.

If broken: routers would send prompts to engines that compute them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from math import lcm
from operator import attrgetter
from typing import Any, TypeAlias

from indexer.index.groups import MAMBA
from indexer.index.holder_sets import HolderSets
from indexer.index.intervals import Intervals, common, reach, united, without
from indexer.index.offloading import ChunkedGroup, chunked_groups, length_with_loads
from indexer.index.pools import PooledTier, PoolHolding, blocks_from, pooled_tiers
from indexer.index.prefix_query import Detail, DetailedHit, GroupReach, PublisherHit, Span
from indexer.index.publisher import PublisherIndex
from indexer.index.reuse import ReuseRules, Rule, Spec, Trace, hit_length
from indexer.index.state import Coverage
from indexer.index.tiers import CPU, GPU, tier_rank

ON_DEVICE = frozenset({GPU})
Matched: TypeAlias = Mapping[int, set[tuple[int, str]]]
"""End -> group and tier of the blocks that end there, though no event says so: their hashes do."""
NOTHING_MATCHED: Matched = {}


class Judgement:
    """One publisher and one prompt. `holdings`: what pools have for it."""

    def __init__(
        self,
        publisher: PublisherIndex,
        rules: ReuseRules,
        sets: HolderSets,
        granule: int,
        count: int,
        matched: Matched,
        holdings: list[PoolHolding],
        detail: Detail,
    ) -> None:
        self.publisher, self.rules, self.sets, self.granule, self.count = publisher, rules, sets, granule, count
        self.matched = matched
        self.detail = detail
        self.trace: Trace | None = None
        self.pooled = pooled_tiers(holdings)
        self.group_masks = self._group_masks(None)

    def hit(self) -> PublisherHit | None:
        is_found = any(mask & self.sets.any_holder for mask in self.group_masks.values())
        if not (is_found or self.pooled or self.matched or self.rules.takes_for_granted):
            return None
        spans = self.spans() if self.pooled or self.detail in (Detail.TIERS, Detail.INTERVALS) else []
        tiers = self._tiers(spans) if spans else self._own_tiers()
        resident = max(tiers.values(), default=0)
        hit = self._hit_tokens()
        if not hit and not resident:
            return None
        registration, checkpoint = self.publisher.registration, self.publisher.checkpoint
        names = registration.worker_id, registration.dp_rank
        coverage, reason, at = self.publisher.trust
        leading = [span for span in spans if span.end <= resident]
        said = *names, hit, resident, tiers, coverage, reason, at, checkpoint.sequence_number
        answer = self._detailed(said, leading)
        if pools := sorted({span.worker_id for span in leading if span.worker_id != registration.worker_id}):
            answer.pools = pools
        return answer

    def _detailed(self, said: tuple[Any, ...], leading: list[Span]) -> PublisherHit:
        """The hit of which this is said, with what is asked beside. `leading`: spans of its prefix."""
        if self.detail in (Detail.SUMMARY, Detail.INTERVALS):
            hit = PublisherHit(*said)
            if self.detail is Detail.INTERVALS:
                hit.spans = leading
            return hit
        detailed = DetailedHit(*said)
        if self.detail is Detail.GROUPS:
            detailed.groups = self._group_reaches()
        else:
            detailed.tier_tokens = dict.fromkeys(self._tier_names(), 0)
            for span in leading:
                detailed.tier_tokens[span.tier] += span.end - span.start
        return detailed

    def _group_reaches(self) -> list[GroupReach]:
        """Each group as if it were the only one, and nothing were computed again."""
        found = []
        for spec in self.rules.specs:
            alignment = min(self.rules.alignment, spec.block_tokens)
            for group in spec.groups:
                alone = ReuseRules((replace(spec, groups=(group,), drops=False),), alignment, self.rules.hash_tokens)
                held = self._length(alone, self.count, None, self.pooled)
                found.append(GroupReach(group, spec.kind, spec.window, spec.block_tokens, held))
        return sorted(found, key=attrgetter("group"))

    def explained(self) -> Trace:
        """How `hit_tokens` of the hit comes about."""
        trace = self.trace = Trace(self.count)
        trace.note(Rule.LAST_TOKEN, self._limit())
        self._hit_tokens()
        self.trace = None
        return trace

    @property
    def held(self) -> Intervals:
        """What every group of full attention has on any tier, or pools for it."""
        return self._held(self.group_masks, self.pooled)

    def spans(self) -> list[Span]:
        """Every part of the prompt that is held, on the fastest tier that it takes, if possible by the worker."""
        own = self.publisher.registration.worker_id
        found: list[Span] = []
        so_far: frozenset[str] = frozenset()
        pooled: list[PooledTier] = []
        before: Intervals = []
        for tier in self._tier_names():
            so_far |= {tier}
            masks = self._group_masks(so_far)
            for source in (None, *(p for p in self.pooled if p.tier == tier)):
                if source is not None:
                    pooled.append(source)
                now = self._held(masks, pooled)
                worker_id = own if source is None else source.holding.worker_id
                found += (Span(start, end, tier, worker_id) for start, end in without(now, before))
                before = now
        return sorted(found, key=_start_of)

    def _held(self, group_masks: dict[int, int], pooled: list[PooledTier]) -> Intervals:
        """What every group of full attention has, or pools for it."""
        held = [self._blocks(spec, group_masks, pooled) for spec in self.full_specs]
        return reduce(common, held)

    def _blocks(self, spec: Spec, group_masks: dict[int, int], pooled: list[PooledTier]) -> Intervals:
        block, first = spec.block_tokens, 0
        needed = [group_masks.get(group, 0) for group in spec.groups]
        found = [] if spec.kind == MAMBA else blocks_from(pooled, block)
        for mask, length in self.sets.all_runs(block // self.granule):
            if all(mask & slots for slots in needed):
                found.append((first * block, (first + length) * block))
            first += length
        return united(found)

    def _hit_tokens(self) -> int:
        """What the engine would skip. What pools have is taken for its own, but no connector goes on from there."""
        hit = self._hit_without_pools()
        if not self.pooled:
            return hit
        with_pools = self._length_on(ON_DEVICE if self.publisher.connector.is_shown else None, self.pooled)
        if self.trace is not None:
            self.trace.note(Rule.POOLS, max(hit, with_pools))
        return max(hit, with_pools)

    def _hit_without_pools(self) -> int:
        """A connector loads on top of what the engine has itself; all others have one cache."""
        connector, rules = self.publisher.connector, self.rules
        if not connector.is_shown:
            return self._length_on(None, trace=self.trace)
        local = self._length_on(ON_DEVICE, trace=self.trace)
        slower_tiers = frozenset(h.tier for h in self.publisher.residents.holders.values()) - ON_DEVICE
        slower = self._group_masks(slower_tiers)
        groups = chunked_groups(rules, connector.blocks_per_chunk, connector.draft_groups) if slower else None
        if groups is None:
            return local
        align = lcm(*(spec.block_tokens for spec in rules.specs if spec.kind == MAMBA))

        def holds_chunk(group: ChunkedGroup, end: int) -> bool:
            is_held = bool(self._mask_at(end) & slower.get(group.group, 0))
            return is_held or group.group in self._matched_at(end, slower_tiers)

        is_known = self.publisher.checkpoint.coverage is Coverage.COMPLETE
        unsure = 0 if is_known else max(g.chunk_tokens - g.chunk_tokens // connector.blocks_per_chunk for g in groups)
        where = groups, local, self.count, align, holds_chunk
        loaded = length_with_loads(*where, unsure=unsure)
        if self.trace is not None:
            self.trace.note(Rule.CONNECTOR_LOADS, length_with_loads(*where))
            self.trace.note(Rule.CONNECTOR_UNSURE, loaded)
        return loaded

    def _length_on(
        self, tiers: frozenset[str] | None, pooled: list[PooledTier] | None = None, trace: Trace | None = None
    ) -> int:
        """The engine's own rule over what it has (on these tiers), and what pools have."""
        return self._length(self.rules, self._limit(), tiers, pooled, trace)

    def _length(
        self,
        rules: ReuseRules,
        limit: int,
        tiers: frozenset[str] | None,
        pooled: list[PooledTier] | None,
        trace: Trace | None = None,
    ) -> int:
        group_masks = self.group_masks if tiers is None else self._group_masks(tiers)
        from_pools = {spec: self._blocks(spec, {}, pooled) for spec in rules.specs} if pooled else {}

        def holds(spec: Spec, end: int) -> bool:
            mask, matched = self._mask_at(end), self._matched_at(end, tiers)
            if all(mask & group_masks.get(group, 0) or group in matched for group in spec.groups):
                return True
            block = (end - 1) // spec.block_tokens * spec.block_tokens
            return any(start <= block and end <= stop for start, stop in from_pools.get(spec, ()))

        def contiguous(spec: Spec) -> int:
            if pooled:
                return reach(self._blocks(spec, group_masks, pooled))
            length = self._reach(spec, group_masks)
            while self.matched and holds(spec, length + spec.block_tokens):
                length += spec.block_tokens
            return length

        return hit_length(rules, limit, holds, contiguous, trace)

    def _matched_at(self, end: int, tiers: frozenset[str] | None) -> set[int]:
        """The groups that have a block ending there (on these tiers), as its hash says."""
        return {group for group, tier in self.matched.get(end, ()) if tiers is None or tier in tiers}

    def _mask_at(self, end: int) -> int:
        """The holders of the prefix of so many tokens."""
        j, rest = divmod(end, self.granule)
        return 0 if rest or not 0 < j <= self.sets.count else self.sets.mask_at(j - 1)

    def _limit(self) -> int:
        """At least one token is always computed; SGLang's pairs leave one more (a pair needs its second token)."""
        return self.count - (2 if self.publisher.leaves_one_token_more else 1)

    def _group_masks(self, tiers: frozenset[str] | None) -> dict[int, int]:
        """Group -> the slots of its holders (on these tiers) that the engine can load from."""
        masks: dict[int, int] = {}
        for key, holder in self.publisher.residents.holders.items():
            if holder.is_credited and (tiers is None or holder.tier in tiers):
                masks[key.group] = masks.get(key.group, 0) | 1 << holder.slot
        return masks

    def _reach(self, spec: Spec, group_masks: dict[int, int]) -> int:
        blocks = 0
        needed = [group_masks.get(group, 0) for group in spec.groups]
        for mask, length in self.sets.runs(spec.block_tokens // self.granule):
            if not all(mask & slots for slots in needed):
                break
            blocks += length
        return blocks * spec.block_tokens

    @property
    def full_specs(self) -> list[Spec]:
        """Those of full attention; without any, all."""
        return [spec for spec in self.rules.specs if spec.is_full] or list(self.rules.specs)

    def _tier_names(self) -> list[str]:
        """Of all holders, always GPU and CPU; fastest first."""
        own = {h.tier for h in self.publisher.residents.holders.values() if h.is_credited}
        return sorted({*own, *(pooled.tier for pooled in self.pooled), GPU, CPU}, key=tier_rank)

    def _tiers(self, spans: list[Span]) -> dict[str, int]:
        """Cumulative reach: how far the prefix is held on this tier and the faster ones."""
        ranks = {tier: rank for rank, tier in enumerate(self._tier_names())}
        return {
            tier: reach(united((s.start, s.end) for s in spans if ranks[s.tier] <= rank))
            for tier, rank in ranks.items()
        }

    def _own_tiers(self) -> dict[str, int]:
        """The same without pools, where nobody asks for spans."""
        tiers = self._tier_names()
        reaches: dict[str, int] = {}
        so_far: frozenset[str] = frozenset()
        for tier in tiers:
            so_far |= {tier}
            masks = self.group_masks if len(so_far) == len(tiers) else self._group_masks(so_far)
            reaches[tier] = min(self._reach(spec, masks) for spec in self.full_specs)
        return reaches


def _start_of(span: Span) -> int:
    return span.start
