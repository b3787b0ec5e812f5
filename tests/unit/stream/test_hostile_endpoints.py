"""Replay endpoints that are silent, slow, endless or not the engine's own: live batches go on, and coverage says it."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from indexer.index.state import Checkpoint, Coverage, CoverageReason
from indexer.stream.followed import FollowState
from indexer.stream.limits import StreamLimits
from indexer.stream.registry import Registry
from tests.stream_stand_ins import (
    END_MARKER,
    RecordingIndex,
    RecordingStore,
    SimulatedEngine,
    SimulatedReplay,
    SimulatedTransport,
    number_frame,
    payload,
    registration,
    run_virtual,
    stored,
    until,
)
from tests.unit.stream.test_follower import LIMITS, LIVE, REPLAY, Scene, engine_with, fingerprint_of, frames


def test_two_hundred_silent_endpoints_hold_up_nobody_for_long() -> None:
    limits = StreamLimits(replays_max=4, replay_turn_wait_s=10.0, replay_idle_timeout_s=2.0)

    async def main() -> None:
        engines = {f"tcp://h:{port}": engine_with(0, is_silent=True) for port in range(1, 201)}
        registry = Registry(RecordingIndex(), RecordingStore(), limits, transport=SimulatedTransport(engines))
        running = asyncio.create_task(registry.run())
        for port, endpoint in enumerate(engines, 1):
            await registry.register(registration(dp_rank=port, endpoint=endpoint, replay_endpoint=endpoint))
        await until(lambda: all(engine.subscriptions[0].is_connected for engine in engines.values()))
        for engine in engines.values():
            engine.publish(stored(2))
        started = asyncio.get_running_loop().time()
        await until(lambda: all(f.index.applied == [1] for f in registry.followed()), 60)
        took_s = asyncio.get_running_loop().time() - started
        assert took_s <= limits.replay_turn_wait_s + limits.replay_idle_timeout_s + 0.1
        counted = sum((f.counters for f in registry.followed()), start=type(registry.followed()[0].counters)())
        assert counted["replays_no_turn"] > 100
        assert counted["replays_silent"] > 10
        await registry.close()
        await running

    run_virtual(main())


def test_while_a_turn_is_waited_for_that_is_shown() -> None:
    async def main() -> None:
        engines = {f"tcp://h:{port}": engine_with(0, is_silent=True) for port in (1, 2)}
        limits = StreamLimits(replays_max=1)
        registry = Registry(RecordingIndex(), RecordingStore(), limits, transport=SimulatedTransport(engines))
        running = asyncio.create_task(registry.run())
        for rank, endpoint in enumerate(engines):
            await registry.register(registration(dp_rank=rank, endpoint=endpoint, replay_endpoint=endpoint))
        shown = lambda: {f.index.trust.reason for f in registry.followed()}  # noqa: E731
        await until(lambda: shown() == {CoverageReason.REPLAYING, CoverageReason.WAITING_FOR_TURN})
        assert {f.replay.state for f in registry.followed()} == {"running", "waiting_for_turn"}
        assert all(f.state is FollowState.REPLAYING for f in registry.followed())
        await until(lambda: not registry.first_replays_pending, 30)
        assert {f.replay.state for f in registry.followed()} == {"cooling_down"}
        assert all(f.replay.last_end == "silent" and f.replay.next_try_at for f in registry.followed())
        await registry.close()
        await running

    run_virtual(main())


@pytest.mark.parametrize("pause_s", [1.9, 0.05], ids=["trickling", "endless"])
def test_an_endpoint_that_never_ends_is_given_up_in_time(pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(self: SimulatedReplay, start: int) -> None:
        def send(number: int) -> None:
            self._arrive([frames(number, payload(stored(number)))])
            self.loop.call_later(pause_s, send, number + 1)

        send(start)

    monkeypatch.setattr(SimulatedReplay, "_serve", serve)

    async def main() -> None:
        scene = Scene(SimulatedEngine(next_number=10**6))
        async with scene.following():
            await until(lambda: scene.engine.subscriptions[0].is_connected)
            started = asyncio.get_running_loop().time()
            newest = scene.engine.publish(stored(5))
            await scene.until_applied(newest, limit_s=1_000)
            assert asyncio.get_running_loop().time() - started <= LIMITS.replay_timeout_s + 2 * pause_s
            assert scene.counters["replays_deadline"] == 1
            assert scene.publisher.checkpoint.coverage is not Coverage.COMPLETE

    run_virtual(main())


def test_an_endpoint_of_another_rank_is_found_out_and_nothing_of_it_stays() -> None:
    """The port offset of ranks is easily wrong: the endpoint is that of another engine."""

    async def main() -> None:
        scene = Scene(SimulatedEngine(seed=1))
        other = SimulatedEngine(seed=2, clock=5e8)
        for number in range(10):
            other.publish(stored(1_000 + number))
            scene.engine.publish(stored(number))
        scene.transport.engines = {LIVE: scene.engine, REPLAY: other}
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            for number in range(10, 15):
                scene.engine.publish(stored(number))
                other.publish(stored(1_000 + number))
            await scene.until_applied(14)
            assert all(block < 1_000 for block in scene.publisher.held)
            assert scene.publisher.trust[:2] == (Coverage.SINCE, CoverageReason.REPLAY_IS_FOREIGN)
            assert scene.publisher.checkpoint.since == 10
            assert scene.followed.replay.state == "distrusted"
            asked = len(other.requests)
            scene.engine.publish(stored(15), is_lost=True)
            scene.engine.publish(stored(16))
            await scene.until_applied(16)
            assert len(other.requests) == asked

    run_virtual(main())


@pytest.mark.parametrize("has_checkpoint", [False, True], ids=["reconnected", "from a checkpoint"])
def test_without_a_replay_endpoint_nothing_is_proven_and_coverage_says_so(has_checkpoint: bool) -> None:
    async def main() -> None:
        engine = engine_with(*range(4))
        number, data = engine.buffer[3]
        checkpoint = Checkpoint(1, number, fingerprint_of(data)) if has_checkpoint else None
        scene = Scene(engine if has_checkpoint else SimulatedEngine(), has_replay=False, checkpoint=checkpoint)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            if not has_checkpoint:
                scene.engine.publish(stored(1))
                await scene.until_applied(0)
                assert scene.publisher.coverage is Coverage.COMPLETE
                scene.engine.stop()
                await scene.until_state(FollowState.DISCONNECTED)
                scene.engine.start(as_new_run=False)
                await scene.until_state(FollowState.CONNECTED)
            newest = scene.engine.publish(stored(9))
            await scene.until_applied(newest)
            assert scene.publisher.held[9]
            assert scene.publisher.trust[:2] == (Coverage.DEGRADED, CoverageReason.CONTINUITY_UNPROVEN)

    run_virtual(main())


def test_what_was_sent_before_a_checkpoint_was_read_is_no_restart() -> None:
    async def main() -> None:
        engine = engine_with(*range(6))
        number, data = engine.buffer[3]
        scene = Scene(engine, has_replay=False, checkpoint=Checkpoint(1, number, fingerprint_of(data)))
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            for past, past_data in itertools.islice(engine.buffer, 1, 6):
                engine.subscriptions[0].carry([b"", number_frame(past), past_data])
            await scene.until_applied(5)
            assert scene.publisher.applied == [4, 5]
            assert scene.publisher.checkpoint.coverage is Coverage.COMPLETE
            assert ("restart",) not in scene.publisher.told

    run_virtual(main())


def test_a_batch_nobody_can_read_is_a_lost_batch() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            scene.engine.publish(stored(1))
            scene.engine.publish_payload(b"\xc1")
            await scene.until_applied(1)
            assert scene.publisher.trust[:2] == (Coverage.DEGRADED, CoverageReason.UNREADABLE_BATCH)
            assert scene.publisher.trust.at == 1_000.0

    run_virtual(main())


def test_an_endpoint_that_says_there_is_nothing_below_a_live_batch_is_contradicted() -> None:
    async def main() -> None:
        scene = Scene(engine_with(*range(5)))
        scene.engine.answers = lambda start, buffered: [*(frames(*b) for b in buffered[:3]), END_MARKER]
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            newest = scene.engine.publish(stored(6))
            await scene.until_applied(newest)
            assert scene.publisher.checkpoint.coverage is not Coverage.COMPLETE

    run_virtual(main())
