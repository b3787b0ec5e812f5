"""A fleet against a stand-in for the service that answers what the engines themselves would, or something else."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from indexer.simulate.cache import Image, Prompt
from indexer.simulate.command import simulate_command
from indexer.simulate.engine import SimulatedEngine
from indexer.simulate.fleet import Fleet
from indexer.simulate.workload import example_prompt


class StandInService:
    """The routes a fleet calls. `error` is added to every answer; `coverage` is what it says of every publisher."""

    def __init__(self, error: int = 0, coverage: str = "complete") -> None:
        self.error = error
        self.coverage = coverage
        self.engines: list[SimulatedEngine] = []
        self.registered: dict[str, dict[str, Any]] = {}
        self.conflicts = 0

    def post_publishers(self, body: dict[str, Any]) -> tuple[int, Any]:
        known = self.registered.setdefault(body["worker_id"], body)
        self.conflicts += known != body
        return (201, {}) if known == body else (409, {"error": {"code": "publisher_conflict"}})

    def delete(self, worker_id: str) -> tuple[int, Any]:
        self.registered.pop(worker_id, None)
        return 200, {}

    def get_publishers(self) -> tuple[int, Any]:
        numbers = {engine.worker_id: engine.last_sequence_number for engine in self.engines}
        entries = [
            {"worker_id": worker, "dp_rank": 0, "sequence_number": numbers.get(worker), "coverage": self.coverage}
            for worker in self.registered
        ]
        return 200, {"publishers": entries}

    def post_prefix_hits(self, body: dict[str, Any]) -> tuple[int, Any]:
        images = tuple(Image(**item) for item in body.get("multimodal", ()))
        tokens = tuple(array("I", body["token_ids"]))
        prompt = Prompt(tokens, body.get("lora_name"), body.get("cache_salt"), images)
        answers = {engine.worker_id: engine.lookup(prompt) + self.error for engine in self.engines}
        hits = [
            {"worker_id": worker_id, "dp_rank": 0, "hit_tokens": hit_tokens, "resident_tokens": hit_tokens}
            for worker_id, hit_tokens in answers.items()
        ]
        return 200, {"prompt_tokens": len(tokens), "hits": hits}


@contextmanager
def serving(service: StandInService) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: Any) -> None:
            content = self.format.encode(body)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.answer(*service.get_publishers())

        def do_DELETE(self) -> None:
            self.answer(*service.delete(unquote(self.path.split("/")[3].partition("?")[0])))

        @property
        def format(self) -> Any:
            return msgspec.msgpack if self.headers["content-type"] == "application/msgpack" else msgspec.json

        def do_POST(self) -> None:
            body = self.format.decode(self.rfile.read(int(self.headers["content-length"])))
            routes: dict[str, Callable[[dict[str, Any]], tuple[int, Any]]] = {
                "/v1/publishers": service.post_publishers,
                "/v1/prefix-hits": service.post_prefix_hits,
            }
            self.answer(*routes[self.path](body))

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def live(service: StandInService, url: str, checks: int) -> tuple[Fleet, list[str]]:
    """A fleet's life until it has compared so many answers or counted them as not comparable."""
    said: list[str] = []

    async def scenario() -> Fleet:
        fleet = Fleet(url, engines=4, rate=200, restarts=False, check_interval_s=0.01, announce=said.append)
        service.engines = fleet.engines
        task = asyncio.create_task(fleet.live())
        async with asyncio.timeout(30):
            while fleet.report.checked + fleet.report.uncovered < checks and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        return fleet

    return asyncio.run(scenario()), said


def test_right_answers_are_counted_as_exact_and_the_example_is_announced() -> None:
    service = StandInService()
    with serving(service) as url:
        fleet, said = live(service, url, checks=100)
        assert service.registered == {}
    assert fleet.report.exact == fleet.report.checked >= 100
    assert "all exact" in str(fleet.report)
    assert any("curl -s http://127.0.0.1" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("error", "coverage", "kind"),
    [(16, "complete", "too_high"), (-1, "complete", "too_low"), (-1, "since", "uncovered"), (16, "since", "too_high")],
)
def test_wrong_answers_are_told_apart(error: int, coverage: str, kind: str) -> None:
    service = StandInService(error, coverage)
    with serving(service) as url:
        fleet, _ = live(service, url, checks=10)
    report = fleet.report
    assert getattr(report, kind) >= 10
    assert report.exact == 0
    assert bool(report.wrong) == (kind != "uncovered")


def test_a_registration_left_by_an_earlier_fleet_is_replaced() -> None:
    service = StandInService()
    service.registered["http://127.0.0.1:9001"] = {"worker_id": "http://127.0.0.1:9001", "endpoint": "tcp://old:1"}
    with serving(service) as url:
        live(service, url, checks=1)
    assert service.conflicts == 1


def test_restarts_and_resets_leave_the_answers_comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.simulate.fleet.DISTURBANCE_INTERVAL_S", 0.02)
    monkeypatch.setattr("indexer.simulate.fleet.RESTART_DOWN_S", 0.01)
    monkeypatch.setattr("indexer.simulate.fleet.UNCHECKED_AFTER_RESTART_S", 0.0)
    service = StandInService()

    async def scenario(url: str) -> Fleet:
        fleet = Fleet(url, rate=200, check_interval_s=0.01, announce=lambda _: None)
        service.engines = fleet.engines
        await fleet.live(duration_s=1.0)
        return fleet

    with serving(service) as url:
        report = asyncio.run(scenario(url)).report
    assert report.restarts
    assert report.resets
    assert report.checked == report.exact > 0


def test_an_example_prompt_is_given_once_it_is_cached() -> None:
    service = StandInService()
    with serving(service) as url:
        fleet = Fleet(url, announce=lambda _: None)
        assert fleet.example_prompt() is None

        async def scenario() -> None:
            service.engines = fleet.engines
            task = asyncio.create_task(fleet.live())
            async with asyncio.timeout(30):
                while fleet.example_prompt() is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert fleet.example_prompt() == example_prompt()
            task.cancel()
            await asyncio.wait([task])

        asyncio.run(scenario())


def test_a_fleet_ends_after_its_time_and_can_leave_its_publishers_registered() -> None:
    service = StandInService()
    with serving(service) as url:

        async def scenario() -> None:
            fleet = Fleet(url, engines=2, announce=lambda _: None)
            await fleet.live(duration_s=0.2, unregister=False)

        asyncio.run(scenario())
    assert len(service.registered) == 2


def test_the_command_says_so_and_fails_if_there_is_no_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("indexer.simulate.fleet.SERVICE_UP_WITHIN_S", 0.0)
    assert simulate_command("http://127.0.0.1:9", engines=1) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_the_command_ends_with_a_summary() -> None:
    service = StandInService()
    with serving(service) as url:
        assert simulate_command(url, engines=1, duration_s=0.1) == 0
