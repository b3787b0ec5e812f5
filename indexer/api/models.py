"""`GET /v1/models`: what is known of each model, before anybody asks for a prompt of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from indexer.api.access import caller_of
from indexer.api.ports import FollowedPublisher, Services
from indexer.api.prefix_hits_schemas import ModelList
from indexer.api.publishers import answer
from indexer.api.schemas import NAME_LENGTH_MAX, errors
from indexer.api.slices import giving_way
from indexer.index.scope import Scope

Tenant = Annotated[str, Query(min_length=1, max_length=NAME_LENGTH_MAX, description="Only the models of this tenant.")]


def models_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["query"])

    @router.get(
        "/models",
        summary="Every model that publishers are registered for, and what is known of it",
        responses={200: {"model": ModelList}, **errors(422, 503)},
    )
    async def list_models(request: Request, tenant: Tenant | None = None) -> Response:
        caller = caller_of(request)
        if tenant is not None:
            caller.require(tenant)
        by_model: dict[tuple[str, str], list[FollowedPublisher]] = {}
        for publisher in sorted(services.registry.followed(), key=lambda f: f.registration.key):
            registration = publisher.registration
            if caller.sees(registration.tenant) and tenant in (None, registration.tenant):
                by_model.setdefault((registration.tenant, registration.model), []).append(publisher)
        models = []
        for name in sorted(by_model):
            scope = services.index.scope(*name)
            if scope is not None:  # else its last publisher went while others had their turn
                models.append(await describe_model(*name, scope, by_model[name]))
        return answer({"models": models})

    return router


async def describe_model(
    tenant: str, model: str, scope: Scope, publishers: Sequence[FollowedPublisher]
) -> dict[str, Any]:
    """What `ModelSummary` says, as plain values. Gives way now and then."""
    groups: Counter[tuple[int, str, int | None, tuple[int, ...]]] = Counter()
    keys = []
    async for publisher in giving_way(publishers):
        groups.update((g.group, g.kind, g.window, g.sizes) for g in publisher.index.groups.states())
        keys.append(
            {
                "worker_id": publisher.registration.worker_id,
                "dp_rank": publisher.registration.dp_rank,
                "state": str(publisher.state),
                "coverage": publisher.index.trust.coverage,
            }
        )
    return {
        "tenant": tenant,
        "model": model,
        "granules": sorted(scope.spaces),
        "block_sizes": sorted({size for *_, sizes in groups for size in sizes}),
        "groups": [
            {"group": group, "kind": kind, "window": window, "sizes": sizes, "publishers": count}
            for (group, kind, window, sizes), count in sorted(groups.items(), key=repr)
        ],
        "adapters": list(scope.names.adapters),
        "adapters_complete": scope.names.has_all_adapters,
        "publishers": {
            "count": len(keys),
            "states": Counter(key["state"] for key in keys),
            "coverages": Counter(key["coverage"] for key in keys),
            "keys": keys,
        },
    }
