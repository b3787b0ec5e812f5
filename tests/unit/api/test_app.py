from __future__ import annotations

from typing import Any

import pytest

from indexer.api.errors import field_path
from indexer.api.schemas import Alive, Ready
from tests.unit.api.stand_ins import World, error_of


def test_alive_at_once_ready_when_nothing_is_missing(world: World) -> None:
    world.life.is_recovered, world.life.lacks = False, ["the database is not reachable"]
    alive = world.client.get("/healthz")
    Alive.model_validate(alive.json())
    assert alive.status_code == 200
    unready = world.client.get("/readyz")
    Ready.model_validate(unready.json())
    assert (unready.status_code, unready.json()["missing"]) == (503, ["the database is not reachable"])
    world.life.lacks = []
    assert (world.client.get("/readyz").status_code, world.client.get("/readyz").json()["ready"]) == (200, True)


def test_unknown_routes_and_methods_are_in_the_envelope(world: World) -> None:
    assert error_of(world.client.get("/v2/nothing")) == (404, "not_found", None)
    assert error_of(world.client.get("/v1/prefix-hits")) == (405, "method_not_allowed", None)
    assert error_of(world.client.put("/v1/publishers", json={})) == (405, "method_not_allowed", None)
    assert world.client.get("/v1/prefix-hits").headers["allow"] == "POST"


def test_metrics_name_routes_and_never_paths(world: World) -> None:
    world.register(worker_id="somebody")
    world.client.get("/v1/publishers/somebody")
    world.client.get("/nowhere/secret")
    world.client.request("BREW", "/healthz")
    response = world.client.get("/metrics")
    text = response.text
    assert response.headers["content-type"].startswith("text/plain")
    assert 'route="/v1/publishers/{worker_id:path}"' in text
    assert 'route="unknown"' in text
    assert 'method="other"' in text
    assert "somebody" not in text
    assert "secret" not in text
    assert "indexer_ready 1.0" in text


def test_more_requests_at_once_than_allowed_are_a_503_but_probes_are_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from indexer.api import bounds

    monkeypatch.setattr(bounds.ApiLimits, "requests_max", 0, raising=False)
    assert error_of(world.client.get("/v1/stats")) == (503, "overloaded", None)
    assert world.client.get("/healthz").status_code == 200


def schemas_in(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [ref for value in node.values() for ref in schemas_in(value)]
    return [ref for value in node for ref in schemas_in(value)] if isinstance(node, list) else []


def test_the_openapi_document_describes_every_route(world: World) -> None:
    document = world.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert set(document["paths"]) == {
        "/v1/prefix-hits",
        "/v1/routed",
        "/v1/observed",
        "/v1/watch",
        "/v1/hot-prefixes",
        "/v1/workers/{worker_id}/drain-impact",
        "/v1/prefix-hits:batch",
        "/v1/models",
        "/v1/publishers",
        "/v1/publishers/{worker_id}",
        "/v1/publishers/{worker_id}/clear",
        "/v1/publishers/{worker_id}/resync",
        "/v1/blocks/{content_key}",
        "/v1/stats",
        "/v1/audit",
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/scores",
        "/health",
        "/workers",
        "/dump",
        "/peers",
        "/register_peer",
        "/deregister_peer",
        "/lookup",
        *(
            prefix + path
            for prefix in ("", "/conductor")
            for path in ("/register", "/unregister", "/query", "/query_by_hash", "/services", "/global_view")
        ),
    }
    for ref in schemas_in(document):
        name = ref.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"]
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]
            assert operation["responses"]


def test_the_openapi_document_has_examples(world: World) -> None:
    document = world.client.get("/openapi.json").json()
    query = document["paths"]["/v1/prefix-hits"]["post"]
    content = query["requestBody"]["content"]
    assert set(content) == {"application/json", "application/msgpack"}
    assert content["application/json"]["examples"]["plain"]["value"]["token_ids"]
    assert query["responses"]["200"]["content"]["application/json"]["example"]["hits"]
    assert document["components"]["schemas"]["RegistrationBody"]["examples"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_a_field_path_reads_like_code() -> None:
    assert field_path(("multimodal", 0, "offset")) == "multimodal[0].offset"
    assert field_path(()) == ""
