"""Explanations in tests: got in one go, and held against the answer that they explain."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import msgspec

from indexer.index.content_index import ContentIndex
from indexer.index.explain import Explanation, LastEvent, PublisherExplanation
from indexer.index.prefix_query import Detail, PrefixQuery, PublisherHit
from indexer.index.publisher import PublisherIndex

ResultT = TypeVar("ResultT")


def all_of(work: Generator[None, None, ResultT]) -> ResultT:
    """What it returns."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: ResultT = end.value
        return result


def explained(index: ContentIndex, query: PrefixQuery, *publishers: PublisherIndex) -> Explanation:
    return all_of(index.explain(query, publishers))


def last_events(told: PublisherExplanation, group: int = 0) -> list[tuple[int, int, str, LastEvent | None]]:
    """(start, end, state, last event) of each range of a group."""
    (blocks,) = (blocks for blocks in told.groups if blocks.group == group)
    return [(part.start, part.end, part.state, part.last_event) for part in blocks.ranges]


def check_explanations(index: ContentIndex, query: PrefixQuery) -> None:
    """Of all publishers of the prompt's scope: what is explained is what is answered."""
    query = msgspec.structs.replace(query, detail=Detail.INTERVALS)
    scope = index.scope(query.tenant, query.model)
    hits = {(hit.worker_id, hit.dp_rank): hit for hit in index.prefix_hits(query).hits}
    for publisher in list(scope.publishers) if scope is not None else ():
        (told,) = explained(index, query, publisher).publishers
        check_explanation(told, hits.get(publisher.registration.key), len(query.token_ids))


def check_explanation(told: PublisherExplanation, hit: PublisherHit | None, prompt_tokens: int) -> None:
    if hit is None:
        assert (told.hit_tokens, told.resident_tokens, told.tiers, told.spans) == (0, 0, {}, [])
    else:
        assert told.absent is None
        assert (told.hit_tokens, told.resident_tokens) == (hit.hit_tokens, hit.resident_tokens)
        assert (told.tiers, told.spans) == (hit.tiers, hit.spans)
    lengths = [prompt_tokens, *(step.after for step in told.steps)]
    assert [step.before for step in told.steps] == lengths[:-1]
    assert told.absent is not None or max(0, lengths[-1]) == told.hit_tokens, told
    for group in told.groups:
        ends = [0, *(part.end for part in group.ranges)]
        assert [part.start for part in group.ranges] == ends[:-1]
        assert all(part.end > part.start and not part.end % group.block_tokens for part in group.ranges)
        assert all((part.last_event is None) == (part.state == "held") for part in group.ranges)
    if told.first_miss is not None and not told.pools and told.absent is None:
        assert told.first_miss.start == told.resident_tokens
