"""The asynchronous client: the same calls, in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar, Unpack

from indexer.client import requests
from indexer.client.answers import Counts, Outcome, PrefixHits
from indexer.client.async_connections import AsyncConnections
from indexer.client.calls import TIMEOUT_S, Calls, Settings
from indexer.client.endpoints import Attempt, Trip
from indexer.client.faults import Fault, NoPlace
from indexer.client.prompts import LocalHashes, TokenIds

T = TypeVar("T")


class AsyncIndexClient:
    """As `IndexClient`, for one event loop at a time: in another one it begins with new connections."""

    def __init__(self, urls: str | Sequence[str], **settings: Unpack[Settings]) -> None:
        self._calls = Calls(urls, **settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: list[AsyncConnections] = []

    async def prefix_hits(
        self,
        model: str,
        token_ids: TokenIds | None = None,
        *,
        local_hashes: LocalHashes | None = None,
        granule: int | None = None,
        deadline_s: float | None = None,
        **options: Unpack[requests.Prompt],
    ) -> PrefixHits:
        """How much of a prompt each engine would skip. Raises TypeError, ValueError or RuntimeError for misuse only."""
        request = self._calls.prefix_hits(model, token_ids, local_hashes, granule, options)
        trip = self._calls.begin(request, time.monotonic(), deadline_s)
        await self._travel(trip, request)
        return self._calls.end_query(trip)

    async def register(
        self,
        worker_id: str,
        model: str,
        endpoint: str,
        *,
        timeout_s: float = TIMEOUT_S,
        **fields: Unpack[requests.Registration],
    ) -> Outcome:
        """Have an engine followed. Again with the same values: done, status 200 instead of 201."""
        return await self._send(requests.register(worker_id, model, endpoint, **fields), timeout_s)

    async def unregister(self, worker_id: str, dp_rank: int | None = None, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Without `dp_rank`: all ranks. One that is not registered is refused, `unknown_publisher`."""
        return await self._send(requests.unregister(worker_id, dp_rank), timeout_s)

    async def ready(self, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Whether an endpoint is ready; a connection to it is open then."""
        return await self._send(requests.ready(), timeout_s)

    async def call(self, method: str, path: str, body: object = None, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Any other route, in JSON."""
        return await self._send(requests.call(method, path, body), timeout_s)

    def counts(self) -> Counts:
        return self._calls.counts()

    async def close(self) -> None:
        """Calls under way end as they would."""
        self._calls.is_closed = True
        self._drop_connections()
        await asyncio.sleep(0)  # the transports' own last callbacks

    async def __aenter__(self) -> AsyncIndexClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, request: requests.Request[bytes], timeout_s: float) -> Outcome:
        trip = self._calls.begin(request, time.monotonic(), timeout_s, insists=True)
        await self._travel(trip, request)
        return self._calls.end(trip)

    async def _travel(self, trip: Trip[T], request: requests.Request[T]) -> None:
        while (attempt := trip.next(time.monotonic())) is not None:
            sent = self._calls.encode(request, attempt)
            try:
                response = await self._connections_to(attempt).exchange(sent, attempt.deadline)
            except Fault as fault:
                trip.failed(attempt, fault.reason, str(fault), time.monotonic())
            except NoPlace as fault:
                trip.gave_up(str(fault))
            else:
                trip.answered(attempt, response, time.monotonic())

    def _connections_to(self, attempt: Attempt) -> AsyncConnections:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._connections = [
                AsyncConnections(endpoint, self._calls.connections_max) for endpoint in self._calls.endpoints
            ]
        return self._connections[attempt.endpoint]

    def _drop_connections(self) -> None:
        for connections in self._connections:
            connections.close()
