"""The HTTP application: its routes, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI

from indexer import __version__
from indexer.api.access import AccessControl, Keyring, describe_access
from indexer.api.bounds import RequestBounds
from indexer.api.dialects.dynamo import health_router as dynamo_health_router
from indexer.api.dialects.dynamo import read_hash_shape, read_token_shape
from indexer.api.dialects.dynamo_dump import dump_router
from indexer.api.dialects.dynamo_fleet import fleet_router as dynamo_fleet_router
from indexer.api.dialects.lmcache import lookup_route, lookup_router
from indexer.api.dialects.routes import dialect_queries, dialect_router
from indexer.api.errors import add_error_handlers, require_recovered
from indexer.api.explain import explain_router
from indexer.api.feedback import feedback_router, feedback_routes
from indexer.api.fleet import fleet_router
from indexer.api.health import health_router
from indexer.api.inspect import inspect_router
from indexer.api.known_queries import KnownQueries
from indexer.api.meters import MeasuredIndex, RequestMeter
from indexer.api.models import models_router
from indexer.api.ports import Life, Services
from indexer.api.prefix_hits import prefix_hits_router, prefix_hits_routes, read_shape
from indexer.api.publishers import publishers_router
from indexer.api.query_route import DirectQueries, QueryDispatch
from indexer.api.scores import scores_route, scores_router
from indexer.api.watch import WatchFeed, watch_router

DESCRIPTION = """Which inference engine still holds how much of this prompt?

Register the event stream of each engine, then ask `POST /v1/prefix-hits` for every prompt. Errors are
`{"error": {"code", "message", "field"}}` with stable codes. 64-bit keys and hashes are strings of 16 hex digits.
"""


class Application(FastAPI):
    """FastAPI, and the queries that the HTTP server may answer without it."""

    direct: DirectQueries
    watch_feed: WatchFeed
    describe: Callable[[dict[str, Any]], None]

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.describe(super().openapi())
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(services: Services, keyring: Keyring | None = None) -> Application:
    """While the index is being recovered, everything but the probes answers 503 `not_ready`. Without a keyring anyone
    may ask for anything."""
    app = Application(
        title="KV-cache content index",
        version=__version__,
        description=DESCRIPTION,
        redirect_slashes=False,
        redoc_url=None,
    )
    meter, index = RequestMeter(services.metrics), MeasuredIndex(services.index, services.metrics)
    queries = [
        *prefix_hits_routes(services, index),
        scores_route(services, index),
        *feedback_routes(services),
        *dialect_queries(services, index),
        lookup_route(services, index),
    ]
    limits = services.limits
    app.watch_feed = WatchFeed(
        services.registry, limits.watchers_max, limits.watch_events_max, limits.watch_heartbeat_s
    )
    _include_routers(app, services)
    add_error_handlers(app)
    app.add_middleware(QueryDispatch, routes=queries)
    paths = [query.path for query in queries]
    if keyring is not None:
        app.add_middleware(AccessControl, keyring=keyring, queries=paths)
    app.add_middleware(RequestBounds, limits=limits, meter=meter)
    readers = [read_shape, read_token_shape, read_hash_shape]
    known = KnownQueries(services.index, services.life, limits, services.metrics, readers)
    app.describe = partial(describe_access, queries=paths) if keyring else _describe_nothing
    app.direct = DirectQueries(queries, limits, meter, known, keyring)
    return app


def _include_routers(app: Application, services: Services) -> None:
    """In the order of the OpenAPI document."""
    recovered = [Depends(_require_recovered(services.life))]
    app.include_router(prefix_hits_router())
    app.include_router(feedback_router())
    for make_router in (publishers_router, inspect_router, fleet_router, models_router, explain_router):
        app.include_router(make_router(services), dependencies=recovered)
    app.include_router(health_router(services))
    app.include_router(dynamo_health_router(services.life))
    app.include_router(scores_router())
    app.include_router(dialect_router(services))
    app.include_router(dynamo_fleet_router(services))
    app.include_router(dump_router(services))
    app.include_router(lookup_router())
    app.include_router(watch_router(services, app.watch_feed), dependencies=recovered)


def _describe_nothing(_: dict[str, Any]) -> None: ...


def _require_recovered(life: Life) -> Callable[[], Awaitable[None]]:
    async def require() -> None:
        require_recovered(life)

    return require
