"""A subscription opened before its publisher's rows are read, so that nothing falls between the two.

Purpose: a replica that starts while others follow a publisher reads rows that go on changing. Without a replay endpoint
the batches between the rows and the first one received would be lost. So it subscribes first, lets the rows come up to
what it receives, reads them, and goes on from there. What the rows have already, the follower leaves out, and is proof
that both are of one run (continuity.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from indexer.stream.ports import LiveSource, ReplaySource, Transport
from indexer.wire.errors import WireError
from indexer.wire.frames import split_message

CONNECTED_WITHIN_S = 2.0
FIRST_BATCH_WITHIN_S = 1.0
"""Whatever was published before the subscription is in the rows after this long, if their writer is well."""


class EarlySubscription:
    """A `LiveSource` that is open already."""

    def __init__(self, transport: Transport, endpoint: str) -> None:
        self._news = asyncio.Event()
        self.wake: Callable[[], None] = self._news.set  # whoever takes over puts his own here
        self._source = transport.open_live(endpoint, self._on_news)
        self._received: list[list[bytes]] = []
        self._changes: list[bool] = []

    def _on_news(self) -> None:
        self.wake()

    async def first_number(self) -> int | None:
        """Of the first batch received; None if none comes in time."""
        now = asyncio.get_running_loop().time
        deadline = now() + CONNECTED_WITHIN_S
        while not self._received and now() < deadline:
            self._news.clear()
            self._received = self._source.drain(1)
            changes = self._source.connection_changes()
            if True in changes:
                deadline = now() + FIRST_BATCH_WITHIN_S
            self._changes += changes
            if not self._received:
                await _wait(self._news, deadline - now())
        return _number_of(self._received[0]) if self._received else None

    def drain(self, messages_max: int) -> list[list[bytes]]:
        first, self._received = self._received, []
        assert len(first) <= messages_max, "one was received, and one at least is asked for"
        return first + (self._source.drain(messages_max - len(first)) if messages_max > len(first) else [])

    def connection_changes(self) -> list[bool]:
        changes, self._changes = self._changes, []
        return changes + self._source.connection_changes()

    def close(self) -> None:
        self._source.close()


class OpenedEarly:
    """A `Transport` for one follower: its first subscription is the early one."""

    def __init__(self, transport: Transport, early: EarlySubscription) -> None:
        self._transport = transport
        self._early: EarlySubscription | None = early

    def open_live(self, endpoint: str, wake: Callable[[], None]) -> LiveSource:
        early, self._early = self._early, None
        if early is None:
            return self._transport.open_live(endpoint, wake)
        early.wake = wake
        wake()
        return early

    def open_replay(self, endpoint: str, wake: Callable[[], None]) -> ReplaySource:
        return self._transport.open_replay(endpoint, wake)

    def close(self) -> None:
        self._transport.close()


def _number_of(frames: list[bytes]) -> int | None:
    try:
        return split_message(frames).sequence_number
    except WireError:
        return None


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass  # the caller looks at the time
