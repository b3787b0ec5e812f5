"""Questions about a fleet: which prefixes are hot, and what would be lost with a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from indexer.api.access import Caller, caller_of
from indexer.api.errors import ApiError
from indexer.api.fleet_schemas import DrainImpacts, HotPrefixes
from indexer.api.formats import hex_key
from indexer.api.ports import Services
from indexer.api.publishers import answer, unknown_publisher
from indexer.api.schemas import NAME_LENGTH_MAX, errors
from indexer.api.slices import giving_way, in_slices
from indexer.index.content_index import ContentIndex
from indexer.index.drain import DrainImpact
from indexer.index.heat import HotPrefix, Sample, WeighedKeys, hot_prefixes, weigh, weights_of
from indexer.index.holder import Holder
from indexer.index.publisher import PublisherIndex
from indexer.index.scope import Scope

HOT_PREFIXES_MAX = 1_000
HOLDERS_NAMED_MAX = 100
PREFIXES_PER_SLICE = 20

Name = Annotated[str, Query(min_length=1, max_length=NAME_LENGTH_MAX)]
OptionalName = Annotated[str | None, Query(min_length=1, max_length=NAME_LENGTH_MAX)]
Limit = Annotated[int, Query(ge=1, le=HOT_PREFIXES_MAX)]


def fleet_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["inspection"])
    index, half_life_s = services.index, services.limits.heat_half_life_s

    @router.get(
        "/hot-prefixes",
        summary="The prefixes that most queries ask for, and who holds them",
        description="An estimate from a sample of queries, of what somebody held of their prompts.",
        responses={200: {"model": HotPrefixes}, **errors(403, 404, 422, 503)},
    )
    async def get_hot_prefixes(request: Request, model: Name, tenant: Name = "default", limit: Limit = 20) -> Response:
        caller_of(request).require(tenant)
        scope = index.scope(tenant, model)
        if scope is None:
            message = f"no publisher of model {model!r} is registered for tenant {tenant!r}"
            raise ApiError(404, "unknown_model", message, "model")
        samples = index.heat.samples(tenant, model)
        weights = weights_of(samples, index.heat.every, time.monotonic(), half_life_s)
        prefixes = await asyncio.to_thread(hot_prefixes, samples, weights, limit)
        queries = float(weights.sum())
        told = {
            "tenant": tenant,
            "model": model,
            "samples": len(samples),
            "queries": round(queries, 1),
            "prefixes": await _describe_all(scope, prefixes, queries),
        }
        return answer(told)

    @router.get(
        "/workers/{worker_id:path}/drain-impact",
        summary="What only this worker holds: what would have to be computed again if it went",
        responses={200: {"model": DrainImpacts}, **errors(404, 422, 503)},
    )
    async def get_drain_impact(request: Request, worker_id: str, model: OptionalName = None) -> Response:
        ranks = _ranks_of(index, caller_of(request), worker_id, model)
        if not ranks:
            raise unknown_publisher(worker_id, None)
        impacts = [
            {
                "tenant": tenant,
                "model": name,
                "dp_ranks": of_model,
                **await _impact(index, name, tenant, worker_id, half_life_s),
            }
            for (tenant, name), of_model in sorted(ranks.items())
        ]
        return answer({"worker_id": worker_id, "models": impacts})

    return router


async def _describe_all(scope: Scope, prefixes: Sequence[HotPrefix], queries: float) -> list[dict[str, Any]]:
    return [_describe(scope, prefix, queries) async for prefix in giving_way(prefixes, PREFIXES_PER_SLICE)]


def _describe(scope: Scope, prefix: HotPrefix, queries: float) -> dict[str, Any]:
    tiers: dict[PublisherIndex, set[str]] = {}
    for holder in _holders(scope, prefix):
        tiers.setdefault(cast("PublisherIndex", holder.owner), set()).add(holder.tier)
    holders = sorted((publisher.registration.key, sorted(on)) for publisher, on in tiers.items())
    return {
        "content_key": hex_key(prefix.content_key),
        "tokens": prefix.end_granules * prefix.granule,
        "queries": round(prefix.queries, 1),
        "share": round(prefix.queries / queries, 4),
        "copies": len(holders),
        "holders": [
            {"worker_id": key.worker_id, "dp_rank": key.dp_rank, "tiers": on} for key, on in holders[:HOLDERS_NAMED_MAX]
        ],
    }


def _holders(scope: Scope, prefix: HotPrefix) -> Iterator[Holder]:
    """Those that count in answers."""
    space = scope.spaces.get(prefix.granule)
    for holder in space.holders(prefix.content_key) if space is not None else ():
        if isinstance(holder, Holder) and holder.is_verified and holder.is_credited:
            yield from [holder] if cast("PublisherIndex", holder.owner).is_credited else ()


def _ranks_of(
    index: ContentIndex, caller: Caller, worker_id: str, model: str | None
) -> dict[tuple[str, str], list[int]]:
    """The ranks of a worker, as far as the caller sees them, by tenant and model."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for publisher in index.publishers():
        registration = publisher.registration
        is_asked = registration.worker_id == worker_id and model in (None, registration.model)
        if is_asked and caller.sees(registration.tenant):
            ranks.setdefault((registration.tenant, registration.model), []).append(registration.dp_rank)
    return ranks


async def _impact(index: ContentIndex, model: str, tenant: str, worker_id: str, half_life_s: float) -> dict[str, Any]:
    """In slices, so that nobody waits for it."""
    scope = index.scope(tenant, model)
    samples = index.heat.samples(tenant, model)
    weights = weights_of(samples, index.heat.every, time.monotonic(), half_life_s)
    heat = await asyncio.to_thread(_weigh_all, samples, weights)
    impact = DrainImpact(scope if scope is not None else Scope(), worker_id)
    await in_slices(impact.steps(heat))
    queried = impact.queried_tokens
    return {
        "held_blocks": impact.held_blocks,
        "held_tokens": impact.held_tokens,
        "only_here_blocks": impact.only_here_blocks,
        "only_here_tokens": impact.only_here_tokens,
        "queried_tokens": round(queried, 1),
        "queried_only_here_tokens": round(impact.queried_only_here_tokens, 1),
        "queried_share": round(impact.queried_only_here_tokens / queried, 4) if queried else 0.0,
    }


def _weigh_all(samples: Sequence[Sample], weights: Any) -> dict[int, WeighedKeys]:
    return {granule: weigh(samples, weights, granule) for granule in {sample.granule for sample in samples}}
