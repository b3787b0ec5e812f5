"""The service as its users start it: a process, its standard streams, its exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import psutil
import zmq

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0
_URL = re.compile(r'(?:answers at |"url": ")(https?://[^ "]+)')


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`, looked at again and again; fails loudly after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def runs(process: psutil.Process) -> bool:
    """One that has ended does not, though nobody may have asked for its status yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")}


def run_cli(*arguments: str, stdin: str | None = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "indexer.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment() | environment,
        check=False,
    )


class ServiceProcess:
    """`kv-indexer serve` on any free port. Leaving the context kills what is left of it."""

    def __init__(self, data_dir: Path, *arguments: str, port: int = 0, **environment: str) -> None:
        command = [sys.executable, "-m", "indexer.cli", "serve", "--port", str(port), "--data-dir", str(data_dir)]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_environment() | environment,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.children: list[psutil.Process] = []

    def _read(self) -> None:
        assert self.process.stdout
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        found: re.Match[str] = wait_for(lambda: self._alive() and _URL.search(self.output), "a URL", START_TIMEOUT_S)
        return found[1]

    def _alive(self) -> bool:
        assert self.process.poll() is None, f"the service ended with {self.process.poll()}: {self.output}"
        return True

    def wait_until_ready(self) -> ServiceProcess:
        try:
            wait_for(lambda: self._alive() and self.call("GET", "/readyz")[0] == 200, "ready", START_TIMEOUT_S)
        except AssertionError as error:
            error.add_note(f"{self.call('GET', '/readyz')} after {self.output}")
            raise
        self.note_children()
        return self

    def note_children(self) -> list[psutil.Process]:
        """Remember the processes that the service has started until now."""
        known = {child.pid for child in self.children}
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.children += [child for child in children if child.pid not in known]
        return self.children

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and body of the answer; status 0 if there was none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except (OSError, ValueError):
            return 0, None

    def metric(self, name: str) -> float:
        """One without labels, as /metrics has it."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[1])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit status after a signal, once nothing that the service started runs any more."""
        self.note_children()
        self.process.send_signal(number)
        status = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        return status

    def is_alone(self) -> bool:
        return not any(map(runs, self.children))

    def kill_children(self) -> None:
        """Those that were noted. Without the first, some end before it is their turn."""
        for child in self.children:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.note_children()
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)
        self.kill_children()
        psutil.wait_procs(self.children, timeout=10)


class Engine:
    """One engine's publisher socket, with events written by hand."""

    def __init__(self, worker_id: str, port: int = 0) -> None:
        self.worker_id = worker_id
        self.sequence_number = -1
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for_subscription(self) -> None:
        """The next one; ends of earlier subscriptions are passed over."""
        while True:
            assert self._socket.poll(15_000), "nobody subscribed"
            if self._socket.recv() == b"\x01":
                return

    def store(self, first_hash: int, parent: int | None, token_ids: list[int]) -> None:
        """Blocks of 16 tokens with the hashes first_hash, first_hash + 1, ..."""
        hashes = list(range(first_hash, first_hash + len(token_ids) // 16))
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": token_ids,
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        self.send(event)

    def remove(self, *hashes: int) -> None:
        self.send({"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"})

    def clear(self) -> None:
        self.send({"type": "AllBlocksCleared"})

    def send(self, event: dict[str, Any]) -> None:
        """A batch of its own."""
        self.sequence_number += 1
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        self._socket.send_multipart([b"", self.sequence_number.to_bytes(8, "big"), payload])

    def register(self, service: ServiceProcess) -> tuple[int, Any]:
        body = {"worker_id": self.worker_id, "model": "m", "endpoint": self.endpoint, "engine": "vllm"}
        return service.call("POST", "/v1/publishers", body)

    def wait_until_applied(self, service: ServiceProcess) -> None:
        path = f"/v1/publishers/{quote(self.worker_id, safe='')}?dp_rank=0"
        wait_for(
            lambda: service.call("GET", path)[1].get("sequence_number") == self.sequence_number,
            f"batch {self.sequence_number} applied",
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()
