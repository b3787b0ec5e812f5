from __future__ import annotations

from typing import Any

import pytest

from indexer.api.access import Caller
from indexer.api.prefix_hits_schemas import ModelList
from indexer.index import names_seen
from indexer.index.state import Coverage, CoverageReason
from indexer.registration import PublisherKey
from tests.engine_events import decoded, stored
from tests.unit.api.stand_ins import World, error_of

TOKENS = list(range(1, 65))


def hold(world: World, *events: Any, worker_id: str = "w", **values: Any) -> None:
    world.register(worker_id=worker_id, **values)
    publisher = world.index.publisher(PublisherKey(worker_id, values.get("dp_rank", 0)))
    assert publisher is not None
    publisher.apply(decoded(*events), 0, 0)


def models(world: World, query: str = "") -> list[dict[str, Any]]:
    response = world.client.get(f"/v1/models{query}")
    ModelList.model_validate(response.json())
    found: list[dict[str, Any]] = response.json()["models"]
    return found


def test_nothing_is_registered(world: World) -> None:
    assert models(world) == []


def test_a_model_says_what_its_publishers_have_shown(world: World) -> None:
    full = {"kv_cache_spec_kind": "full_attention", "group_idx": 0}
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32, "group_idx": 1}
    both = stored([1], None, TOKENS, 64, **full), stored([1, 2], None, TOKENS[:32], 16, **window)
    hold(world, *both)
    hold(world, *both, worker_id="w", dp_rank=1)
    hold(world, stored([1], None, TOKENS[:4], 4, lora_name="tuned"), worker_id="v")
    world.register(worker_id="u")
    publisher = world.index.publisher(PublisherKey("w", 1))
    assert publisher is not None
    publisher.set_coverage(Coverage.SINCE, CoverageReason.JOINED_LATE, 1.0, since=3)
    assert models(world) == [
        {
            "tenant": "default",
            "model": "m",
            "granules": [4, 16],
            "block_sizes": [4, 16, 64],
            "groups": [
                {"group": 0, "kind": "full_attention", "window": None, "sizes": [64], "publishers": 2},
                {"group": 0, "kind": "unknown", "window": None, "sizes": [4], "publishers": 1},
                {"group": 1, "kind": "sliding_window", "window": 32, "sizes": [16], "publishers": 2},
            ],
            "adapters": ["tuned"],
            "adapters_complete": True,
            "publishers": {
                "count": 4,
                "states": {"connected": 4},
                "coverages": {"complete": 3, "since": 1},
                "keys": [
                    {"worker_id": "u", "dp_rank": 0, "state": "connected", "coverage": "complete"},
                    {"worker_id": "v", "dp_rank": 0, "state": "connected", "coverage": "complete"},
                    {"worker_id": "w", "dp_rank": 0, "state": "connected", "coverage": "complete"},
                    {"worker_id": "w", "dp_rank": 1, "state": "connected", "coverage": "since"},
                ],
            },
        }
    ]


def test_more_adapters_than_are_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_seen, "ADAPTERS_MAX", 1)
    hold(world, stored([1], None, TOKENS[:16], lora_name="a"), stored([2], None, TOKENS[:16], lora_name="b"))
    (model,) = models(world)
    assert (model["adapters"], model["adapters_complete"]) == (["a"], False)


def test_models_of_one_tenant(world: World) -> None:
    for number, (tenant, model) in enumerate([("b", "m"), ("a", "n"), ("a", "m")]):
        world.register(worker_id=f"w{number}", tenant=tenant, model=model)
    assert [(m["tenant"], m["model"]) for m in models(world)] == [("a", "m"), ("a", "n"), ("b", "m")]
    assert [m["model"] for m in models(world, "?tenant=a")] == ["m", "n"]
    assert models(world, "?tenant=c") == []
    assert error_of(world.client.get("/v1/models?tenant=")) == (422, "invalid_value", "tenant")


def test_a_caller_sees_its_own_tenants_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, tenant in enumerate(("own", "other")):
        world.register(worker_id=f"w{number}", tenant=tenant)
    monkeypatch.setattr("indexer.api.models.caller_of", lambda _: Caller(frozenset({"own"})))
    assert [m["tenant"] for m in models(world)] == ["own"]
    for tenant in ("other", "nobody"):
        assert error_of(world.client.get(f"/v1/models?tenant={tenant}")) == (403, "tenant_forbidden", "tenant")


def test_nothing_is_answered_before_recovery(world: World) -> None:
    world.life.is_recovered = False
    assert error_of(world.client.get("/v1/models")) == (503, "not_ready", None)
