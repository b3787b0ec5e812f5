"""HTTP load in a closed loop: wrk if it is installed, else one plain keep-alive connection of our own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.servers import Request, Server

WARM_UP_S = 0.5
_WRK_SCRIPT = """
local requests, turn = {}, 0
function init(arguments)
  local file = io.open(arguments[1], "rb")
  while true do
    local size = file:read("*n")
    if not size then break end
    file:read(1)
    requests[#requests + 1] = file:read(size)
  end
end
function request()
  turn = turn % #requests + 1
  return requests[turn]
end
function done(summary, latency)
  local errors = summary.errors
  local failed = errors.status + errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format('\\nRESULT {"requests":%d,"seconds":%f,"p50_us":%d,"p99_us":%d,"max_us":%d,"failed":%d}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99), latency.max, failed))
end
"""


class Loaded(NamedTuple):
    """What a load found. Latencies in microseconds; processor time is the server's, per request."""

    requests: int
    per_s: float
    p50_us: float
    p99_us: float
    max_us: float
    cpu_us: float


def measure(server: Server, requests: Sequence[Request], seconds: int, connections: int = 1) -> Loaded:
    """Send the requests in turn, again and again. Raises RuntimeError if one is not answered well."""
    encoded = [encode_request(server.port, request) for request in requests]
    _plain(server.port, encoded, WARM_UP_S)
    before = server.tree.cpu_s()
    if shutil.which("wrk"):
        result = _wrk(server.port, encoded, seconds, connections)
    else:
        result = _plain(server.port, encoded, seconds)
    cpu_s = server.tree.cpu_s() - before
    count = int(result["requests"])
    if result["failed"] or not count:
        raise RuntimeError(f"{server.name}: {result['failed']} of {count} requests failed: {requests[0].path}")
    latencies = result["p50_us"], result["p99_us"], result["max_us"]
    return Loaded(count, count / result["seconds"], *latencies, cpu_s / count * 1e6)


def encode_request(port: int, request: Request) -> bytes:
    head = (
        f"POST {request.path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: {request.content_type}\r\ncontent-length: {len(request.body)}\r\n\r\n"
    )
    return head.encode() + request.body


def _wrk(port: int, encoded: Sequence[bytes], seconds: int, connections: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kv-index-bench-") as directory:
        script, requests = Path(directory, "load.lua"), Path(directory, "requests")
        script.write_text(_WRK_SCRIPT)
        requests.write_bytes(b"".join(b"%d\n%s" % (len(request), request) for request in encoded))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", "-s", str(script)]
        command += [f"http://127.0.0.1:{port}", "--", str(requests)]
        output = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False).stdout
    for line in output.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
            return result
    raise RuntimeError(f"wrk gave no result: {output[-400:]}")


def _plain(port: int, encoded: Sequence[bytes], seconds: float) -> dict[str, float]:
    times: list[float] = []
    failed, started = 0, time.perf_counter()
    with KeepAlive(port) as connection:
        while not times or time.perf_counter() - started < seconds:
            begun = time.perf_counter()
            failed += connection.exchange(encoded[len(times) % len(encoded)]) != 200
            times.append(time.perf_counter() - begun)
    elapsed = time.perf_counter() - started
    p50, p99 = percentile(times, 50), percentile(times, 99)
    return {
        "requests": len(times),
        "seconds": elapsed,
        "p50_us": p50 * 1e6,
        "p99_us": p99 * 1e6,
        "max_us": max(times) * 1e6,
        "failed": failed,
    }


class KeepAlive:
    """One connection that sends bytes and reads one answer: as little of a client as there can be."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def exchange(self, request: bytes) -> int:
        """The status of the answer."""
        self._socket.sendall(request)
        while b"\r\n\r\n" not in self._received:
            self._receive()
        head, _, rest = self._received.partition(b"\r\n\r\n")
        left = content_length(head) - len(rest)
        while left > 0:
            left -= self._receive()
        self._received = b""
        return int(head.split(maxsplit=2)[1])

    def _receive(self) -> int:
        part = self._socket.recv(1 << 18)
        if not part:
            raise ConnectionError("the server closed the connection")
        self._received += part
        return len(part)

    def __enter__(self) -> KeepAlive:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest of the given values; they need not be sorted."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
