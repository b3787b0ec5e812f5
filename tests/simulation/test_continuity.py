"""Whether a stream goes on: the pure machine, links that lose, repeat and hide, replay endpoints of every kind.

No tasks, no sockets, virtual time: `World.turn` is a turn of a follower. A failure prints its seed.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from indexer.index.state import Checkpoint, Coverage, CoverageReason
from indexer.stream.continuity import Continuity, Verdict
from indexer.stream.held import HeldBatches, NumberedBatch
from indexer.stream.limits import StreamLimits
from indexer.stream.repair import Repair, ReplayTurns
from indexer.stream.replay import ReplayEnd
from tests.sizes import fewer, some
from tests.stream_stand_ins import END_MARKER, RecordingPublisher, number_frame, registration

LIMITS = StreamLimits(
    held_batches_max=40,
    replay_turn_wait_s=1.0,
    replay_idle_timeout_s=0.5,
    replay_timeout_s=3.0,
    replay_cool_down_s=2.0,
)
LONGEST_REPAIR_S = LIMITS.replay_turn_wait_s + LIMITS.replay_timeout_s + LIMITS.replay_idle_timeout_s
REPAIRS_IN_A_ROW = 4  # prove, prove the new run, join or fill, fill once more after a contradiction
STEPS = 60
ENDPOINTS = [
    *("honest",) * 6,
    "silent",
    "garbage",
    "other engine",
    "other run",
    "no end marker",
    "starts later",
    "lossy",
    "trickling",
    "endless",
]


def sent(run: int, number: int, at: float) -> NumberedBatch:
    """`run` is negative for another engine."""
    payload = b"\x93" + struct.pack(">Bdqq", 0xCB, at, run, number)
    return NumberedBatch(number, hash((run, number)) & 0xFFFF_FFFF, payload)


def run_of(batch: NumberedBatch) -> int:
    run: int = struct.unpack_from(">q", batch.payload, 10)[0]
    return run


class Index(RecordingPublisher):
    """Remembers which batches it consists of."""

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(registration(), checkpoint)
        self.content: list[NumberedBatch] = []

    def take(self, batch: NumberedBatch) -> None:
        known = self.checkpoint.sequence_number
        assert known is None or not self.content or batch.sequence_number > known, "applied in order, and once"
        self.content.append(batch)
        self._move(sequence_number=batch.sequence_number, fingerprint=batch.fingerprint)

    def restart(self, at: float | None = None) -> None:
        super().restart(at)
        self.content.clear()

    def drop_residencies(self, at: float | None = None) -> None:
        super().drop_residencies(at)
        self.content.clear()


class Answers:
    """A replay source whose answers arrive at their times."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.due: deque[tuple[float, list[bytes]]] = deque()

    def request(self, start: int) -> None:
        self.due.extend(self.world.answers(start))

    def drain(self, messages_max: int) -> list[list[bytes]]:
        taken = []
        while self.due and self.due[0][0] <= self.world.now and len(taken) < messages_max:
            taken.append(self.due.popleft()[1])
        return taken

    def close(self) -> None: ...


@dataclass
class World:
    """An engine, its link, its replay endpoint, and whoever follows it."""

    seed: int
    has_replay: bool
    now: float = 1_000.0
    run: int = 1
    engine: list[NumberedBatch] = field(default_factory=list)  # of this run
    earlier: list[NumberedBatch] = field(default_factory=list)  # of the one before
    inbox: deque[NumberedBatch] = field(default_factory=deque)
    changes: list[bool] = field(default_factory=list)
    is_connected: bool = False
    longest_wait_s: float = 0.0
    repair: Repair | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.loss = self.random.choice([0.0, 0.05, 0.3])
        self.buffer_batches = self.random.choice([2, 10, 10_000])
        self.endpoint = "honest"
        self.foreign = [sent(-1, n, 900.0) for n in range(self.random.choice([3, 30, 100]))]
        self.is_foreign_ever = False
        self.index = Index()
        self.counters: Counter[str] = Counter()
        self.turns = ReplayTurns(1)
        self.follow()

    def follow(self) -> None:
        """As at a start of the service: only index and checkpoint are there."""
        self.continuity = Continuity(
            self.index,
            self.counters,
            LIMITS,
            has_replay=self.has_replay,
            now=lambda: self.now,
            wall=lambda: self.now,
        )
        if self.repair is not None:
            self.repair.close()
        self.held = HeldBatches(LIMITS.held_batches_max, LIMITS.held_bytes_max)
        self.received_at: dict[int, float] = {}
        self.repair = None
        self.inbox.clear()
        self.changes = [True] if self.is_connected else []

    # ------------------------------------------------------------------ the engine and its link

    def publish(self, *, is_lost: bool = False) -> None:
        batch = sent(self.run, len(self.engine), self.now)
        self.engine.append(batch)
        if self.is_connected and not is_lost and self.random.random() >= self.loss:
            self.inbox.append(batch)
            if self.random.random() < 0.02:
                self.inbox.append(batch)

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.changes.append(True)

    def break_connection(self) -> None:
        """What was on its way, and perhaps what had arrived already, is read after the next connection was made."""
        if self.is_connected:
            self.is_connected = False
            self.changes.append(False)

    def begin_new_run(self) -> None:
        self.run += 1
        self.earlier, self.engine = self.engine, []

    def restart_hidden(self) -> None:
        """Behind a proxy. The one case that nobody can see is left out: that the first number received is our next."""
        self.settle()
        self.begin_new_run()
        for _ in range(self.random.choice([0, 1, len(self.earlier), len(self.earlier) + 3])):
            self.publish(is_lost=True)
        if len(self.engine) == self.continuity.sequence.next_number:
            self.publish(is_lost=True)
        if self.is_connected:
            self.inbox.append(batch := sent(self.run, len(self.engine), self.now))
            self.engine.append(batch)

    def answers(self, start: int) -> list[tuple[float, list[bytes]]]:
        kind, at = self.endpoint, self.now + 0.01
        self.is_foreign_ever |= kind in ("other engine", "other run")
        source = {"other engine": self.foreign, "other run": self.earlier}.get(kind, self.engine)
        past = [b for b in source[-self.buffer_batches :] if b.sequence_number >= start]
        if kind == "silent":
            return []
        if kind == "garbage":
            return [(at, [b"garbage"])]
        if kind == "starts later":
            past = past[self.random.randint(0, 3) :]
        if kind == "lossy":
            past = [b for b in past if self.random.random() < 0.7]
        if kind == "endless":
            more = (sent(self.run, n, self.now) for n in itertools.count(len(self.engine)))
            past = [*past, *itertools.islice(more, 1_000)]
        step = LIMITS.replay_idle_timeout_s * 0.9 if kind in ("trickling", "endless") else 0.0
        due = [
            (at + i * step, [b"", number_frame(b.sequence_number), b.payload + struct.pack(">q", b.fingerprint)])
            for i, b in enumerate(past)
        ]
        if kind not in ("no end marker", "endless") and not (kind == "lossy" and self.random.random() < 0.5):
            due.append((at + len(due) * step, END_MARKER))
        return due

    # ------------------------------------------------------------------ what a follower does

    def turn(self) -> bool:
        """One turn of its loop. False: there is nothing to do before something happens."""
        changes, self.changes = self.changes, []
        for connected in changes:
            self.continuity.connection_changed(self.held, is_connected=connected)
        while self.inbox and self.held.room > 0:
            batch = self.inbox.popleft()
            self.received_at[id(batch)] = self.now
            self.held.extend([batch])
        assert len(self.held) <= LIMITS.held_batches_max
        if self.repair is None and self.continuity.wants_to_ask(self.held):
            ask = self.continuity.ask(self.held)
            next_number = self.continuity.sequence.next_number
            turn = self.turns.ask(lambda: None)
            self.repair = Repair(
                ask.start, turn, lambda: Answers(self), LIMITS, self.counters, self.now, next_number=next_number
            )
        return self.advance_repair() if self.repair else self.apply_held()

    def apply_held(self) -> bool:
        while batch := self.held.first:
            if self.continuity.wants_to_ask(self.held):
                return True
            verdict = self.continuity.live(batch, self.held)
            if verdict is Verdict.APPLY:
                self.pop()
                self.index.take(batch)
            elif verdict is Verdict.DROP:
                self.pop()
            elif verdict is Verdict.WAIT:
                return False
            self.check()
        return self.continuity.wants_to_ask(self.held)

    def pop(self) -> None:
        batch = self.held.pop()
        self.longest_wait_s = max(self.longest_wait_s, self.now - self.received_at.get(id(batch), self.now))

    def advance_repair(self) -> bool:
        repair = self.repair
        assert repair is not None
        answers = repair.take(self.now, 16)
        for number, data in answers:
            batch = NumberedBatch(number, struct.unpack(">q", data[-8:])[0], data[:-8])
            is_first = number == repair.first_number
            verdict = self.continuity.answered(batch, self.held, start=repair.start, is_first=is_first)
            if isinstance(verdict, ReplayEnd):
                repair.stop(verdict)
                break
            if verdict is Verdict.APPLY:
                self.index.take(batch)
            self.check()
        if not answers and self.held.room <= 0:
            repair.stop(ReplayEnd.HELD_FULL)
        if repair.goes_on(self.now, self.continuity.sequence.next_number):
            return bool(answers)
        assert repair.end is not None
        self.repair = None
        self.continuity.ended(repair.end, self.held)
        self.check()
        return True

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            turns = 0
            while self.turn():
                turns += 1
                assert turns < 10_000, f"seed {self.seed}: it never comes to rest"
            if self.now >= end:
                return
            self.now = min(end, self.now + 0.05)

    def settle(self) -> None:
        """Until nothing is on its way."""
        deadline = self.now + 10 * LONGEST_REPAIR_S
        self.run_for(0.0)
        while self.inbox or self.held or self.repair:
            assert self.now < deadline, f"seed {self.seed}: held up"
            self.run_for(0.25)

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        point, content = self.index.checkpoint, self.index.content
        what = f"seed {self.seed}, has_replay={self.has_replay}: {point}"
        numbers = [batch.sequence_number for batch in content]
        if point.coverage is Coverage.COMPLETE:
            assert numbers == list(range(len(numbers))), what
        if point.coverage is Coverage.SINCE:
            assert point.since is not None
            assert numbers == list(range(point.since, point.since + len(numbers))), what
        if point.coverage is not Coverage.DEGRADED and not self.is_in_the_dark:
            assert len({run_of(batch) for batch in content}) <= 1, what
            assert all(run_of(batch) > 0 for batch in content), what

    @property
    def is_in_the_dark(self) -> bool:
        """What an endpoint has told, and no live batch has confirmed or refuted yet."""
        return not self.continuity.is_joined and self.is_foreign_ever

    def live(self) -> None:
        self.connect()
        for _ in range(STEPS):
            self.act(self.random.random())
            self.run_for(self.random.choice([0.0, 0.0, 0.02, 0.3]))
        self.endpoint, self.loss = "honest", 0.0
        self.connect()
        self.settle()
        self.run_for(COOL_S)
        self.publish()
        self.settle()
        for _ in range(200):  # of another run, a replay may have told a number that is still to come
            if self.index.checkpoint.sequence_number == len(self.engine) - 1:
                break
            self.publish()
            self.settle()
        assert self.index.checkpoint.sequence_number == len(self.engine) - 1, f"seed {self.seed}"
        assert run_of(self.index.content[-1]) == self.run, f"seed {self.seed}"
        assert self.longest_wait_s <= REPAIRS_IN_A_ROW * LONGEST_REPAIR_S, f"seed {self.seed}"

    def act(self, choice: float) -> None:
        if choice < 0.80:
            self.publish()
        elif choice < 0.85:
            self.break_connection()
            for _ in range(self.random.randint(0, 3)):
                self.publish()
            self.run_for(self.random.choice([0.0, 1.0]))
            self.connect()
        elif choice < 0.88:
            self.break_connection()
            self.begin_new_run()
            for _ in range(self.random.choice([0, 2, len(self.earlier), len(self.earlier) + 2])):
                self.publish()
            self.run_for(self.random.choice([0.0, 1.0]))
            self.connect()
        elif choice < 0.90:
            self.restart_hidden()
        elif choice < 0.92:
            self.follow()
        elif choice < 0.93:
            self.continuity.resync(is_full=self.random.random() < 0.5)
        else:
            self.endpoint = self.random.choice(ENDPOINTS)


COOL_S = 10 * LIMITS.replay_cool_down_s + 1.0
RUNS = 250


@pytest.mark.parametrize("has_replay", [False, True], ids=["without replay", "with replay"])
@pytest.mark.parametrize("block", some(range(10)))
def test_complete_means_that_nothing_was_lost_and_nothing_takes_for_ever(block: int, has_replay: bool) -> None:
    ends: Counter[Coverage] = Counter()
    for seed in range(RUNS * block, RUNS * (block + 1)):
        world = World(seed, has_replay)
        world.live()
        ends[world.index.checkpoint.coverage] += 1
    assert ends[Coverage.COMPLETE] > 2, ends  # the check above was made


def test_with_an_honest_endpoint_that_keeps_everything_nothing_is_ever_lost() -> None:
    for seed in range(50_000, 50_000 + fewer(300)):
        world = World(seed, has_replay=True)
        world.buffer_batches = 10_000
        world.connect()
        for _ in range(STEPS):
            choice = world.random.random()
            world.act(choice if choice < 0.85 or 0.90 <= choice < 0.93 else 0.0)
            world.run_for(world.random.choice([0.0, 0.02, 0.3]))
        world.loss = 0.0
        world.connect()
        world.publish()
        world.settle()
        point = world.index.checkpoint
        assert point.coverage is Coverage.COMPLETE, f"seed {seed}: {point}"
        assert world.index.content == world.engine, f"seed {seed}"


def test_an_endpoint_of_another_engine_is_found_out_and_leaves_nothing_behind() -> None:
    for seed in range(60_000, 60_000 + fewer(300)):
        world = World(seed, has_replay=True)
        world.endpoint = "other engine"
        for _ in range(world.random.choice([0, 5, 50])):
            world.publish()
        world.connect()
        for _ in range(30):
            world.publish()
            world.run_for(world.random.choice([0.0, 0.02, 0.3]))
        world.settle()
        assert all(run_of(batch) > 0 for batch in world.index.content) or (
            world.index.checkpoint.reason is CoverageReason.CONTINUITY_UNPROVEN
        ), f"seed {seed}: {world.index.checkpoint}"
