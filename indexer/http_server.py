"""uvicorn inside our own event loop: listens before anything else starts, and stops when we say."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

import uvicorn

from indexer.api.query_route import DirectQueries
from indexer.http_connection import Connection, ConnectionConfig, Inputs
from indexer.listening import listen, url_of

BACKLOG = 2048
KEEP_ALIVE_S = 75
GRACEFUL_STOP_S = 5


class HttpServer:
    """A context: the address is taken when it is entered (raises ListenError) and free when it is left.

    `queries` are answered by the server itself where it can; `app` must answer them too. `is_shared`: other processes
    take the same address. `tls`: HTTPS by this context, which may be loaded anew meanwhile.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        queries: DirectQueries | None = None,
        *,
        is_shared: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._is_shared = is_shared
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
        config.queries, config.inputs, config.tls = queries, Inputs(), tls
        self._scheme = "http" if tls is None else "https"
        self._server = _Server(config)

    def __enter__(self) -> HttpServer:
        self._socket = listen(self._host, self._port, BACKLOG, is_shared=self._is_shared)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._socket is not None
        self._socket.close()

    @property
    def url(self) -> str:
        assert self._socket is not None
        return url_of(self._socket, self._scheme)

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
