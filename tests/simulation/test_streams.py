"""Followers against engines that restart, links that lose, repeat and reorder, and a service that dies; virtual time.

At the end of each run the real index is compared with a model fed with what the engine truly published. Wherever
coverage says `complete`, they must agree; a failure prints its seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.publisher import PublisherIndex
from indexer.index.state import Coverage
from indexer.stream.followed import FollowedPublisher, FollowState
from indexer.stream.follower import Clock, Follower
from indexer.stream.limits import StreamLimits
from indexer.stream.repair import ReplayTurns
from indexer.wire.decode import decode_batch
from tests.sizes import fewer, some
from tests.stream_stand_ins import (
    CLEARED,
    END_MARKER,
    Link,
    SimulatedEngine,
    SimulatedTransport,
    change_references,
    number_frame,
    payload,
    registration,
    removed,
    run_virtual,
    stored,
    until,
)

LIVE, REPLAY = "tcp://engine:5557", "tcp://engine:5558"
LIMITS = StreamLimits(
    held_batches_max=300, replay_idle_timeout_s=1.0, replay_timeout_s=5.0, replay_cool_down_s=3.0, slice_s=0.002
)
STEPS = 150
BLOCKS = 60


@dataclass
class World:
    """One seed: an engine, its model, and whoever follows it."""

    seed: int
    has_replay: bool
    engine: SimulatedEngine = field(init=False)
    truth: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        chance = self.random.random
        link = Link(loss=0.3 * chance() ** 2, repeat=0.2 * chance() ** 2, reorder=0.2 * max(0.0, chance() - 0.5))
        self.engine = SimulatedEngine(self.seed, link, buffer_batches=self.random.choice([3, 30, 10_000]))
        self.given = registration(endpoint=LIVE, replay_endpoint=REPLAY if self.has_replay else None)
        self.index = ContentIndex()
        self.publisher: PublisherIndex = self.index.add_publisher(self.given)
        self.followed = FollowedPublisher(self.given, self.publisher)
        self.transport = SimulatedTransport({LIVE: self.engine, REPLAY: self.engine})
        self.task: asyncio.Task[None]

    def follow(self) -> None:
        """As at a start of the service: only the index and its checkpoint are there."""
        ticks = iter(range(10**9))
        clock = Clock(wall=lambda: 0.0, elapsed=lambda: next(ticks) / 1_000)
        turns = ReplayTurns(2)
        follower = Follower(self.followed, self.transport, LIMITS, replay_turns=turns, clock=clock)
        self.task = asyncio.create_task(follower.run())

    async def stop_following(self) -> None:
        self.task.cancel()
        outcome = (await asyncio.gather(self.task, return_exceptions=True))[0]
        assert isinstance(outcome, asyncio.CancelledError), repr(outcome)

    def publish(self, *, is_lost: bool = False) -> None:
        events: list[dict[str, object]] = []
        for _ in range(self.random.randint(1, 4)):
            choice = self.random.random()
            if choice < 0.6 or not self.truth:
                events.append(stored(self.random.randrange(BLOCKS)))
            elif choice < 0.97:
                events.append(removed(self.random.choice(list(self.truth))))
            else:
                events.append(CLEARED)
            change_references(self.truth, decode_batch_event(events[-1]))
        self.engine.publish(*events, is_lost=is_lost)

    async def restart_engine(self) -> None:
        """Its first batches are not lost: a new run whose first known number is just our next cannot be told apart."""
        self.engine.stop()
        await asyncio.sleep(self.random.choice([0.005, 0.5, 5.0]))
        self.truth.clear()
        last_number = self.engine.next_number
        self.engine.start(as_new_run=True)
        if self.has_replay and self.random.random() < 0.5:  # the new run passes our last number before we look
            for _ in range(last_number + self.random.randint(0, 3)):
                self.publish()
        await until(lambda: self.engine.subscriptions[0].is_connected)
        loss, self.engine.link.loss = self.engine.link.loss, 0.0
        for _ in range(self.random.randint(1, 5)):
            self.publish()
        self.engine.link.loss = loss

    async def break_connection(self) -> None:
        self.engine.stop()
        for _ in range(self.random.randint(0, 3)):
            self.publish()
        await asyncio.sleep(self.random.choice([0.0, 0.1, 4.0]))
        self.engine.start(as_new_run=False)

    async def restart_service(self) -> None:
        await self.stop_following()
        for _ in range(self.random.randint(0, 3)):
            self.publish()
        self.follow()

    async def misbehave(self) -> None:
        """For a while the replay endpoint is silent, answers garbage, or leaves batches and the end marker out."""
        engine, chance = self.engine, self.random.random

        def lossy(start: int, buffered: list[tuple[int, bytes]]) -> list[list[bytes]]:
            past = [[b"", number_frame(n), data] for n, data in buffered if n >= start and chance() < 0.8]
            return past + ([END_MARKER] if chance() < 0.5 else [])

        engine.answers = self.random.choice([lossy, lambda start, buffered: [[b"garbage"]], lambda start, buffered: []])
        for _ in range(self.random.randint(1, 10)):
            self.publish()
            await asyncio.sleep(0.05)
        engine.answers = None

    async def live(self, actions: list[tuple[float, object]]) -> None:
        self.follow()
        await asyncio.sleep(self.random.choice([0.0, 0.1]))
        weights = [weight for weight, _ in actions]
        for _ in range(STEPS):
            action = self.random.choices([a for _, a in actions], weights)[0]
            if action is None:
                self.publish()
                await asyncio.sleep(self.random.choice([0.0, 0.0, 0.001, 0.05]))
            else:
                await action(self)  # type: ignore[operator]
        await self.settle()

    async def settle(self) -> None:
        """The link is good again; everything that still happens has happened."""
        await asyncio.sleep(1.0)
        self.engine.link = Link()
        await until(lambda: self.followed.state is FollowState.CONNECTED, 30, f"seed {self.seed}")
        await asyncio.sleep(10.0)
        for _ in range(3):
            self.publish()
            await asyncio.sleep(1.0)
        newest = self.engine.next_number - 1
        await until(lambda: self.publisher.checkpoint.sequence_number == newest, 30, f"seed {self.seed}: {newest}")
        await until(lambda: self.followed.state is FollowState.CONNECTED, 30, f"seed {self.seed}")
        await self.stop_following()
        self.transport.close()

    def held(self) -> dict[int, int]:
        return {int(h): count for _, h, _, count in self.publisher.residencies()}

    def check(self) -> None:
        if self.publisher.checkpoint.coverage is Coverage.COMPLETE:
            assert self.held() == dict(self.truth), f"seed {self.seed}"


def decode_batch_event(event: dict[str, object]) -> object:
    return decode_batch(payload(event)).events[0]


EVERYTHING = [
    (80.0, None),
    (1.0, World.restart_engine),
    (2.0, World.break_connection),
    (2.0, World.restart_service),
    (1.0, World.misbehave),
]


@pytest.mark.parametrize("has_replay", [False, True], ids=["without replay", "with replay"])
@pytest.mark.parametrize("block", some(range(4)))
def test_where_coverage_says_complete_the_index_is_what_the_engine_has(block: int, has_replay: bool) -> None:
    complete = 0
    for seed in range(50 * block, 50 * block + 50):
        world = World(seed, has_replay)
        run_virtual(world.live(EVERYTHING))
        world.check()
        complete += world.publisher.checkpoint.coverage is Coverage.COMPLETE
    assert complete > 2  # the check above was made


def test_with_a_replay_endpoint_that_keeps_everything_no_link_can_do_harm() -> None:
    for seed in range(1_000, 1_000 + fewer(60)):
        world = World(seed, has_replay=True)
        world.engine.buffer = type(world.engine.buffer)(maxlen=None)
        run_virtual(world.live([(80.0, None), (2.0, World.restart_service)]))
        assert world.publisher.checkpoint.coverage is Coverage.COMPLETE, f"seed {seed}"
        world.check()


@pytest.mark.parametrize("has_replay", [False, True], ids=["without replay", "with replay"])
def test_restarts_over_good_links_leave_nothing_of_the_old_run(has_replay: bool) -> None:
    complete = 0
    actions = [(80.0, None), (3.0, World.restart_engine), (1.0, World.restart_service)]
    for seed in range(2_000, 2_000 + fewer(50)):
        world = World(seed, has_replay)
        world.engine.link = Link()
        run_virtual(world.live(actions))
        world.check()
        complete += world.publisher.checkpoint.coverage is Coverage.COMPLETE
    assert complete > fewer(25)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        world = World(7, has_replay=True)
        run_virtual(world.live(EVERYTHING))
        runs.append((world.followed.counters, world.publisher.checkpoint, world.held()))
    assert runs[0] == runs[1]
