"""The HTTP application: its routes, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Depends, FastAPI

from indexer import __version__
from indexer.api.bounds import RequestBounds
from indexer.api.dialects.dynamo import dynamo_queries, dynamo_router, read_hash_shape, read_token_shape
from indexer.api.errors import add_error_handlers, require_recovered
from indexer.api.explain import explain_router
from indexer.api.health import health_router
from indexer.api.inspect import inspect_router
from indexer.api.known_queries import KnownQueries
from indexer.api.meters import MeasuredIndex, RequestMeter
from indexer.api.ports import Life, Services
from indexer.api.prefix_hits import prefix_hits_route, prefix_hits_router, read_shape
from indexer.api.publishers import publishers_router
from indexer.api.query_route import DirectQueries, QueryDispatch

DESCRIPTION = """Which inference engine still holds how much of this prompt?

Register the event stream of each engine, then ask `POST /v1/prefix-hits` for every prompt. Errors are
`{"error": {"code", "message", "field"}}` with stable codes. 64-bit keys and hashes are strings of 16 hex digits.
"""


class Application(FastAPI):
    """FastAPI, and the queries that the HTTP server may answer without it."""

    direct: DirectQueries


def create_app(services: Services) -> Application:
    """While the index is being recovered, everything but the probes answers 503 `not_ready`."""
    app = Application(
        title="KV-cache content index",
        version=__version__,
        description=DESCRIPTION,
        redirect_slashes=False,
        redoc_url=None,
    )
    recovered = [Depends(_require_recovered(services.life))]
    meter, index = RequestMeter(services.metrics), MeasuredIndex(services.index, services.metrics)
    queries = [prefix_hits_route(services, index), *dynamo_queries(services, index)]
    app.include_router(prefix_hits_router())
    app.include_router(publishers_router(services), dependencies=recovered)
    app.include_router(inspect_router(services), dependencies=recovered)
    app.include_router(explain_router(services), dependencies=recovered)
    app.include_router(health_router(services))
    app.include_router(dynamo_router(services))
    add_error_handlers(app)
    app.add_middleware(QueryDispatch, routes=queries)
    app.add_middleware(RequestBounds, limits=services.limits, meter=meter)
    readers = [read_shape, read_token_shape, read_hash_shape]
    known = KnownQueries(services.index, services.life, services.limits, services.metrics, readers)
    app.direct = DirectQueries(queries, services.limits, meter, known)
    return app


def _require_recovered(life: Life) -> Callable[[], Awaitable[None]]:
    async def require() -> None:
        require_recovered(life)

    return require
