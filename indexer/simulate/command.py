"""`kv-indexer simulate`: a simulated fleet as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import Unpack

from indexer.client.calls import Settings
from indexer.simulate.fleet import DEFAULT_RATE, Fleet, FleetReport
from indexer.simulate.service_client import ServiceUnreachable


def simulate_command(
    url: str,
    engines: int = 3,
    rate: float = DEFAULT_RATE,
    seed: int = 0,
    duration_s: float | None = None,
    restarts: bool = True,
    **client: Unpack[Settings],
) -> int:
    """Run a fleet until `duration_s` is over, SIGINT or SIGTERM. Returns the exit status.

    0 if every answer compared was exact, 1 if one was wrong or the service could not be reached.
    """
    announce = partial(print, flush=True)

    async def run() -> FleetReport:
        fleet = Fleet(
            url,
            engines=engines,
            rate=rate,
            seed=seed,
            restarts=restarts,
            announce=announce,
            **client,
        )
        await _until_stopped(fleet, duration_s)
        return fleet.report

    try:
        report = asyncio.run(run())
    except ServiceUnreachable as error:
        sys.stderr.write(f"kv-indexer simulate: {error}\n")
        return 1
    announce(str(report))
    return 0 if report.exact == report.checked else 1


async def _until_stopped(fleet: Fleet, duration_s: float | None) -> None:
    """The fleet's life, ended early by the first SIGINT or SIGTERM; a second one ends the process at once."""
    task = asyncio.create_task(fleet.live(duration_s=duration_s), name="fleet")
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    with suppress(asyncio.CancelledError):
        await task
