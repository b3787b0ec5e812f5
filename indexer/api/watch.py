"""`GET /v1/watch`: what changes among the publishers, as server-sent events.

Purpose: whoever shows or guards a fleet need not ask for all publishers again and again. As long as anybody watches,
all publishers are looked at every LOOK_INTERVAL_S, and what differs from the look before becomes events. They are kept
in one ring for all watchers; each of these only has a place in it, the time of the last event that it was sent.

Invariants: events leave in the order of their ids, which are microseconds since 1970 and so tell nothing of events
that a caller may not see; who may have missed one is told so (`lagged`, or a `ready` that has not resumed). Nobody is
waited for: a watcher that does not read costs no more than its place.

If broken: a page would show a fleet that is no longer so.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from indexer.api.access import Caller, caller_of, holds_of
from indexer.api.errors import ApiError
from indexer.api.ports import FollowedPublisher, RegistryPort, Services
from indexer.api.schemas import NAME_LENGTH_MAX, errors
from indexer.index.state import Trust
from indexer.registration import PublisherKey, Registration

LOOK_INTERVAL_S = 0.25
SLICE = 500  # publishers looked at between two chances for other work on the loop
HEARTBEAT = b": still here\n\n"

ANSWER_OPENAPI: dict[str, Any] = {
    "description": "A stream of events, each with an id, a name and one line of JSON",
    "content": {
        "text/event-stream": {
            "schema": {"type": "string"},
            "example": 'id: 1785312000250000\nevent: state\ndata: {"worker_id":"http://10.0.0.7:8000","dp_rank":0,'
            '"tenant":"default","model":"m","state":"connected","before":"connecting","at":1785312000.25}\n\n',
        }
    },
}

_encode = msgspec.json.Encoder().encode


class _Seen(NamedTuple):
    """What a look has found of one publisher."""

    registration: Registration
    state: str
    trust: Trust
    generation: int
    is_alarmed: bool
    wrong_share: float


class _Event(NamedTuple):
    event_id: int
    tenant: str
    frame: bytes


class WatchFeed:
    """See the module. `events_max`: of the ring; `heartbeat_s`: after so long without an event a comment is sent."""

    def __init__(self, registry: RegistryPort, watchers_max: int, events_max: int, heartbeat_s: float) -> None:
        self._registry = registry
        self._watchers_max = watchers_max
        self._heartbeat_s = heartbeat_s
        self._events: deque[_Event] = deque(maxlen=events_max)
        self._seen: dict[PublisherKey, _Seen] | None = None
        self._complete_since = 0  # id from which on the ring has every event
        self._last_id = 0
        self._one_look = asyncio.Lock()
        self._next_look_at = 0.0
        self._closed = asyncio.Event()
        self.watchers = 0

    def close(self) -> None:
        """All streams end, at once."""
        self._closed.set()

    def enter(self) -> None:
        """One watcher more. Raises ApiError 503 at the bound."""
        if self.watchers >= self._watchers_max:
            message = f"{self._watchers_max} watch already"
            raise ApiError(503, "too_many_watchers", message, headers={"retry-after": "5"})
        self.watchers += 1

    def leave(self) -> None:
        self.watchers -= 1

    async def watch(
        self, caller: Caller, tenant: str | None, last_event_id: int | None, holds: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[bytes]:
        """Frames for one watcher, until the feed is closed, or its key no longer `holds`. `tenant`: only this one."""
        loop = asyncio.get_running_loop()
        await self.look()
        place = newest = self._new_id()
        if is_resumed := last_event_id is not None and self._complete_since <= last_event_id <= newest:
            place = last_event_id
        yield _frame(place, "ready", {"resumed": is_resumed})
        sent_at = loop.time()
        while not self._closed.is_set() and holds():
            if place < self._complete_since:
                place = self._complete_since
                yield _frame(place, "lagged", {})
            events = self._after(place)
            for event in events:
                if caller.sees(event.tenant) and tenant in (None, event.tenant):
                    yield event.frame
                    sent_at = loop.time()
            if events:
                place = events[-1].event_id
            if loop.time() - sent_at >= self._heartbeat_s:
                yield HEARTBEAT
                sent_at = loop.time()
            await self._pause()
            await self.look()

    async def look(self) -> None:
        """At all publishers, unless that was done a moment ago. Cost: 1 us a publisher."""
        async with self._one_look:
            now = asyncio.get_running_loop().time()
            if self._seen is None or now >= self._next_look_at:
                self._next_look_at = now + LOOK_INTERVAL_S
                await self._look_at_all()

    async def _look_at_all(self) -> None:
        """Each is noted in `_seen` as soon as its events are: the watcher that looks may leave in the midst."""
        is_first = self._seen is None
        seen = {} if self._seen is None else self._seen
        found = {followed.registration.key: followed for followed in self._registry.followed()}
        for number, (key, followed) in enumerate(found.items(), 1):
            before, seen[key] = seen.get(key), _look_at(followed)
            if not is_first and seen[key] != before:
                self._note_changes(before, seen[key])
            if number % SLICE == 0:
                await asyncio.sleep(0)
        for key in [key for key in seen if key not in found]:
            self._note("unregistered", seen.pop(key))
        if is_first:
            self._seen, self._complete_since = seen, self._new_id()

    def _note_changes(self, before: _Seen | None, seen: _Seen) -> None:
        if before is None or before.registration.publisher_id != seen.registration.publisher_id:
            if before is not None:
                self._note("unregistered", before)
            self._note("registered", seen, state=seen.state, **_describe(seen.trust))
            return
        if seen.generation != before.generation:
            self._note("restarted", seen, generation=seen.generation)
        if seen.state != before.state:
            self._note("state", seen, state=seen.state, before=before.state)
        if seen.trust != before.trust:
            self._note("coverage", seen, **_describe(seen.trust), before=before.trust.coverage)
        if seen.is_alarmed != before.is_alarmed:
            self._note("prediction_alarm", seen, alarm=seen.is_alarmed, wrong_share=round(seen.wrong_share, 4))

    def _note(self, kind: str, seen: _Seen, **facts: Any) -> None:
        registration, event_id = seen.registration, self._new_id()
        named = {"worker_id": registration.worker_id, "dp_rank": registration.dp_rank}
        scoped = {"tenant": registration.tenant, "model": registration.model}
        if len(self._events) == self._events.maxlen:
            self._complete_since = self._events[0].event_id
        frame = _frame(event_id, kind, {**named, **scoped, **facts, "at": event_id / 1_000_000})
        self._events.append(_Event(event_id, registration.tenant, frame))

    def _new_id(self) -> int:
        """Now, or a little later, so that each is greater than those before."""
        self._last_id = max(self._last_id + 1, time.time_ns() // 1_000)
        return self._last_id

    def _after(self, place: int) -> Sequence[_Event]:
        if not self._events or self._events[-1].event_id <= place:
            return ()
        return [event for event in self._events if event.event_id > place]

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(LOOK_INTERVAL_S):
                await self._closed.wait()
        except TimeoutError:
            return


class EventStream(StreamingResponse):
    """Gives the watcher's place back, however it ends."""

    def __init__(self, feed: WatchFeed, frames: AsyncIterator[bytes]) -> None:
        self._feed = feed
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(frames, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.leave()


def watch_router(services: Services, feed: WatchFeed) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["inspection"])
    services.metrics.watchers.set_function(lambda: feed.watchers)

    @router.get(
        "/watch",
        summary="What changes among the publishers, as server-sent events",
        description="docs/api.md lists the events. Ends when the service stops.",
        response_class=Response,
        responses={200: ANSWER_OPENAPI, **errors(403, 422, 503)},
    )
    async def watch(
        request: Request,
        tenant: Annotated[str | None, Query(min_length=1, max_length=NAME_LENGTH_MAX)] = None,
        last_event_id: Annotated[int | None, Header(ge=0, description="Where to go on.")] = None,
    ) -> Response:
        caller = caller_of(request)
        if tenant is not None:
            caller.require(tenant)
        if services.life.is_stopping:
            raise ApiError(503, "stopping", "the service is stopping")
        feed.enter()
        return EventStream(feed, feed.watch(caller, tenant, last_event_id, holds_of(request)))

    return router


def _look_at(followed: FollowedPublisher) -> _Seen:
    index = followed.index
    predictions = index.predictions
    is_alarmed = predictions is not None and predictions.is_alarmed
    share = predictions.wrong_share if predictions is not None and is_alarmed else 0.0
    return _Seen(followed.registration, followed.state, index.trust, index.checkpoint.generation, is_alarmed, share)


def _describe(trust: Trust) -> dict[str, Any]:
    return {"coverage": trust.coverage, "coverage_reason": trust.reason, "coverage_at": trust.at}


def _frame(event_id: int, kind: str, data: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event_id, kind.encode(), _encode(data))
