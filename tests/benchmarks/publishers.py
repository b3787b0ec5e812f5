"""Many engines' publishers in a process of their own: real ZMQ sockets that send an encoded stream when told to.

Each audience (a server under test) has sockets of its own, so that it gets the whole stream and nobody else's part.
XPUB sockets are PUB sockets that also say when somebody has subscribed, so nothing is sent before. The process ends
when its standard input does.

As a program: `python -m tests.benchmarks.publishers PLAN`, commands and answers are lines of JSON.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import zmq

from tests.benchmarks.streams import Message, StreamPlan, marker_payload, messages

ANSWER_WITHIN_S = 180.0
SUBSCRIBED_WITHIN_S = 30.0


class PublisherError(RuntimeError):
    """The publishers' process ended, answered too late, or nobody subscribed."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a `send` did. Times are of the monotonic clock, which all processes of a machine share."""

    started: float
    ended: float
    stored: int
    removed: int
    probes: list[float]
    fell_behind_s: float

    @property
    def blocks(self) -> int:
        return self.stored + self.removed


class Publishers:
    """The parent's side of the process. One command at a time: `begin_send` must be followed by `sent`."""

    def __init__(self, plan: StreamPlan) -> None:
        self.plan = plan
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.publishers", json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()  # it has encoded everything

    def open(self, audience: str) -> list[str]:
        """Bind a socket per worker; their endpoints."""
        return [f"tcp://127.0.0.1:{port}" for port in self._ask(command="open", audience=audience)]

    def wait_until_subscribed(self, audience: str) -> None:
        self._ask(command="subscribed", audience=audience)

    def mark(self, audience: str, marker: int) -> None:
        """One more block at every worker, sent after all that was sent before."""
        self._ask(command="mark", audience=audience, marker=marker)

    def send(self, audience: str, until_blocks: int | None = None) -> Sent:
        """As fast as possible."""
        self.begin_send(audience, until_blocks)
        return self.sent()

    def begin_send(
        self,
        audience: str,
        until_blocks: int | None = None,
        *,
        blocks_per_s: float = 0.0,
        probe_interval_s: float = 0.0,
        first_probe: int = 0,
        seconds_max: float = 120.0,
    ) -> None:
        """Start sending the stream from where it stopped until so many blocks are stored or removed (None: to its end).

        0 blocks a second is as fast as possible. Every `probe_interval_s` a marker of its own goes out at worker 0.
        """
        self._tell(
            command="send",
            audience=audience,
            until_blocks=until_blocks,
            blocks_per_s=blocks_per_s,
            probe_interval_s=probe_interval_s,
            first_probe=first_probe,
            seconds_max=seconds_max,
        )

    def sent(self) -> Sent:
        return Sent(**self._answer())

    def is_sending(self) -> bool:
        """Whether the answer to `begin_send` is still to come."""
        assert self._process.stdout is not None
        return not select.select([self._process.stdout], [], [], 0)[0]

    def __enter__(self) -> Publishers:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, **command: object) -> Any:
        self._tell(**command)
        return self._answer()

    def _tell(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_WITHIN_S)[0]:
            raise PublisherError(f"the publishers did not answer within {ANSWER_WITHIN_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise PublisherError("the publishers' process ended; what it said is above")
        return json.loads(line)


# What follows runs in the child.


@dataclass(slots=True)
class Audience:
    """Sockets and sequence numbers by worker, and how far the stream has got."""

    sockets: list[zmq.Socket[bytes]]
    sequence_numbers: list[int] = field(default_factory=list)
    cursor: int = 0
    blocks: int = 0

    def publish(self, worker: int, payload: bytes) -> None:
        number = self.sequence_numbers[worker]
        self.sequence_numbers[worker] = number + 1
        self.sockets[worker].send_multipart([b"kv-events", number.to_bytes(8, "big"), payload])


class Sender:
    """Answers the parent's commands."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._messages = messages(plan)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * plan.workers + 64)
        self._audiences: dict[str, Audience] = {}

    def open(self, audience: str) -> list[int]:
        opened = Audience([], [0] * self._plan.workers)
        ports = []
        for _ in range(self._plan.workers):
            socket = self._context.socket(zmq.XPUB)
            socket.set_hwm(0)  # nothing is dropped here: what a slow reader has not taken yet waits in memory
            socket.setsockopt(zmq.LINGER, 0)
            ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
            opened.sockets.append(socket)
        self._audiences[audience] = opened
        return ports

    def subscribed(self, audience: str) -> bool:
        deadline = time.monotonic() + SUBSCRIBED_WITHIN_S
        for socket in self._audiences[audience].sockets:
            if not socket.poll(int(max(0.0, deadline - time.monotonic()) * 1e3)):
                raise PublisherError(f"{audience} did not subscribe within {SUBSCRIBED_WITHIN_S} s")
            socket.recv()
        return True

    def mark(self, audience: str, marker: int) -> bool:
        for worker in range(self._plan.workers):
            self._audiences[audience].publish(worker, marker_payload(marker))
        return True

    def send(
        self,
        audience: str,
        until_blocks: int | None,
        blocks_per_s: float,
        probe_interval_s: float,
        first_probe: int,
        seconds_max: float,
    ) -> dict[str, object]:
        listening = self._audiences[audience]
        started = time.monotonic()
        stored = removed = 0
        fell_behind_s = 0.0
        probes: list[float] = []
        while (message := self._next(listening, until_blocks)) and time.monotonic() - started < seconds_max:
            listening.publish(message.worker, message.payload)
            listening.cursor += 1
            listening.blocks += message.stored + message.removed
            stored, removed = stored + message.stored, removed + message.removed
            if probe_interval_s and time.monotonic() >= started + len(probes) * probe_interval_s:
                payload = marker_payload(first_probe + len(probes))
                probes.append(time.monotonic())
                listening.publish(0, payload)
            if blocks_per_s:
                early_s = started + (stored + removed) / blocks_per_s - time.monotonic()
                time.sleep(max(0.0, early_s))
                fell_behind_s = max(fell_behind_s, -early_s)
        return {
            "started": started,
            "ended": time.monotonic(),
            "stored": stored,
            "removed": removed,
            "probes": probes,
            "fell_behind_s": fell_behind_s,
        }

    def _next(self, listening: Audience, until_blocks: int | None) -> Message | None:
        if listening.cursor == len(self._messages) or (until_blocks is not None and listening.blocks >= until_blocks):
            return None
        return self._messages[listening.cursor]


def main() -> None:
    sender = Sender(StreamPlan(**json.loads(sys.argv[1])))
    commands: dict[str, Callable[..., object]] = {
        "open": sender.open,
        "subscribed": sender.subscribed,
        "mark": sender.mark,
        "send": sender.send,
    }
    answer: object = True
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command = json.loads(line)
        answer = commands[command.pop("command")](**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
