"""gRPC on a port of its own, inside our event loop, if the setting `grpc_port` is given. Needs the extra `grpc`."""

from __future__ import annotations

import os
from typing import Any

import structlog

from indexer.api.ports import Services
from indexer.errors import ListenError, SettingsError
from indexer.settings import Settings

log = structlog.get_logger(__name__)

GRACEFUL_STOP_S = 5.0
# what gRPC does in a child before it becomes another program ends it, and the embedded Postgres is one
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
try:
    import grpc

    from indexer.api.rpc.services import rpc_handlers
except ImportError as error:  # the extra is not installed
    _missing: ImportError | None = error
else:
    _missing = None


class GrpcServer:
    """Make it inside the event loop that runs it. `port`: that it listens on.

    Raises SettingsError without the extra, and ListenError if the address is taken.
    """

    def __init__(self, settings: Settings, services: Services) -> None:
        assert settings.grpc_port is not None
        if _missing is not None:
            message = f"grpc_port needs gRPC, which is not installed ({_missing}): pip install 'kv-indexer[grpc]'"
            raise SettingsError("grpc_port", message)
        options = [
            ("grpc.max_receive_message_length", settings.body_bytes_max),
            ("grpc.so_reuseport", int(settings.shared_port is not None)),  # replicas answer together
        ]
        self._server: Any = grpc.aio.server(
            handlers=rpc_handlers(services), options=options, maximum_concurrent_rpcs=settings.requests_max
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            self.port: int = self._server.add_insecure_port(f"{host}:{settings.grpc_port}")
        except RuntimeError as error:
            message = f"cannot listen on {host} port {settings.grpc_port} for gRPC: it is in use, or not ours"
            raise ListenError(message) from error

    async def serve(self) -> None:
        """Until `close`."""
        await self._server.start()
        log.info("grpc_opened", port=self.port)
        await self._server.wait_for_termination()

    async def close(self) -> None:
        """Take no new calls, let those under way finish (for GRACEFUL_STOP_S), end `serve`."""
        await self._server.stop(GRACEFUL_STOP_S)
