"""What both clients share: settings, the way along the endpoints, and what becomes of its end. No input or output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from indexer.client.addresses import read_endpoints
from indexer.client.answers import Counts, Failure, Outcome, PrefixHits
from indexer.client.endpoints import Attempt, Endpoints, Trip
from indexer.client.http1 import encode_request
from indexer.client.prompts import LocalHashes, TokenIds
from indexer.client.requests import Request, prefix_hits

DEADLINE_S = 0.010
TIMEOUT_S = 5.0
CONNECTIONS_MAX = 128
T = TypeVar("T")


class Settings(TypedDict, total=False):
    """What both clients take beside URLs; see `IndexClient`."""

    deadline_s: float
    granule: int | None
    api_key: str | None
    ca_file: str | Path | None
    any_name: bool
    connections_max: int
    on_no_signal: Callable[[Failure], object] | None


class Calls:
    """Raises ValueError, TypeError, and OSError for a `ca_file` that cannot be read."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        deadline_s: float = DEADLINE_S,
        granule: int | None = None,
        api_key: str | None = None,
        ca_file: str | Path | None = None,
        any_name: bool = False,
        connections_max: int = CONNECTIONS_MAX,
        on_no_signal: Callable[[Failure], object] | None = None,
    ) -> None:
        if not deadline_s > 0:
            raise ValueError("deadline_s must be above 0")
        if granule is not None and granule < 1:
            raise ValueError("granule must be a positive number of tokens")
        if connections_max < 1:
            raise ValueError("connections_max must be a positive number")
        self.endpoints = read_endpoints(urls, api_key, ca_file, any_name=any_name)
        self.connections_max = connections_max
        self.is_closed = False
        self._deadline_s = deadline_s
        self._granule = granule
        self._on_no_signal = on_no_signal
        self.start()

    def start(self) -> None:
        """With nothing known of any endpoint, and nothing counted."""
        self._standing = Endpoints([endpoint.url for endpoint in self.endpoints])

    def counts(self) -> Counts:
        return self._standing.counts()

    def prefix_hits(
        self, model: str, token_ids: TokenIds | None, hashes: LocalHashes | None, granule: int | None, options: Any
    ) -> Request[PrefixHits]:
        return prefix_hits(model, token_ids, hashes, self._granule if granule is None else granule, **options)

    def begin(self, request: Request[T], now: float, deadline_s: float | None, *, insists: bool = False) -> Trip[T]:
        """Raises RuntimeError once closed."""
        if self.is_closed:
            raise RuntimeError("this client is closed")
        deadline = now + (self._deadline_s if deadline_s is None else deadline_s)
        return Trip(self._standing, request, deadline, insists=insists)

    def encode(self, request: Request[Any], attempt: Attempt) -> bytes:
        endpoint = self.endpoints[attempt.endpoint]
        return encode_request(
            request.method, endpoint.path + request.target, endpoint.headers, request.content_type, request.body
        )

    def end_query(self, trip: Trip[PrefixHits]) -> PrefixHits:
        failure = trip.end()
        if failure is None:
            assert trip.answer is not None
            return trip.answer
        if self._on_no_signal is not None:
            self._on_no_signal(failure)
        return PrefixHits(0, (), (), failure)

    def end(self, trip: Trip[bytes]) -> Outcome:
        failure = trip.end()
        if failure is None:
            assert trip.response is not None
            return Outcome(trip.response.status, trip.response.body)
        return Outcome(failure.status, b"", failure)
