"""uvicorn inside our own event loop: listens before anything else starts, and stops when we say."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from indexer.api.errors import error_response
from indexer.api.query_route import DirectQueries, QueryRoute
from indexer.errors import ListenError

BACKLOG = 2048
HEAD_BYTES_MAX = 65_536
KEEP_ALIVE_S = 75
GRACEFUL_STOP_S = 5


class HttpServer:
    """A context: the address is taken when it is entered (raises ListenError) and free when it is left.

    `queries` are answered by the server itself where it can; `app` must answer them too.
    """

    def __init__(self, app: Any, host: str, port: int, queries: DirectQueries | None = None) -> None:
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._ended = asyncio.Event()
        config = _Config(
            app,
            access_log=False,
            log_config=None,
            http=_Protocol,
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACEFUL_STOP_S,
            server_header=False,
        )
        config.queries = queries
        self._server = _Server(config)

    def __enter__(self) -> HttpServer:
        self._socket = _listen(self._host, self._port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._socket is not None
        self._socket.close()

    @property
    def url(self) -> str:
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def serve(self) -> None:
        """Until `close`."""
        assert self._socket is not None
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._ended.set()

    async def close(self) -> None:
        """Take no new requests, let those under way finish (for GRACEFUL_STOP_S), end `serve`."""
        self._server.should_exit = True
        await self._ended.wait()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's own affair."""
        yield


class _Config(uvicorn.Config):
    """What every connection needs to know: uvicorn gives each its configuration."""

    queries: DirectQueries | None = None


class _Protocol(HttpToolsProtocol):
    """One connection. Bounds the head of a request, which uvicorn does not; refuses in our envelope what is no HTTP.

    The parser keeps a head until it is complete, at many times its size, and joins the pieces of a long value anew with
    each that arrives: some megabytes would stop the event loop for seconds.

    A query whose head and body came in one piece is answered at once, with no task and no ASGI, which are most of the
    cost of a short one. Its head is held until the body is there; when it turns out not to be the plain case after all,
    it is handed over to the application as if nothing had been held.

    Invariants: a head is held within one call of `data_received` only, and only if all requests before it have been
    answered; at most one query is answered there (pipelined ones take turns with other connections).

    If broken: answers would leave in another order than their requests came.
    """

    _queries: DirectQueries | None = None
    _head_bytes = 0
    _is_in_head = True
    _may_hold = False
    _held: QueryRoute | None = None
    _held_body = b""
    _idle_since: float | None = None  # since a query was answered here and nothing came; uvicorn times its own answers
    _idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._queries = cast("_Config", self.config).queries
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._idle_since = None
        self._head_bytes += len(data)
        self._may_hold = True
        super().data_received(data)
        if self._held is not None:
            self._hand_over()
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(431, "head_too_large", f"request line and headers are larger than {HEAD_BYTES_MAX} bytes")

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._may_hold and self._queries is not None and self._is_plain():
            self._held = self._queries.find(self.url)
        self._may_hold = False
        if self._held is None:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._held is not None and not self._held_body:
            self._held_body = body
            return
        if self._held is not None:  # chunks
            self._hand_over()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._held is None or not self._is_answered(self._held):
            super().on_message_complete()

    def _is_plain(self) -> bool:
        """Nothing is under way or waits to be written, and the connection stays open afterwards."""
        parser = self.parser
        last: RequestResponseCycle | None = self.cycle
        return (
            (last is None or last.response_complete)
            and not self.flow.write_paused
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and parser.get_http_version() == "1.1"
        )

    def _is_answered(self, query: QueryRoute) -> bool:
        """False = handed over instead."""
        assert self._queries is not None
        answer = self._queries.answer(query, self._held_body, self.headers)
        if answer is None:
            self._hand_over()
            return False
        self._held, self._held_body = None, b""
        self._write(answer.status, [*self.server_state.default_headers, *answer.headers], answer.body)
        self.server_state.total_requests += 1
        self._begin_idleness()
        return True

    def _hand_over(self) -> None:
        """The application takes the held request, with what came of its body."""
        body, self._held, self._held_body = self._held_body, None, b""
        super().on_headers_complete()
        if body:
            super().on_body(body)

    def _begin_idleness(self) -> None:
        """One timer watches many answers: setting one for each would be a tenth of a query's cost."""
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idleness)

    def _check_idleness(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            self.timeout_keep_alive_handler()
        else:
            self._idle_timer = self.loop.call_later(left_s, self._check_idleness)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "bad_request", msg)

    def _refuse(self, status: int, code: str, message: str) -> None:
        response = error_response(status, code, message, headers={"connection": "close"})
        self._write(status, response.raw_headers, bytes(response.body))
        self.transport.close()

    def _write(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", body)))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ListenError(f"the address {host!r} is not known: {error.strerror}; choose another --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(_reason(error, host, port)) from error
    listener.setblocking(False)
    return listener


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already in use; stop what uses it or choose another --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"the address {host} does not belong to this machine; choose another --host"
    return f"cannot listen on {host} port {port}: {error.strerror}"
