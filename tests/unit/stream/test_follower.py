"""The life of one publisher, in virtual time and without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager

import pytest

from indexer.index.state import Checkpoint, Coverage, CoverageReason, Trust
from indexer.stream.followed import FollowedPublisher, FollowState
from indexer.stream.follower import Clock, Follower, fingerprint_of
from indexer.stream.limits import StreamLimits
from indexer.stream.repair import ReplayTurns
from tests.stream_stand_ins import (
    END_MARKER,
    RecordingPublisher,
    SimulatedEngine,
    SimulatedTransport,
    number_frame,
    payload,
    registration,
    removed,
    run_virtual,
    stored,
    until,
)

LIVE, REPLAY = "tcp://engine:5557", "tcp://engine:5558"
LIMITS = StreamLimits(replay_idle_timeout_s=2.0, replay_timeout_s=20.0, replay_cool_down_s=30.0)


class Scene:
    """One engine, one follower, and what came of it."""

    def __init__(
        self,
        engine: SimulatedEngine,
        *,
        has_replay: bool = True,
        checkpoint: Checkpoint | None = None,
        limits: StreamLimits = LIMITS,
    ) -> None:
        self.engine = engine
        self.registration = registration(endpoint=LIVE, replay_endpoint=REPLAY if has_replay else None)
        self.publisher = RecordingPublisher(self.registration, checkpoint)
        self.publisher.show(Trust(Coverage.DISCONNECTED, CoverageReason.NEVER_CONNECTED, None))
        self.followed = FollowedPublisher(self.registration, self.publisher)
        self.transport = SimulatedTransport({LIVE: engine, REPLAY: engine})
        self.limits = limits
        self.counters = self.followed.counters

    def follower(self) -> Follower:
        ticks = iter(range(10**9))
        clock = Clock(wall=lambda: 1_000.0, elapsed=lambda: next(ticks) / 1_000)
        turns = ReplayTurns(4)
        return Follower(self.followed, self.transport, self.limits, replay_turns=turns, clock=clock)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[Follower]:
        follower = self.follower()
        task = asyncio.create_task(follower.run())
        await asyncio.sleep(0)
        try:
            yield follower
            assert not task.done() or follower._is_finishing, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.transport.close()

    async def until_applied(self, number: int, limit_s: float = 10.0) -> None:
        await until(lambda: self.publisher.checkpoint.sequence_number == number, limit_s, f"batch {number}")

    async def until_state(self, state: FollowState, limit_s: float = 10.0) -> None:
        await until(lambda: self.followed.state is state, limit_s, state)


def engine_with(*numbers: int, **values: object) -> SimulatedEngine:
    """An engine that has published batches 0, 1, ... each storing the block with its number plus one."""
    engine = SimulatedEngine(**values)  # type: ignore[arg-type]
    for number in numbers:
        engine.publish(stored(number + 1))
    return engine


def frames(number: int, data: bytes) -> list[bytes]:
    return [b"", b"topic", number_frame(number), data]


def pile_up(scene: Scene, batches: Sequence[bytes], lost: Container[int] = ()) -> None:
    """Batches 0, 1, ... arrive at the same moment."""
    (live,) = scene.engine.subscriptions
    live.inbox.extend(frames(number, data)[1:] for number, data in enumerate(batches) if number not in lost)
    live.wake()


# ---------------------------------------------------------------------- without replay


def test_batches_are_applied_in_order() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            assert scene.followed.state is FollowState.CONNECTING
            assert scene.publisher.coverage is Coverage.DISCONNECTED
            await scene.until_state(FollowState.CONNECTED)
            for block in range(300):
                scene.engine.publish(stored(block))
            await scene.until_applied(299)
            assert scene.publisher.applied == list(range(300))
            assert scene.publisher.coverage is Coverage.COMPLETE
            assert scene.followed.last_batch_at == 1_000.0

    run_virtual(main())


@pytest.mark.parametrize("odd", [40, 41, 47, 99])
def test_batches_that_piled_up_are_applied_in_order_around_one_that_is_not_simple(odd: int) -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            batches = [b"no batch" if number == odd else payload(stored(number)) for number in range(100)]
            pile_up(scene, batches, lost=(60, 61))
            await scene.until_applied(99)
            assert scene.publisher.applied == [n for n in range(100) if n not in (odd, 60, 61)]
            told = [("skip", odd), ("gap", 60)]
            assert [entry[:2] for entry in scene.publisher.told] == (told if odd < 60 else told[::-1])
            assert scene.counters["batches_applied"] == 97
            assert scene.publisher.together_most > 2

    run_virtual(main())


def test_ranks_of_batches_applied_together_are_checked_one_by_one() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            pile_up(scene, [payload(stored(number), rank=number % 2) for number in range(50)])
            await scene.until_applied(49)
            assert scene.counters["rank_mismatches"] == 25

    run_virtual(main())


def test_after_a_failure_batches_are_applied_one_at_a_time() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        scene.counters["failures"] = 1
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            pile_up(scene, [payload(stored(number)) for number in range(50)])
            await scene.until_applied(49)
            assert scene.publisher.together_most == 1

    run_virtual(main())


def test_joining_late_says_since_when_and_is_no_gap() -> None:
    async def main() -> None:
        scene = Scene(engine_with(*range(7)), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            scene.engine.publish(stored(8))
            await scene.until_applied(7)
            assert scene.publisher.told == [("since", "joined_late", 7)]
            assert scene.counters["gaps"] == 0

    run_virtual(main())


def test_a_gap_without_replay_is_counted_and_the_stream_goes_on() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            for number in range(6):
                scene.engine.publish(stored(number), is_lost=number in (3, 4))
            await scene.until_applied(5)
            assert scene.publisher.told == [("gap", 3, 4)]
            assert scene.counters["missing_batches"] == 2
            assert scene.publisher.coverage is Coverage.DEGRADED

    run_virtual(main())


def test_numbers_falling_back_drop_everything_first_then_apply() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            for number in range(5):
                scene.engine.publish(stored(100 + number))
            await scene.until_applied(4)
            scene.engine.restart()
            await until(lambda: scene.engine.subscriptions[0].is_connected)
            scene.engine.publish(stored(7))
            await scene.until_applied(0)
            assert scene.publisher.told == [("doubt", "continuity_unproven"), ("restart",)]
            assert dict(scene.publisher.held) == {7: 1}
            assert scene.publisher.coverage is Coverage.COMPLETE
            assert scene.publisher.checkpoint.generation == 2

    run_virtual(main())


def test_the_same_first_batch_again_after_a_reconnect_is_a_restart() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            for _ in range(2):
                await scene.until_state(FollowState.CONNECTED)
                scene.engine.publish_payload(payload(stored(1)))
                await scene.until_applied(0)
                scene.engine.restart()
                await scene.until_state(FollowState.DISCONNECTED)
            assert scene.publisher.told == [("doubt", "continuity_unproven"), ("restart",)]
            assert dict(scene.publisher.held) == {1: 1}

    run_virtual(main())


def test_a_repeated_frame_is_left_out() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        scene.engine.link.repeat = 1.0
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            for number in range(5):
                scene.engine.publish(stored(number))
            await until(lambda: scene.counters["duplicates"] == 5)
            assert scene.publisher.applied == [0, 1, 2, 3, 4]

    run_virtual(main())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([b"data"], "frame_count"),
        ([b"topic", b"data"], "frame_count"),
        ([b"topic", number_frame(1), b"data", b""], "frame_count"),
        ([b"topic", b"\0\0\0\1", b"data"], "sequence_bytes"),
        ([b"topic", b"\xff" * 8, b""], "sequence_range"),
    ],
)
def test_bad_messages_are_counted_and_the_stream_lives_on(bad: list[bytes], reason: str) -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            scene.engine.publish(stored(1))
            scene.engine.subscriptions[0].carry(bad)
            scene.engine.publish(stored(2))
            await scene.until_applied(1)
            assert scene.counters["bad_messages"] == scene.counters[f"bad_messages_{reason}"] == 1
            assert scene.followed.last_bad_message == (reason, tuple(map(len, bad)))
            assert scene.publisher.told == []

    run_virtual(main())


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "truncated_batch"), (b"\xc1", "truncated_batch"), (b"\x07", "not_a_batch")]
)
def test_an_unreadable_payload_costs_only_itself(data: bytes, reason: str) -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            scene.engine.publish(stored(1))
            scene.engine.publish_payload(data)
            scene.engine.publish(stored(2))
            await scene.until_applied(2)
            assert scene.publisher.told == [("skip", 1, reason)]
            assert scene.publisher.applied == [0, 2]
            assert scene.counters["unreadable_batches"] == 1

    run_virtual(main())


def test_another_rank_in_a_batch_is_counted_and_applied_to_the_registered_publisher() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            for rank in (0, 3, None):
                scene.engine.publish_payload(payload(stored(1), rank=rank))
            await scene.until_applied(2)
            assert scene.publisher.held[1] == 3
            assert scene.counters["rank_mismatches"] == 1

    run_virtual(main())


def test_coverage_shows_disconnected_and_afterwards_that_nothing_is_proven() -> None:
    async def main() -> None:
        scene = Scene(engine_with(0, 1), has_replay=False)
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            scene.engine.publish(stored(2))
            await scene.until_applied(2)
            scene.engine.stop()
            await scene.until_state(FollowState.DISCONNECTED)
            assert scene.publisher.trust[:2] == (Coverage.DISCONNECTED, CoverageReason.CONNECTION_LOST)
            assert scene.publisher.checkpoint.coverage is Coverage.SINCE
            scene.engine.start(as_new_run=False)
            await scene.until_state(FollowState.CONNECTED)
            assert scene.publisher.trust[:2] == (Coverage.DEGRADED, CoverageReason.CONTINUITY_UNPROVEN)
            assert scene.publisher.checkpoint.since == 2

    run_virtual(main())


# ---------------------------------------------------------------------- start, with replay


def test_the_past_is_asked_for_at_once_and_applied_before_live_batches() -> None:
    async def main() -> None:
        scene = Scene(engine_with(0, 1, 2))
        async with scene.following():
            assert scene.followed.is_in_first_replay
            await until(lambda: scene.engine.subscriptions[0].is_connected)
            scene.engine.publish(stored(4))
            await scene.until_applied(3)
            assert scene.publisher.applied == [0, 1, 2, 3]
            assert set(scene.publisher.shown) <= {Coverage.RECOVERING, Coverage.COMPLETE}
            assert scene.publisher.shown[0] is Coverage.RECOVERING
            await scene.until_state(FollowState.CONNECTED)
            assert scene.publisher.coverage is Coverage.COMPLETE
            assert scene.engine.requests == [0]
            assert not scene.followed.is_in_first_replay

    run_virtual(main())


def test_a_past_that_starts_later_than_asked_for_says_since_when() -> None:
    async def main() -> None:
        scene = Scene(engine_with(*range(10), buffer_batches=4))
        async with scene.following():
            await scene.until_applied(9)
            assert scene.publisher.told == [("since", "replay_starts_later", 6)]
            assert scene.publisher.applied == [6, 7, 8, 9]

    run_virtual(main())


def test_an_engine_that_has_sent_nothing_is_complete() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            await scene.until_state(FollowState.CONNECTED)
            assert scene.publisher.coverage is Coverage.COMPLETE
            assert scene.publisher.told == []

    run_virtual(main())


def test_a_checkpoint_is_proven_by_its_batch_and_continued() -> None:
    async def main() -> None:
        engine = engine_with(*range(6))
        number, data = engine.buffer[3]
        scene = Scene(engine, checkpoint=Checkpoint(1, number, fingerprint_of(data)))
        async with scene.following():
            await scene.until_applied(5)
            assert engine.requests == [3]
            assert scene.publisher.applied == [4, 5]
            assert scene.publisher.told == []

    run_virtual(main())


def test_another_batch_under_the_checkpoint_is_a_restart() -> None:
    async def main() -> None:
        engine = engine_with(*range(6))
        scene = Scene(engine, checkpoint=Checkpoint(1, 3, 12345))
        scene.publisher.held.update([77])
        async with scene.following():
            await scene.until_applied(5)
            assert engine.requests == [3, 0]
            assert scene.publisher.told == [("restart",), ("complete", "replayed")]
            assert scene.publisher.applied == [0, 1, 2, 3, 4, 5]
            assert 77 not in scene.publisher.held
            assert scene.publisher.coverage in (Coverage.RECOVERING, Coverage.COMPLETE)

    run_virtual(main())


@pytest.mark.parametrize("published", [0, 2])
def test_a_newest_number_below_the_checkpoint_is_a_restart(published: int) -> None:
    async def main() -> None:
        scene = Scene(engine_with(*range(published)), checkpoint=Checkpoint(1, 900, 1))
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"] == 2 and scene.counters["restarts"] == 1)
            await scene.until_state(FollowState.CONNECTED)
            assert scene.publisher.told == [("restart",), ("complete", "replayed")][: 1 + (published > 0)]
            assert scene.publisher.applied == list(range(published))

    run_virtual(main())


def test_a_past_that_no_longer_holds_the_checkpoint_leaves_coverage_degraded() -> None:
    async def main() -> None:
        scene = Scene(engine_with(*range(10), buffer_batches=4), checkpoint=Checkpoint(1, 2, 1))
        async with scene.following():
            await scene.until_applied(9)
            assert ("gap", 3, 5) in scene.publisher.told
            assert ("doubt", "continuity_unproven") in scene.publisher.told

    run_virtual(main())


def test_a_past_that_begins_right_after_the_checkpoint_proves_nothing() -> None:
    async def main() -> None:
        scene = Scene(engine_with(*range(10), buffer_batches=4), checkpoint=Checkpoint(1, 5, 1))
        async with scene.following():
            await scene.until_applied(9)
            assert scene.publisher.checkpoint.coverage is Coverage.DEGRADED

    run_virtual(main())


def test_an_endpoint_that_does_not_answer_delays_live_batches_once_and_not_for_long() -> None:
    async def main() -> None:
        scene = Scene(engine_with(0, 1, is_silent=True))
        loop = asyncio.get_running_loop()
        async with scene.following():
            await until(lambda: scene.engine.subscriptions[0].is_connected)
            scene.engine.publish(stored(3))
            started = loop.time()
            await scene.until_applied(2)
            assert loop.time() - started < LIMITS.replay_idle_timeout_s + 0.1
            assert scene.publisher.told == [("since", "joined_late", 2)]
            started = loop.time()
            scene.engine.publish(stored(4), is_lost=True)
            scene.engine.publish(stored(5))
            await scene.until_applied(4)
            assert loop.time() - started < 0.1
            assert scene.engine.requests == [0]
            assert scene.publisher.coverage is Coverage.DEGRADED

    run_virtual(main())


def test_an_endpoint_that_did_not_answer_is_asked_again_after_a_while() -> None:
    async def main() -> None:
        scene = Scene(engine_with(0, is_silent=True))
        async with scene.following():
            await until(lambda: scene.counters["replays_silent"])
            scene.engine.is_silent = False
            await asyncio.sleep(LIMITS.replay_cool_down_s + 0.1)
            scene.engine.publish(stored(2))
            await scene.until_applied(1)
            assert scene.publisher.applied == [0, 1]

    run_virtual(main())


# ---------------------------------------------------------------------- gaps, with replay


@pytest.mark.parametrize("front", [[b""], [b"", b"topic"]], ids=["three frames", "four frames"])
def test_a_gap_is_replayed_before_the_batch_that_showed_it(front: list[bytes]) -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        scene.engine.answers = lambda start, buffered: [
            *([*front, number_frame(n), data] for n, data in buffered if n >= start),
            [*front, b"\xff" * 8, b""],
        ]
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            for number in range(8):
                scene.engine.publish(stored(number), is_lost=number in (3, 4))
            await scene.until_applied(7)
            assert scene.engine.requests == [0, 2]
            assert scene.publisher.applied == list(range(8))
            assert scene.publisher.told == []
            assert scene.counters["gaps_repaired"] == 1
            assert scene.publisher.checkpoint.coverage is Coverage.COMPLETE

    run_virtual(main())


def test_a_number_that_the_engine_never_sent_is_lost_and_not_asked_for_twice() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            scene.engine.publish(stored(0))
            scene.engine.next_number = 3
            for number in range(3, 6):
                scene.engine.publish(stored(number))
            await scene.until_applied(5)
            assert scene.engine.requests == [0, 0]
            assert scene.publisher.told == [("gap", 1, 2)]
            assert scene.publisher.applied == [0, 3, 4, 5]

    run_virtual(main())


def test_a_replay_with_a_hole_is_asked_again_from_the_hole() -> None:
    async def main() -> None:
        scene = Scene(engine_with(*range(10)))

        def lossy(start: int, buffered: list[tuple[int, bytes]]) -> list[list[bytes]]:
            wanted = [(n, data) for n, data in buffered if n >= start]
            kept = [b for b in wanted if b[0] not in (4, 5)] if start == 0 else wanted
            return [*(frames(*b) for b in kept), END_MARKER]

        scene.engine.answers = lossy
        async with scene.following():
            await scene.until_applied(9)
            assert scene.engine.requests == [0, 3]
            assert scene.publisher.applied == list(range(10))
            assert scene.publisher.checkpoint.coverage is Coverage.COMPLETE

    run_virtual(main())


@pytest.mark.parametrize(
    ("answers", "is_repaired"),
    [
        ([[b"garbage"]], False),
        ([[b"", b"x", b"data"], END_MARKER], False),
        ([END_MARKER], False),
        ([frames(9, payload(stored(9))), END_MARKER], False),
        ([2, 3, 4, 5], True),  # no end marker
        ([2, 3, 4], False),  # and not the held batch
        ([3, 4, 5], False),  # no lead-in, but the held batch
        ([3, 4], False),  # neither
        ([frames(1, payload()), frames(3, payload(stored(3))), frames(4, payload(stored(4))), END_MARKER], False),
    ],
    ids=[
        "garbage",
        "bad number",
        "only the end",
        "starts beyond",
        "no end marker",
        "too short",
        "no lead-in",
        "nothing to prove it",
        "another run",
    ],
)
def test_whatever_a_replay_endpoint_does_live_batches_are_applied_in_bounded_time(
    answers: list[int | list[bytes]], is_repaired: bool
) -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        loop = asyncio.get_running_loop()
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            scene.engine.answers = lambda start, buffered: [
                frames(*buffered[a]) if isinstance(a, int) else a for a in answers
            ]
            for number in range(6):
                scene.engine.publish(stored(number), is_lost=number in (3, 4))
            started = loop.time()
            await scene.until_applied(5)
            assert loop.time() - started < 2 * LIMITS.replay_idle_timeout_s
            assert (scene.publisher.checkpoint.coverage is Coverage.COMPLETE) == is_repaired
            assert scene.counters["replays"] <= 2 + LIMITS.replay_tries_max

    run_virtual(main())


def test_part_of_a_gap_is_repaired_and_the_rest_is_lost() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            scene.engine.answers = lambda start, buffered: [frames(*buffered[n]) for n in (2, 3)]
            for number in range(8):
                scene.engine.publish(stored(number), is_lost=number in (3, 4))
            await scene.until_applied(7)
            assert scene.publisher.applied == [0, 1, 2, 3, 5, 6, 7]
            assert scene.publisher.told == [("gap", 4, 4)]

    run_virtual(main())


def test_too_many_held_batches_end_a_replay_and_nothing_live_is_lost() -> None:
    async def main() -> None:
        limits = StreamLimits(held_batches_max=10, replay_idle_timeout_s=1_000.0, replay_timeout_s=1_000.0)
        scene = Scene(engine_with(0, is_silent=True), limits=limits)
        async with scene.following():
            await scene.until_state(FollowState.REPLAYING)
            for number in range(1, 100):
                scene.engine.publish(stored(number))
            await scene.until_applied(99)
            assert scene.counters["replays_held_full"] >= 1
            assert scene.publisher.applied == list(range(1, 100))
            assert scene.publisher.told == [("since", "joined_late", 1)]

    run_virtual(main())


def test_the_byte_bound_of_held_batches_counts_too() -> None:
    async def main() -> None:
        limits = StreamLimits(held_bytes_max=2_000, replay_idle_timeout_s=1_000.0, replay_timeout_s=1_000.0)
        scene = Scene(engine_with(0, is_silent=True), limits=limits)
        async with scene.following():
            await scene.until_state(FollowState.REPLAYING)
            for _ in range(10):
                scene.engine.publish(stored(*range(50)))
            await scene.until_applied(10)
            assert scene.counters["replays_held_full"] >= 1

    run_virtual(main())


# ---------------------------------------------------------------------- restarts, with replay


def test_a_reconnect_to_the_same_run_fetches_what_was_missed() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            for number in range(3):
                scene.engine.publish(stored(number))
            await scene.until_applied(2)
            scene.engine.stop()
            for number in range(3, 6):
                scene.engine.publish(stored(number))
            scene.engine.start(as_new_run=False)
            await scene.until_applied(5)
            assert scene.engine.requests == [0, 2]
            assert scene.publisher.applied == list(range(6))
            assert scene.publisher.told == []

    run_virtual(main())


@pytest.mark.parametrize("has_passed", [False, True], ids=["new run is shorter", "new run has passed our last number"])
def test_a_restart_behind_a_lost_connection_is_found_by_replay(has_passed: bool) -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            for number in range(3):
                scene.engine.publish(stored(100 + number))
            await scene.until_applied(2)
            scene.engine.stop()
            scene.engine.start(as_new_run=True)
            blocks = range(10 if has_passed else 2)
            for block in blocks:
                scene.engine.publish(stored(block))
            await scene.until_applied(len(blocks) - 1)
            assert scene.publisher.told == [("restart",), ("complete", "replayed")]
            assert sorted(scene.publisher.held) == list(blocks)
            await scene.until_state(FollowState.CONNECTED)
            scene.engine.publish(stored(50))
            await scene.until_applied(len(blocks))
            assert scene.publisher.coverage is Coverage.COMPLETE

    run_virtual(main())


def test_late_batches_of_the_old_run_change_nothing() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            for number in range(3):
                scene.engine.publish(stored(100 + number))
            await scene.until_applied(2)
            live = scene.engine.subscriptions[0]
            for number in (3, 4):  # sent before the engine died, read after the new connection was made
                live.inbox.append([b"", number_frame(number), payload(stored(100 + number))])
            live.is_connected = False
            live.changes.append(False)
            scene.engine.start(as_new_run=True)
            scene.engine.publish(stored(1))
            live._connect()
            await scene.until_applied(0)
            scene.engine.publish(stored(2))
            await scene.until_applied(1)
            assert sorted(scene.publisher.held) == [1, 2]
            assert scene.counters["late_batches"] == 2
            assert scene.publisher.told == [("restart",), ("complete", "replayed")]

    run_virtual(main())


def test_a_restart_seen_live_asks_for_the_numbers_before_it() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            for number in range(9):
                scene.engine.publish(stored(100 + number))
            await scene.until_applied(8)
            scene.engine.next_number = 0  # no lost connection is seen, as behind a proxy
            scene.engine.buffer.clear()
            for number in range(4):
                scene.engine.publish(stored(number), is_lost=number < 2)
            await scene.until_applied(3)
            assert scene.publisher.told == [("restart",), ("complete", "replayed")]
            assert sorted(scene.publisher.held) == [0, 1, 2, 3]
            assert scene.publisher.checkpoint.coverage is Coverage.COMPLETE

    run_virtual(main())


# ---------------------------------------------------------------------- rebuilding


def test_an_index_that_needs_replay_gets_the_whole_run_again() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        scene.publisher.needs_replay_at = [4]
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            for number in range(7):
                scene.engine.publish(stored(number), removed(number - 3))
            await scene.until_applied(6)
            assert scene.publisher.applied == [0, 1, 2, 3, 4, *range(7)]
            assert sorted(scene.publisher.held) == [4, 5, 6]
            assert scene.publisher.checkpoint.coverage is Coverage.COMPLETE

    run_virtual(main())


def test_an_index_that_needs_replay_and_cannot_have_it_is_degraded() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        scene.publisher.needs_replay_at = [2]
        async with scene.following():
            await scene.until_state(FollowState.CONNECTED)
            for number in range(4):
                scene.engine.publish(stored(number))
            await scene.until_applied(3)
            assert scene.publisher.applied == [0, 1, 2, 3]
            assert scene.publisher.coverage is Coverage.DEGRADED

    run_virtual(main())


def test_an_index_that_needs_replay_again_and_again_is_given_up() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        scene.publisher.needs_replay_at = [2] * 50
        async with scene.following():
            await until(lambda: scene.counters["replays_marker"])
            for number in range(3):
                scene.engine.publish(stored(number))
            await until(lambda: scene.counters["rebuilds"] == LIMITS.replay_tries_max)
            scene.engine.publish(stored(3))
            await scene.until_applied(3)
            assert scene.publisher.checkpoint.coverage is Coverage.DEGRADED

    run_virtual(main())


# ---------------------------------------------------------------------- the end


def test_finishing_applies_what_was_received() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine(), has_replay=False)
        async with scene.following() as follower:
            await scene.until_state(FollowState.CONNECTED)
            live = scene.engine.subscriptions[0]
            live.inbox.extend([b"", number_frame(n), payload(stored(n))] for n in range(1_000))
            follower.finish()
            await scene.until_applied(999)
            await until(lambda: not scene.engine.subscriptions)

    run_virtual(main())


def test_finishing_does_not_step_over_a_gap_or_wait_for_a_replay() -> None:
    async def main() -> None:
        scene = Scene(SimulatedEngine())
        async with scene.following() as follower:
            await until(lambda: scene.counters["replays_marker"])
            scene.engine.is_silent = True
            for number in range(5):
                scene.engine.publish(stored(number), is_lost=number == 2)
            await scene.until_state(FollowState.REPLAYING)
            follower.finish()
            await until(lambda: not scene.engine.subscriptions, limit_s=0.5)
            assert scene.publisher.checkpoint.sequence_number == 1
            assert scene.publisher.checkpoint.coverage is Coverage.COMPLETE

    run_virtual(main())
