"""An engine's side of a stream over real ZMQ on loopback: a PUB socket and a replay ROUTER, on free ports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from tests.stream_stand_ins import number_frame

Answers = Callable[[int, list[tuple[int, bytes]]], list[list[bytes]]]


class ZmqEngine:
    """`host`: as in an endpoint. `answers`: what the ROUTER sends for (start, sent); None = as vLLM >= 0.26.

    `send_queue_max`: messages kept for a slow subscriber, 0 = all; more are lost silently.
    """

    def __init__(self, host: str = "127.0.0.1", answers: Answers | None = None, send_queue_max: int = 0) -> None:
        self.host, self.answers, self.send_queue_max = host, answers, send_queue_max
        self.context = zmq.Context()
        self.port = self.replay_port = 0
        self.requests: list[list[bytes]] = []
        self.open()

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://{self.host}:{self.replay_port}"

    def open(self) -> None:
        """Bind, on the ports used before if there are any."""
        self.sent: list[tuple[int, bytes]] = []
        self.next_number = 0
        self.publisher = self._bound(zmq.XPUB, self.port)
        self.router = self._bound(zmq.ROUTER, self.replay_port)
        self.port = _port(self.publisher)
        self.replay_port = _port(self.router)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="replay", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()
        self.publisher.close(0)
        self.router.close(0)

    def close(self) -> None:
        self.stop()
        self.context.destroy(linger=0)

    def restart(self) -> None:
        """A new process on the same ports: numbers begin again, nothing of the past can be replayed."""
        self.stop()
        self.open()

    def wait_for_subscription(self) -> None:
        """Until a subscriber is there; what is sent before would be lost. Blocks: use `asyncio.to_thread`."""
        while True:
            assert self.publisher.poll(15_000), "nobody subscribed"
            if self.publisher.recv().startswith(b"\x01"):  # not the end of an earlier subscription
                return

    def publish(self, data: bytes, *, is_lost: bool = False) -> int:
        """Send one batch; if `is_lost`, only a replay has it."""
        number, self.next_number = self.next_number, self.next_number + 1
        self.sent.append((number, data))
        if not is_lost:
            self.send_frames([b"topic", number_frame(number), data])
        return number

    def send_frames(self, frames: list[bytes]) -> None:
        self.publisher.send_multipart(frames)

    def _bound(self, kind: int, port: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set_hwm(self.send_queue_max if kind == zmq.XPUB else 0)
        socket.set(zmq.LINGER, 0)
        if kind == zmq.XPUB:
            socket.set(zmq.XPUB_VERBOSE, 1)  # tell of every subscriber, not only of the first
        socket.set(zmq.IPV6, int(self.host.startswith("[")))
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.bind(f"tcp://{self.host}:{port or '*'}")
                return socket
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _serve(self) -> None:
        while not self._is_stopped.is_set():
            if not self.router.poll(20):
                continue
            identity, *request = self.router.recv_multipart()
            self.requests.append(request)
            for frames in self._answer(request):
                self.router.send_multipart([identity, *frames])

    def _answer(self, request: list[bytes]) -> list[list[bytes]]:
        """Engines ignore a request of another shape."""
        if len(request) != 2 or request[0] != b"" or len(request[1]) != 8:
            return []
        start = int.from_bytes(request[1], "big")
        return (self.answers or four_frames)(start, list(self.sent))


def four_frames(start: int, sent: list[tuple[int, bytes]]) -> list[list[bytes]]:
    past = [[b"", b"topic", number_frame(n), data] for n, data in sent if n >= start]
    return [*past, [b"", b"", b"\xff" * 8, b""]]


def three_frames(start: int, sent: list[tuple[int, bytes]]) -> list[list[bytes]]:
    return [frames[:1] + frames[2:] for frames in four_frames(start, sent)]


def _port(socket: zmq.Socket[bytes]) -> int:
    return int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
