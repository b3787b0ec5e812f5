"""Several simulated engines against a running service, checking its answers as they go.

The fleet registers its engines, sends them a workload, now and then restarts one or empties its cache, and every so
often asks the service about a prompt. To compare like with like it holds all engines still until the service has
applied what they sent, asks, and lets them go on: an answer is right if it equals the engine's own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Unpack

import zmq.asyncio

from indexer.client.calls import Settings
from indexer.simulate.cache import Prompt
from indexer.simulate.engine import SimulatedEngine
from indexer.simulate.flavours import FLAVOURS, MODEL
from indexer.simulate.service_client import PublisherState, ServiceClient, ServiceUnreachable
from indexer.simulate.workload import EXAMPLE_FIRST_TOKEN, EXAMPLE_TOKENS, Workload, example_prompt

DEFAULT_RATE = 8.0
FIRST_PORT = 9001
CHECK_INTERVAL_S = 1.0
STATUS_INTERVAL_S = 10.0
DISTURBANCE_INTERVAL_S = 30.0
SERVICE_UP_WITHIN_S = 60.0
SETTLED_WITHIN_S = 1.0
UNREGISTER_WITHIN_S = 2.0
RESTART_DOWN_S = 1.0
UNCHECKED_AFTER_RESTART_S = 2.0
RECENT_PROMPTS_MAX = 64
WRONG_ANSWERS_SHOWN_MAX = 20


@dataclass(slots=True)
class FleetReport:
    """What a fleet did and how the service answered.

    Compared answers are `exact`, `too_high` or `too_low`. Not compared: `unsettled` (the service had not applied all
    that the engine sent, or the engine had not sent all that it did) and `uncovered` (lower than the engine's answer,
    but the service had said that its history of this engine is not complete). `refused` requests found an engine down
    or full.
    """

    engines: int = 0
    requests: int = 0
    refused: int = 0
    exact: int = 0
    too_high: int = 0
    too_low: int = 0
    unsettled: int = 0
    uncovered: int = 0
    restarts: int = 0
    resets: int = 0
    unanswered: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def checked(self) -> int:
        return self.exact + self.too_high + self.too_low

    def __str__(self) -> str:
        verdict = "all exact"
        if self.exact != self.checked:
            verdict = f"{self.exact:,} exact, {self.too_high:,} too high, {self.too_low:,} too low"
        elif not self.checked:
            verdict = "none yet"
        sentence = f"{self.engines} engines, {self.requests:,} requests, {self.checked:,} answers checked, {verdict}"
        extra = {"restarts": self.restarts, "resets": self.resets, "not answered by the service": self.unanswered}
        return "fleet: " + ", ".join([sentence, *(f"{count:,} {what}" for what, count in extra.items() if count)])


class Fleet:
    """`engines` simulated engines and the service at `url`. `announce` gets a sentence now and then."""

    def __init__(
        self,
        url: str,
        *,
        engines: int = 3,
        rate: float = DEFAULT_RATE,
        seed: int = 0,
        restarts: bool = True,
        check_interval_s: float = CHECK_INTERVAL_S,
        announce: Callable[[str], None] = print,
        **client: Unpack[Settings],
    ) -> None:
        self.report = FleetReport(engines=engines)
        self._client = ServiceClient(url, **client)
        self._context = zmq.asyncio.Context()
        self._engines = [self._engine(place, seed) for place in range(engines)]
        self._workload = Workload(seed, [engine.flavour.takes for engine in self._engines])
        self._chance = random.Random(f"disturbances/{seed}")
        self._rate = rate
        self._disturbs = restarts
        self._check_interval_s = check_interval_s
        self._announce = announce
        self._recent: deque[Prompt] = deque(maxlen=RECENT_PROMPTS_MAX)
        self._example_announced = False

    @property
    def engines(self) -> list[SimulatedEngine]:
        return self._engines

    def example_prompt(self) -> tuple[str, list[int]] | None:
        """Model and tokens of a prompt that some engine holds now; None if there is none yet."""
        model, token_ids = example_prompt()
        is_cached = any(engine.lookup(Prompt(tuple(token_ids))) for engine in self._engines)
        return (model, token_ids) if is_cached else None

    async def start(self) -> None:
        """Open all engines and register them; waits for the service up to SERVICE_UP_WITHIN_S."""
        for engine in self._engines:
            await engine.start()
        deadline = time.monotonic() + SERVICE_UP_WITHIN_S
        for engine in self._engines:
            await self._register(engine, deadline)

    async def run(self) -> None:
        """Drive, disturb, check and report, until cancelled or a task fails."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.run(), name=f"engine {engine.worker_id}")
            tasks.create_task(self._drive(), name="workload")
            tasks.create_task(self._check(), name="checks")
            tasks.create_task(self._tell(), name="status")
            if self._disturbs:
                tasks.create_task(self._disturb(), name="disturbances")

    async def live(self, *, duration_s: float | None = None, unregister: bool = True) -> None:
        """Start, run for `duration_s` or until cancelled, close."""
        try:
            await self.start()
            with suppress(TimeoutError):
                async with asyncio.timeout(duration_s):
                    await self.run()
        finally:
            await self.close(unregister=unregister)

    async def close(self, *, unregister: bool) -> None:
        """Unregister, so that the service does not miss its engines, and close every socket."""
        try:
            if unregister:
                await self._unregister()
        finally:
            await self._client.close()
            for engine in self._engines:
                await engine.close()
            self._context.destroy(linger=0)

    async def check_once(self) -> None:
        """Ask the service about one prompt and compare every engine's answer with the engine's own."""
        prompt = self._prompt_to_check()
        async with AsyncExitStack() as stack:
            for engine in self._engines:
                await stack.enter_async_context(engine.lock)
            states = await self._settled_states()
            answers = await self._client.hit_tokens(MODEL, prompt)
            for engine in self._engines:
                self._compare(engine, states.get(engine.worker_id), answers.get(engine.worker_id, 0), prompt)

    def _engine(self, place: int, seed: int) -> SimulatedEngine:
        worker_id = f"http://127.0.0.1:{FIRST_PORT + place}"
        topic = f"kv@{worker_id}@{MODEL}" if place % 2 else ""
        flavour = FLAVOURS[place % len(FLAVOURS)]()
        return SimulatedEngine(worker_id, flavour, context=self._context, seed=seed, topic=topic)

    async def _register(self, engine: SimulatedEngine, deadline: float) -> None:
        while True:
            try:
                await self._client.register(engine, MODEL)
                return
            except ServiceUnreachable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.25)

    async def _unregister(self) -> None:
        """Tried for UNREGISTER_WITHIN_S, no more: the service may be gone already."""
        with suppress(ServiceUnreachable, TimeoutError):
            async with asyncio.timeout(UNREGISTER_WITHIN_S):
                for engine in self._engines:
                    await self._client.unregister(engine.worker_id)

    async def _drive(self) -> None:
        """Requests at random times, `rate` a second on average."""
        due = time.monotonic()
        while True:
            due += self._workload.wait_s(self._rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            assignment = self._workload.next_assignment()
            self.report.requests += 1
            self._recent.append(assignment.job.prompt)
            if not self._engines[assignment.engine].submit(assignment.job):
                self.report.refused += 1

    async def _disturb(self) -> None:
        """Now and then an engine restarts or empties its cache."""
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / DISTURBANCE_INTERVAL_S))
            engine = self._chance.choice(self._engines)
            if self._chance.random() < 0.5:
                self.report.restarts += 1
                await engine.restart(RESTART_DOWN_S)
            else:
                self.report.resets += 1
                engine.reset_cache()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            self._announce(str(self.report))

    async def _check(self) -> None:
        """Check again and again; a service that is away for a while is waited for, and counted."""
        while True:
            await asyncio.sleep(self._check_interval_s)
            try:
                await self.check_once()
            except ServiceUnreachable:
                self.report.unanswered += 1
                continue
            self._announce_example()

    def _announce_example(self) -> None:
        if not self._example_announced and self.example_prompt() is not None:
            self._example_announced = True
            self._announce(f"fleet: ask it yourself:\n{example_curl(self._client.url)}")

    def _prompt_to_check(self) -> Prompt:
        if not self._recent:
            return Prompt(tuple(example_prompt()[1]))
        return self._workload.variant(self._chance.choice(self._recent))

    async def _settled_states(self) -> dict[str, PublisherState]:
        """What the service says of its publishers once it has applied all that was sent, or after SETTLED_WITHIN_S.

        A publisher that the service lost (its data were deleted, say) is registered again.
        """
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while True:
            states = await self._client.publishers()
            missing = [engine for engine in self._engines if engine.worker_id not in states]
            for engine in missing:
                await self._client.register(engine, MODEL)
            behind = [e for e in self._engines if e not in missing and not _is_settled(e, states[e.worker_id])]
            if not behind or time.monotonic() > deadline:
                return states
            await asyncio.sleep(0.02)

    def _compare(self, engine: SimulatedEngine, state: PublisherState | None, answer: int, prompt: Prompt) -> None:
        if state is None or engine.has_unsent_events or not _is_comparable(engine, state):
            self.report.unsettled += 1
            return
        expected = engine.lookup(prompt)
        if answer == expected:
            self.report.exact += 1
        elif answer < expected and state.coverage != "complete":
            self.report.uncovered += 1
        else:
            self._note_wrong(engine, answer, expected, prompt)

    def _note_wrong(self, engine: SimulatedEngine, answer: int, expected: int, prompt: Prompt) -> None:
        if answer > expected:
            self.report.too_high += 1
        else:
            self.report.too_low += 1
        if len(self.report.wrong) >= WRONG_ANSWERS_SHOWN_MAX:
            return
        sentence = (
            f"fleet: for {len(prompt.token_ids)} tokens the service promised {answer}, but {engine.worker_id}"
            f" ({engine.flavour.name}, after batch {engine.last_sequence_number}) would skip {expected}"
        )
        self.report.wrong.append(sentence)
        self._announce(sentence)


def _is_settled(engine: SimulatedEngine, state: PublisherState) -> bool:
    """Whether waiting has no further use: all that the engine sent is applied, or it sent nothing."""
    return engine.last_sequence_number is None or state.sequence_number == engine.last_sequence_number


def _is_comparable(engine: SimulatedEngine, state: PublisherState) -> bool:
    """Whether the service speaks of this run of the engine. Shortly after a restart equal numbers prove nothing."""
    is_fresh = engine.restarts > 0 and time.monotonic() - engine.up_since < UNCHECKED_AFTER_RESTART_S
    is_sent = engine.last_sequence_number is not None
    return engine.is_up and is_sent and not is_fresh and state.sequence_number == engine.last_sequence_number


def example_curl(url: str) -> str:
    """A command that asks the service about the example prompt; its tokens are consecutive, to keep it short."""
    last = EXAMPLE_FIRST_TOKEN + EXAMPLE_TOKENS - 1
    tokens = f"'$(seq -s, {EXAMPLE_FIRST_TOKEN} {last})'"
    body = f'\'{{"model":"{MODEL}","token_ids":[{tokens}]}}\''
    return f"  curl -s {url.rstrip('/')}/v1/prefix-hits -H 'content-type: application/json' -d {body}"
