"""Publishers come and go: registering, unregistering, supervision; in virtual time and without sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from indexer.errors import EndpointError, NoReplayEndpoint, PublisherConflict, PublisherLimit
from indexer.index.state import Coverage, CoverageReason
from indexer.registration import AUTO
from indexer.stream.followed import FollowState
from indexer.stream.limits import StreamLimits
from indexer.stream.registry import Registry
from tests.stream_stand_ins import (
    RecordingIndex,
    RecordingPublisher,
    RecordingStore,
    SimulatedEngine,
    SimulatedTransport,
    number_frame,
    payload,
    registration,
    run_virtual,
    stored,
    until,
)


class Scene:
    def __init__(self, *ports: int, limits: StreamLimits | None = None) -> None:
        self.index = RecordingIndex()
        self.store = RecordingStore()
        self.engines = {f"tcp://h:{port}": SimulatedEngine() for port in ports or (1,)}
        self.transport = SimulatedTransport(self.engines)
        self.registry: Registry[RecordingPublisher] = Registry(
            self.index, self.store, limits or StreamLimits(), transport=self.transport
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Registry[RecordingPublisher]]:
        task = asyncio.create_task(self.registry.run())
        try:
            yield self.registry
            assert not task.done(), task
        finally:
            await self.registry.close()
            await task

    @property
    def engine(self) -> SimulatedEngine:
        return self.engines["tcp://h:1"]


def worker(port: int = 1, **values: object) -> object:
    return registration(**({"endpoint": f"tcp://h:{port}"} | values))


def test_registering_follows_and_saves() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            followed, created = await registry.register(worker())
            assert created
            assert followed.registration.publisher_id == 1
            assert registry.find("w", 0) is followed
            assert registry.followed() == [followed]
            await until(lambda: followed.state is FollowState.CONNECTED)
            scene.engine.publish(stored(5))
            await until(lambda: followed.index.held[5])

    run_virtual(main())


def test_registering_the_same_again_changes_nothing() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            first, _ = await registry.register(worker(endpoint="tcp://H:1"))
            second, created = await registry.register(worker(endpoint="tcp://h:01"))
            assert (second, created) == (first, False)
            assert len(scene.store.rows) == 1

    run_virtual(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("endpoint", "tcp://h:2"),
        ("replay_endpoint", "tcp://h:3"),
        ("tenant", "other"),
        ("engine", "sglang"),
        ("block_size", 16),
        ("options", {"eagle": True}),
    ],
)
def test_registering_other_values_is_a_conflict_that_names_the_field(field: str, value: object) -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            await registry.register(worker())
            with pytest.raises(PublisherConflict) as caught:
                await registry.register(worker(**{field: value}))
            assert caught.value.field == field

    run_virtual(main())


@pytest.mark.parametrize("engine", ["vllm", "sglang", AUTO])
def test_whoever_leaves_the_engine_open_agrees_with_what_is_registered(engine: str) -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            await registry.register(worker(engine=engine))
            followed, is_new = await registry.register(worker(engine=AUTO))
            assert (followed.registration.engine, is_new) == (engine, False)

    run_virtual(main())


def test_a_bad_endpoint_or_one_publisher_too_many_is_refused_and_nothing_is_saved() -> None:
    async def main() -> None:
        scene = Scene(limits=StreamLimits(publishers_max=1))
        async with scene.running() as registry:
            for bad in ({"endpoint": "tcp://*:1"}, {"replay_endpoint": "tcp://0.0.0.0:1"}):
                with pytest.raises(EndpointError):
                    await registry.register(worker(**bad))
            await registry.register(worker())
            with pytest.raises(PublisherLimit):
                await registry.register(worker(dp_rank=1))
            assert len(scene.store.rows) == len(scene.index.publishers) == 1

    run_virtual(main())


def test_a_store_that_fails_leaves_nothing_half_registered() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            scene.store.fails = True
            with pytest.raises(ConnectionError):
                await registry.register(worker())
            assert not registry.followed()
            assert not scene.index.publishers
            scene.store.fails = False
            _, created = await registry.register(worker())
            assert created

    run_virtual(main())


def test_registering_at_the_same_time_follows_once() -> None:
    async def main() -> None:
        scene = Scene()
        scene.store.delay_s = 0.1
        async with scene.running() as registry:
            results = await asyncio.gather(*(registry.register(worker()) for _ in range(5)))
            assert [created for _, created in results] == [True, False, False, False, False]
            assert len({id(followed) for followed, _ in results}) == 1
            assert not registry._locks

    run_virtual(main())


def test_unregistering_removes_one_rank_or_all() -> None:
    async def main() -> None:
        scene = Scene(1, 2, 3)
        async with scene.running() as registry:
            for rank in range(3):
                await registry.register(worker(rank + 1, dp_rank=rank))
            await registry.register(worker(worker_id="other"))
            assert await registry.unregister("w", 1) == 1
            assert await registry.unregister("w", 1) == 0
            assert await registry.unregister("nobody") == 0
            assert await registry.unregister("w") == 2
            assert [f.registration.worker_id for f in registry.followed()] == ["other"]
            assert list(scene.store.rows) == [4]

    run_virtual(main())


def test_unregistering_waits_for_a_registration_that_is_under_way() -> None:
    async def main() -> None:
        scene = Scene()
        scene.store.delay_s = 0.1
        async with scene.running() as registry:
            registering = asyncio.create_task(registry.register(worker()))
            await asyncio.sleep(0.05)
            assert await registry.unregister("w") == 1
            await registering
            assert not registry.followed()
            assert not scene.index.publishers
            assert not scene.store.rows

    run_virtual(main())


def test_no_queued_batch_is_applied_after_unregistering() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            followed, _ = await registry.register(worker())
            await until(lambda: followed.state is FollowState.CONNECTED)
            live = scene.engine.subscriptions[0]
            live.inbox.extend([b"", number_frame(n), payload(stored(n))] for n in range(20_000))
            live.wake()
            await until(lambda: followed.index.applied, pause_s=0)
            assert await registry.unregister("w") == 1
            applied = len(followed.index.applied)
            assert 0 < applied < 20_000
            await asyncio.sleep(1)
            assert len(followed.index.applied) == applied
            assert not followed.index.held
            assert not scene.index.publishers

    run_virtual(main())


def test_unregistering_works_without_the_store_and_is_made_good_later() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            await registry.register(worker())
            scene.store.fails = True
            assert await registry.unregister("w") == 1
            assert not registry.followed()
            assert not scene.index.publishers
            assert registry.deletions_pending == 1
            await asyncio.sleep(3)
            assert list(scene.store.rows) == [1]
            scene.store.fails = False
            await until(lambda: not registry.deletions_pending)
            assert not scene.store.rows

    run_virtual(main())


def test_registering_anew_first_deletes_what_is_left_of_the_old_registration() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            await registry.register(worker())
            scene.store.fails = True
            await registry.unregister("w")
            with pytest.raises(ConnectionError):
                await registry.register(worker())
            scene.store.fails = False
            followed, created = await registry.register(worker())
            assert created
            assert list(scene.store.rows) == [followed.registration.publisher_id] == [2]
            await asyncio.sleep(3)
            assert list(scene.store.rows) == [2]

    run_virtual(main())


def test_a_follower_that_dies_is_shown_and_started_again_with_a_growing_pause() -> None:
    async def main() -> None:
        scene = Scene(limits=StreamLimits(restart_delay_min_s=1.0, restart_delay_max_s=4.0))
        loop = asyncio.get_running_loop()
        opened: list[float] = []
        open_live = scene.transport.open_live

        def failing(endpoint: str, wake: object) -> object:
            opened.append(loop.time())
            if len(opened) < 6:
                raise OSError("too many open files")
            return open_live(endpoint, wake)  # type: ignore[arg-type]

        scene.transport.open_live = failing  # type: ignore[method-assign, assignment]
        async with scene.running() as registry:
            followed, _ = await registry.register(worker())
            await until(lambda: followed.state is FollowState.FAILED)
            assert followed.last_error == "OSError: too many open files"
            assert followed.index.coverage is Coverage.DISCONNECTED
            await until(lambda: followed.state is FollowState.CONNECTED, limit_s=60)
            assert [round(b - a) for a, b in itertools.pairwise(opened)] == [1, 2, 4, 4, 4]
            assert followed.counters["failures"] == 5

    run_virtual(main())


def test_a_batch_that_kills_its_follower_twice_is_skipped() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            followed, _ = await registry.register(worker(replay_endpoint="tcp://h:1"))
            await until(lambda: followed.counters["replays_marker"])
            followed.index.fails_on = lambda number: number == 2
            for number in range(5):
                scene.engine.publish(stored(number))
            await until(lambda: followed.index.checkpoint.sequence_number == 4, limit_s=30)
            assert followed.index.applied == [0, 1, 3, 4]
            assert followed.index.told.count(("skip", 2, "poisonous_batch")) == 1
            assert followed.counters["failures"] == 2

    run_virtual(main())


def test_closing_is_bounded_even_if_a_follower_has_failed() -> None:
    async def main() -> None:
        scene = Scene(1, 2)
        loop = asyncio.get_running_loop()
        async with scene.running() as registry:
            await registry.register(worker())
            failing, _ = await registry.register(worker(2, dp_rank=1))
            failing.index.fails_on = lambda number: True
            await until(lambda: failing.state is FollowState.CONNECTED)
            scene.engines["tcp://h:2"].publish(stored(1))
            await until(lambda: failing.state is FollowState.FAILED)
            started = loop.time()
        assert loop.time() - started < 0.5
        assert all(not engine.subscriptions for engine in scene.engines.values())

    run_virtual(main())


def test_first_replays_are_reported_until_they_are_over() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            await registry.register(worker(replay_endpoint="tcp://h:1"))
            assert registry.first_replays_pending == 1
            await until(lambda: not registry.first_replays_pending)

    run_virtual(main())


# ---------------------------------------------------------------------- liveness


def test_a_publisher_that_is_gone_for_long_stops_counting_until_it_is_back() -> None:
    async def main() -> None:
        scene = Scene(limits=StreamLimits(disconnected_credit_s=300.0))
        async with scene.running() as registry:
            followed, _ = await registry.register(worker())
            await until(lambda: followed.state is FollowState.CONNECTED)
            scene.engine.publish(stored(1))
            await until(lambda: followed.index.held[1])
            scene.engine.stop()
            await asyncio.sleep(299.0)
            assert followed.index.is_credited
            assert followed.index.trust[:2] == (Coverage.DISCONNECTED, CoverageReason.CONNECTION_LOST)
            await asyncio.sleep(2.0)
            assert not followed.index.is_credited
            assert followed.index.trust[:2] == (Coverage.DISCONNECTED, CoverageReason.NOT_CREDITED)
            assert followed.counters["credits_lost"] == 1
            scene.engine.start(as_new_run=False)
            await until(lambda: followed.index.is_credited)
            assert followed.index.held[1]

    run_virtual(main())


def test_one_that_is_back_counts_again_only_after_its_replay() -> None:
    async def main() -> None:
        scene = Scene(limits=StreamLimits(disconnected_credit_s=10.0, replay_idle_timeout_s=2.0))
        async with scene.running() as registry:
            followed, _ = await registry.register(worker(replay_endpoint="tcp://h:1"))
            await until(lambda: followed.counters["replays_marker"])
            scene.engine.stop()
            await until(lambda: not followed.index.is_credited, 20)
            scene.engine.is_silent = True
            scene.engine.start(as_new_run=False)
            await until(lambda: followed.state is FollowState.REPLAYING)
            await asyncio.sleep(1.0)
            assert not followed.index.is_credited
            await until(lambda: followed.index.is_credited)
            assert followed.state is FollowState.CONNECTED

    run_virtual(main())


def test_without_a_limit_a_publisher_counts_for_ever() -> None:
    async def main() -> None:
        scene = Scene(limits=StreamLimits(disconnected_credit_s=0.0))
        scene.engine.is_up = False
        async with scene.running() as registry:
            followed, _ = await registry.register(worker())
            await asyncio.sleep(1e6)
            assert followed.index.is_credited
            assert registry.followed() == [followed]

    run_virtual(main())


def test_a_registration_expires_only_while_nobody_is_connected() -> None:
    async def main() -> None:
        scene = Scene(1, 2, limits=StreamLimits(registration_expiry_s=60.0))
        scene.engines["tcp://h:2"].is_up = False
        async with scene.running() as registry:
            await registry.register(worker())
            await registry.register(worker(2, dp_rank=1))
            await asyncio.sleep(55.0)
            assert len(registry.followed()) == 2
            await until(lambda: len(registry.followed()) == 1)
            assert registry.registrations_expired == 1
            assert list(scene.store.rows) == [1]
            scene.engine.stop()
            await until(lambda: not registry.followed(), 70)

    run_virtual(main())


def test_an_operator_clears_and_the_stream_goes_on() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            followed, _ = await registry.register(worker())
            await until(lambda: followed.state is FollowState.CONNECTED)
            scene.engine.publish(stored(1))
            await until(lambda: followed.index.held[1])
            assert await registry.clear("nobody") == 0
            assert await registry.clear("w", 0) == 1
            assert not followed.index.held
            scene.engine.publish(stored(2))
            await until(lambda: followed.index.held[2])
            point = followed.index.checkpoint
            assert (point.coverage, point.reason, point.since) == (Coverage.SINCE, CoverageReason.CLEARED, 1)

    run_virtual(main())


def test_an_operator_asks_an_endpoint_again_that_was_left_alone() -> None:
    async def main() -> None:
        scene = Scene(limits=StreamLimits(replay_cool_down_s=1e6))
        scene.engine.is_silent = True
        async with scene.running() as registry:
            followed, _ = await registry.register(worker(replay_endpoint="tcp://h:1"))
            await until(lambda: followed.counters["replays_silent"])
            scene.engine.publish(stored(1))
            scene.engine.publish(stored(2), is_lost=True)
            scene.engine.publish(stored(3))
            await until(lambda: followed.index.held[3])
            assert followed.index.checkpoint.reason is CoverageReason.GAP
            assert followed.replay.state == "cooling_down"
            scene.engine.is_silent = False
            assert await registry.resync("w") == 1
            await until(lambda: followed.counters["replays_marker"])
            assert followed.index.checkpoint.reason is CoverageReason.GAP
            assert await registry.resync("w", is_full=True) == 1
            await until(lambda: followed.index.held[2])
            assert followed.index.checkpoint.coverage is Coverage.COMPLETE
            assert dict(followed.index.held) == {1: 1, 2: 1, 3: 1}
            await registry.register(worker(dp_rank=1))
            with pytest.raises(NoReplayEndpoint):
                await registry.resync("w")

    run_virtual(main())
