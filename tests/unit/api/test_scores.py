from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from indexer.api.scores import PodScores
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import PROMPT_TOKENS_MAX, World, error_of

BLOCK = 16
PROMPT = list(range(1, 65))


def ask(world: World, **values: Any) -> Any:
    return world.client.post("/v1/scores", json={"model": "m", "token_ids": PROMPT} | values)


def stored(first: int, blocks: int, medium: str) -> list[Any]:
    parent = first - 1 if first else None
    tokens = PROMPT[first * BLOCK : (first + blocks) * BLOCK]
    return ["BlockStored", list(range(first, first + blocks)), parent, tokens, BLOCK, None, medium, None]


def publish(world: World, worker_id: str, dp_rank: int, *events: list[Any]) -> None:
    followed = world.registry.find(worker_id, dp_rank)
    assert followed
    followed.index.apply(decode_batch(msgspec.msgpack.encode([1.0, list(events), 0])), 0, 1)


@pytest.fixture
def holding(world: World) -> World:
    """Blocks of "gpu": GPU x 3; "mixed": GPU, CPU, GPU, DISK on rank 1, one on rank 0; "hole": 0 and 2."""
    for worker_id, dp_rank in (("gpu", 0), ("mixed", 0), ("mixed", 1), ("hole", 0)):
        assert world.register(worker_id=worker_id, dp_rank=dp_rank, engine="sglang").status_code == 201
    publish(world, "gpu", 0, stored(0, 3, "GPU"))
    publish(world, "mixed", 0, stored(0, 1, "GPU"))
    publish(
        world,
        "mixed",
        1,
        stored(0, 1, "GPU"),
        stored(1, 1, "CPU"),
        stored(2, 1, "GPU"),
        stored(2, 1, "CPU"),
        stored(3, 1, "DISK"),
    )
    publish(world, "hole", 0, stored(0, 1, "GPU"), stored(1, 2, "GPU"), ["BlockRemoved", [1], "GPU"])
    return world


def test_a_score_sums_the_weight_of_each_blocks_fastest_tier(holding: World) -> None:
    response = ask(holding)
    PodScores.model_validate(response.json())
    assert response.json() == {
        "block_tokens": BLOCK,
        "scores": {"mixed": pytest.approx(1.0 + 0.8 + 1.0 + 0.5), "gpu": 3.0, "hole": 1.0},
        "warnings": [],
    }
    assert list(response.json()["scores"]) == ["mixed", "gpu", "hole"]


def test_weights_are_set_by_tier(holding: World) -> None:
    scores = ask(holding, tier_weights={"gpu": 2, "CPU": 1, "storage": 0.25}).json()["scores"]
    assert scores == {"gpu": 6.0, "mixed": 5.25, "hole": 2.0}
    assert ask(holding, tier_weights={"GPU": 0}).json()["scores"] == {"mixed": pytest.approx(1.3)}


def test_only_candidates_are_scored_and_unknown_ones_are_named(holding: World) -> None:
    body = ask(holding, pods=["hole", "gone"]).json()
    assert body["scores"] == {"hole": 1.0}
    assert [warning["code"] for warning in body["warnings"]] == ["unknown_worker"]
    assert ask(holding, pods=[]).json()["scores"] == {}


def test_an_unknown_model_is_a_warning(holding: World) -> None:
    body = ask(holding, model="x").json()
    assert (body["scores"], body["warnings"][0]["code"]) == ({}, "unknown_model")
    assert ask(holding, tenant="t").json()["warnings"][0]["code"] == "unknown_model"


@pytest.mark.parametrize("values", [{"lora_name": "a"}, {"cache_salt": "a"}])
def test_an_adapter_or_a_salt_is_another_prompt(holding: World, values: dict[str, Any]) -> None:
    assert ask(holding, **values).json()["scores"] == {}


def test_msgpack_is_answered_in_msgpack(holding: World) -> None:
    body = msgspec.msgpack.encode({"model": "m", "token_ids": struct.pack("<64I", *PROMPT)})
    response = holding.client.post("/v1/scores", content=body, headers={"content-type": "application/msgpack"})
    assert msgspec.msgpack.decode(response.content)["scores"]["gpu"] == 3.0


@pytest.mark.parametrize(
    ("values", "code", "field"),
    [
        ({"token_ids": []}, "empty_prompt", "token_ids"),
        ({"token_ids": [1] * (PROMPT_TOKENS_MAX + 1)}, "prompt_too_long", "token_ids"),
        ({"token_ids": [-1]}, "invalid_value", "token_ids[0]"),
        ({"pods": [1]}, "invalid_value", "pods[0]"),
        ({"tier_weights": {"GPU": -1}}, "invalid_value", "tier_weights[...]"),
        ({"tier_weights": {"GPU": "1"}}, "invalid_value", "tier_weights[...]"),
        ({"workers": ["a"]}, "unknown_field", "workers"),
    ],
)
def test_a_wrong_value_is_named(holding: World, values: dict[str, Any], code: str, field: str) -> None:
    assert error_of(ask(holding, **values)) == (422, code, field)
