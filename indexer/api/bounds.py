"""What one request may cost, and what it did cost: body size, requests at once, time, and the last line of defence.

One plain ASGI wrapper around all routes. It counts a body while it streams in, so that a caller that does not say (or
lies about) its length is stopped too, and one that trickles it cannot hold its place among the requests for ever.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from indexer.api.errors import ApiError, unexpected_error
from indexer.api.meters import RequestMeter
from indexer.api.ports import ApiLimits

BODY_DEADLINE_S = 30.0
PROBES = frozenset({"/healthz", "/readyz", "/health"})


class RequestBounds:
    """Refuses what is too much (408, 413, 503), turns a crash into a 500 envelope, and measures every request."""

    def __init__(self, app: ASGIApp, limits: ApiLimits, meter: RequestMeter) -> None:
        self._app = app
        self._limits = limits
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = perf_counter()
        status = 0

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._meter.in_flight += 1
        try:
            self._refuse_too_much(scope)
            await self._app(scope, self._counted(receive), send_noting_status)
        except ApiError as error:
            await error.response()(scope, receive, send_noting_status)
        except ClientDisconnect:
            pass  # gone in the midst of its body: nobody is left to answer
        except Exception as error:
            if status:
                raise  # half an answer is out: only the server can end the connection
            response = unexpected_error(scope["path"], scope["method"], error)
            await response(scope, receive, send_noting_status)
        finally:
            self._meter.in_flight -= 1
            route = getattr(scope.get("route"), "path", "unknown")
            self._meter.note(route, scope["method"], status, perf_counter() - started)

    def _refuse_too_much(self, scope: Scope) -> None:
        if self._meter.in_flight > self._limits.requests_max and scope["path"] not in PROBES:
            raise ApiError(503, "overloaded", "too many requests at once", headers={"retry-after": "1"})
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._limits.body_bytes_max:
                raise self._too_large()

    def _counted(self, receive: Receive) -> Receive:
        received = 0
        deadline: float | None = asyncio.get_running_loop().time() + BODY_DEADLINE_S

        async def receive_counted() -> Message:
            nonlocal received, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _too_slow() from None
            received += len(message.get("body", b""))
            if received > self._limits.body_bytes_max:
                raise self._too_large()
            if not message.get("more_body"):
                deadline = None
            return message

        return receive_counted

    def _too_large(self) -> ApiError:
        return ApiError(413, "body_too_large", f"the body is larger than {self._limits.body_bytes_max} bytes")


def _too_slow() -> ApiError:
    message = f"the body did not arrive within {BODY_DEADLINE_S:g} seconds"
    return ApiError(408, "body_too_slow", message, headers={"connection": "close"})
