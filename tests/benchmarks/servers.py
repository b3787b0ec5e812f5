"""The servers under test: ours as a user starts it, and a peer that speaks a dialect of its own. One small class each.

Both are asked in the peer's dialect (`POST /register`, `/query`, `/query_by_hash`) wherever ours serves it, so that
both do the same work for the same bytes; what ours does not serve there is asked in its native API.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from tests.benchmarks.processes import ProcessTree
from tests.benchmarks.streams import BLOCK_TOKENS

MODEL = "bench"
HASH_SEED = 1337
START_LIMIT_S = 60.0
STOP_LIMIT_S = 40.0
WAIT_LIMIT_S = 180.0
LOG_TAIL_BYTES = 2_000


class Request(NamedTuple):
    """One HTTP request with a body."""

    path: str
    content_type: str
    body: bytes


class Server:
    """A server process with a directory and a port of its own, and one keep-alive connection to it."""

    name = "server"
    health_path = "/health"

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._log_path = directory / "log"
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self._process: subprocess.Popen[bytes] | None = None

    # What differs between servers.

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        return self.call("GET", self.health_path)[0] == 200

    def register(self, worker: int, endpoint: str) -> None:
        body = {"instance_id": worker, "model_name": MODEL, "endpoint": endpoint, "block_size": BLOCK_TOKENS}
        self.expect("POST", "/register", body)

    def unregister(self, worker: int) -> None:
        self.expect("POST", "/unregister", {"instance_id": worker, "model_name": MODEL})

    def query(self, token_ids: Sequence[int]) -> Request:
        return Request("/query", "application/json", to_json({"model_name": MODEL, "token_ids": list(token_ids)}))

    def query_by_hash(self, token_ids: Sequence[int]) -> Request | None:
        """None if this server does not serve it."""
        body = {"model_name": MODEL, "block_hashes": local_hashes(token_ids)}
        return Request("/query_by_hash", "application/json", to_json(body))

    def query_binary(self, token_ids: Sequence[int]) -> Request | None:
        """With the tokens as bytes; None if this server takes only JSON."""
        return None

    def read_answer(self, body: bytes) -> dict[int, int]:
        """Tokens that each worker holds of the prompt that was asked with `query`."""
        scores = json.loads(body)["scores"]
        return {int(worker): sum(by_rank.values()) for worker, by_rank in scores.items()}

    def unstored_changes(self) -> float | None:
        """What it still has to write to its database; None if it has no database."""
        return None

    # What all have in common.

    @property
    def tree(self) -> ProcessTree:
        assert self._process is not None
        return ProcessTree(self._process.pid)

    def start(self) -> float:
        """Seconds until it is ready."""
        started = time.monotonic()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean_environment()
            )
        wait_for(self._has_come_up, f"{self.name} is ready", START_LIMIT_S, pause_s=0.02)
        return time.monotonic() - started

    def stop(self) -> float:
        """Seconds until it has ended, asked politely."""
        started = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection.close()
        return time.monotonic() - started

    def held(self, token_ids: Sequence[int]) -> dict[int, int]:
        """Tokens that each worker holds of a prompt; empty also when the model is not known yet."""
        status, body = self.send(self.query(token_ids))
        return self.read_answer(body) if status == 200 else {}

    def send(self, request: Request) -> tuple[int, bytes]:
        return self.call("POST", request.path, request.body, request.content_type)

    def expect(self, method: str, path: str, body: object = None) -> Any:
        status, text = self.call(method, path, None if body is None else to_json(body))
        if status >= 300:
            raise RuntimeError(f"{self.name}: {method} {path} answered {status}: {text[:200]!r}")
        return json.loads(text) if text.strip() else None

    def call(
        self, method: str, path: str, body: bytes | None = None, content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        for is_last_try in (False, True):
            try:
                self._connection.request(method, path, body, {"content-type": content_type} if body else {})
                response = self._connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if is_last_try or not isinstance(error, ConnectionError):  # else closed while nobody used it
                    raise
        raise AssertionError("the last try returns or raises")

    def log_tail(self) -> str:
        return self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _has_come_up(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self.log_tail()}")
        with contextlib.suppress(OSError):
            return self.is_ready()
        return False


class Ours(Server):
    """`kv-indexer serve`. Without the dialect's routes, everything is asked natively."""

    name = "ours"
    health_path = "/healthz"
    speaks_dialect = False

    def command(self) -> list[str]:
        port, data = str(self.port), str(self._directory / "data")
        return [sys.executable, "-m", "indexer.cli", "serve", "--port", port, "--data-dir", data]

    def is_ready(self) -> bool:
        if self.call("GET", "/readyz")[0] != 200:
            return False
        self.speaks_dialect = self.call("POST", "/query", b"{}")[0] not in (404, 405)
        return True

    def register(self, worker: int, endpoint: str) -> None:
        if self.speaks_dialect:
            super().register(worker, endpoint)
            return
        body = {"worker_id": str(worker), "model": MODEL, "endpoint": endpoint, "block_size": BLOCK_TOKENS}
        self.expect("POST", "/v1/publishers", body)

    def unregister(self, worker: int) -> None:
        if self.speaks_dialect:
            super().unregister(worker)
            return
        self.expect("DELETE", f"/v1/publishers/{worker}")

    def query(self, token_ids: Sequence[int]) -> Request:
        if self.speaks_dialect:
            return super().query(token_ids)
        body = {"model": MODEL, "token_ids": list(token_ids)}
        return Request("/v1/prefix-hits", "application/json", to_json(body))

    def query_by_hash(self, token_ids: Sequence[int]) -> Request | None:
        return super().query_by_hash(token_ids) if self.speaks_dialect else None

    def query_binary(self, token_ids: Sequence[int]) -> Request | None:
        body = {"model": MODEL, "token_ids": np.array(token_ids, "<u4").tobytes()}
        return Request("/v1/prefix-hits", "application/msgpack", msgspec.msgpack.encode(body))

    def read_answer(self, body: bytes) -> dict[int, int]:
        if self.speaks_dialect:
            return super().read_answer(body)
        return {int(hit["worker_id"]): hit["resident_tokens"] for hit in json.loads(body)["hits"]}

    def unstored_changes(self) -> float | None:
        return self.metric("indexer_flush_pending_changes")

    def metric(self, name: str) -> float | None:
        """A number without labels from `/metrics`; None if there is none of this name."""
        for line in self.call("GET", "/metrics")[1].decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
        return None


class Peer(Server):
    """Another project's indexer, run by the Python environment it is installed in. It listens on all addresses."""

    name = "peer"

    def __init__(self, directory: Path, python: Path, threads: int = 4) -> None:
        super().__init__(directory)
        self._python = python
        self._threads = threads

    def command(self) -> list[str]:
        options = ["--port", str(self.port), "--threads", str(self._threads)]
        return [str(self._python), "-m", "dynamo.indexer", *options]


@contextlib.contextmanager
def running(peer_python: Path | None) -> Iterator[list[Server]]:
    """Ours, and the peer if there is one; both stopped in the end, with all that they wrote."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = [Ours(_directory(stack))]
        if peer_python is not None:
            servers.append(Peer(_directory(stack), peer_python))
        for server in servers:
            stack.callback(server.stop)
            server.start()
        yield servers


def _directory(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-index-bench-")))


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = WAIT_LIMIT_S, pause_s: float = 0.004) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(pause_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment() -> dict[str, str]:
    """Ours without settings from outside: measured is what a user gets who sets none."""
    return {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")} | {"NO_COLOR": "1"}


def to_json(body: object) -> bytes:
    return msgspec.json.encode(body)


def local_hashes(token_ids: Sequence[int]) -> list[int]:
    """Of every whole block, signed as the dialect wants them."""
    packed = np.array(token_ids, "<u4").tobytes()
    size = BLOCK_TOKENS * 4
    digests = (
        xxhash.xxh3_64_digest(packed[start : start + size], HASH_SEED)
        for start in range(0, len(packed) - size + 1, size)
    )
    return [int.from_bytes(digest, "big", signed=True) for digest in digests]
