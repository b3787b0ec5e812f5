"""What Dynamo's standalone indexer says of its workers and peers.

One entry is one instance with all its ranks. Peers are other indexers that keep each other's state there; here replicas
share a database and find each other in it, so there are none, and none can be registered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from indexer.api.access import Caller, caller_of
from indexer.api.dialects.dynamo_bodies import (
    DEREGISTER_PEER_OPENAPI,
    PEERS_OPENAPI,
    REGISTER_PEER_OPENAPI,
    WORKERS_OPENAPI,
    PeerBody,
)
from indexer.api.errors import ApiError, require_recovered
from indexer.api.formats import check_json, decode
from indexer.api.ports import FollowedPublisher, Services
from indexer.api.publishers import answer
from indexer.api.schemas import NAME_LENGTH_MAX
from indexer.api.slices import giving_way

PENDING, ACTIVE, FAILED = "pending", "active", "failed"
STATUS_OF = {"connected": ACTIVE, "replaying": ACTIVE, "failed": FAILED}  # all other states wait for a connection
WORST_FIRST = FAILED, PENDING, ACTIVE
U64_DIGITS_MAX = 20

_read_peer = msgspec.json.Decoder(PeerBody).decode
Filter = Annotated[str | None, Query(max_length=NAME_LENGTH_MAX)]


def fleet_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/workers", **WORKERS_OPENAPI)
    async def workers(request: Request, model_name: Filter = None, routing_group: Filter = None) -> Response:
        require_recovered(services.life)
        caller = caller_of(request)
        if routing_group is not None:
            caller.require(routing_group, "routing_group")
        followed = _seen(services, caller, model_name, routing_group)
        return answer(await describe_workers(sorted(followed, key=lambda f: f.registration.key)))

    @router.get("/peers", **PEERS_OPENAPI)
    async def peers() -> Response:
        return answer([])

    @router.post("/register_peer", **REGISTER_PEER_OPENAPI)
    async def register_peer(request: Request) -> Response:
        await _read_body(request)
        message = "indexers keep no state of each other here: start replicas on the same database instead"
        raise ApiError(422, "peers_not_supported", message, "url")

    @router.post("/deregister_peer", **DEREGISTER_PEER_OPENAPI)
    async def deregister_peer(request: Request) -> Response:
        fields = await _read_body(request)
        raise ApiError(404, "unknown_peer", f"no peer {fields.url!r} is registered", "url")

    return router


async def _read_body(request: Request) -> PeerBody:
    check_json(request.headers.get("content-type"))
    return decode("JSON", _read_peer, await request.body())


def _seen(
    services: Services, caller: Caller, model_name: str | None, routing_group: str | None
) -> Iterable[FollowedPublisher]:
    for followed in services.registry.followed():
        registration = followed.registration
        is_meant = model_name in (None, registration.model) and routing_group in (None, registration.tenant)
        if is_meant and caller.sees(registration.tenant) and not registration.is_pool:
            yield followed


async def describe_workers(in_order: Iterable[FollowedPublisher]) -> list[dict[str, Any]]:
    """`in_order`: ranks of one instance follow each other."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    publishers: AsyncIterator[FollowedPublisher] = giving_way(in_order)
    async for followed in publishers:
        registration = followed.registration
        key = registration.worker_id, registration.model, registration.tenant
        worker = found.get(key)
        if worker is None:
            worker = found[key] = {
                "instance_id": instance_id_of(registration.worker_id),
                "source": "zmq",
                "status": ACTIVE,
                "model_name": registration.model,
                "routing_group": registration.tenant,
                "block_size": registration.block_size or followed.index.granule,
                "endpoints": {},
                "listeners": {},
            }
        rank, listener = str(registration.dp_rank), describe_listener(followed)
        worker["endpoints"][rank] = registration.endpoint
        worker["listeners"][rank] = listener
        worker["status"] = min(worker["status"], listener["status"], key=WORST_FIRST.index)
    return list(found.values())


def describe_listener(followed: FollowedPublisher) -> Mapping[str, str]:
    listener = {"endpoint": followed.registration.endpoint, "status": STATUS_OF.get(followed.state, PENDING)}
    if followed.last_error is not None:
        listener["last_error"] = followed.last_error
    return listener


def instance_id_of(worker_id: str) -> int | str:
    """A number of 64 bits where the worker was registered as one; else its text."""
    is_number = worker_id.isascii() and worker_id.isdigit() and len(worker_id) <= U64_DIGITS_MAX
    number = int(worker_id) if is_number else -1
    return number if 0 <= number < 2**64 and str(number) == worker_id else worker_id
