"""`/healthz` (the process is alive), `/readyz` (it may be asked) and `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from indexer import __version__
from indexer.api.ports import Services
from indexer.api.publishers import answer
from indexer.api.schemas import Alive, Ready


def health_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="The process is alive", responses={200: {"model": Alive}})
    async def healthz() -> Response:
        return answer({"status": "alive", "version": __version__})

    @router.get(
        "/readyz",
        summary="Recovered, and the store is reachable",
        responses={200: {"model": Ready}, 503: {"model": Ready, "description": "Not ready; says what is missing"}},
    )
    async def readyz() -> Response:
        missing = services.life.missing()
        return answer({"ready": not missing, "missing": missing}, 503 if missing else 200)

    @router.get("/metrics", summary="Numbers for Prometheus", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        services.metrics.ready.set(not services.life.missing())
        await services.refresh_metrics()
        return Response(generate_latest(services.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return router
