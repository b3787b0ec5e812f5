"""Following engines over real ZMQ sockets, into the real index."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.index.state import Coverage, CoverageReason
from indexer.stream.followed import FollowedPublisher, FollowState
from indexer.stream.limits import StreamLimits
from indexer.stream.registry import Registry
from indexer.stream.zmq_source import ZmqTransport
from tests.integration.stream.zmq_engine import Answers, ZmqEngine, four_frames, three_frames
from tests.stream_stand_ins import RecordingStore, number_frame, payload, registration, removed, stored, until

LIMITS = StreamLimits(replay_idle_timeout_s=0.5, replay_timeout_s=5.0, replay_cool_down_s=60.0)


class Scene:
    def __init__(self, registry: Registry[PublisherIndex], index: ContentIndex, transport: ZmqTransport) -> None:
        self.registry, self.index, self.transport = registry, index, transport
        self.engines: list[ZmqEngine] = []

    def engine(self, host: str = "127.0.0.1", answers: Answers | None = None, send_queue_max: int = 0) -> ZmqEngine:
        engine = ZmqEngine(host, answers, send_queue_max)
        self.engines.append(engine)
        return engine

    async def follow(
        self, engine: ZmqEngine, /, *, replay: bool = False, **values: object
    ) -> FollowedPublisher[PublisherIndex]:
        given = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint if replay else None} | values
        followed, _ = await self.registry.register(registration(**given))
        await subscribed(engine)
        await until(lambda: followed.state is FollowState.CONNECTED and not followed.is_in_first_replay)
        return followed


@asynccontextmanager
async def scene(limits: StreamLimits = LIMITS) -> AsyncIterator[Scene]:
    index = ContentIndex()
    transport = ZmqTransport(limits)
    registry: Registry[PublisherIndex] = Registry(index, RecordingStore(), limits, transport=transport)
    made = Scene(registry, index, transport)
    running = asyncio.create_task(registry.run())
    try:
        yield made
    finally:
        await registry.close()
        await running
        for engine in made.engines:
            engine.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the loop that the service uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def subscribed(engine: ZmqEngine) -> None:
    await asyncio.to_thread(engine.wait_for_subscription)


async def applied(followed: FollowedPublisher[PublisherIndex], number: int) -> None:
    await until(lambda: followed.index.checkpoint.sequence_number == number, 15, f"batch {number} of {followed}")


def block(number: int) -> bytes:
    return payload(stored(1_000 + number))


def holds(followed: FollowedPublisher[PublisherIndex]) -> list[int]:
    """Numbers of the batches whose block is held, as often as it is."""
    counts = {h: count for _, h, _, count in followed.index.residencies()}
    return sorted(int(h) - 1_000 for h, count in counts.items() for _ in range(count))


def test_a_gap_without_replay_lowers_coverage_and_the_stream_goes_on() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine)
            for number in range(6):
                engine.publish(block(number), is_lost=number in (2, 3))
            await applied(followed, 5)
            assert holds(followed) == [4, 5]
            assert followed.index.status().unverified == 2, "the lost batches may have removed them"
            assert followed.index.coverage is Coverage.DEGRADED
            assert (followed.index.gaps, followed.index.missing_batches) == (1, 2)

    run(main)


@pytest.mark.parametrize("answers", [four_frames, three_frames])
def test_a_gap_is_repaired_by_replay(answers: Answers) -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine(answers=answers)
            followed = await s.follow(engine, replay=True)
            for number in range(6):
                engine.publish(block(number), is_lost=number in (2, 3))
            await applied(followed, 5)
            assert holds(followed) == [0, 1, 2, 3, 4, 5]
            assert followed.index.coverage is Coverage.COMPLETE
            assert engine.requests == [[b"", number_frame(0)], [b"", number_frame(1)]]

    run(main)


@pytest.mark.parametrize("answers", [four_frames, three_frames])
def test_a_late_subscriber_gets_the_past(answers: Answers) -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine(answers=answers)
            for number in range(3_000):
                engine.publish(block(number))
            followed = await s.follow(engine, replay=True)
            engine.publish(block(3_000))
            await applied(followed, 3_000)
            assert holds(followed) == list(range(3_001))
            assert followed.index.coverage is Coverage.COMPLETE

    run(main)


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        (lambda start, sent: [], "silent"),
        (lambda start, sent: [[b"garbage"]], "garbage"),
        (lambda start, sent: four_frames(start, sent)[:-1], "idle"),
        (lambda start, sent: [[b"", b"topic", b"\x01", b"data"]], "garbage"),
        (lambda start, sent: four_frames(start, [*sent[2:], sent[1]]), "unordered"),
    ],
    ids=["no answer", "garbage", "no end marker", "bad number", "not in order"],
)
def test_a_bad_replay_endpoint_is_counted_and_live_batches_are_not_stuck_behind_it(answers: Answers, end: str) -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine(answers=answers)
            for number in range(4):
                engine.publish(block(number))
            started = time.monotonic()
            followed = await s.follow(engine, replay=True)
            engine.publish(block(4))
            await applied(followed, 4)
            assert time.monotonic() - started < 5
            assert followed.counters[f"replays_{end}"] >= 1
            assert 4 in holds(followed)
            assert followed.index.coverage in ((Coverage.COMPLETE,) if end == "idle" else (Coverage.SINCE,))

    run(main)


def test_a_past_that_starts_later_than_asked_for_says_since_when() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine(answers=lambda start, sent: four_frames(max(start, 5), sent))
            for number in range(8):
                engine.publish(block(number))
            followed = await s.follow(engine, replay=True)
            await applied(followed, 7)
            assert holds(followed) == [5, 6, 7]
            assert followed.index.checkpoint.since == 5
            assert followed.index.coverage is Coverage.SINCE

    run(main)


@pytest.mark.parametrize("replay", [False, True], ids=["without replay", "with replay"])
def test_a_restart_on_the_same_ports_drops_what_the_old_run_left(replay: bool) -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine, replay=replay)
            for number in range(5):
                engine.publish(block(number))
            await applied(followed, 4)
            await asyncio.to_thread(engine.restart)
            await subscribed(engine)
            engine.publish(block(7))
            engine.publish(block(8))
            await applied(followed, 1)
            assert holds(followed) == [7, 8]
            await until(lambda: followed.index.coverage is Coverage.COMPLETE)
            assert followed.index.generation == 2

    run(main)


def test_a_new_run_that_has_passed_our_last_number_is_found_by_replay() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine, replay=True)
            for number in range(3):
                engine.publish(block(number))
            await applied(followed, 2)
            await asyncio.to_thread(engine.restart)
            for number in range(10, 20):
                engine.publish(block(number), is_lost=True)
            await subscribed(engine)
            await applied(followed, 9)
            assert holds(followed) == list(range(10, 20))

    run(main)


def test_the_replay_endpoint_of_another_rank_is_found_out() -> None:
    async def main() -> None:
        async with scene() as s:
            engine, other = s.engine(), s.engine()
            for number in range(5):
                engine.publish(block(number))
                other.publish(block(1_000 + number))
            followed = await s.follow(engine, replay=True, replay_endpoint=other.replay_endpoint)
            for number in range(5, 8):
                engine.publish(block(number))
                other.publish(block(1_000 + number))
            await applied(followed, 7)
            assert holds(followed) == [5, 6, 7]
            assert followed.index.trust[:2] == (Coverage.SINCE, CoverageReason.REPLAY_IS_FOREIGN)
            assert followed.counters["replays_distrusted"] == 1

    run(main)


def test_a_reconnect_to_the_same_run_is_proven_by_replay() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine, replay=True)
            for number in range(3):
                engine.publish(block(number))
            await applied(followed, 2)
            sent = list(engine.sent)
            engine.stop()
            await until(lambda: followed.state is FollowState.DISCONNECTED)
            await asyncio.to_thread(engine.open)
            engine.sent, engine.next_number = sent, 3  # the same process, behind a connection that broke
            await subscribed(engine)
            await until(lambda: followed.state is FollowState.CONNECTED)
            engine.publish(block(3))
            await applied(followed, 3)
            assert holds(followed) == [0, 1, 2, 3]
            await until(lambda: followed.index.coverage is Coverage.COMPLETE)
            assert not followed.counters["restarts"]

    run(main)


def test_a_lost_connection_is_shown_and_made_again() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine)
            engine.publish(block(0))
            await applied(followed, 0)
            engine.stop()
            await until(lambda: followed.state is FollowState.DISCONNECTED)
            assert followed.index.coverage is Coverage.DISCONNECTED
            assert followed.index.checkpoint.coverage is Coverage.COMPLETE
            await asyncio.to_thread(engine.open)
            engine.next_number = 1  # the same run, behind a connection that broke
            await subscribed(engine)
            engine.publish(block(1))
            await applied(followed, 1)
            assert holds(followed) == [0, 1]
            assert followed.index.trust[:2] == (Coverage.DEGRADED, CoverageReason.CONTINUITY_UNPROVEN)
            assert followed.counters["connections_lost"] == 1

    run(main)


def test_ranks_of_one_engine_are_publishers_of_their_own() -> None:
    async def main() -> None:
        async with scene() as s:
            engines = [s.engine(), s.engine()]
            ranks = [await s.follow(engine, dp_rank=rank) for rank, engine in enumerate(engines)]
            for rank, engine in enumerate(engines):
                engine.publish(payload(stored(1_001), rank=rank))
                await applied(ranks[rank], 0)
            engines[1].publish(payload(removed(1_001), rank=1))
            await applied(ranks[1], 1)
            assert [holds(followed) for followed in ranks] == [[1], []]
            answer = s.index.prefix_hits(PrefixQuery("m", [1] * 16 + [5]))
            assert [(hit.worker_id, hit.dp_rank, hit.hit_tokens) for hit in answer.hits] == [("w", 0, 16)]
            assert not ranks[0].counters["rank_mismatches"]

    run(main)


def test_ipv6_endpoints_work_with_and_without_brackets() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")

    async def main() -> None:
        async with scene() as s:
            engine = s.engine("[::1]")
            followed = await s.follow(
                engine, endpoint=f"tcp://::1:{engine.port}", replay_endpoint=f"tcp://::1:{engine.replay_port}"
            )
            assert followed.registration.endpoint == engine.endpoint
            engine.publish(block(0))
            await applied(followed, 0)
            assert followed.counters["replays_marker"] == 1

    run(main)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_host_name_is_found_in_whichever_family_the_engine_listens(host: str) -> None:
    if host.startswith("["):
        addresses = {str(info[4][0]) for info in socket.getaddrinfo("localhost", 0, socket.AF_UNSPEC)}
        if "::1" not in addresses:
            pytest.skip("localhost has no IPv6 address on this machine")

    async def main() -> None:
        async with scene() as s:
            engine = s.engine(host)
            followed = await s.follow(engine, endpoint=f"tcp://localhost:{engine.port}")
            engine.publish(block(0))
            await applied(followed, 0)

    run(main)


def test_an_engine_that_starts_later_is_found_by_its_name() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            engine.stop()
            given = registration(endpoint=f"tcp://localhost:{engine.port}")
            followed, _ = await s.registry.register(given)
            await until(lambda: "localhost" in s.transport.families, what="tries that failed")
            assert followed.state is FollowState.CONNECTING
            assert followed.index.coverage is Coverage.DISCONNECTED
            await asyncio.to_thread(engine.open)
            await subscribed(engine)
            engine.publish(block(0))
            await applied(followed, 0)

    run(main)


def test_ipc_endpoints_work(tmp_path: Path) -> None:
    async def main() -> None:
        context = zmq.Context()
        pub = context.socket(zmq.XPUB)
        pub.bind(f"ipc://{tmp_path}/kv-events")
        async with scene() as s:
            followed, _ = await s.registry.register(registration(endpoint=f"ipc://{tmp_path}/kv-events"))
            await asyncio.to_thread(pub.recv)
            pub.send_multipart([b"", number_frame(0), block(0)])
            await applied(followed, 0)
            assert followed.state is FollowState.CONNECTED
        context.destroy(linger=0)

    run(main)


def test_bad_messages_are_counted_and_the_stream_lives_on() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine)
            engine.publish(block(0))
            for frames in ([b"x"], [b"t", b"x"], [b"t", number_frame(1), b"x", b"y"], [b"t", b"\0\0\0\1", b"x"]):
                engine.send_frames(frames)
            engine.publish(b"\xc1 no msgpack")
            engine.publish(block(2))
            await applied(followed, 2)
            assert (holds(followed), followed.index.status().unverified) == ([2], 1)
            assert followed.counters["bad_messages"] == 4
            assert followed.counters["bad_messages_frame_count"] == 3
            assert followed.counters["bad_messages_sequence_bytes"] == 1
            assert followed.counters["unreadable_batches"] == 1
            assert followed.last_bad_message == ("sequence_bytes", (1, 4, 1))
            assert followed.index.coverage is Coverage.DEGRADED

    run(main)


def test_unregistering_while_batches_are_queued_leaves_nothing() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine)
            for number in range(20_000):
                engine.publish(block(number))
            await until(lambda: followed.index.batches_applied)
            assert await s.registry.unregister("w") == 1
            stopped_at = followed.index.batches_applied
            assert stopped_at < 20_000
            for number in range(100):
                engine.publish(block(number))
            await asyncio.sleep(0.05)
            assert followed.index.batches_applied == stopped_at
            assert not s.index.publishers()
            assert s.index.prefix_hits(PrefixQuery("m", list(range(17)))).hits == []

    run(main)


def test_a_publisher_registered_again_is_followed_from_the_start() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            await s.follow(engine, replay=True)
            engine.publish(block(0))
            await s.registry.unregister("w")
            followed = await s.follow(engine, replay=True)
            await applied(followed, 0)
            assert holds(followed) == [0]

    run(main)


def test_three_hundred_publishers_are_followed_by_one_process() -> None:
    async def main() -> None:
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 1_000)
        sockets = [context.socket(zmq.XPUB) for _ in range(300)]
        async with scene() as s:
            started = time.monotonic()
            for number, pub in enumerate(sockets):
                port = pub.bind_to_random_port("tcp://127.0.0.1")
                await s.registry.register(registration(worker_id=f"w{number}", endpoint=f"tcp://127.0.0.1:{port}"))
            for pub in sockets:
                await asyncio.to_thread(pub.recv)
                pub.send_multipart([b"", number_frame(0), block(1)])
            await until(lambda: all(f.index.checkpoint.sequence_number == 0 for f in s.registry.followed()), 30)
            assert time.monotonic() - started < 30
            assert await s.registry.unregister("w7") == 1
            assert len(s.index.publishers()) == 299
        context.destroy(linger=0)

    run(main)


def test_a_subscriber_that_slept_catches_up_by_replay() -> None:
    """Its socket queue overflows silently; the gap that shows is repaired."""

    async def main() -> None:
        async with scene(StreamLimits(receive_queue_max=10, replay_idle_timeout_s=0.5)) as s:
            engine = s.engine(send_queue_max=10)
            followed = await s.follow(engine, replay=True)
            big = payload(stored(1_000) | {"unknown field": b"x" * 40_000})
            for _ in range(500):  # the loop does not run meanwhile
                engine.publish(big)
            await asyncio.sleep(0)
            await until(lambda: followed.index.batches_applied)
            while followed.index.checkpoint.sequence_number != engine.next_number - 1:
                engine.publish(big)  # as long as its queue is full, this is lost as well
                await asyncio.sleep(0.05)
            assert followed.counters["gaps_repaired"] >= 1
            assert followed.index.coverage is Coverage.COMPLETE
            assert holds(followed) == [0] * engine.next_number

    run(main)


def test_a_fast_stream_does_not_hold_up_the_loop() -> None:
    async def main() -> None:
        async with scene() as s:
            engine = s.engine()
            followed = await s.follow(engine)
            for number in range(5_000):
                engine.publish(block(number))
            gc.disable()  # whose pauses grow with all that other tests left behind
            longest, before = 0.0, time.thread_time()  # not that of others on a busy machine
            while followed.index.checkpoint.sequence_number != 4_999:
                await asyncio.sleep(0)
                now = time.thread_time()
                longest, before = max(longest, now - before), now
            gc.enable()
            assert longest < 0.03  # slices are 5 ms, and a burst is received between two of them

    run(main)
