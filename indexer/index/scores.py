"""One number per publisher, as llm-d's scorer has it: blocks of the prefix that it holds, each by the tier it is on.

The score is a sum over the prefix without a hole, one weight per block: that of the fastest tier that has it. A block
is a granule, so that scores of engines with blocks of several sizes can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import Detail, PrefixAnswer, PrefixQuery, PublisherHit, QueryWarning
from indexer.index.tiers import CPU, GPU

DEFAULT_WEIGHTS: Mapping[str, float] = {GPU: 1.0, CPU: 0.8}
OTHER_WEIGHT = 0.5  # of tiers that nobody gave one


class Score(msgspec.Struct, gc=False):
    worker_id: str
    dp_rank: int
    score: float


class Scores(NamedTuple):
    """Best first, ties by worker and rank. `block_tokens`: of the blocks that are counted."""

    block_tokens: int
    scores: list[Score]
    warnings: Sequence[QueryWarning]


def scores(index: ContentIndex, answer: PrefixAnswer, query: PrefixQuery, weights: Mapping[str, float]) -> Scores:
    """`answer`: to this query, without details. `weights`: by tier, beside DEFAULT_WEIGHTS or instead of them.

    Cost: 1 us a hit; where a prefix lies on several tiers, another query for those publishers with details.
    """
    weights = {**DEFAULT_WEIGHTS, **weights}
    scope = index.scope(query.tenant, query.model)
    block_tokens = min(scope.spaces, default=1) if scope else 1
    mixed = frozenset(hit.worker_id for hit in answer.hits if not _is_on_gpu(hit))
    hits = [hit for hit in answer.hits if hit.worker_id not in mixed]
    if mixed:
        detailed = msgspec.structs.replace(query, workers=mixed, detail=Detail.INTERVALS)
        hits += index.prefix_hits(detailed).hits
    found = [Score(hit.worker_id, hit.dp_rank, _weigh(hit, weights) / block_tokens) for hit in hits]
    found.sort(key=_best_first)
    return Scores(block_tokens, [score for score in found if score.score], answer.warnings)


def _is_on_gpu(hit: PublisherHit) -> bool:
    return hit.tiers[GPU] == hit.resident_tokens


def _weigh(hit: PublisherHit, weights: Mapping[str, float]) -> float:
    """Tokens, each by the weight of its tier."""
    if hit.spans is msgspec.UNSET:
        return hit.resident_tokens * weights[GPU]
    return sum((span.end - span.start) * weights.get(span.tier, OTHER_WEIGHT) for span in hit.spans)


def _best_first(score: Score) -> tuple[float, str, int]:
    return -score.score, score.worker_id, score.dp_rank
