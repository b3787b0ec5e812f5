"""What replicas do with each other's registrations; in virtual time and without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from indexer.index.state import Checkpoint, CoverageReason, ProvenBatch
from indexer.registration import Command, CommandKind, Registration
from indexer.stream.early import FIRST_BATCH_WITHIN_S
from indexer.stream.followed import FollowedPublisher, FollowState
from indexer.stream.follower import fingerprint_of
from indexer.stream.limits import StreamLimits
from indexer.stream.registry import SETTLED_S, Registry
from tests.stream_stand_ins import (
    RecordingIndex,
    RecordingPublisher,
    RecordingStore,
    SimulatedEngine,
    SimulatedTransport,
    registration,
    run_virtual,
    stored,
    until,
)

ENDPOINT = "tcp://h:1"


class Rows:
    """What the other replica has written: a checkpoint."""

    def __init__(self, store: RecordingStore) -> None:
        self.store = store
        self.checkpoint = Checkpoint()
        self.is_ours = False
        self.looks = 0
        self.loads: list[int | None] = []
        self.told: list[tuple[CommandKind, list[int]]] = []

    def is_written_here(self, publisher_id: int) -> bool:
        return self.is_ours

    async def load(self, publisher: RecordingPublisher, at_least: int | None) -> None:
        self.loads.append(at_least)
        await until(lambda: at_least is None or (self.checkpoint.sequence_number or 0) >= at_least)
        publisher.checkpoint = self.checkpoint

    async def tell(self, kind: CommandKind, publisher_ids: Collection[int]) -> None:
        if self.store.fails:
            raise ConnectionError("the store is away")
        self.told.append((kind, list(publisher_ids)))

    async def registrations(self, publisher_ids: Collection[int]) -> list[Registration]:
        return [r for i, r in self.store.rows.items() if i in publisher_ids]


class Scene:
    """One replica; `others` is what another one registers in the shared store."""

    def __init__(self, limits: StreamLimits | None = None) -> None:
        self.index = RecordingIndex()
        self.store = RecordingStore()
        self.rows = Rows(self.store)
        self.engine = SimulatedEngine()
        self.transport = SimulatedTransport({ENDPOINT: self.engine})
        self.registry: Registry[RecordingPublisher] = Registry(
            self.index, self.store, limits, stored=self.rows, transport=self.transport
        )

    async def registered_elsewhere(self, **values: object) -> Registration:
        return await self.store.save(registration(**{"endpoint": ENDPOINT, **values}))

    async def adopted(self) -> FollowedPublisher[RecordingPublisher]:
        """Registered elsewhere, and followed here from now on."""
        await self.registered_elsewhere()
        await self.look()
        return self.followed

    @property
    def followed(self) -> FollowedPublisher[RecordingPublisher]:
        found = self.registry.find("w", 0)
        assert found is not None
        return found

    def begin_look(self) -> list[int]:
        self.rows.looks += 1
        return list(self.store.rows)

    async def look(self) -> None:
        await self.registry.reconcile(self.begin_look(), self.rows.looks)

    def is_stored_until(self, number: int, payload_number: int | None = None) -> None:
        data = dict(self.engine.buffer)[number if payload_number is None else payload_number]
        self.rows.checkpoint = Checkpoint(1, number, fingerprint_of(data), coverage_at=1.0)

    def proven_batch(self, number: int) -> ProvenBatch:
        return ProvenBatch(1, number, fingerprint_of(dict(self.engine.buffer)[number]))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Registry[RecordingPublisher]]:
        task = asyncio.create_task(self.registry.run())
        try:
            yield self.registry
            assert not task.done(), task
        finally:
            await self.registry.close()
            await task


def test_a_registration_elsewhere_is_followed_here_and_goes_when_it_goes() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            saved = await scene.registered_elsewhere()
            await scene.look()
            followed = scene.followed
            assert followed.registration == saved
            await until(lambda: followed.state is FollowState.CONNECTED)
            await scene.store.delete(saved.publisher_id)
            await scene.look()
            assert registry.find("w", 0) is None
            assert len(scene.index.removed) == 1
            assert registry.deletions_pending == 0, "who has unregistered it deletes it"

    run_virtual(main())


def test_what_was_registered_here_a_moment_ago_is_not_taken_for_gone() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            before = scene.begin_look()
            followed, _ = await registry.register(registration(endpoint=ENDPOINT))
            await registry.reconcile(before, scene.rows.looks)
            assert registry.find("w", 0) is not None
            await scene.store.delete(followed.registration.publisher_id)
            await scene.look()
            assert registry.find("w", 0) is None, "by the first look after it"

    run_virtual(main())


def test_what_was_unregistered_here_a_moment_ago_does_not_come_back() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running() as registry:
            followed, _ = await registry.register(registration(endpoint=ENDPOINT))
            scene.store.fails = True
            await registry.unregister("w")
            await scene.look()
            assert registry.find("w", 0) is None
            assert followed.registration.publisher_id in scene.store.rows
            scene.store.fails = False
            await until(lambda: not scene.store.rows, limit_s=10)
            await scene.look()
            await scene.registered_elsewhere()
            await scene.look()
            assert registry.find("w", 0) is not None

    run_virtual(main())


def test_registered_anew_elsewhere_is_another_publisher() -> None:
    async def main() -> None:
        scene = Scene()
        async with scene.running():
            old = await scene.registered_elsewhere(model="old")
            await scene.look()
            await scene.look()
            await scene.store.delete(old.publisher_id)
            await scene.registered_elsewhere(model="new")
            await scene.look()
            followed = scene.followed
            assert followed.registration.model == "new"

    run_virtual(main())


def test_more_publishers_than_the_bound_are_not_followed() -> None:
    async def main() -> None:
        scene = Scene(StreamLimits(publishers_max=1))
        async with scene.running() as registry:
            for rank in range(2):
                await scene.registered_elsewhere(dp_rank=rank)
            await scene.look()
            assert len(registry.followed()) == 1

    run_virtual(main())


def test_without_replay_nothing_is_lost_between_rows_and_subscription() -> None:
    """Batches go on while it subscribes, waits for the rows, and reads them."""

    async def main() -> None:
        scene = Scene()
        for number in range(5):
            scene.engine.publish(stored(number))
        async with scene.running():
            followed = await scene.adopted()
            assert followed.is_in_first_replay
            await until(lambda: scene.engine.subscriptions and scene.engine.subscriptions[0].is_connected)
            for number in range(5, 8):
                scene.engine.publish(stored(number))
            await until(lambda: scene.rows.loads)
            assert scene.rows.loads == [5]
            assert not followed.index.applied
            scene.is_stored_until(6)
            await until(lambda: followed.index.checkpoint.sequence_number == 7)
            scene.engine.publish(stored(8))
            await until(lambda: followed.index.checkpoint.sequence_number == 8)
            assert followed.index.applied == [7, 8]
            assert not followed.is_in_first_replay
            assert followed.counters["connections"] == 1

    run_virtual(main())


def test_a_quiet_engine_is_waited_for_a_while_only() -> None:
    async def main() -> None:
        scene = Scene()
        scene.engine.publish(stored(0))
        scene.is_stored_until(0)
        async with scene.running() as registry:
            followed = await scene.adopted()
            await until(lambda: followed.state is FollowState.CONNECTED, limit_s=2 * FIRST_BATCH_WITHIN_S)
            assert scene.rows.loads == [None]
            scene.engine.publish(stored(1))
            await until(lambda: followed.index.applied == [1])
            assert followed.index.told == [("doubt", "continuity_unproven")]
            (publisher_id,) = scene.store.rows
            registry.others_are_at({publisher_id + 1: scene.proven_batch(1)})
            assert followed.index.checkpoint.reason is CoverageReason.CONTINUITY_UNPROVEN
            registry.others_are_at({publisher_id: scene.proven_batch(1)})
            assert followed.index.checkpoint.reason is CoverageReason.PROVEN

    run_virtual(main())


def test_an_engine_that_is_down_does_not_hold_up_the_rows() -> None:
    async def main() -> None:
        scene = Scene()
        scene.engine.publish(stored(0))
        scene.is_stored_until(0)
        scene.engine.stop()
        async with scene.running():
            followed = await scene.adopted()
            await until(lambda: followed.index.checkpoint.sequence_number == 0, limit_s=10)
            scene.engine.start(as_new_run=False)
            await until(lambda: followed.state is FollowState.CONNECTED)

    run_virtual(main())


def test_a_restart_after_the_warm_up_is_still_found() -> None:
    async def main() -> None:
        scene = Scene()
        for number in range(5):
            scene.engine.publish(stored(number))
        scene.is_stored_until(4)
        async with scene.running():
            followed = await scene.adopted()
            await until(lambda: followed.state is FollowState.CONNECTED)
            scene.engine.publish(stored(5))
            await until(lambda: followed.index.applied == [5])
            scene.engine.restart()
            await until(lambda: followed.counters["connections"] == 2)
            scene.engine.publish(stored(9))
            await until(lambda: followed.index.applied == [5, 0])
            assert ("restart",) in followed.index.told

    run_virtual(main())


def test_with_replay_the_rows_are_proven_by_it() -> None:
    async def main() -> None:
        scene = Scene()
        for number in range(5):
            scene.engine.publish(stored(number))
        scene.is_stored_until(2)
        async with scene.running():
            await scene.registered_elsewhere(replay_endpoint=ENDPOINT)
            await scene.look()
            followed = scene.followed
            await until(lambda: followed.index.applied == [3, 4])
            assert scene.rows.loads == [None]
            assert followed.index.told == []

    run_virtual(main())


def test_a_registration_here_is_followed_at_once_if_its_rows_are_written_here() -> None:
    async def main() -> None:
        scene = Scene()
        scene.rows.is_ours = True
        async with scene.running() as registry:
            followed, created = await registry.register(registration(endpoint=ENDPOINT))
            assert created
            await until(lambda: followed.state is FollowState.CONNECTED, limit_s=FIRST_BATCH_WITHIN_S / 2)
            scene.engine.publish(stored(0))
            await until(lambda: followed.index.applied == [0])
            again, created = await registry.register(replace(followed.registration, publisher_id=0))
            assert (again, created) == (followed, False)

    run_virtual(main())


def command(command_id: int, publisher_id: int, age_s: float = 0.0) -> Command:
    return Command(command_id, publisher_id, CommandKind.CLEAR, age_s)


def clears(publisher: RecordingPublisher) -> int:
    return publisher.told.count(("clear",))


def test_what_an_operator_asks_for_here_is_told_to_the_others() -> None:
    async def main() -> None:
        scene = Scene()
        scene.rows.is_ours = True
        async with scene.running() as registry:
            await registry.register(registration(endpoint=ENDPOINT, replay_endpoint="tcp://h:2"))
            assert await registry.clear("w") == await registry.resync("w", is_full=True) == 1
            assert await registry.clear("nobody") == 0
            (publisher_id,) = scene.store.rows
            told = [(CommandKind.CLEAR, [publisher_id]), (CommandKind.RESYNC_FULL, [publisher_id])]
            assert scene.rows.told == told
            scene.store.fails = True
            assert await registry.clear("w") == 1, "here, although the store is away"
            assert scene.rows.told == told

    run_virtual(main())


def test_what_another_replica_was_asked_for_is_done_here_once() -> None:
    async def main() -> None:
        scene = Scene()
        scene.rows.is_ours = True
        async with scene.running() as registry:
            followed, _ = await registry.register(registration(endpoint=ENDPOINT))
            (publisher_id,) = scene.store.rows
            await until(lambda: followed.state is FollowState.CONNECTED)
            for _ in range(2):
                registry.obey([command(1, publisher_id), command(2, publisher_id + 1)])
            assert clears(followed.index) == 1
            registry.obey([command(1, publisher_id), command(3, publisher_id)])
            assert clears(followed.index) == 2

    run_virtual(main())


@pytest.mark.parametrize(("age_s", "times"), [(SETTLED_S - 1, 1), (SETTLED_S + 1, 0)])
def test_rows_loaded_soon_after_a_command_may_be_from_before_it(age_s: float, times: int) -> None:
    async def main() -> None:
        scene = Scene()
        scene.engine.publish(stored(0))
        scene.is_stored_until(0)
        async with scene.running() as registry:
            saved = await scene.registered_elsewhere()
            await scene.look()
            registry.obey([command(1, saved.publisher_id, age_s)])
            followed = scene.followed
            assert clears(followed.index) == 0, "it is not loaded"
            await until(lambda: followed.index.checkpoint.sequence_number == 0, limit_s=10)
            await until(lambda: followed.state is FollowState.CONNECTED)
            registry.obey([command(1, saved.publisher_id, age_s)])
            assert clears(followed.index) == times

    run_virtual(main())


def test_what_is_cleared_while_it_is_loaded_is_cleared_when_it_is() -> None:
    async def main() -> None:
        scene = Scene()
        scene.engine.publish(stored(0))
        scene.is_stored_until(0)
        async with scene.running() as registry:
            await scene.registered_elsewhere()
            await scene.look()
            assert await registry.clear("w") == 1
            followed = scene.followed
            await until(lambda: followed.state is FollowState.CONNECTED, limit_s=10)
            assert clears(followed.index) == 2

    run_virtual(main())
