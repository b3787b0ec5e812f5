"""A process that keeps leases, for tests that freeze or kill one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from indexer.store.lease import LeaseKeeper, replica_name


async def hold(database_url: str) -> None:
    """Says a line once it holds what it could get, and then holds it."""
    keeper = LeaseKeeper(database_url, replica_name())
    running = asyncio.create_task(keeper.run())
    while not await keeper.look_now():
        pass
    sys.stdout.write("holds\n")
    sys.stdout.flush()
    await running


@contextmanager
def lease_holder(database_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which holds all leases already."""
    command = [sys.executable, "-m", "tests.integration.store.lease_holder", database_url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        yield process
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1]))
