"""What a caller that is bound to tenants sees through the dialects: only its own, not even that there are others."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.api.access import Caller
from tests.unit.api.stand_ins import World, error_of

ENDPOINT = "tcp://10.0.0.7:5557"
DYNAMO = {"instance_id": 7, "model_name": "m"}
RFC1403 = {"instance_id": "w", "modelname": "m"}
REGISTER = {"endpoint": ENDPOINT, "block_size": 16}
QUERY = {"model": "m", "token_ids": [1], "block_size": 16}

CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/register", DYNAMO | REGISTER, "routing_group"),
    ("/unregister", DYNAMO, "routing_group"),
    ("/query", {"model_name": "m", "token_ids": [1]}, "routing_group"),
    ("/query_by_hash", {"model_name": "m", "block_hashes": [1]}, "routing_group"),
    ("/register", RFC1403 | REGISTER | {"type": "vLLM", "dp_rank": 0}, "tenant_id"),
    ("/unregister", RFC1403, "tenant_id"),
    ("/query", QUERY, "tenant_id"),
    ("/query_by_hash", {"model": "m", "seq_hashes": [1], "block_size": 16}, "tenant_id"),
    ("/lookup", {"tokens": [1]}, "tenant"),
    ("/v1/scores", {"model": "m", "token_ids": [1]}, "tenant"),
]


@pytest.fixture
def bound(world: World) -> World:
    """Publishers of the tenants "mine" and "default"; whoever asks from here on is bound to "mine"."""
    for worker_id, tenant in (("w", "default"), ("m", "mine")):
        assert world.register(worker_id=worker_id, tenant=tenant).status_code == 201
    app = world.client.app

    async def with_caller(scope: Any, receive: Any, send: Any) -> None:
        scope["caller"] = Caller(frozenset({"mine"}))
        await app(scope, receive, send)

    world.client.app = with_caller  # type: ignore[assignment]
    return world


@pytest.mark.parametrize(("path", "body", "field"), CALLS)
def test_another_tenant_is_forbidden_and_nothing_is_changed(
    bound: World, path: str, body: dict[str, Any], field: str
) -> None:
    assert error_of(bound.client.post(path, json=body)) == (403, "tenant_forbidden", field)
    assert set(bound.registry.entries) == {("w", 0), ("m", 0)}
    own = {"routing_group": "mine", "tenant_id": "mine", "tenant": "mine"}[field]
    assert bound.client.post(path, json=body | {field: own}).status_code != 403


@pytest.mark.parametrize("path", ["/query", "/query_by_hash", "/register", "/unregister"])
def test_the_later_form_says_so_in_its_words(bound: World, path: str) -> None:
    body = next(body for known, body, field in CALLS if (known, field) == (path, "tenant_id"))
    response = bound.client.post("/conductor" + path, json=body)
    assert (response.status_code, response.json()["reason"]) == (403, "tenant_forbidden")
    assert response.json()["field"] == "tenant_id"


def test_lists_leave_others_out(bound: World) -> None:
    assert [worker["instance_id"] for worker in bound.client.get("/workers").json()] == ["m"]
    refused = bound.client.get("/workers?routing_group=default")
    assert error_of(refused) == (403, "tenant_forbidden", "routing_group")
    services = bound.client.get("/services").json()
    assert (services["count"], services["services"][0]["InstanceID"]) == (1, "m")
    view = bound.client.get("/global_view").json()
    assert (view["context_count"], view["contexts"][0]["tenant_id"]) == (1, "mine")


def test_only_its_own_is_dumped(bound: World) -> None:
    assert bound.client.get("/dump").status_code == 200
    assert bound.store.dumped_tenants == {"mine"}
