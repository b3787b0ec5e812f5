"""One simulated engine: a scheduler over a cache, publishing over real ZMQ sockets as engines do.

A PUB socket sends `[topic, sequence number, payload]`, numbers from 0; a ROUTER answers replay requests from a bounded
buffer. A restart closes both and opens them again on the same ports, with an empty cache and number 0, unannounced.

`lock` is held for the length of a step and of a restart's ends: whoever holds it sees the engine stand still.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence

import zmq
import zmq.asyncio

from indexer.simulate.cache import Mutation, Prompt
from indexer.simulate.encode import encode_batch
from indexer.simulate.flavours import Flavour
from indexer.simulate.scheduler import Job, Scheduler

SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
PUBLISHER_HWM = 100_000
REBIND_WITHIN_S = 5.0
REPLAY_SLICE = 64


class SimulatedEngine:
    """An engine that is down until `start`. `run` steps it every `tick_s` seconds while there is work.

    The replay buffer holds the last `buffer_steps` batches.
    """

    def __init__(
        self,
        worker_id: str,
        flavour: Flavour,
        *,
        context: zmq.asyncio.Context,
        seed: int = 0,
        host: str = "127.0.0.1",
        topic: str = "",
        tick_s: float = 0.05,
        buffer_steps: int = 2_000,
    ) -> None:
        self.worker_id = worker_id
        self.flavour = flavour
        self.lock = asyncio.Lock()
        self.is_up = False
        self.up_since = 0.0
        self.last_sequence_number: int | None = None
        self.restarts = 0
        self._context = context
        self._host = host
        self._topic = topic.encode()
        self._tick_s = tick_s
        self._chance = random.Random(f"{seed}/{worker_id}")
        self._ports = [0, 0]
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._wake = asyncio.Event()
        self._scheduler = self._fresh_scheduler()

    @property
    def endpoint(self) -> str:
        return f"tcp://{self._host}:{self._ports[0]}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://{self._host}:{self._ports[1]}"

    @property
    def has_unsent_events(self) -> bool:
        """Whether the cache is ahead of what was published."""
        return self._scheduler.cache.has_mutations

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.is_up and self._scheduler.has_work

    def lookup(self, prompt: Prompt) -> int:
        """The engine's own answer: tokens that a fresh request would skip now."""
        return self._scheduler.cache.lookup(prompt) if self.is_up else 0

    def submit(self, job: Job) -> bool:
        """Queue a request. False while down or when too many wait."""
        accepted = self.is_up and self._scheduler.submit(job)
        self._wake.set()
        return accepted

    def reset_cache(self) -> None:
        """Empty the cache when no request runs."""
        self._scheduler.reset_cache()
        self._wake.set()

    async def start(self) -> None:
        """Open the sockets: on any free ports at first, later on the same again."""
        self._publisher = await self._bind(zmq.PUB, PUBLISHER_HWM, 0)
        self._replay = await self._bind(zmq.ROUTER, 2 * ((self._sent.maxlen or 0) + 1), 1)
        self._replay_task = asyncio.create_task(self._serve_replay(self._replay), name=f"replay {self.worker_id}")
        self.is_up = True
        self.up_since = time.monotonic()
        self._wake.set()

    async def close(self) -> None:
        """Close the sockets at once; what a slow reader has not got yet is lost, as when a process dies."""
        if not self.is_up:
            return
        self.is_up = False
        self._replay_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._replay_task
        self._publisher.close(linger=0)
        self._replay.close(linger=0)

    async def restart(self, down_s: float = 0.0) -> None:
        """Die with everything cached or queued, and begin again after `down_s` seconds."""
        async with self.lock:
            await self.close()
            self._sent.clear()
            self.last_sequence_number = None
            self._scheduler = self._fresh_scheduler()
        await asyncio.sleep(down_s)
        async with self.lock:
            self.restarts += 1
            await self.start()

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            self._wake.clear()
            if not self.has_work:
                await self._wake.wait()
            await self.step()
            await asyncio.sleep(self._tick_s)

    async def step(self) -> None:
        """One step, and one batch if there is something to publish."""
        async with self.lock:
            if not self.is_up:
                return
            if self._replay_task.done():
                self._replay_task.result()
            mutations = self._scheduler.step()
            if mutations:
                await self._publish(mutations)

    def _fresh_scheduler(self) -> Scheduler:
        return Scheduler(self.flavour.make_cache(self._chance), held_steps=self.flavour.held_steps)

    async def _publish(self, mutations: Sequence[Mutation]) -> None:
        payload = encode_batch(time.time(), [self.flavour.encode(mutation) for mutation in mutations])
        sequence_number = 0 if self.last_sequence_number is None else self.last_sequence_number + 1
        self._sent.append((sequence_number, payload))
        self.last_sequence_number = sequence_number
        await self._publisher.send_multipart([self._topic, _sequence_bytes(sequence_number), payload])

    async def _bind(self, kind: int, hwm: int, port_index: int) -> zmq.asyncio.Socket:
        """A bound socket. A port just closed may take a moment to be free again."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, hwm)
        deadline = time.monotonic() + REBIND_WITHIN_S
        while True:
            try:
                socket.bind(f"tcp://{self._host}:{self._ports[port_index] or '*'}")
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    socket.close()
                    raise
                await asyncio.sleep(0.02)
        self._ports[port_index] = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        """Answer replay requests; other messages get no answer, as with real engines."""
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
                continue
            for count, answer in enumerate(self._replay_answers(int.from_bytes(frames[2], "big"))):
                await router.send_multipart([frames[0], b"", *answer])
                if count % REPLAY_SLICE == REPLAY_SLICE - 1:
                    await asyncio.sleep(0)

    def _replay_answers(self, first: int) -> Iterator[list[bytes]]:
        lead = [self._topic] if self.flavour.replay_with_topic else []
        for sequence_number, payload in list(self._sent):
            if sequence_number >= first:
                yield [*lead, _sequence_bytes(sequence_number), payload]
        yield [*([b""] if lead else []), END_OF_REPLAY, b""]


def _sequence_bytes(sequence_number: int) -> bytes:
    return sequence_number.to_bytes(SEQUENCE_BYTES, "big")
