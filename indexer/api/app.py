"""The HTTP application: its routes, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Depends, FastAPI

from indexer import __version__
from indexer.api.bounds import RequestBounds
from indexer.api.errors import add_error_handlers, require_recovered
from indexer.api.health import health_router
from indexer.api.inspect import inspect_router
from indexer.api.ports import Life, Services
from indexer.api.prefix_hits import prefix_hits_router
from indexer.api.publishers import publishers_router

DESCRIPTION = """Which inference engine still holds how much of this prompt?

Register the event stream of each engine, then ask `POST /v1/prefix-hits` for every prompt. Errors are
`{"error": {"code", "message", "field"}}` with stable codes. 64-bit keys and hashes are strings of 16 hex digits.
"""


def create_app(services: Services) -> FastAPI:
    """While the index is being recovered, everything under /v1 answers 503 `not_ready`; the probes answer at once."""
    app = FastAPI(
        title="KV-cache content index",
        version=__version__,
        description=DESCRIPTION,
        redirect_slashes=False,
        redoc_url=None,
    )
    recovered = [Depends(_require_recovered(services.life))]
    app.include_router(prefix_hits_router(services))
    app.include_router(publishers_router(services), dependencies=recovered)
    app.include_router(inspect_router(services), dependencies=recovered)
    app.include_router(health_router(services))
    add_error_handlers(app)
    app.add_middleware(RequestBounds, limits=services.limits, metrics=services.metrics)
    return app


def _require_recovered(life: Life) -> Callable[[], Awaitable[None]]:
    async def require() -> None:
        require_recovered(life)

    return require
