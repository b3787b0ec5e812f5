"""A bad network between an engine and the service: real ZMQ sockets on both sides, and faults that the seed decides.

Live messages go through in order; some are lost, some come twice, at once or a little later, and now and then nothing
comes for a while and then as much as a full queue had kept. Replay requests and their answers go through unharmed. What
happens to a message depends on the seed, the engine's run and its number alone, never on time.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

import zmq

BOUND_WITHIN_S = 10.0
HANDLED_WITHIN_S = 30.0
SUBSCRIBED_WITHIN_S = 15.0
POLL_MS = 20
LATER_MAX = 3
END_OF_REPLAY = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class Faults:
    """Of so many messages, the rest goes through once.

    Stalls: after `stall_every` messages (0 = never) the link holds back the next `stall_for`, as for a subscriber that
    has stopped reading. It keeps the first `kept_max` of them and loses the others, as a full queue does.
    """

    seed: int = 1
    lost: float = 0.0
    repeated: float = 0.0
    stall_every: int = 0
    stall_for: int = 0
    kept_max: int = 0


class Fate(Enum):
    PASSED = auto()
    LOST = auto()
    REPEATED = auto()
    REPEATED_LATER = auto()


def fate_of(faults: Faults, run: int, sequence_number: int) -> Fate:
    chance = random.Random(f"{faults.seed} {run} {sequence_number}")
    if chance.random() < faults.lost:
        return Fate.LOST
    if chance.random() < faults.repeated:
        return chance.choice((Fate.REPEATED, Fate.REPEATED_LATER))
    return Fate.PASSED


class LossyProxy:
    """One engine's link. The service is given `endpoint` and `replay_endpoint` instead of the engine's own.

    Counters: `lost`, `repeated`, `kept` (held back during stalls and sent after them). `last_passed` is the last number
    of this run that was sent on, None before the first.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay: str, faults: Faults) -> None:
        self._context = context
        self._engine_endpoint, self._engine_replay = endpoint, replay
        self._faults = faults
        self._run = -1
        self._ports = [0, 0]
        self._state = threading.Condition()
        self.lost = self.repeated = self.kept = 0
        self._open_engine_side()
        self._open_service_side()
        self._start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[0]}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[1]}"

    def wait_until_handled(self, messages: int) -> None:
        """Until so many messages of the engine's run have met their fate."""
        with self._state:
            assert self._state.wait_for(lambda: self._handled >= messages, HANDLED_WITHIN_S), (self._handled, messages)

    def wait_for_subscription(self) -> None:
        """Until the service has subscribed since the last time the link was cut."""
        with self._state:
            assert self._state.wait_for(lambda: self._is_subscribed, SUBSCRIBED_WITHIN_S), f"nobody at {self.endpoint}"

    def engine_restarted(self) -> None:
        """The engine is a new process on its old ports: the link is cut with it. Wait for both subscriptions then."""
        self._stop()
        self._close(self._live, *self._clients.values(), self._front, self._router)
        self._open_engine_side()
        self._open_service_side()
        self._start()

    def cut(self) -> None:
        """The service loses its connection and makes it again; what was held back is lost."""
        self._stop()
        self._kept.clear()
        self._later.clear()
        self._close(self._front, self._router)
        self._open_service_side()
        self._start()

    def close(self) -> None:
        self._stop()
        self._close(self._live, *self._clients.values(), self._front, self._router)

    # ------------------------------------------------------------------ sockets

    def _open_engine_side(self) -> None:
        self._run += 1
        self._handled = 0
        self.last_passed: int | None = None
        self._kept: deque[list[bytes]] = deque()
        self._later: deque[tuple[int, list[bytes]]] = deque()  # (after so many messages, frames)
        self._clients: dict[bytes, zmq.Socket[bytes]] = {}
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(0)
        self._live.setsockopt(zmq.RECONNECT_IVL, 10)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(self._engine_endpoint)

    def _open_service_side(self) -> None:
        self._is_subscribed = False
        self._front = self._bound(zmq.XPUB, 0)
        self._router = self._bound(zmq.ROUTER, 1)

    def _bound(self, kind: int, place: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        deadline = time.monotonic() + BOUND_WITHIN_S
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{self._ports[place] or '*'}")
                break
            except zmq.ZMQError:  # a port that was just closed may take a moment to be free again
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self._ports[place] = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket

    def _close(self, *sockets: zmq.Socket[bytes]) -> None:
        for socket in sockets:
            socket.close(linger=0)

    # ------------------------------------------------------------------ the link at work, in its thread

    def _start(self) -> None:
        self._is_open = True
        self._thread = threading.Thread(target=self._work, name="lossy link", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._is_open = False
        self._thread.join()

    def _work(self) -> None:
        poller = zmq.Poller()
        for socket in (self._live, self._front, self._router, *self._clients.values()):
            poller.register(socket, zmq.POLLIN)
        while self._is_open:
            ready = dict(poller.poll(POLL_MS))
            if self._front in ready:
                self._note_subscription(self._front.recv())
            if self._router in ready:
                self._pass_request(self._router.recv_multipart(), poller)
            if self._live in ready:
                self._handle(self._live.recv_multipart())
            for client, socket in list(self._clients.items()):
                if socket in ready:
                    self._pass_answer(client, socket, poller)

    def _note_subscription(self, message: bytes) -> None:
        with self._state:
            self._is_subscribed = message[:1] == b"\x01"
            self._state.notify_all()

    def _pass_request(self, frames: list[bytes], poller: zmq.Poller) -> None:
        """Each client has a socket of its own at the engine, whose answers can then be told apart."""
        client, *request = frames
        if client not in self._clients:
            self._clients[client] = self._context.socket(zmq.DEALER)
            self._clients[client].set_hwm(0)
            self._clients[client].connect(self._engine_replay)
            poller.register(self._clients[client], zmq.POLLIN)
        self._clients[client].send_multipart(request)

    def _pass_answer(self, client: bytes, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        answer = socket.recv_multipart()
        with suppress(zmq.ZMQError):  # the client is gone
            self._router.send_multipart([client, *answer])
        if answer[-2] == END_OF_REPLAY:
            poller.unregister(socket)
            self._close(self._clients.pop(client))

    def _handle(self, frames: list[bytes]) -> None:
        number = int.from_bytes(frames[1], "big")
        if self._is_stalled:
            self._hold_back(frames)
        else:
            self._release()
            self._meet_fate(frames, fate_of(self._faults, self._run, number))
        self._repeat_due()
        with self._state:
            self._handled += 1
            self._state.notify_all()

    @property
    def _is_stalled(self) -> bool:
        every, lasting = self._faults.stall_every, self._faults.stall_for
        return bool(every) and self._handled % (every + lasting) >= every

    def _hold_back(self, frames: list[bytes]) -> None:
        if len(self._kept) < self._faults.kept_max:
            self._kept.append(frames)
        else:
            self.lost += 1

    def _release(self) -> None:
        self.kept += len(self._kept)
        while self._kept:
            self._pass(self._kept.popleft())

    def _meet_fate(self, frames: list[bytes], fate: Fate) -> None:
        if fate is Fate.LOST:
            self.lost += 1
            return
        self._pass(frames)
        if fate is Fate.REPEATED:
            self._repeat(frames)
        elif fate is Fate.REPEATED_LATER:
            self._later.append((self._handled + LATER_MAX, frames))

    def _repeat_due(self) -> None:
        while self._later and self._later[0][0] <= self._handled:
            self._repeat(self._later.popleft()[1])

    def _repeat(self, frames: list[bytes]) -> None:
        self.repeated += 1
        self._front.send_multipart(frames)

    def _pass(self, frames: list[bytes]) -> None:
        self.last_passed = int.from_bytes(frames[1], "big")
        self._front.send_multipart(frames)
