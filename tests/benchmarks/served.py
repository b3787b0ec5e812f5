"""The service as a user starts it, under load: ingest over ZMQ and queries over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import zmq

from tests.benchmarks.streams import DECODE, PREFILL, Shape, encode_stream, stored_prompt

LIMIT_S = 120.0
BURST = 32


class Service:
    """A running service and one keep-alive connection to it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self.connection.request(method, path, body, {"content-type": "application/json"} if body else {})
        response = self.connection.getresponse()
        return response.status, response.read()

    def json(self, method: str, path: str, body: object = None) -> dict[str, object]:
        status, text = self.call(method, path, None if body is None else json.dumps(body).encode())
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {text[:200]!r}")
        return json.loads(text) if text else {}

    def cpu_s(self) -> float:
        """Processor seconds of the service process so far (not of Postgres)."""
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(condition: Callable[[], bool], what: str, pause_s: float = 0.01) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT_S} s")
        time.sleep(pause_s)


@contextlib.contextmanager
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="kv-index-bench-") as directory:
        port = free_port()
        command = [sys.executable, "-m", "indexer.cli", "serve", "--port", str(port), "--data-dir", directory]
        with open(os.path.join(directory, "log"), "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        served = Service(process, port)
        try:
            wait_for(lambda: is_ready(served), "the service is ready", 0.1)
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def is_ready(served: Service) -> bool:
    try:
        return served.call("GET", "/readyz")[0] == 200
    except OSError:
        served.connection.close()
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ingest(served: Service, shape: Shape, blocks: int, worker_id: str) -> dict[str, float]:
    """Publish a stream as fast as it is taken; time from the first send until its last batch is applied."""
    payloads = encode_stream(shape, blocks)
    context = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.set_hwm(0)
    try:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        served.json("POST", "/v1/publishers", {"worker_id": worker_id, "model": "bench", "endpoint": endpoint})
        publisher.recv()  # the subscription
        cpu_before, started = served.cpu_s(), time.perf_counter()
        for number, payload in enumerate(payloads):
            publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
        path = f"/v1/publishers/{worker_id}?dp_rank=0"
        wait_for(
            lambda: served.json("GET", path)["sequence_number"] == len(payloads) - 1, "the stream is applied", 0.05
        )
        elapsed, cpu = time.perf_counter() - started, served.cpu_s() - cpu_before
        counts = served.json("GET", path)["counts"]
        assert isinstance(counts, dict)
        stored = counts["residencies"]
        assert isinstance(stored, int)
        return {"blocks": stored, "blocks_per_s": stored / elapsed, "cpu_us_per_block": cpu / stored * 1e6}
    finally:
        publisher.close(0)
        context.term()


def query(served: Service, tokens: list[int], repeats: int) -> dict[str, float]:
    """Latency of one prompt over one keep-alive connection, in milliseconds."""
    body = json.dumps({"model": "bench", "token_ids": tokens}).encode()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        status, text = served.call("POST", "/v1/prefix-hits", body)
        times.append((time.perf_counter() - started) * 1e3)
        assert status == 200
        assert json.loads(text)["hits"], text
    times.sort()
    return {"p50_ms": statistics.median(times), "p99_ms": times[int(len(times) * 0.99)]}


def measure() -> dict[str, dict[str, float]]:
    """Ingest of both shapes, then queries against what was ingested."""
    results: dict[str, dict[str, float]] = {}
    with service() as served:
        results["ingest, 32-block events"] = ingest(served, PREFILL, 400_000, "w0")
        results["ingest, one-block events"] = ingest(served, DECODE, 100_000, "w1")
        payloads = encode_stream(PREFILL, 2_000)
        for tokens in (512, 8_192):
            results[f"query, {tokens} tokens"] = query(served, stored_prompt(payloads, tokens), 1_000)
    return results
