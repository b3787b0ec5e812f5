"""What stands behind the application in these tests: a registry that follows nothing, a store of a few rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx

from indexer.api.access import Keyring
from indexer.api.app import Application, create_app
from indexer.api.ports import ApiLimits, Sees, Services
from indexer.errors import NoReplayEndpoint, PastOutOfReach, PublisherConflict, PublisherLimit, StoreUnavailable
from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.index.state import StoredBlock, StoredCut
from indexer.metrics import Metrics
from indexer.registration import PublisherKey, Registration
from indexer.store.past import Past
from indexer.stream.endpoints import normalise_endpoint
from indexer.stream.followed import ReplayStatus

BODY_BYTES_MAX = 4096
PROMPT_TOKENS_MAX = 500


@dataclass
class StandInFollowed:
    registration: Registration
    index: PublisherIndex
    state: str = "connected"
    last_error: str | None = None
    last_batch_at: float | None = None
    counters: dict[str, int] = field(default_factory=dict)

    def describe_replay(self, now: float) -> dict[str, object] | None:
        return asdict(ReplayStatus()) if self.registration.replay_endpoint else None


@dataclass
class StandInRegistry:
    """Remembers registrations, as the real one does, and follows nothing."""

    index: ContentIndex
    publishers_max: int = 10
    failure: Exception | None = None
    registrations_expired: int = 0
    resyncs: list[tuple[str, int, bool]] = field(default_factory=list)
    entries: dict[PublisherKey, StandInFollowed] = field(default_factory=dict)

    async def register(self, registration: Registration) -> tuple[StandInFollowed, bool]:
        if self.failure:
            raise self.failure
        if known := self.entries.get(registration.key):
            if known.registration != replace(registration, publisher_id=known.registration.publisher_id):
                raise PublisherConflict(*registration.key, "endpoint")
            return known, False
        if len(self.entries) >= self.publishers_max:
            raise PublisherLimit(self.publishers_max)
        saved = replace(registration, publisher_id=len(self.entries) + 1)
        self.entries[saved.key] = StandInFollowed(saved, self.index.add_publisher(saved))
        return self.entries[saved.key], True

    async def unregister(self, worker_id: str, dp_rank: int | None, sees: Sees = lambda _: True) -> int:
        keys = [followed.registration.key for followed in self._found(worker_id, dp_rank, sees)]
        for key in keys:
            del self.entries[key]
            self.index.remove_publisher(key)
        return len(keys)

    async def clear(self, worker_id: str, dp_rank: int | None, sees: Sees) -> int:
        found = self._found(worker_id, dp_rank, sees)
        for followed in found:
            followed.index.clear(12.5)
        return len(found)

    async def resync(self, worker_id: str, dp_rank: int | None, sees: Sees, *, is_full: bool) -> int:
        found = self._found(worker_id, dp_rank, sees)
        for followed in found:
            if followed.registration.replay_endpoint is None:
                raise NoReplayEndpoint(*followed.registration.key)
            self.resyncs.append((*followed.registration.key, is_full))
        return len(found)

    def _found(self, worker_id: str, dp_rank: int | None, sees: Sees) -> list[StandInFollowed]:
        named = [f for k, f in self.entries.items() if k.worker_id == worker_id and dp_rank in (None, k.dp_rank)]
        return [followed for followed in named if sees(followed.registration.tenant)]

    def find(self, worker_id: str, dp_rank: int) -> StandInFollowed | None:
        return self.entries.get(PublisherKey(worker_id, dp_rank))

    def followed(self) -> list[StandInFollowed]:
        return list(self.entries.values())


@dataclass
class StandInLife:
    is_recovered: bool = True
    is_stopping: bool = False
    lacks: list[str] = field(default_factory=list)

    def missing(self) -> list[str]:
        return self.lacks


@dataclass
class StandInStore:
    """A few rows, which may be out of reach."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    is_away: bool = False
    dumped: list[StoredCut | list[StoredBlock]] = field(default_factory=list)
    dumped_tenants: Collection[str] | None = None

    async def blocks(self, content_key: int, tenants: Collection[str] | None) -> list[dict[str, object]]:
        self._reach()
        rows = [row for row in self.rows if row["content_key"] == content_key]
        return [row for row in rows if tenants is None or row["tenant"] in tenants]

    async def audit(self) -> dict[str, object]:
        self._reach()
        of_both = ("publishers", "publishers_of_others", "differences_total")
        of_each = (f"{what}_in_{where}" for what in ("residencies", "ghosts") for where in ("memory", "store"))
        return {"is_equal": True, **dict.fromkeys((*of_both, *of_each), 0), "differences": []}

    async def dump(self, tenants: Collection[str] | None) -> AsyncGenerator[StoredCut | list[StoredBlock], None]:
        self._reach()
        self.dumped_tenants = tenants
        for part in self.dumped:
            yield part

    def _reach(self) -> None:
        if self.is_away:
            raise StoreUnavailable("the database is away")


def stand_in_services(
    index: ContentIndex, registry: StandInRegistry, life: StandInLife, store: StandInStore, limits: ApiLimits
) -> Services:
    async def refresh_metrics() -> None: ...

    async def past(at: float, query: PrefixQuery, wanted: Sequence[PublisherKey]) -> Past:
        """Ten seconds from the start there was nothing, then all that is."""
        if at < 10:
            raise PastOutOfReach(10.0)
        return Past(index, [index.publisher(key) if at < 20 else None for key in wanted])

    return Services(
        index=index,
        registry=registry,
        normalise_endpoint=normalise_endpoint,
        blocks=store.blocks,
        audit=store.audit,
        dump=store.dump,
        life=life,
        limits=limits,
        metrics=Metrics(),
        refresh_metrics=refresh_metrics,
        past=past,
    )


def application(index: ContentIndex, keyring: Keyring | None = None) -> Application:
    """The application with the limits that the service has by default."""
    limits = ApiLimits(33_554_432, 1_000_000, 1_024)
    services = stand_in_services(index, StandInRegistry(index), StandInLife(), StandInStore(), limits)
    return create_app(services, keyring)


class ApiClient:
    """Sends one request at a time to an application in this process."""

    def __init__(self, app: Application) -> None:
        self.app = app

    def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                return await client.request(method, path, **content)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, **content: Any) -> httpx.Response:
        return self.request("POST", path, **content)

    def put(self, path: str, **content: Any) -> httpx.Response:
        return self.request("PUT", path, **content)

    def delete(self, path: str) -> httpx.Response:
        return self.request("DELETE", path)


@dataclass
class World:
    """The application and what stands behind it, for a test to arrange."""

    index: ContentIndex
    registry: StandInRegistry
    life: StandInLife
    client: ApiClient
    store: StandInStore
    metrics: Metrics

    def register(self, **values: Any) -> Any:
        body = {"worker_id": "w", "model": "m", "endpoint": "tcp://127.0.0.1:5557", **values}
        return self.client.post("/v1/publishers", json=body)

    def ask(self, **values: Any) -> Any:
        return self.client.post("/v1/prefix-hits", json={"model": "m", "token_ids": [1, 2, 3], **values})


def empty_world(keyring: Keyring | None = None) -> World:
    index, life, store = ContentIndex(), StandInLife(), StandInStore()
    registry = StandInRegistry(index)
    limits = ApiLimits(BODY_BYTES_MAX, PROMPT_TOKENS_MAX, requests_max=50)
    services = stand_in_services(index, registry, life, store, limits)
    return World(index, registry, life, ApiClient(create_app(services, keyring)), store, services.metrics)


def error_of(response: Any) -> tuple[int, str, str | None]:
    """Status, code and field of an error envelope, whose shape is checked."""
    error = response.json()["error"]
    assert set(error) == {"code", "message", "field"}
    assert error["message"]
    return response.status_code, error["code"], error["field"]
