"""The paths that several services have in common: each reads who speaks, and hands over to that dialect.

Queries are tried as Dynamo's first: routers of that kind ask all the time, and pay nothing for the others.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from indexer.api.access import Caller, caller_of
from indexer.api.dialects.dynamo import HASH_QUERY_FORMAT, OK, QUERY_FORMAT, DynamoQueries, DynamoRegistry
from indexer.api.dialects.later_form import PREFIX, always_later, faults_in_form, later_if_msgpack
from indexer.api.dialects.openapi import (
    GLOBAL_VIEW_OPENAPI,
    HASH_QUERY_OPENAPI,
    LATER_GLOBAL_VIEW_OPENAPI,
    LATER_HASH_QUERY_OPENAPI,
    LATER_QUERY_OPENAPI,
    LATER_REGISTER_OPENAPI,
    LATER_SERVICES_OPENAPI,
    LATER_UNREGISTER_OPENAPI,
    QUERY_OPENAPI,
    REGISTER_OPENAPI,
    SERVICES_OPENAPI,
    UNREGISTER_OPENAPI,
)
from indexer.api.dialects.recognition import is_rfc1403_query, is_rfc1403_registration
from indexer.api.dialects.rfc1403 import Rfc1403Queries
from indexer.api.dialects.rfc1403_registry import Rfc1403Registry
from indexer.api.errors import ApiError, require_recovered
from indexer.api.formats import choose_format, encode_msgpack, is_msgpack
from indexer.api.meters import MeasuredIndex
from indexer.api.ports import Life, Services
from indexer.api.publishers import answer
from indexer.api.query_kernels import HASH_QUERY_PATH, QUERY_PATH
from indexer.api.query_route import QueryRoute, describe_query

REGISTER_PATH, UNREGISTER_PATH = "/register", "/unregister"


def dialect_queries(services: Services, index: MeasuredIndex) -> list[QueryRoute]:
    dynamo, rfc1403 = DynamoQueries(services, index), Rfc1403Queries(services, index)

    def by_tokens(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        if is_msgpack(content_type):
            return later_by_tokens(body, content_type, caller)
        chosen = choose_format(content_type, QUERY_FORMAT)
        parts = chosen.split(body)
        fields = chosen.try_parts(parts)
        if fields is None and is_rfc1403_query(body if parts is None else parts[1]):
            return rfc1403.by_tokens(body, content_type, caller, is_later=False, parts=parts)
        return chosen.content_type, dynamo.by_tokens(fields or chosen.read(body), caller)

    def by_hashes(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        if is_msgpack(content_type):
            return later_by_hashes(body, content_type, caller)
        chosen = choose_format(content_type, HASH_QUERY_FORMAT)
        fields = chosen.try_parts(chosen.split(body))
        if fields is None and is_rfc1403_query(body):
            return rfc1403.by_hashes(body, content_type, caller, is_later=False)
        return chosen.content_type, dynamo.by_hashes(fields or chosen.read(body), caller)

    def later_by_tokens(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        return rfc1403.by_tokens(body, content_type, caller, is_later=True)

    def later_by_hashes(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        return rfc1403.by_hashes(body, content_type, caller, is_later=True)

    return [
        QueryRoute(QUERY_PATH, by_tokens, services.life, later_if_msgpack),
        QueryRoute(HASH_QUERY_PATH, by_hashes, services.life, later_if_msgpack),
        QueryRoute(PREFIX + QUERY_PATH, later_by_tokens, services.life, always_later),
        QueryRoute(PREFIX + HASH_QUERY_PATH, later_by_hashes, services.life, always_later),
    ]


def dialect_router(services: Services) -> APIRouter:
    router = APIRouter()
    dynamo, rfc1403 = DynamoRegistry(services), Rfc1403Registry(services)
    describe_query(router, QUERY_PATH, QUERY_OPENAPI)
    describe_query(router, HASH_QUERY_PATH, HASH_QUERY_OPENAPI)
    describe_query(router, PREFIX + QUERY_PATH, LATER_QUERY_OPENAPI)
    describe_query(router, PREFIX + HASH_QUERY_PATH, LATER_HASH_QUERY_OPENAPI)

    @router.post(REGISTER_PATH, **REGISTER_OPENAPI)
    @router.post(PREFIX + REGISTER_PATH, **LATER_REGISTER_OPENAPI)
    async def register(request: Request) -> Response:
        body, content_type, caller = await _read(request)
        is_later = _is_below_prefix(request) or is_msgpack(content_type)
        with faults_in_form(is_later):
            _require_running(services.life)
            if is_later or is_rfc1403_registration(body):
                return _encoded(await rfc1403.register(body, content_type, caller), content_type)
            await dynamo.register(body, content_type, caller)
            return answer(OK, 201)

    @router.post(UNREGISTER_PATH, **UNREGISTER_OPENAPI)
    @router.post(PREFIX + UNREGISTER_PATH, **LATER_UNREGISTER_OPENAPI)
    async def unregister(request: Request) -> Response:
        body, content_type, caller = await _read(request)
        is_later = _is_below_prefix(request) or is_msgpack(content_type)
        with faults_in_form(is_later):
            require_recovered(services.life)
            if is_later or is_rfc1403_registration(body):
                return _encoded(await rfc1403.unregister(body, content_type, caller), content_type)
            await dynamo.unregister(body, content_type, caller)
            return answer(OK)

    @router.get("/services", **SERVICES_OPENAPI)
    @router.get(PREFIX + "/services", **LATER_SERVICES_OPENAPI)
    async def services_(request: Request) -> Response:
        with faults_in_form(_is_below_prefix(request)):
            require_recovered(services.life)
            return answer(await rfc1403.services(caller_of(request)))

    @router.get("/global_view", **GLOBAL_VIEW_OPENAPI)
    @router.get(PREFIX + "/global_view", **LATER_GLOBAL_VIEW_OPENAPI)
    async def global_view(request: Request) -> Response:
        with faults_in_form(_is_below_prefix(request)):
            require_recovered(services.life)
            return answer(await rfc1403.global_view(caller_of(request)))

    return router


def _is_below_prefix(request: Request) -> bool:
    path: str = request.scope["path"]
    return path.startswith(PREFIX)


async def _read(request: Request) -> tuple[bytes, str | None, Caller]:
    return await request.body(), request.headers.get("content-type"), caller_of(request)


def _require_running(life: Life) -> None:
    require_recovered(life)
    if life.is_stopping:
        raise ApiError(503, "stopping", "the service is stopping")


def _encoded(body: dict[str, Any], content_type: str | None) -> Response:
    """In the format of the request."""
    if is_msgpack(content_type):
        return Response(encode_msgpack(body), media_type="application/msgpack")
    return answer(body)
