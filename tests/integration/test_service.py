"""The service within this process, with its real database: what happens when a part of it fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from indexer.errors import StoreUnavailable
from indexer.service import Service, TaskDied
from indexer.settings import Settings
from indexer.store.writer import Writer


def run_service(data_dir: Path, when_ready: Callable[[Service], None], **settings: object) -> int:
    """Start, do something once it is ready, return the exit status; no database process may be left."""

    async def run() -> int:
        service = Service(Settings(port=0, data_dir=data_dir, **settings))
        running = asyncio.create_task(service.run())
        while not running.done() and service.life.missing():
            await asyncio.wait({running}, timeout=0.01)
        if not running.done():
            when_ready(service)
        return await running

    before = database_processes()
    try:
        return asyncio.run(run())
    finally:
        assert database_processes() <= before


def database_processes() -> set[int]:
    """Children of this process that belong to a database server; other tests may have one running."""
    return {child.pid for child in psutil.Process().children(recursive=True) if "postgres" in child.name()}


def terminate(_: Service) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_stops_it_with_status_0(data_dir: Path) -> None:
    assert run_service(data_dir, terminate) == 0


def test_once_it_is_ready_no_request_has_to_make_the_openapi_document(data_dir: Path) -> None:
    made = []

    def look(service: Service) -> None:
        made.append(service.app.openapi_schema is not None)
        terminate(service)

    assert run_service(data_dir, look) == 0
    assert made == [True]


def test_a_task_that_dies_stops_it_loudly(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(_: Writer) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Writer, "run", die)
    with pytest.raises(TaskDied, match=r"'writer' died.*a defect"):
        run_service(data_dir, lambda _: None)


def test_a_task_that_ends_stops_it_too(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(_: Writer) -> None: ...

    monkeypatch.setattr(Writer, "run", end)
    with pytest.raises(TaskDied, match="'writer' died"):
        run_service(data_dir, lambda _: None)


async def hang(_: Writer) -> None:
    await asyncio.Event().wait()


def test_the_deadline_cuts_a_stop_short(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "flush", hang)
    assert run_service(data_dir, terminate, stop_deadline_s=1) == 1


def test_a_second_signal_cuts_a_stop_short(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def signal_and_hang(_: Writer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr(Writer, "run", hang)
    monkeypatch.setattr(Writer, "flush", signal_and_hang)
    assert run_service(data_dir, terminate, stop_deadline_s=600) == 1


def test_a_last_flush_that_fails_is_not_hidden(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Writer) -> None:
        raise StoreUnavailable("the database is away")

    monkeypatch.setattr(Writer, "run", hang)
    monkeypatch.setattr(Writer, "flush", fail)
    assert run_service(data_dir, terminate) == 1
