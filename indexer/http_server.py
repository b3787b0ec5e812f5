"""uvicorn inside our own event loop: listens before anything else starts, and stops when we say."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from indexer.api.errors import error_response
from indexer.errors import ListenError

BACKLOG = 2048
HEAD_BYTES_MAX = 65_536
KEEP_ALIVE_S = 75
GRACEFUL_STOP_S = 5


class HttpServer:
    """A context: the address is taken when it is entered (raises ListenError) and free when it is left."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._ended = asyncio.Event()
        self._server = _Server(
            uvicorn.Config(
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
        )

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


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request, which uvicorn does not, and refuses what is no HTTP in our envelope.

    The parser keeps a head until it is complete, at many times its size, and joins the pieces of a long value anew with
    each that arrives: some megabytes would stop the event loop for seconds.
    """

    _head_bytes = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(431, "head_too_large", f"request line and headers are larger than {HEAD_BYTES_MAX} bytes")

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "bad_request", msg)

    def _refuse(self, status: int, code: str, message: str) -> None:
        response = error_response(status, code, message, headers={"connection": "close"})
        head = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + bytes(response.body))
        self.transport.close()


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
