"""The synchronous client: one object for all threads of a process."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

from indexer.client import requests
from indexer.client.answers import Counts, Outcome, PrefixHits
from indexer.client.blocking_connections import BlockingConnections
from indexer.client.calls import TIMEOUT_S, Calls, Settings
from indexer.client.endpoints import Trip
from indexer.client.faults import Fault, NoPlace
from indexer.client.prompts import LocalHashes, TokenIds

T = TypeVar("T")


class IndexClient:
    """Asks the service at one of `urls`, in this order of preference.

    `deadline_s`: for a whole query, connecting and failing over included. `granule`: hash prompts here, and send only
    the hashes. `api_key`: sent as a bearer token. `ca_file`: who signs the certificates of `https` endpoints, or those
    themselves, instead of whom the system trusts; `any_name`: they may be for other names than that of the URL.
    `connections_max`: to each endpoint. `on_no_signal`: called with each failure of a query, in the thread that asked.

    Safe among threads; after a fork the child begins with connections of its own. Proxies of the environment are not
    used.
    """

    def __init__(self, urls: str | Sequence[str], **settings: Unpack[Settings]) -> None:
        self._calls = Calls(urls, **settings)
        self._connections = [
            BlockingConnections(endpoint, self._calls.connections_max) for endpoint in self._calls.endpoints
        ]
        _clients.add(self)

    def prefix_hits(
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
        self._travel(trip, request)
        return self._calls.end_query(trip)

    def register(
        self,
        worker_id: str,
        model: str,
        endpoint: str,
        *,
        timeout_s: float = TIMEOUT_S,
        **fields: Unpack[requests.Registration],
    ) -> Outcome:
        """Have an engine followed. Again with the same values: done, status 200 instead of 201."""
        return self._send(requests.register(worker_id, model, endpoint, **fields), timeout_s)

    def unregister(self, worker_id: str, dp_rank: int | None = None, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Without `dp_rank`: all ranks. One that is not registered is refused, `unknown_publisher`."""
        return self._send(requests.unregister(worker_id, dp_rank), timeout_s)

    def ready(self, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Whether an endpoint is ready; a connection to it is open then."""
        return self._send(requests.ready(), timeout_s)

    def call(self, method: str, path: str, body: object = None, *, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Any other route, in JSON."""
        return self._send(requests.call(method, path, body), timeout_s)

    def counts(self) -> Counts:
        return self._calls.counts()

    def close(self) -> None:
        """Calls that other threads have under way end as they would."""
        self._calls.is_closed = True
        for connections in self._connections:
            connections.close()

    def __enter__(self) -> IndexClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, request: requests.Request[bytes], timeout_s: float) -> Outcome:
        trip = self._calls.begin(request, time.monotonic(), timeout_s, insists=True)
        self._travel(trip, request)
        return self._calls.end(trip)

    def _travel(self, trip: Trip[T], request: requests.Request[T]) -> None:
        while (attempt := trip.next(time.monotonic())) is not None:
            sent = self._calls.encode(request, attempt)
            try:
                response = self._connections[attempt.endpoint].exchange(sent, attempt.deadline)
            except Fault as fault:
                trip.failed(attempt, fault.reason, str(fault), time.monotonic())
            except NoPlace as fault:
                trip.gave_up(str(fault))
            else:
                trip.answered(attempt, response, time.monotonic())

    def _begin_anew(self) -> None:
        """In the child of a fork."""
        self._calls.start()
        for connections in self._connections:
            connections.forget()


_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._begin_anew()


os.register_at_fork(after_in_child=_after_fork)
