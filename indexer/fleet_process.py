"""The simulated fleet beside the service, as a process of its own: the service knows it only over the network."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import structlog

log = structlog.get_logger(__name__)

STOP_TIMEOUT_S = 5.0


class FleetProcess:
    """Starts `kv-indexer simulate` and waits for it; a fleet that ends is reported, the service goes on without it.

    The pipe to its standard input closes when this process dies, however it dies: the fleet then ends by itself. It has
    a session of its own, so that Ctrl-C reaches it through us only, in the right order.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    async def run(self) -> None:
        command = [sys.executable, "-m", "indexer.cli", "simulate", "--url", self._url, "--end-with-input"]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
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
