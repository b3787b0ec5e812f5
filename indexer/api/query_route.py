"""A query as bytes in, bytes out: one synchronous function per route, whoever calls it.

Purpose: routers ask thousands of times a second, and a web framework would cost more than the question. `QueryDispatch`
calls a query for every request that takes the way of ASGI; the HTTP server calls it by itself (`DirectQueries`) where
it can. FastAPI only describes these routes, and answers other methods than POST.

Invariants: a query never raises; both ways give the same bytes, ask for the same keys, count in the same metrics and
keep the same bounds: what `DirectQueries` must not answer, it leaves to the application.

If broken: a limit would hold for one way only, and a caller could choose the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import structlog
from fastapi import APIRouter
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from indexer.api.access import ANYONE, Caller, Keyring, LastCaller
from indexer.api.errors import ApiError, require_recovered, unexpected_error
from indexer.api.known_queries import KnownQueries
from indexer.api.meters import RequestMeter
from indexer.api.ports import ApiLimits, Life
from indexer.api.request_kernels import METHOD, find_authorization, read_head

log = structlog.get_logger(__name__)

Answer: TypeAlias = Callable[[bytes, str | None, Caller], tuple[bytes, bytes]]
InForm: TypeAlias = Callable[[ApiError, str | None], ApiError]


def as_it_is(fault: ApiError, _: str | None) -> ApiError:
    return fault


class RawAnswer(NamedTuple):
    """What goes on the wire; `headers` are all that the answer itself has, its content-length among them."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class QueryRoute:
    """`answer`: body, content type and caller -> content type and body of the answer. May raise ApiError, which
    leaves as `in_form` says, by the content type of the query."""

    def __init__(self, path: str, answer: Answer, life: Life, in_form: InForm = as_it_is) -> None:
        self.path = path
        self._answer = answer
        self._life = life
        self._in_form = in_form

    def __call__(self, body: bytes, content_type: str | None, caller: Caller = ANYONE) -> RawAnswer:
        """Never raises: every fault is an answer."""
        try:
            require_recovered(self._life)
            answer_type, answer = self._answer(body, content_type, caller)
        except ApiError as error:
            return _raw(self._in_form(error, content_type).response())
        except Exception as error:
            return _raw(unexpected_error(self.path, "POST", error))
        return RawAnswer(200, ((b"content-length", b"%d" % len(answer)), (b"content-type", answer_type)), answer)


class QueryDispatch:
    """ASGI: POSTs of the query routes, before any router sees them; everything else goes on to `app`."""

    def __init__(self, app: ASGIApp, routes: Sequence[QueryRoute]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        caller = scope.get("caller", ANYONE)
        answer = route(await _body(receive), content_type_of(scope["headers"]), caller)
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.body})


class PlainQuery(NamedTuple):
    """Who asks, and where the body of the query is among the bytes that came."""

    caller: Caller
    route: QueryRoute
    content_type: str | None
    start: int
    stop: int


class DirectQueries:
    """The queries as the HTTP server may answer them itself, if the plain application would answer them at all.

    With a `keyring` a connection has to find out who asks (`find_caller`) before each of them.
    """

    def __init__(
        self,
        routes: Sequence[QueryRoute],
        limits: ApiLimits,
        meter: RequestMeter,
        known: KnownQueries | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        self.keyring = keyring
        self._known = known
        self._routes = {route.path.encode(): route for route in routes}
        self._limits = limits
        self._meter = meter

    def find_caller(self, data: memoryview, filled: int, last: LastCaller) -> Caller | None:
        """Whose token the head of this request has; None = leave it to the application, which refuses it."""
        assert self.keyring is not None
        start, stop = find_authorization(data, filled)
        return self.keyring.find_again(bytes(data[start:stop]), last) if stop else None

    def find(self, data: memoryview, filled: int, caller: Caller = ANYONE) -> PlainQuery | None:
        """The query that these bytes begin with; its body need not be there yet, but must find room in `data`.

        None = leave it to the application: not a plain query, a body that is too large, or too many requests at once.
        """
        start, length, target_stop, type_start, type_stop = read_head(data, filled)
        stop = start + length
        if start < 0 or stop > len(data) or length > self._limits.body_bytes_max:
            return None
        route = self._routes.get(bytes(data[len(METHOD) : target_stop]))
        if route is None or self._meter.in_flight >= self._limits.requests_max:
            return None
        content_type = str(data[type_start:type_stop], "latin-1") if type_stop else None
        return PlainQuery(caller, route, content_type, start, stop)

    def answer_known(
        self, data: Any, filled: int, headers: list[tuple[bytes, bytes]], caller: Caller = ANYONE
    ) -> bytes | None:
        """The answer to the request that these bytes are, head and all, if one kernel can give it. See KnownQueries."""
        if self._known is None or self._meter.in_flight >= self._limits.requests_max:
            return None
        try:
            return self._known.answer(data, filled, headers, caller)
        except Exception:  # a defect of ours, which shall not cost the answer
            log.exception("known_query_failed")
            return None

    def answer(self, query: PlainQuery, body: bytes) -> RawAnswer:
        started = perf_counter()
        answer = query.route(body, query.content_type, query.caller)
        self._meter.note(query.route.path, "POST", answer.status, perf_counter() - started)
        return answer


def describe_query(router: APIRouter, path: str, openapi: Mapping[str, Any]) -> None:
    """Into the OpenAPI document, and known to the router for other methods than POST."""

    async def never_called() -> Response:
        raise AssertionError("QueryDispatch answers every POST of this route")

    router.add_api_route(path, never_called, methods=["POST"], name=path, **openapi)


def content_type_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if name == b"content-type":
            return value.decode("latin-1")
    return None


async def _body(receive: Receive) -> bytes:
    """Raises ClientDisconnect, and what the bounds of the application raise."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def _raw(response: Response) -> RawAnswer:
    return RawAnswer(response.status_code, response.raw_headers, bytes(response.body))
