"""`GET /v1/watch`: what changes among the publishers, in order, bounded, and only what the caller may see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import Message

from indexer.api import watch as watching
from indexer.api.access import Caller
from indexer.api.errors import ApiError
from indexer.api.watch import HEARTBEAT, WatchFeed
from indexer.index.predictions import PredictionLimits, Predictions
from indexer.index.state import Coverage, CoverageReason, Trust
from indexer.registration import Registration
from tests.unit.api.stand_ins import World, empty_world, error_of

ANYONE = Caller()
Told = tuple[int, str, dict[str, Any]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_INTERVAL_S", 0.001)


def feed_of(world: World, watchers_max: int = 8, events_max: int = 100, heartbeat_s: float = 60.0) -> WatchFeed:
    return WatchFeed(world.registry, watchers_max, events_max, heartbeat_s)


async def register(world: World, worker_id: str = "w", tenant: str = "default") -> Any:
    followed, _ = await world.registry.register(Registration(worker_id, 0, "m", "tcp://127.0.0.1:1", tenant=tenant))
    return followed


def read(frame: bytes) -> Told:
    lines = frame.decode().removesuffix("\n\n").split("\n")
    fields = dict(line.split(": ", 1) for line in lines)
    assert list(fields) == ["id", "event", "data"]
    return int(fields["id"]), fields["event"], json.loads(fields["data"])


async def following(frames: AsyncIterator[bytes], kind: str) -> dict[str, Any]:
    """The next event, which must be of this kind."""
    _, told, data = read(await asyncio.wait_for(anext(frames), 10))
    assert told == kind, data
    return data


def run(test: Callable[[World, WatchFeed], Any], **bounds: Any) -> None:
    world = empty_world()
    asyncio.run(test(world, feed_of(world, **bounds)))


def test_every_kind_of_change_is_an_event() -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        known = await register(world)
        frames = feed.watch(ANYONE, None, None)
        assert await following(frames, "ready") == {"resumed": False}
        known.state = "disconnected"
        event = await following(frames, "state")
        assert isinstance(event.pop("at"), float)
        assert event == {
            "worker_id": "w",
            "dp_rank": 0,
            "tenant": "default",
            "model": "m",
            "state": "disconnected",
            "before": "connected",
        }
        known.index.show(Trust(Coverage.DISCONNECTED, CoverageReason.CONNECTION_LOST, 3.5))
        event = await following(frames, "coverage")
        assert (event["coverage"], event["coverage_reason"], event["coverage_at"], event["before"]) == (
            "disconnected",
            "connection_lost",
            3.5,
            "complete",
        )
        known.index.restart()
        assert (await following(frames, "restarted"))["generation"] == 2
        known.index.predictions = Predictions(PredictionLimits(10, 1, 0.2))
        known.index.predictions.note(1, 0, None, 1.0)
        event = await following(frames, "prediction_alarm")
        assert (event["alarm"], event["wrong_share"]) == (True, 1.0)
        known.index.predictions = None
        assert not (await following(frames, "prediction_alarm"))["alarm"]
        await register(world, "x")
        event = await following(frames, "registered")
        assert (event["worker_id"], event["state"], event["coverage"]) == ("x", "connected", "complete")
        await world.registry.unregister("x", None)
        assert (await following(frames, "unregistered"))["worker_id"] == "x"

    run(scenario)


def test_who_was_registered_anew_between_two_looks_is_another_publisher() -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        await register(world, "x")
        await register(world)
        frames = feed.watch(ANYONE, None, None)
        await following(frames, "ready")
        await world.registry.unregister("x", None)
        await world.registry.unregister("w", None)
        await register(world)
        assert (await following(frames, "unregistered"))["worker_id"] == "w"
        assert (await following(frames, "registered"))["worker_id"] == "w"
        assert (await following(frames, "unregistered"))["worker_id"] == "x"

    run(scenario)


def test_ids_grow_and_a_watcher_goes_on_where_it_was() -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        known = await register(world)
        frames = feed.watch(ANYONE, None, None)
        place, _, _ = read(await anext(frames))
        ids = [place]
        for state in ("disconnected", "connected", "replaying"):
            known.state = state
            ids.append(read(await anext(frames))[0])
        assert ids == sorted(set(ids))
        await frames.aclose()
        known.state = "failed"
        resumed = feed.watch(ANYONE, None, ids[1])
        assert await following(resumed, "ready") == {"resumed": True}
        assert [(await following(resumed, "state"))["state"] for _ in range(3)] == ["connected", "replaying", "failed"]
        anew = feed.watch(ANYONE, None, None)
        await following(anew, "ready")
        known.state = "connected"
        assert (await following(anew, "state"))["state"] == "connected", "nothing of before"

    run(scenario)


@pytest.mark.parametrize("last_event_id", [0, 10**18])
def test_who_was_elsewhere_before_does_not_resume(last_event_id: int) -> None:
    """Another run of the service, or a clock that is ahead."""

    async def scenario(world: World, feed: WatchFeed) -> None:
        frames = feed.watch(ANYONE, None, last_event_id)
        assert await following(frames, "ready") == {"resumed": False}

    run(scenario)


def test_a_watcher_that_does_not_keep_up_is_told_and_goes_on_with_what_is_left() -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        known = await register(world)
        slow, quick = feed.watch(ANYONE, None, None), feed.watch(ANYONE, None, None)
        await following(slow, "ready")
        first, _, _ = read(await anext(quick))
        states = [f"state {number}" for number in range(10)]
        for state in states:
            known.state = state
            assert (await following(quick, "state"))["state"] == state
        assert await following(slow, "lagged") == {}
        assert [(await following(slow, "state"))["state"] for _ in range(4)] == states[-4:]
        late = feed.watch(ANYONE, None, first)
        assert await following(late, "ready") == {"resumed": False}
        assert len(feed._events) == 4

    run(scenario, events_max=4)


def test_a_caller_sees_its_own_tenants_only() -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        frames = feed.watch(Caller(frozenset({"mine", "also mine"})), None, None)
        narrowed = feed.watch(ANYONE, "also mine", None)
        await following(frames, "ready")
        await following(narrowed, "ready")
        for tenant in ("other", "mine", "other too", "also mine"):
            await register(world, f"of {tenant}", tenant)
        assert [(await following(frames, "registered"))["tenant"] for _ in range(2)] == ["mine", "also mine"]
        assert (await following(narrowed, "registered"))["tenant"] == "also mine"

    run(scenario)


def test_silence_is_broken_by_comments_also_while_others_have_events() -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        known = await register(world)
        frames = feed.watch(Caller(frozenset({"mine"})), None, None)
        await following(frames, "ready")
        for number in range(3):
            known.state = f"state {number}"
            assert await asyncio.wait_for(anext(frames), 10) == HEARTBEAT

    run(scenario, heartbeat_s=0.0)


def test_all_streams_end_when_the_feed_is_closed() -> None:
    async def scenario(_: World, feed: WatchFeed) -> None:
        streams = [feed.watch(ANYONE, None, None) for _ in range(3)]
        for frames in streams:
            await following(frames, "ready")
        waiting = [asyncio.ensure_future(anext(frames, None)) for frames in streams]
        feed.close()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [None] * 3

    run(scenario)


def test_there_are_only_so_many_watchers(world: World) -> None:
    feed = feed_of(world, watchers_max=1)
    feed.enter()
    with pytest.raises(ApiError) as refused:
        feed.enter()
    assert (refused.value.status_code, refused.value.code) == (503, "too_many_watchers")
    feed.leave()
    feed.enter()


def test_many_publishers_are_looked_at_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        monkeypatch.setattr(watching, "SLICE", 1)
        world.registry.publishers_max = 30
        for number in range(20):
            await register(world, str(number))
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(others())
        await feed.look()
        other.cancel()
        assert turns >= 20

    run(scenario)


def test_a_watcher_that_leaves_during_a_look_takes_no_event_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the next look tell anything twice."""

    async def scenario(world: World, feed: WatchFeed) -> None:
        monkeypatch.setattr(watching, "SLICE", 1)
        known = [await register(world, worker_id) for worker_id in ("a", "b", "gone")]
        frames = feed.watch(ANYONE, None, None)
        await following(frames, "ready")
        for followed in known[:2]:
            followed.state = "disconnected"
        await world.registry.unregister("gone", None)
        await register(world, "new")
        leaving = asyncio.ensure_future(feed._look_at_all())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
        assert len(feed._events) == 1, "in the middle"
        told = [read(await anext(frames)) for _ in range(4)]
        assert [(kind, data["worker_id"]) for _, kind, data in told] == [
            ("state", "a"),
            ("state", "b"),
            ("registered", "new"),
            ("unregistered", "gone"),
        ]
        await feed._look_at_all()
        assert len(feed._events) == 4

    run(scenario)


def test_a_first_look_that_is_cut_short_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        monkeypatch.setattr(watching, "SLICE", 1)
        await register(world, "a")
        await register(world, "b")
        leaving = asyncio.ensure_future(feed.look())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
        await following(feed.watch(ANYONE, None, None), "ready")
        assert not feed._events

    run(scenario)


# ---------------------------------------------------------------------- the route


async def streamed(world: World, path: str = "/v1/watch", *headers: tuple[bytes, bytes]) -> list[Message]:
    """What the application sends to a caller that is gone after the first piece of the body."""
    sent: list[Message] = []
    is_over = asyncio.Event()
    pending: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) > 1:
            is_over.set()

    name, _, query = path.partition("?")
    scope = {"type": "http", "method": "GET", "path": name, "query_string": query.encode(), "headers": headers}
    await asyncio.wait_for(world.client.app(scope, receive, send), 10)
    return sent


def test_the_stream_begins_at_once_and_its_place_is_given_back(world: World) -> None:
    async def scenario() -> None:
        await register(world)
        start, first, *_ = await streamed(world)
        assert start["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        assert (b"cache-control", b"no-store") in start["headers"]
        place, kind, _ = read(first["body"])
        assert kind == "ready"
        assert world.client.app.watch_feed.watchers == 0
        _, first, *_ = await streamed(world, "/v1/watch?tenant=default", (b"last-event-id", b"%d" % place))
        assert read(first["body"])[2] == {"resumed": True}

    asyncio.run(scenario())
    assert "indexer_watchers 0.0" in world.client.get("/metrics").text


@pytest.mark.parametrize("value", ["x", "-1", "1.5"])
def test_a_wrong_place_is_refused_by_name(world: World, value: str) -> None:
    answer = world.client.request("GET", "/v1/watch", headers={"last-event-id": value})
    assert error_of(answer) == (422, "invalid_value", "last-event-id")


def test_a_wrong_tenant_is_refused_by_name(world: World) -> None:
    assert error_of(world.client.get("/v1/watch?tenant=")) == (422, "invalid_value", "tenant")


def test_nobody_watches_a_service_that_stops(world: World) -> None:
    world.life.is_stopping = True
    assert error_of(world.client.get("/v1/watch")) == (503, "stopping", None)
    assert world.client.app.watch_feed.watchers == 0


def test_a_key_that_is_taken_back_sees_no_more() -> None:
    async def scenario(world: World, feed: WatchFeed) -> None:
        holds = [True]
        frames = feed.watch(Caller(frozenset({"default"})), None, None, lambda: holds[0])
        await following(frames, "ready")
        holds[0] = False
        await register(world)
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(frames), 10)

    run(scenario)
