"""The publishers' process sends what it was told to, over real sockets; the plain HTTP load works without wrk."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.benchmarks import http_load
from tests.benchmarks.processes import Neighbours, ProcessTree
from tests.benchmarks.publishers import Publishers
from tests.benchmarks.streams import PREFILL, StreamPlan, marker_payload, messages

PLAN = StreamPlan(PREFILL.name, 2_048, 2)
RECEIVE_WITHIN_MS = 10_000


@pytest.fixture
def subscriber() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVTIMEO, RECEIVE_WITHIN_MS)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        yield socket


def test_a_stream_is_sent_in_parts_and_marked_at_its_end(subscriber: zmq.Socket[bytes]) -> None:
    mine = [message.payload for message in messages(PLAN) if message.worker == 0]
    with Publishers(PLAN) as publishers:
        endpoints = publishers.open("here")
        with zmq.Context() as context, context.socket(zmq.SUB) as other:
            other.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(endpoints[0])
            other.connect(endpoints[1])
            publishers.wait_until_subscribed("here")
        first, rest = publishers.send("here", 1_024), publishers.send("here")
        publishers.mark("here", 7)
        received = [subscriber.recv_multipart() for _ in range(len(mine) + 1)]
    assert (first.blocks, rest.blocks) == (1_024, 1_024)
    assert [int.from_bytes(frames[1], "big") for frames in received] == list(range(len(mine) + 1))
    assert [frames[2] for frames in received] == [*mine, marker_payload(7)]


def test_a_paced_stream_takes_its_time_and_carries_probes(subscriber: zmq.Socket[bytes]) -> None:
    plan = StreamPlan(PREFILL.name, 2_048, 1)
    with Publishers(plan) as publishers:
        subscriber.connect(publishers.open("here")[0])
        publishers.wait_until_subscribed("here")
        publishers.begin_send("here", blocks_per_s=10_000, probe_interval_s=0.05, first_probe=100)
        sent = publishers.sent()
    assert sent.ended - sent.started >= 2_048 / 10_000
    assert 2 <= len(sent.probes) <= 8
    assert sent.probes == sorted(sent.probes)


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_the_plain_load_counts_requests_and_their_times() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        request = http_load.Request("/query", "application/json", b'{"model":"m"}')
        result = http_load._plain(server.server_port, [http_load.encode_request(server.server_port, request)], 0.1)
        server.shutdown()
    assert result["requests"] >= 1
    assert result["failed"] == 0
    assert 0 < result["p50_us"] <= result["p99_us"] <= result["max_us"]


def test_what_a_process_costs_can_be_read() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            tree, neighbours = ProcessTree(busy.pid), Neighbours()
            before, until = tree.cpu_s(), time.monotonic() + 30.0
            while tree.cpu_s() - before < 0.03:
                assert time.monotonic() < until
            assert tree.resident_bytes() > 1_000_000
            assert tree.database_cpu_s() == tree.database_bytes() == 0
            assert neighbours.cpu_s() >= 0
        finally:
            busy.kill()
