"""The contract of the lookup of LMCache's controller, exact JSON."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from indexer.api.dialects.lmcache import Lookup
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import PROMPT_TOKENS_MAX, World, error_of

BLOCK = 16
PROMPT = list(range(1, 49))


def lookup(world: World, **values: Any) -> Any:
    return world.client.post("/lookup", json={"tokens": PROMPT} | values)


def store(world: World, worker_id: str, dp_rank: int, tokens: list[int], medium: str = "GPU") -> None:
    event = ["BlockStored", list(range(len(tokens) // BLOCK)), None, tokens, BLOCK, None, medium, None]
    followed = world.registry.find(worker_id, dp_rank)
    assert followed
    followed.index.apply(decode_batch(msgspec.msgpack.encode([1.0, [event], 0])), 0, 1)


@pytest.fixture
def holding(world: World) -> World:
    for worker_id, dp_rank in (("a", 0), ("b", 0), ("b", 1)):
        assert world.register(worker_id=worker_id, dp_rank=dp_rank, engine="sglang").status_code == 201
    store(world, "a", 0, PROMPT[:32])
    store(world, "a", 0, PROMPT, "CPU")
    store(world, "b", 0, PROMPT[:16])
    store(world, "b", 1, PROMPT[:32])
    return world


def test_the_longest_match_of_each_instance_and_where_it_lies(holding: World) -> None:
    response = lookup(holding)
    body = response.json()
    Lookup.model_validate(body)
    assert re.fullmatch("Lookup[0-9a-f-]{36}", body.pop("event_id"))
    assert (response.status_code, body) == (200, {"layout_info": {"a": ["CPU", 48], "b": ["GPU", 32]}})


def test_every_lookup_has_an_id_of_its_own(holding: World) -> None:
    assert lookup(holding).json()["event_id"] != lookup(holding).json()["event_id"]


def test_what_nobody_has_is_answered_with_nothing(holding: World) -> None:
    assert lookup(holding, tokens=[]).json()["layout_info"] == {}
    assert lookup(holding, tokens=[7] * 32).json()["layout_info"] == {}


def test_the_only_model_of_the_tenant_is_meant(holding: World) -> None:
    assert error_of(lookup(holding, tenant="other")) == (404, "unknown_model", "model")
    assert holding.register(worker_id="c", model="other").status_code == 201
    assert error_of(lookup(holding)) == (422, "ambiguous_model", "model")
    assert lookup(holding, model="m").json()["layout_info"]["a"] == ["CPU", 48]
    assert lookup(holding, model="other").json()["layout_info"] == {}
    assert holding.register(worker_id="d", tenant="t").status_code == 201
    assert lookup(holding, tenant="t").json()["layout_info"] == {}


def test_unknown_fields_are_passed_over(holding: World) -> None:
    assert lookup(holding, event_id="x").json()["layout_info"]["b"] == ["GPU", 32]


def test_a_wrong_value_is_named(holding: World) -> None:
    assert error_of(holding.client.post("/lookup", json={})) == (422, "missing_field", "tokens")
    assert error_of(lookup(holding, tokens=[1, -1])) == (422, "invalid_value", "tokens[1]")
    assert error_of(lookup(holding, tokens=[1] * (PROMPT_TOKENS_MAX + 1))) == (422, "prompt_too_long", "tokens")
    assert error_of(holding.client.post("/lookup", content=b"{")) == (400, "invalid_json", None)
