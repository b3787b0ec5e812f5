"""One query: a prompt -> what each publisher of its scope would not compute again.

Every granule in use is looked up and judged by itself (lookup.py); what pools have is found first and counts for the
workers they serve, what routers expect is added at the end, and warnings say what hits do not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from math import lcm
from typing import NamedTuple

import numpy as np

from indexer.index.columns import U64
from indexer.index.expected import ExpectedBlocks
from indexer.index.groups import UNKNOWN
from indexer.index.holder_sets import HolderSets
from indexer.index.judgement import NOTHING_MATCHED, Judgement
from indexer.index.key_space import KeySpace
from indexer.index.lookup import Lookup, best_first, is_asked_for, prompt_keys, token_buffer
from indexer.index.pools import PoolHolding, holdings_for
from indexer.index.prefix_query import (
    U32_BYTES,
    Detail,
    DetailedHit,
    PrefixAnswer,
    PrefixQuery,
    PublisherHit,
    QueryWarning,
)
from indexer.index.publisher import PublisherIndex
from indexer.index.query_warnings import assumed, has_more_to_say, not_complete, of_no_hits, unknown_granule
from indexer.index.reuse import ReuseRules, Spec
from indexer.index.scope import Scope
from indexer.index.tiers import CPU, GPU


def answer(query: PrefixQuery, scope: Scope, now: float = 0.0) -> PrefixAnswer:
    """`now`: as told to `ExpectedBlocks`."""
    tokens = token_buffer(query.token_ids)
    result = PrefixAnswer(len(tokens) // U32_BYTES if isinstance(tokens, bytes) else len(tokens))
    is_hashed = query.is_hashed
    if is_hashed:
        _begin_with_hashes(query, scope, result)
    holdings = list(_pool_holdings(query, tokens, result.prompt_tokens, scope)) if scope.pools else []
    for space in scope.spaces.values() if query.granule is None else _of_granule(query.granule, scope):
        if len(space) or scope.asked_always or holdings:  # one that everybody refined away from is empty
            lookup = Lookup(query, tokens, result.prompt_tokens, space)
            hits = lookup.judge(scope, holdings)
            if is_hashed and hits:  # the hashes are of this space
                result.prompt_tokens = lookup.count
            result.hits += hits
    if holdings:
        result.hits += _served_without_blocks(query, result.prompt_tokens, scope, holdings)
    if len(scope.spaces) > 1 or holdings:
        result.hits.sort(key=best_first)
    has_hits = bool(result.hits)
    found = {(hit.worker_id, hit.dp_rank) for hit in result.hits} if scope.not_complete else set()
    if scope.expected is not None and query.expected is not None:
        _add_expected(query, scope.expected, result.hits, now)
    if not has_hits and (is_hashed or has_more_to_say(query, result.prompt_tokens, scope)):
        result.warnings.extend(of_no_hits(query, result.prompt_tokens, scope, partial(_has_hits, scope=scope)))
    if query.min_hit_tokens or query.limit is not None:
        result.hits = _best(query, result.hits)
    if scope.assumptions or scope.not_complete:
        result.warnings.extend(_of_trust(query, scope, result.hits, found))
    return result


def _of_trust(
    query: PrefixQuery, scope: Scope, hits: list[PublisherHit], found: set[tuple[str, int]]
) -> Iterator[QueryWarning]:
    """What hits rest on, and who may hold more than is known. `found`: all that have a hit, also one left out."""
    yield from assumed(scope, hits)
    if scope.not_complete:
        yield from not_complete(query, scope, found)


def _of_granule(granule: int, scope: Scope) -> list[KeySpace]:
    return [scope.spaces[granule]] if granule in scope.spaces else []


def _best(query: PrefixQuery, hits: list[PublisherHit]) -> list[PublisherHit]:
    return [hit for hit in hits if hit.hit_tokens >= query.min_hit_tokens][: query.limit]


def _begin_with_hashes(query: PrefixQuery, scope: Scope, result: PrefixAnswer) -> None:
    result.prompt_tokens = prompt_tokens(query, scope.spaces)
    if query.granule is not None and query.granule not in scope.spaces:
        result.warnings.append(unknown_granule(query.granule, scope.spaces))


def prompt_tokens(query: PrefixQuery, granules: Iterable[int]) -> int:
    """Of hashes those of whole granules; 0 if their size is not known. `granules`: those in use."""
    if query.is_hashed:
        return query.hash_count * (query.granule or min(granules, default=0))
    return query.token_count


def _has_hits(query: PrefixQuery, scope: Scope) -> bool:
    """From what engines hold themselves."""
    tokens = token_buffer(query.token_ids)
    return any(Lookup(query, tokens, query.token_count, space).judge(scope, []) for space in scope.spaces.values())


def _pool_holdings(query: PrefixQuery, tokens: bytes | array[int], count: int, scope: Scope) -> Iterator[PoolHolding]:
    """What each pool has of the prompt, if anything. Cost: a further look-up per granule of pools."""
    spaces = {pool.space for pool in scope.pools if pool.space is not None and len(pool.space)}
    for space in filter(query.asks, spaces):
        lookup = Lookup(query, tokens, count, space)
        for pool, serves in scope.pools.items():
            if pool.space is space and pool.is_credited:
                rules = pool.reuse.rules_of_a_pool
                if spans := lookup.spans_of(pool, rules):
                    yield PoolHolding(pool.registration.worker_id, serves, rules.alignment, spans)


def _served_without_blocks(
    query: PrefixQuery, count: int, scope: Scope, holdings: list[PoolHolding]
) -> Iterator[PublisherHit]:
    """Workers that have not published a block yet: nothing is known of them but what pools have for them."""
    for publisher in scope.publishers:
        if publisher.space is None and not publisher.is_pool and is_asked_for(query, publisher):
            serving = holdings_for(publisher.registration.worker_id, holdings)
            hit = _without_blocks(query, count, publisher, serving).hit() if serving else None
            if hit is not None:
                yield hit


def _without_blocks(query: PrefixQuery, count: int, publisher: PublisherIndex, serving: list[PoolHolding]) -> Judgement:
    block = max(holding.block_tokens for holding in serving)
    rules = ReuseRules((Spec(UNKNOWN, block, None, None, (0,)),), block, block)
    sets = HolderSets(KeySpace(block), np.empty(0, np.uint32), [])
    where = publisher, rules, sets, block, count
    return Judgement(*where, NOTHING_MATCHED, serving, query.detail)


class Judged(NamedTuple):
    """One publisher and one prompt. `judgement`: None if nothing at all is known of it. `keys`: the content key of
    every granule. `is_asked`: whether it is in answers, if it has a hit."""

    judgement: Judgement | None
    keys: U64
    is_asked: bool


NOT_JUDGED = Judged(None, np.empty(0, np.uint64), is_asked=False)


def judge_one(query: PrefixQuery, scope: Scope, publisher: PublisherIndex) -> Judged:
    """As `answer` judges it; only that the prompt is looked up to its end, whoever has it."""
    tokens, count = token_buffer(query.token_ids), query.token_count
    is_asked = is_asked_for(query, publisher) and not publisher.is_pool
    holdings = list(_pool_holdings(query, tokens, count, scope)) if scope.pools and not publisher.is_pool else []
    serving = holdings_for(publisher.registration.worker_id, holdings)
    if publisher.space is None or publisher.reuse.rules is None:
        judgement = _without_blocks(query, count, publisher, serving) if serving else None
        return Judged(judgement, NOT_JUDGED.keys, is_asked)
    lookup = Lookup(query, tokens, count, publisher.space, to_the_end=True)
    judgement = lookup.judgement(scope, publisher, publisher.reuse.rules, serving)
    return Judged(judgement, lookup.keys.copy(), is_asked)


def _add_expected(query: PrefixQuery, expected: ExpectedBlocks, hits: list[PublisherHit], now: float) -> None:
    """Into the hits, with further ones for publishers that have nothing yet."""
    by_key = {(hit.worker_id, hit.dp_rank): hit for hit in hits}
    asked = expected.granules if query.granule is None else expected.granules & {query.granule}
    for granule in asked:
        keys, count = prompt_keys(query, granule)
        for publisher, length in expected.deepest(granule, keys, now).items():
            key = publisher.registration.key
            hit = by_key.get(key) or _nothing_held(publisher, query.detail)
            more = _expected_hit(publisher, granule, length, count) - hit.hit_tokens
            if more > 0 and is_asked_for(query, publisher):
                by_key[key] = _with_expected(hit, more, is_counted=bool(query.expected))
    hits[:] = sorted(by_key.values(), key=best_first)


def _nothing_held(publisher: PublisherIndex, detail: Detail) -> DetailedHit:
    tiers = {GPU: 0, CPU: 0}
    worker_id, dp_rank = publisher.registration.key
    number = publisher.checkpoint.sequence_number
    hit = DetailedHit(worker_id, dp_rank, 0, 0, tiers, *publisher.trust, number)
    if detail is Detail.INTERVALS:
        hit.spans = []
    elif detail is Detail.GROUPS:
        hit.groups = []
    elif detail is Detail.TIERS:
        hit.tier_tokens = tiers.copy()
    return hit


def _with_expected(hit: PublisherHit, tokens: int, *, is_counted: bool) -> DetailedHit:
    fields = {name: getattr(hit, name) for name in hit.__struct_fields__}
    fields["hit_tokens"] += tokens if is_counted else 0
    return DetailedHit(**{**fields, "expected_tokens": tokens})


def _expected_hit(publisher: PublisherIndex, granule: int, granules: int, count: int) -> int:
    """What the engine would skip of a prompt of `count` tokens if it had so much of it. Its rules hold, as far as they
    concern the end of a hit."""
    block = block_of_hits(publisher, granule)
    last = count - (2 if publisher.leaves_one_token_more else 1)
    return max(0, min(granules * granule, last // block * block) - (block if publisher.reuse.drops_blocks else 0))


def block_of_hits(publisher: PublisherIndex, granule: int) -> int:
    """Of what hits of this publisher are multiples, in tokens; the granule, as long as nothing is known."""
    rules = publisher.reuse.rules
    return granule if rules is None else lcm(granule, rules.alignment)
