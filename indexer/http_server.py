"""uvicorn inside our own event loop: listens before anything else starts, and stops when we say."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

import uvicorn

from indexer.api.query_route import DirectQueries
from indexer.errors import ListenError
from indexer.http_connection import Connection, ConnectionConfig, Inputs

BACKLOG = 2048
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
        config = ConnectionConfig(
            app,
            access_log=False,
            log_config=None,
            http=cast("Any", Connection),
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACEFUL_STOP_S,
            server_header=False,
        )
        config.queries, config.inputs = queries, Inputs()
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
