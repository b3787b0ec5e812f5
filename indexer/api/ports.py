"""What the HTTP API needs from the rest of the service, as small protocols: it knows neither sockets nor Postgres."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.index.state import StoredBlock, StoredCut
from indexer.metrics import Metrics
from indexer.registration import PublisherKey, Registration


class FollowedPublisher(Protocol):
    """A registered publisher and how following its stream goes."""

    @property
    def registration(self) -> Registration: ...
    @property
    def index(self) -> PublisherIndex: ...
    @property
    def state(self) -> str: ...
    @property
    def last_error(self) -> str | None: ...
    @property
    def last_batch_at(self) -> float | None: ...  # wall clock, seconds
    @property
    def counters(self) -> Mapping[str, int]: ...

    def describe_replay(self, now: float) -> Mapping[str, object] | None:
        """How its replay endpoint does, as `schemas.Replay` says; None without one. `now`: seconds since 1970."""


Sees: TypeAlias = Callable[[str], bool]
"""Whether a tenant is one of the caller's: for others, its publishers do not exist."""


class RegistryPort(Protocol):
    """Which publishers are followed."""

    async def register(self, registration: Registration) -> tuple[FollowedPublisher, bool]:
        """True = created, False = there with the same values.

        Raises PublisherConflict, PublisherLimit, StoreUnavailable.
        """

    async def unregister(self, worker_id: str, dp_rank: int | None, sees: Sees) -> int:
        """How many publishers were removed; rank None = all of the worker. Does not need the store."""

    async def clear(self, worker_id: str, dp_rank: int | None, sees: Sees) -> int:
        """Forget what they hold; how many publishers, rank None = all of the worker. Does not need the store."""

    async def resync(self, worker_id: str, dp_rank: int | None, sees: Sees, *, is_full: bool) -> int:
        """Ask their replay endpoints again; how many publishers. Raises NoReplayEndpoint."""

    @property
    def registrations_expired(self) -> int: ...

    def find(self, worker_id: str, dp_rank: int) -> FollowedPublisher | None: ...

    def followed(self) -> Sequence[FollowedPublisher]: ...


class Past(Protocol):
    """An index of what was held of one prompt at a past time."""

    @property
    def index(self) -> ContentIndex: ...
    @property
    def publishers(self) -> Sequence[PublisherIndex | None]:
        """Those that were asked for, in that order; None = not registered then."""


class Life(Protocol):
    """Where the service is between start and stop."""

    @property
    def is_recovered(self) -> bool:
        """The index is loaded and may answer. Asked for every query: cheap."""

    @property
    def is_stopping(self) -> bool: ...

    def missing(self) -> list[str]:
        """What keeps the service from being ready, in words; empty = ready."""


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Each is a setting."""

    body_bytes_max: int
    prompt_tokens_max: int
    requests_max: int
    expected_ttl_s: float = 2.0
    prediction_window_max: int = 200
    prediction_count_min: int = 50
    prediction_wrong_share_max: float = 0.2
    heat_half_life_s: float = 600.0
    watchers_max: int = 64
    watch_events_max: int = 1_024
    watch_heartbeat_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a handler may use.

    `normalise_endpoint`: an endpoint as it will be kept and connected to; raises EndpointError. `blocks`: the stored
    rows of one content key, of these tenants (None = all). `audit`: flush, then rows against memory. `dump`: all rows
    of these tenants (None = all), by tenant and model: cuts of publishers, each followed by portions of its blocks.
    `past`: what these publishers held of the prompt at a time, in seconds since 1970; raises PastOutOfReach, too. All
    of them raise StoreUnavailable. `refresh_metrics`: bring the numbers read from the index up to date.
    """

    index: ContentIndex
    registry: RegistryPort
    normalise_endpoint: Callable[[str], str]
    blocks: Callable[[int, Collection[str] | None], Awaitable[list[dict[str, object]]]]
    audit: Callable[[], Awaitable[dict[str, object]]]
    dump: Callable[[Collection[str] | None], AsyncGenerator[StoredCut | list[StoredBlock], None]]
    life: Life
    limits: ApiLimits
    metrics: Metrics
    refresh_metrics: Callable[[], Awaitable[None]]
    past: Callable[[float, PrefixQuery, Sequence[PublisherKey]], Awaitable[Past]]
