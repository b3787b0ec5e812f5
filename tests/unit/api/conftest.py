"""The real application over a real, empty index; only the registry, the store and the start are stood in for."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.api.app import create_app
from indexer.api.ports import ApiLimits, Services
from indexer.errors import StoreUnavailable
from indexer.index.content_index import ContentIndex
from indexer.metrics import Metrics
from indexer.stream.endpoints import normalise_endpoint
from tests.unit.api.stand_ins import (
    BODY_BYTES_MAX,
    PROMPT_TOKENS_MAX,
    ApiClient,
    StandInLife,
    StandInRegistry,
    World,
)


@pytest.fixture
def world() -> World:
    index, life, rows = ContentIndex(), StandInLife(), list[dict[str, Any]]()
    registry = StandInRegistry(index)

    async def blocks(content_key: int) -> list[dict[str, object]]:
        if world.is_store_away:
            raise StoreUnavailable("the database is away")
        return [row for row in rows if row["content_key"] == content_key]

    async def audit() -> dict[str, object]:
        if world.is_store_away:
            raise StoreUnavailable("the database is away")
        return {"is_equal": True}

    async def refresh_metrics() -> None: ...

    services = Services(
        index=index,
        registry=registry,
        normalise_endpoint=normalise_endpoint,
        blocks=blocks,
        audit=audit,
        life=life,
        limits=ApiLimits(BODY_BYTES_MAX, PROMPT_TOKENS_MAX, requests_max=50),
        metrics=Metrics(),
        refresh_metrics=refresh_metrics,
    )
    world = World(index, registry, life, ApiClient(create_app(services)), rows)
    return world
