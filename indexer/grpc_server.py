"""gRPC on a port of its own, inside our event loop, if the setting `grpc_port` is given. Needs the extra `grpc`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import structlog

from indexer.api.access import Caller, Keyring
from indexer.api.errors import ApiError
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

    def __init__(self, settings: Settings, services: Services, keyring: Keyring | None = None) -> None:
        assert settings.grpc_port is not None
        if _missing is not None:
            message = f"grpc_port needs gRPC, which is not installed ({_missing}): pip install 'kv-indexer[grpc]'"
            raise SettingsError("grpc_port", message)
        options = [
            ("grpc.max_receive_message_length", settings.body_bytes_max),
            ("grpc.so_reuseport", int(settings.shared_port is not None)),  # replicas answer together
        ]
        self._server: Any = grpc.aio.server(
            handlers=_handlers(services, keyring), options=options, maximum_concurrent_rpcs=settings.requests_max
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            self.port = self._open(f"{host}:{settings.grpc_port}", settings)
        except RuntimeError as error:
            message = f"cannot listen on {host} port {settings.grpc_port} for gRPC: it is in use, or not ours"
            raise ListenError(message) from error

    def _open(self, address: str, settings: Settings) -> int:
        """With TLS where the HTTP API has it; a changed certificate is used from the next start on."""
        if settings.tls_cert_file is None or settings.tls_key_file is None:
            return int(self._server.add_insecure_port(address))
        pair = settings.tls_key_file.read_bytes(), settings.tls_cert_file.read_bytes()
        return int(self._server.add_secure_port(address, grpc.ssl_server_credentials([pair])))

    async def serve(self) -> None:
        """Until `close`."""
        await self._server.start()
        log.info("grpc_opened", port=self.port)
        await self._server.wait_for_termination()

    async def close(self) -> None:
        """Take no new calls, let those under way finish (for GRACEFUL_STOP_S), end `serve`."""
        await self._server.stop(GRACEFUL_STOP_S)


def _handlers(services: Services, keyring: Keyring | None) -> Any:
    """With keys, a call shows its token in the metadata `authorization`, as over HTTP. Every role may ask."""
    if keyring is None:
        return rpc_handlers(services)

    def caller_of(metadata: Mapping[str, str]) -> Caller:
        caller = keyring.find(metadata.get("authorization", "").encode())
        if caller is None:
            raise ApiError(401, "unauthenticated", "this needs the metadata authorization: Bearer TOKEN of a key")
        return caller

    return rpc_handlers(services, caller_of)
