"""A router's side of the service as a process: what it tells, what it watches."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service_process import Engine, ServiceProcess, wait_for

PROMPT = list(range(1, 49))
STOP_BOUND_S = 4.0  # uvicorn would wait five seconds for a stream that does not end


class Watcher:
    """Reads the stream in a thread; `events` are (name, data), until it ends."""

    def __init__(self, service: ServiceProcess) -> None:
        self._response = urllib.request.urlopen(service.url + "/v1/watch", timeout=60)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        name = ""
        for line in self._response:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                self.events.append((name, json.loads(value)))

    def wait_for(self, kind: str, is_it: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [data for name, data in list(self.events) if name == kind and is_it(data)]

        event: dict[str, Any] = wait_for(found, f"an event {kind} among {self.events}")[0]
        return event


@pytest.fixture
def started(data_dir: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(data_dir) as service:
        yield service.wait_until_ready()


def hits(service: ServiceProcess, **values: Any) -> list[tuple[str, int, int | None]]:
    status, answer = service.call("POST", "/v1/prefix-hits", {"model": "m", "token_ids": PROMPT, **values})
    assert status == 200
    return [(hit["worker_id"], hit["hit_tokens"], hit.get("expected_tokens")) for hit in answer["hits"]]


def test_a_routed_prompt_is_expected_until_the_engine_stores_it_or_time_is_over(started: ServiceProcess) -> None:
    with Engine("a") as engine:
        engine.register(started)
        engine.wait_for_subscription()
        body = {"model": "m", "worker_id": "a", "token_ids": PROMPT, "ttl_s": 60}
        status, told = started.call("POST", "/v1/routed", body)
        assert (status, told["hit_tokens"], told["expected_blocks"]) == (200, 0, 3)
        assert hits(started) == [("a", 0, 32)]
        assert hits(started, expected=True) == [("a", 32, 32)]
        assert started.metric("indexer_expected_blocks") == 3
        engine.store(1, None, PROMPT)
        engine.wait_until_applied(started)
        assert hits(started, expected=True) == [("a", 32, None)]
        assert started.metric("indexer_expected_blocks") == 0
        others = [7 * token for token in PROMPT]
        started.call("POST", "/v1/routed", {**body, "token_ids": others, "ttl_s": 0.05})
        wait_for(lambda: started.metric("indexer_expected_blocks") == 0, "housekeeping to forget")
        assert hits(started, token_ids=others) == []
        assert started.call("GET", "/v1/audit")[1]["is_equal"]


def test_a_watcher_sees_what_happens_and_does_not_hold_up_the_stop(started: ServiceProcess) -> None:
    watcher = Watcher(started)
    assert watcher.wait_for("ready") == {"resumed": False}
    with Engine("a") as engine:
        engine.register(started)
        registered = watcher.wait_for("registered")
        assert registered["worker_id"] == "a"
        if registered["state"] != "connected":
            watcher.wait_for("state", lambda event: event["state"] == "connected")
        report = {"worker_id": "a", "predicted_tokens": 32, "cached_tokens": 0}
        alarms = [started.call("POST", "/v1/observed", report)[1]["alarm"] for _ in range(50)]
        assert alarms == [False] * 49 + [True]
        assert watcher.wait_for("prediction_alarm")["alarm"]
        assert "prediction_alarm_raised" in started.output
        assert started.metric("indexer_prediction_alarms") == 1
    watcher.wait_for(
        "coverage", lambda event: event["coverage"] == "disconnected" and event["before"] != "disconnected"
    )
    started.call("DELETE", "/v1/publishers/a")
    watcher.wait_for("unregistered")
    further = [Watcher(started) for _ in range(3)]
    for one in further:
        one.wait_for("ready")
    began = time.monotonic()
    assert started.stop() == 0
    assert time.monotonic() - began < STOP_BOUND_S
    for one in (watcher, *further):
        one.thread.join(5)
        assert not one.thread.is_alive(), "the stream has ended"
