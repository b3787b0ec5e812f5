"""The simulated fleet beside the service, as a process of its own: the service knows it only over the network."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

STOP_TIMEOUT_S = 5.0
TOKEN_VARIABLE = "INDEXER_TOKEN"


class FleetProcess:
    """Starts `kv-indexer simulate` and waits for it; a fleet that ends is reported, the service goes on without it.

    `token`: of a key, if the service asks for one. `cert_file`: the service's own certificate, if it has one.

    The pipe to its standard input closes when this process dies, however it dies: the fleet then ends by itself. It has
    a session of its own, so that Ctrl-C reaches it through us only, in the right order.
    """

    def __init__(self, url: str, token: str | None = None, cert_file: Path | None = None) -> None:
        self._arguments = ["--url", url]
        if cert_file is not None:  # trusted as it is: it need not be for the address that is used here
            self._arguments += ["--ca-file", str(cert_file), "--any-name"]
        self._environment = os.environ | ({TOKEN_VARIABLE: token} if token else {})
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    async def run(self) -> None:
        command = [sys.executable, "-m", "indexer.cli", "simulate", *self._arguments, "--end-with-input"]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, env=self._environment, start_new_session=True
        )
        status = await self._process.wait()
        if not self._is_stopping:
            log.error("fleet_died", status=status)
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Ask it to unregister its engines and end; waits for STOP_TIMEOUT_S."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)

    async def kill(self) -> None:
        """Whatever is left of it."""
        process = self._process
        if process is not None and process.returncode is None:
            log.warning("fleet_killed")
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
