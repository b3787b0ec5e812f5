"""The embedded server: it starts, stops, survives kills, and is one per directory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest

from indexer.errors import StoreUnavailable
from indexer.store import embedded
from indexer.store.embedded import NICENESS, EmbeddedPostgres
from tests.e2e.service_process import runs

SERVICE = """
import sys, time
from pathlib import Path
from indexer.store.embedded import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]))
server.start_now()
print("pid", server.pid, flush=True)
time.sleep(600)
"""


def processes_of(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any(str(directory) in argument for argument in command) and "postgres" in command[0]:
            found.append(process)
    return found


def test_it_starts_stops_and_keeps_its_data(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    with psycopg.connect(server.database_url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1")
    server.stop_now()
    assert processes_of(data_dir) == []
    server.start_now()
    with psycopg.connect(server.database_url) as connection:
        assert connection.execute("SELECT * FROM kept").fetchall() == [(1,)]
    server.stop_now()
    server.stop_now()
    assert processes_of(data_dir) == []


def test_a_second_service_in_the_same_directory_is_refused(data_dir: Path) -> None:
    first = EmbeddedPostgres(data_dir)
    first.start_now()
    with pytest.raises(StoreUnavailable, match="another service uses"):
        EmbeddedPostgres(data_dir).start_now()
    with psycopg.connect(first.database_url) as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
    first.stop_now()


def test_after_a_kill_of_the_service_the_left_over_server_is_replaced(data_dir: Path) -> None:
    left_over = server_of_a_killed_service(data_dir)
    assert runs(left_over)
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    assert not runs(left_over)
    with psycopg.connect(server.database_url) as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
    server.stop_now()


def test_what_is_left_of_a_killed_server_and_never_ends_is_ended(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process of it that waits for a lock of another that was killed, too."""
    monkeypatch.setattr(embedded, "KILL_TIMEOUT_S", 0.2)
    left_over = server_of_a_killed_service(data_dir)
    server = EmbeddedPostgres(data_dir)
    for end in (left_over.kill, lambda: os.kill(server.pid or 0, signal.SIGKILL)):
        with psycopg.connect(server.database_url) as connection:
            stuck = psutil.Process(connection.info.backend_pid)
            stuck.suspend()
            end()
            assert runs(stuck)
            server.stop_now()
            server.start_now()
            assert not runs(stuck)
    with psycopg.connect(server.database_url) as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
    server.stop_now()
    assert processes_of(data_dir) == []


def server_of_a_killed_service(data_dir: Path) -> psutil.Process:
    service = subprocess.Popen([sys.executable, "-c", SERVICE, str(data_dir)], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    started = next(line for line in service.stdout if line.startswith("pid "))
    service.kill()
    service.wait()
    service.stdout.close()
    return psutil.Process(int(started.removeprefix("pid ")))


def test_it_starts_again_right_after_the_server_was_killed(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    with psycopg.connect(server.database_url):
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        server.stop_now()
        server.start_now()
    server.stop_now()
    assert processes_of(data_dir) == []


def test_ctrl_c_does_not_reach_the_server(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    assert server.pid is not None
    assert os.getpgid(server.pid) != os.getpgid(0)
    server.stop_now()


def test_all_of_its_processes_come_after_ours(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    with psycopg.connect(server.database_url):
        assert server.pid is not None
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        assert len(processes) > 1
        assert {process.nice() for process in processes} == {min(19, psutil.Process().nice() + NICENESS)}
    server.stop_now()


def test_a_server_id_that_is_now_another_program_does_no_harm(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    server.stop_now()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (data_dir / "postgres" / "postmaster.pid").write_text(f"{bystander.pid}\n{data_dir / 'postgres'}\n")
    server.start_now()
    server.stop_now()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_half_made_cluster_is_made_again(data_dir: Path) -> None:
    (data_dir / "postgres.unfinished.7").mkdir()
    (data_dir / "postgres.unfinished.7" / "PG_VERSION").write_text("18")
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    server.stop_now()
    assert sorted(path.name for path in data_dir.iterdir()) == ["postgres", "postgres.log", "service.lock"]


def test_a_long_path_gets_a_short_socket_and_leaves_nothing_behind(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir / ("long" * 30))
    server.start_now()
    with psycopg.connect(server.database_url) as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
    socket_dir = server._socket_dir
    server.stop_now()
    assert not socket_dir.exists()


def test_a_cluster_of_another_version_is_refused_by_name(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    server.stop_now()
    (data_dir / "postgres" / "PG_VERSION").write_text("15\n")
    with pytest.raises(StoreUnavailable, match="PostgreSQL 15"):
        server.start_now()


def test_a_directory_that_cannot_be_used_is_refused_by_name(data_dir: Path) -> None:
    (data_dir / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        EmbeddedPostgres(data_dir / "file").start_now()


def test_a_server_that_cannot_start_says_why_and_leaves_no_process(data_dir: Path) -> None:
    with pytest.raises(StoreUnavailable, match="shared_buffers"):
        EmbeddedPostgres(data_dir, {"shared_buffers": "nonsense"}).start_now()
    assert processes_of(data_dir) == []
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    server.stop_now()


def test_watch_starts_a_server_that_died(data_dir: Path) -> None:
    async def scenario() -> None:
        server = EmbeddedPostgres(data_dir)
        await server.start()
        watching = asyncio.create_task(server.watch())
        died = server.pid
        assert died is not None
        os.kill(died, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while server.restarts == 0:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        with psycopg.connect(server.database_url) as connection:
            assert connection.execute("SELECT 1").fetchall() == [(1,)]
        watching.cancel()
        await server.stop()

    asyncio.run(scenario())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server under another account")
def test_as_root_the_server_runs_under_another_account(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.start_now()
    assert psutil.Process(server.pid).uids().real != 0
    server.stop_now()
