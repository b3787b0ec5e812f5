"""Several services on one machine that answer at one port: `serve --replicas N`.

Purpose: queries use more than one core, and a service that dies is not missed. This process starts the embedded
Postgres, unless there is a database URL, and N services, and starts again whichever dies. Each follows all publishers;
which one writes what is settled among them (store/lease.py). Each has a port of its own, for probes and metrics: with a
fixed port P these are P + 1 to P + N. The port P itself is shared: a service joins it when it is ready, and the kernel
spreads connections over those that have.

Stop: services first, then the database, within one deadline. The pipe to a service's standard input closes when this
process dies, however it dies: the service then stops by itself.

If broken: services would be left behind, or the port would lead to one that is not ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

import structlog
from pydantic import SecretStr

from indexer.errors import IndexerError
from indexer.fleet_process import FleetProcess
from indexer.guard import Guard
from indexer.keys import with_fleet_key
from indexer.listening import bind, url_of
from indexer.metrics import Metrics
from indexer.settings import ENVIRONMENT_PREFIX, Settings, environment_variable
from indexer.store.embedded import EmbeddedPostgres

log = structlog.get_logger(__name__)

RESTART_PAUSE_MIN_S = 0.5
RESTART_PAUSE_MAX_S = 30.0
HEALTHY_AFTER_S = 60.0
KILLED_AFTER_S = 5.0
"""Beyond the deadline that services keep themselves."""
ANSWER_LOOK_INTERVAL_S = 0.1
CONNECTIONS_PER_REPLICA = 8
CONNECTIONS_BESIDE = 20
COMMAND = (sys.executable, "-m", "indexer.cli")


class CompileFailed(IndexerError):
    """The kernels cannot be compiled, so no service would start."""


class Replicas:
    """Make it inside the event loop that runs it (raises SettingsError); `run` it once."""

    def __init__(self, settings: Settings) -> None:
        Guard(settings, Metrics())  # what no service could start with is said here, once
        self._settings, self._fleet_token = with_fleet_key(settings)
        self._stop_asked = asyncio.Event()
        self._processes: set[asyncio.subprocess.Process] = set()
        connections = CONNECTIONS_BESIDE + CONNECTIONS_PER_REPLICA * settings.replicas
        self._embedded = (
            None
            if settings.database_url
            else EmbeddedPostgres(settings.data_dir, {"max_connections": str(connections)})
        )

    async def run(self) -> int:
        """Until a signal; returns the exit status. Raises ListenError, StoreUnavailable, CompileFailed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_asked.set)
        with bind(self._settings.host, self._settings.port, is_shared=True) as reserved:
            try:
                return await self._serve(reserved)
            finally:
                if self._embedded is not None:
                    await self._embedded.stop()

    async def _serve(self, reserved: socket.socket) -> int:
        url = url_of(reserved, "http" if self._settings.tls_cert_file is None else "https")
        log.info("replicas_opened", url=url, replicas=self._settings.replicas)
        await self._compile()
        environment = replica_environment(self._settings, await self._database_url(), reserved.getsockname()[1])
        tasks = [
            asyncio.create_task(self._keep_running(number, environment), name=f"replica {number}")
            for number in range(1, self._settings.replicas + 1)
        ]
        if self._embedded is not None:
            tasks.append(asyncio.create_task(self._embedded.watch(), name="database"))
        tasks.append(asyncio.create_task(self._announce(url, reserved), name="announcement"))
        stop = asyncio.create_task(self._stop_asked.wait(), name="stop")
        done, _ = await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stop, *tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        status = await self._stop_all()
        for dead in done & {*tasks}:
            dead.result()  # raises what it died of
        return status

    async def _database_url(self) -> str:
        if self._embedded is not None:
            return await self._embedded.start()
        assert self._settings.database_url is not None
        return self._settings.database_url.get_secret_value()

    async def _compile(self) -> None:
        """Once, and not each for itself."""
        process = await asyncio.create_subprocess_exec(*COMMAND, "compile", start_new_session=True)
        if await process.wait() != 0:
            raise CompileFailed("the kernels cannot be compiled; `kv-indexer compile` says why")

    async def _keep_running(self, number: int, environment: Mapping[str, str]) -> None:
        pause_s = RESTART_PAUSE_MIN_S
        port = self._settings.port + number if self._settings.port else 0
        own = {**environment, environment_variable("port"): str(port)}
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                *("serve", "--end-with-input"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                env=own,
                start_new_session=True,
            )
            self._processes.add(process)
            log.info("replica_started", replica=number, pid=process.pid, port=port or "any")
            status = await process.wait()
            self._processes.discard(process)
            if loop.time() - started > HEALTHY_AFTER_S:
                pause_s = RESTART_PAUSE_MIN_S
            log.error("replica_died", replica=number, pid=process.pid, status=status, next_start_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)

    async def _announce(self, url: str, reserved: socket.socket) -> None:
        """As soon as one of them answers; with a fleet beside them, if one is wanted."""
        host, port = reserved.getsockname()[:2]
        while True:
            if await _answers(host, port):
                break
            await asyncio.sleep(ANSWER_LOOK_INTERVAL_S)
        sys.stdout.write(f"kv-indexer answers at {url} with {self._settings.replicas} replicas (Ctrl-C stops them)\n")
        sys.stdout.flush()
        if not self._settings.simulate:
            await asyncio.Event().wait()
        fleet = FleetProcess(url, self._fleet_token, self._settings.tls_cert_file)
        try:
            await fleet.run()
        finally:
            await fleet.stop()
            await fleet.kill()

    async def _stop_all(self) -> int:
        """0, or 1 if one of them had something cut off."""
        log.info("stop_began")
        processes = list(self._processes)
        for process in processes:
            with suppress(ProcessLookupError):
                process.terminate()
        waits = [asyncio.create_task(process.wait()) for process in processes]
        if waits:
            await asyncio.wait(waits, timeout=self._settings.stop_deadline_s + KILLED_AFTER_S)
        for process in processes:
            if process.returncode is None:
                log.error("replica_killed", pid=process.pid)
                process.kill()
                await process.wait()
        status = int(any(process.returncode for process in processes))
        log.info("replicas_stopped", status=status)
        return status


def replica_environment(settings: Settings, database_url: str, shared_port: int) -> dict[str, str]:
    """The settings of one replica, but for its own port: those of this process, read by nobody a second time."""
    # Every variable of ours, that of a config file included, is replaced.
    changed = {
        "database_url": SecretStr(database_url),
        "shared_port": shared_port,
        "replicas": 1,
        "simulate": False,
        "data_dir": settings.data_dir.absolute(),
    }
    values = {**dict(settings), **changed}
    others = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    return others | {environment_variable(name): _text(value) for name, value in values.items() if value is not None}


def _text(value: object) -> str:
    """As the environment says it."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={entry}" for name, entry in value.items())
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


async def _answers(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host if host not in ("0.0.0.0", "::") else None, port)
    except OSError:
        return False
    writer.close()
    return True
