"""Stand-ins for tests of `indexer.stream`: virtual time, an engine without sockets, an index that records.

`VirtualTimeLoop` never waits: when nothing is ready it moves its clock to the next timer. `SimulatedEngine` publishes
numbered batches to `SimulatedTransport`'s subscriptions over links that can lose, repeat and reorder, and answers
replays the way engines do, or badly on request.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from indexer.index.publisher import ApplyOutcome
from indexer.index.state import DOUBTS, Checkpoint, Coverage, CoverageReason, Trust
from indexer.registration import PublisherKey, Registration
from indexer.wire.columns import BatchColumns
from indexer.wire.decode import EventBatch, decode_batch
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored

T = TypeVar("T")

END_MARKER = [b"", b"", b"\xff" * 8, b""]

# ---------------------------------------------------------------------- time


class _VirtualSelector(selectors.DefaultSelector):
    """Does not sleep: tells the loop how far its clock may jump."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("every task waits, and no timer will wake one")
            self.loop.virtual_time += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual_time = 0.0
        selector = _VirtualSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.virtual_time


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


async def until(
    condition: Callable[[], object], limit_s: float = 10.0, what: object = "", pause_s: float = 0.005
) -> None:
    """Wait for a condition, with a limit. In virtual time, `pause_s` 0 looks between any two steps of other tasks."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what or condition}")
        await asyncio.sleep(pause_s)


# ---------------------------------------------------------------------- batches


def stored(*hashes: int, parent: int | None = None, medium: str = "GPU") -> dict[str, object]:
    tokens = [h % 1_000 for h in hashes for _ in range(16)]
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 16,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def removed(*hashes: int, medium: str = "GPU") -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEARED: dict[str, object] = {"type": "AllBlocksCleared"}


def payload(*events: Mapping[str, object], ts: float = 0.0, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, events, rank])


def number_frame(number: int) -> bytes:
    return number.to_bytes(8, "big")


def registration(**values: object) -> Registration:
    defaults: dict[str, Any] = {"worker_id": "w", "dp_rank": 0, "model": "m", "endpoint": "tcp://127.0.0.1:5557"}
    return Registration(**(defaults | values))


# ---------------------------------------------------------------------- index


class RecordingPublisher:
    """A publisher's index that counts references per hash and writes down what it was told."""

    def __init__(self, registration: Registration, checkpoint: Checkpoint | None = None) -> None:
        self.registration = registration
        self.checkpoint = checkpoint or Checkpoint()
        self._shown: Trust | None = None
        self.is_credited = True
        self.held: Counter[int] = Counter()
        self.applied: list[int] = []
        self.told: list[tuple[object, ...]] = []
        self.shown: list[Coverage] = []
        self.needs_replay_at: list[int] = []  # sequence numbers, each used once
        self.fails_on: Callable[[int], bool] = lambda number: False
        self.together_most = 0  # batches in one call of `apply_columns`

    @property
    def trust(self) -> Trust:
        return self._shown or self.checkpoint.trust

    @property
    def coverage(self) -> Coverage:
        return self.trust.coverage

    def show(self, trust: Trust | None) -> None:
        self._shown = trust

    def set_credited(self, is_credited: bool) -> None:
        self.is_credited = is_credited

    def apply(self, batch: EventBatch, sequence_number: int, fingerprint: int, at: float | None = None) -> ApplyOutcome:
        if self.fails_on(sequence_number):
            raise RuntimeError(f"defect at batch {sequence_number}")
        outcome = ApplyOutcome.APPLIED
        if sequence_number in self.needs_replay_at:
            self.needs_replay_at.remove(sequence_number)
            self.held.clear()
            outcome = ApplyOutcome.NEEDS_REPLAY
        for event in decode_batch(batch.payload).events:
            change_references(self.held, event)
        self.applied.append(sequence_number)
        self.shown.append(self.coverage)
        self._move(sequence_number=sequence_number, fingerprint=fingerprint)
        return outcome

    takes_columns = True

    def apply_columns(
        self, columns: BatchColumns, batches: Sequence[tuple[int, int, bytes]], at: float | None = None
    ) -> int:
        """All but those that need a replay: such a batch is never simple."""
        numbers = [number for number, _, _ in batches[: columns.batches]]
        applied = next((i for i, number in enumerate(numbers) if number in self.needs_replay_at), len(numbers))
        self.together_most = max(self.together_most, applied)
        for number, fingerprint, payload in batches[:applied]:
            self.apply(decode_batch(payload), number, fingerprint)
        return applied

    def skip(self, sequence_number: int, fingerprint: int, reason: str, at: float | None = None) -> None:
        self.told.append(("skip", sequence_number, reason))
        self._move(sequence_number=sequence_number, fingerprint=fingerprint)
        self._cover(Coverage.DEGRADED, CoverageReason.UNREADABLE_BATCH, at, self.checkpoint.since)

    def restart(self, at: float | None = None) -> None:
        self.told.append(("restart",))
        self.held.clear()
        self.checkpoint = Checkpoint(generation=self.checkpoint.generation + 1, coverage_at=at)

    def clear(self, at: float | None = None) -> None:
        self.told.append(("clear",))
        self.held.clear()
        number = self.checkpoint.sequence_number
        if number is not None:
            self._cover(Coverage.SINCE, CoverageReason.CLEARED, at, number + 1)

    def drop_residencies(self, at: float | None = None) -> None:
        self.told.append(("drop",))
        self.held.clear()

    def set_coverage(
        self, coverage: Coverage, reason: CoverageReason, at: float | None = None, since: int | None = None
    ) -> None:
        self.told.append((coverage.value, reason.value) if since is None else (coverage.value, reason.value, since))
        self._cover(coverage, reason, at, self.checkpoint.since if coverage is Coverage.DEGRADED else since)

    def count_gap(self, gap_first: int, gap_last: int, at: float | None = None) -> None:
        self.told.append(("gap", gap_first, gap_last))
        self._cover(Coverage.DEGRADED, CoverageReason.GAP, at, self.checkpoint.since)

    def doubt(self, reason: CoverageReason, at: float | None = None) -> None:
        self.told.append(("doubt", reason.value))
        point = self.checkpoint
        if point.coverage is not Coverage.DEGRADED or (point.reason in DOUBTS and reason != point.reason):
            self._cover(Coverage.DEGRADED, reason, at, point.since)

    def prove(self, at: float | None = None) -> None:
        point = self.checkpoint
        if point.reason in DOUBTS or point.reason is CoverageReason.REPLAYED:
            coverage = Coverage.COMPLETE if point.since is None else Coverage.SINCE
            self._cover(coverage, CoverageReason.PROVEN, at, point.since)

    def _cover(self, coverage: Coverage, reason: CoverageReason, at: float | None, since: int | None) -> None:
        self._move(coverage=coverage, reason=reason, coverage_at=at, since=since)

    def _move(self, **fields: object) -> None:
        self.checkpoint = replace(self.checkpoint, **fields)  # type: ignore[arg-type]


def change_references(held: Counter[int], event: object) -> None:
    if isinstance(event, BlockStored):
        held.update(int(h) for h in event.block_hashes)
    elif isinstance(event, BlockRemoved):
        held.subtract(int(h) for h in event.block_hashes)
        for engine_hash in [h for h, count in held.items() if count <= 0]:
            del held[engine_hash]
    elif isinstance(event, AllBlocksCleared):
        held.clear()


class RecordingIndex:
    """All publishers, as the registry sees them."""

    def __init__(self) -> None:
        self.publishers: dict[PublisherKey, RecordingPublisher] = {}
        self.removed: list[RecordingPublisher] = []

    def add_publisher(self, registration: Registration) -> RecordingPublisher:
        assert registration.key not in self.publishers
        publisher = self.publishers[registration.key] = RecordingPublisher(registration)
        return publisher

    def remove_publisher(self, key: PublisherKey) -> None:
        if publisher := self.publishers.pop(key, None):
            publisher.held.clear()
            self.removed.append(publisher)


class RecordingStore:
    """Saved registrations. `fails` makes it unavailable, `delay_s` slow."""

    def __init__(self) -> None:
        self.rows: dict[int, Registration] = {}
        self.fails = False
        self.delay_s = 0.0
        self._last_id = 0

    async def save(self, registration: Registration) -> Registration:
        await asyncio.sleep(self.delay_s)
        if self.fails:
            raise ConnectionError("the store is away")
        self._last_id += 1
        self.rows[self._last_id] = saved = replace(registration, publisher_id=self._last_id)
        return saved

    async def delete(self, publisher_id: int) -> None:
        await asyncio.sleep(self.delay_s)
        if self.fails:
            raise ConnectionError("the store is away")
        self.rows.pop(publisher_id, None)


# ---------------------------------------------------------------------- an engine without sockets


@dataclass
class Link:
    """How messages travel. Chances between 0 and 1 per message, times in seconds."""

    latency_s: float = 0.001
    loss: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0


@dataclass
class SimulatedEngine:
    """Numbered batches of one engine and how it answers replays.

    `answers`: None = as engines do, with an end marker; or a function from (start, buffered) to the frames to send.
    `buffer_batches`: how many past batches can be replayed.
    """

    seed: int = 0
    link: Link = field(default_factory=Link)
    buffer_batches: int = 10_000
    answers: Callable[[int, list[tuple[int, bytes]]], list[list[bytes]]] | None = None
    is_silent: bool = False
    is_up: bool = True
    next_number: int = 0
    clock: float = 1e9  # of its machine
    requests: list[int] = field(default_factory=list)
    subscriptions: list[SimulatedLive] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=self.buffer_batches)

    def publish(self, *events: Mapping[str, object], is_lost: bool = False) -> int:
        """Send one batch; `is_lost` = the link loses it, for certain. Returns its number."""
        return self.publish_payload(payload(*events, ts=self.sent_at()), is_lost=is_lost)

    def sent_at(self) -> float:
        """No two batches are alike."""
        self.clock += 0.001
        return self.clock

    def publish_payload(self, data: bytes, *, is_lost: bool = False) -> int:
        number = self.next_number
        self.next_number += 1
        self.buffer.append((number, data))
        for live in self.subscriptions:
            if not is_lost:
                live.carry([b"topic", number_frame(number), data])
        return number

    def stop(self) -> None:
        self.is_up = False
        for live in self.subscriptions:
            live.disconnect()

    def start(self, *, as_new_run: bool) -> None:
        self.is_up = True
        if as_new_run:
            self.next_number = 0
            self.buffer.clear()
        for live in self.subscriptions:
            live.connect_later()

    def restart(self) -> None:
        self.stop()
        self.start(as_new_run=True)

    def answer(self, start: int) -> list[list[bytes]]:
        self.requests.append(start)
        if self.is_silent or not self.is_up:
            return []
        if self.answers:
            return self.answers(start, list(self.buffer))
        return [[b"", b"topic", number_frame(n), data] for n, data in self.buffer if n >= start] + [END_MARKER]


class SimulatedTransport:
    def __init__(self, engines: Mapping[str, SimulatedEngine], *, connect_s: float = 0.01) -> None:
        self.engines = engines
        self.connect_s = connect_s
        self.replays_open = 0

    def open_live(self, endpoint: str, wake: Callable[[], None]) -> SimulatedLive:
        live = SimulatedLive(self.engines[endpoint], wake, self.connect_s)
        live.connect_later()
        return live

    def open_replay(self, endpoint: str, wake: Callable[[], None]) -> SimulatedReplay:
        self.replays_open += 1
        return SimulatedReplay(self.engines[endpoint], wake, self)

    def close(self) -> None:
        assert all(not engine.subscriptions for engine in self.engines.values())
        assert not self.replays_open


class SimulatedLive:
    def __init__(self, engine: SimulatedEngine, wake: Callable[[], None], connect_s: float) -> None:
        self.engine, self.wake, self.connect_s = engine, wake, connect_s
        self.inbox: deque[list[bytes]] = deque()
        self.changes: list[bool] = []
        self.is_connected = False
        self.loop = asyncio.get_running_loop()
        self.arrives_at = 0.0
        engine.subscriptions.append(self)

    def connect_later(self) -> None:
        self.loop.call_later(self.connect_s, self._connect)

    def _connect(self) -> None:
        if self.engine.is_up and not self.is_connected and self in self.engine.subscriptions:
            self.is_connected = True
            self.changes.append(True)
            self.wake()

    def disconnect(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.changes.append(False)
            self.wake()

    def carry(self, frames: list[bytes]) -> None:
        chance, link = self.engine.random.random, self.engine.link
        if not self.is_connected or chance() < link.loss:
            return
        for _ in range(1 + (chance() < link.repeat)):
            self.arrives_at = max(self.arrives_at + 1e-6, self.loop.time() + link.latency_s)  # timers are no queue
            late_s = 5 * link.latency_s if chance() < link.reorder else 0.0
            self.loop.call_at(self.arrives_at + late_s, self._arrive, frames)

    def _arrive(self, frames: list[bytes]) -> None:
        self.inbox.append(frames)
        self.wake()

    def drain(self, messages_max: int) -> list[list[bytes]]:
        return [self.inbox.popleft() for _ in range(min(messages_max, len(self.inbox)))]

    def connection_changes(self) -> list[bool]:
        changes, self.changes = self.changes, []
        return changes

    def close(self) -> None:
        self.engine.subscriptions.remove(self)


class SimulatedReplay:
    def __init__(self, engine: SimulatedEngine, wake: Callable[[], None], transport: SimulatedTransport) -> None:
        self.engine, self.wake, self.transport = engine, wake, transport
        self.inbox: deque[list[bytes]] = deque()
        self.loop = asyncio.get_running_loop()

    def request(self, start: int) -> None:
        self.loop.call_later(self.engine.link.latency_s, self._serve, start)

    def _serve(self, start: int) -> None:
        answers = self.engine.answer(start)
        self.loop.call_later(self.engine.link.latency_s, self._arrive, answers)

    def _arrive(self, answers: list[list[bytes]]) -> None:
        self.inbox.extend(answers)
        self.wake()

    def drain(self, messages_max: int) -> list[list[bytes]]:
        return [self.inbox.popleft() for _ in range(min(messages_max, len(self.inbox)))]

    def close(self) -> None:
        self.transport.replays_open -= 1
