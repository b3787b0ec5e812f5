"""Pools: publishers that own blocks for others, and are no routing target themselves.

What a pool has of a prompt extends the reach of the workers that it serves, on its tier: a block of a worker counts if
the pool's blocks cover all its tokens, whatever the sizes of both. States of Mamba are not taken from pools.
"""

from __future__ import annotations

from typing import NamedTuple

from indexer.index.intervals import Intervals, united, whole_blocks


class PoolSpan(NamedTuple):
    """A part of a prompt that a pool has, in tokens, and the tier it lies on there."""

    start: int
    end: int
    tier: str


class PoolHolding(NamedTuple):
    """What one pool has of a prompt. `serves`: the worker_ids, None = all of the model."""

    worker_id: str
    serves: frozenset[str] | None
    block_tokens: int
    spans: list[PoolSpan]

    def does_serve(self, worker_id: str) -> bool:
        return self.serves is None or worker_id in self.serves


class PooledTier(NamedTuple):
    """What one pool has of it on one tier."""

    holding: PoolHolding
    tier: str


def holdings_for(worker_id: str, holdings: list[PoolHolding]) -> list[PoolHolding]:
    """Those of pools that serve this worker."""
    return [holding for holding in holdings if holding.does_serve(worker_id)]


def pooled_tiers(holdings: list[PoolHolding]) -> list[PooledTier]:
    return [PooledTier(h, tier) for h in holdings for tier in sorted({span.tier for span in h.spans})]


def blocks_from(pooled: list[PooledTier], block_tokens: int) -> Intervals:
    """The blocks of a worker that these cover."""
    spans = ((s.start, s.end) for holding, tier in pooled for s in holding.spans if s.tier == tier)
    return whole_blocks(united(spans), block_tokens)
