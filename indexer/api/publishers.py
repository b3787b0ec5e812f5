"""`/v1/publishers`: which engines are followed, and how well."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Query
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from indexer.api.access import Caller, caller_of
from indexer.api.errors import JSON, ApiError
from indexer.api.formats import hex_key
from indexer.api.ports import FollowedPublisher, RegistryPort, Services
from indexer.api.schemas import DP_RANK_MAX, Affected, Publisher, PublisherList, RegistrationBody, Removed, errors
from indexer.api.slices import giving_way
from indexer.errors import EndpointError, PublisherConflict
from indexer.index.predictions import PredictionOutcome, Predictions
from indexer.index.publisher import PublisherIndex
from indexer.registration import POOL_OPTION, PublisherKey, Registration

DpRank = Annotated[int, Query(ge=0, le=DP_RANK_MAX)]
SeenT = TypeVar("SeenT", FollowedPublisher, PublisherIndex)


def publishers_router(services: Services) -> APIRouter:
    """Paths take the worker_id raw or percent-encoded: it may be a URL, with slashes and colons."""
    router = APIRouter(prefix="/v1/publishers", tags=["publishers"])
    _add_all(router, services)
    _add_commands(router, services.registry)
    _add_one(router, services.registry)
    return router


def _add_all(router: APIRouter, services: Services) -> None:
    registry = services.registry

    @router.post(
        "",
        status_code=201,
        summary="Follow an engine's event stream",
        responses={
            201: {"model": Publisher},
            200: {"model": Publisher, "description": "Registered already, with the same values"},
            **errors(400, 409, 413, 415, 422, 503),
        },
    )
    async def register(request: Request, body: RegistrationBody) -> Response:
        caller = caller_of(request)
        caller.require(body.tenant)
        if services.life.is_stopping:
            raise ApiError(503, "stopping", "the service is stopping")
        registration = to_registration(body, services.normalise_endpoint)
        followed, created = await register_for(caller, registry, registration)
        return answer(describe(followed, time.time()), 201 if created else 200)

    @router.get("", summary="All publishers", responses={200: {"model": PublisherList}, **errors(503)})
    async def list_publishers(request: Request) -> Response:
        sees = caller_of(request).sees
        followed = [publisher for publisher in registry.followed() if sees(publisher.registration.tenant)]
        return answer({"publishers": await describe_all(followed)})


def _add_commands(router: APIRouter, registry: RegistryPort) -> None:
    @router.post(
        "/{worker_id:path}/clear",
        summary="Forget what a worker, or one rank of it, holds, and go on following it",
        responses={200: {"model": Affected}, **errors(404, 422, 503)},
    )
    async def clear(request: Request, worker_id: str, dp_rank: DpRank | None = None) -> Response:
        return affected(await registry.clear(worker_id, dp_rank, caller_of(request).sees), worker_id, dp_rank)

    @router.post(
        "/{worker_id:path}/resync",
        summary="Ask a worker's replay endpoint again: whether its stream went on, or (full) for all it still has",
        responses={200: {"model": Affected}, **errors(404, 409, 422, 503)},
    )
    async def resync(request: Request, worker_id: str, dp_rank: DpRank | None = None, full: bool = False) -> Response:
        sees = caller_of(request).sees
        return affected(await registry.resync(worker_id, dp_rank, sees, is_full=full), worker_id, dp_rank)


def _add_one(router: APIRouter, registry: RegistryPort) -> None:
    @router.get(
        "/{worker_id:path}", summary="One publisher", responses={200: {"model": Publisher}, **errors(404, 422, 503)}
    )
    async def get_publisher(request: Request, worker_id: str, dp_rank: DpRank = 0) -> Response:
        followed = find_seen(registry, caller_of(request), worker_id, dp_rank)
        return answer(describe(followed, time.time()))

    @router.delete(
        "/{worker_id:path}",
        summary="Stop following a worker, or one rank of it, and forget what it holds",
        responses={200: {"model": Removed}, **errors(404, 422, 503)},
    )
    async def unregister(request: Request, worker_id: str, dp_rank: DpRank | None = None) -> Response:
        removed = await registry.unregister(worker_id, dp_rank, caller_of(request).sees)
        if not removed:
            raise unknown_publisher(worker_id, dp_rank)
        return answer({"removed": removed})


async def register_for(
    caller: Caller, registry: RegistryPort, registration: Registration, field: str = "worker_id"
) -> tuple[FollowedPublisher, bool]:
    """As `RegistryPort.register`. Names of workers are shared by all tenants: of one that another tenant has, a caller
    who does not see that tenant learns only that it is taken."""
    try:
        return await registry.register(registration)
    except PublisherConflict:
        known = registry.find(*registration.key)
        if caller.tenants is None or (known is not None and caller.sees(known.registration.tenant)):
            raise
        message = f"the name {registration.worker_id!r} is taken; choose another"
        raise ApiError(409, "publisher_conflict", message, field) from None


def to_registration(body: RegistrationBody, normalise: Callable[[str], str]) -> Registration:
    replay = body.replay_endpoint
    if body.serves is not None and body.kind != "pool":
        raise ApiError(422, "invalid_value", "serves: only a pool serves workers", "serves")
    return Registration(
        worker_id=body.worker_id,
        dp_rank=body.dp_rank,
        model=body.model,
        endpoint=checked_endpoint("endpoint", body.endpoint, normalise),
        replay_endpoint=None if replay is None else checked_endpoint("replay_endpoint", replay, normalise),
        tenant=body.tenant,
        engine=body.engine,
        block_size=body.block_size,
        options=body.options.model_dump(exclude_unset=True) | (_pool_option(body) if body.kind == "pool" else {}),
    )


def _pool_option(body: RegistrationBody) -> dict[str, JsonValue]:
    return {POOL_OPTION: None if body.serves is None else list[JsonValue](sorted(set(body.serves)))}


def checked_endpoint(field: str, endpoint: str, normalise: Callable[[str], str], status: int = 422) -> str:
    """As it will be kept. Raises ApiError with this status."""
    try:
        return normalise(endpoint)
    except EndpointError as error:
        raise ApiError(status, "invalid_endpoint", f"{field}: {error}", field) from None


def find_seen(
    registry: RegistryPort, caller: Caller, worker_id: str, dp_rank: int, field: str = "worker_id"
) -> FollowedPublisher:
    """As `seen`."""
    return seen(caller, registry.find(worker_id, dp_rank), PublisherKey(worker_id, dp_rank), field)


def seen(caller: Caller, publisher: SeenT | None, key: PublisherKey, field: str) -> SeenT:
    """Raises ApiError 404 for none, and as if there were none for one of a tenant that the caller does not see."""
    if publisher is None or not caller.sees(publisher.registration.tenant):
        raise unknown_publisher(*key, field)
    return publisher


def unknown_publisher(worker_id: str, dp_rank: int | None, field: str = "worker_id") -> ApiError:
    rank = "" if dp_rank is None else f" with rank {dp_rank}"
    return ApiError(404, "unknown_publisher", f"no publisher {worker_id!r}{rank} is registered", field)


def affected(publishers: int, worker_id: str, dp_rank: int | None) -> Response:
    if not publishers:
        raise unknown_publisher(worker_id, dp_rank)
    return answer({"publishers": publishers})


async def describe_all(followed: Sequence[FollowedPublisher]) -> list[dict[str, Any]]:
    """Sorted by worker_id and rank."""
    now = time.time()
    in_order = sorted(followed, key=lambda f: f.registration.key)
    return [describe(publisher, now) async for publisher in giving_way(in_order)]


def describe(followed: FollowedPublisher, now: float) -> dict[str, Any]:
    """What `schemas.Publisher` says, as plain values."""
    registration, checkpoint, status = followed.registration, followed.index.checkpoint, followed.index.status()
    trust = followed.index.trust
    return {
        "worker_id": registration.worker_id,
        "dp_rank": registration.dp_rank,
        "model": registration.model,
        "tenant": registration.tenant,
        "engine": registration.engine,
        "dialect": followed.index.dialect,
        "endpoint": registration.endpoint,
        "replay_endpoint": registration.replay_endpoint,
        "block_size": registration.block_size,
        "kind": "pool" if registration.is_pool else "engine",
        "serves": None if registration.serves is None else sorted(registration.serves),
        "options": {name: value for name, value in registration.options.items() if name != POOL_OPTION},
        "state": followed.state,
        "last_error": followed.last_error,
        "coverage": trust.coverage,
        "coverage_reason": trust.reason,
        "coverage_at": trust.at,
        "credited": followed.index.is_credited,
        "since": checkpoint.since,
        "assumptions": status.assumptions,
        "replay": followed.describe_replay(now),
        "sequence_number": checkpoint.sequence_number,
        "generation": checkpoint.generation,
        "granule": status.granule,
        "groups": list(status.groups),
        "counts": {
            "residencies": status.residencies,
            "by_medium": dict(sorted(status.residencies_by_medium.items())),
            "orphans": status.orphans,
            "ghosts": status.ghosts,
            "unverified": status.unverified,
            "unplaced": status.unplaced,
            "gaps": status.gaps,
            "missing_batches": status.missing_batches,
            "batches_applied": status.batches_applied,
            "bad_events": dict(sorted(status.bad_events.items())),
            "index": dict(sorted(status.counters.items())),
            "stream": dict(sorted(followed.counters.items())),
        },
        "predictions": describe_predictions(followed.index.predictions),
        "last_event_age_s": None
        if followed.last_batch_at is None
        else round(max(0.0, now - followed.last_batch_at), 3),
    }


def describe_predictions(predictions: Predictions | None) -> dict[str, Any] | None:
    """What `schemas.PublisherPredictions` says, as plain values."""
    if predictions is None:
        return None
    wrong = predictions.last_wrong
    return {
        "alarm": predictions.is_alarmed,
        "alarm_at": predictions.alarm_at,
        "wrong_share": round(predictions.wrong_share, 4),
        "last": {outcome: predictions.in_window(outcome) for outcome in PredictionOutcome},
        "ever": {outcome: predictions.outcomes[outcome] for outcome in PredictionOutcome},
        "last_wrong": None
        if wrong is None
        else {
            "predicted_tokens": wrong.predicted_tokens,
            "cached_tokens": wrong.cached_tokens,
            "content_key": hex_key(wrong.content_key),
            "at": wrong.at,
        },
    }


def answer(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=JSON)
