from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
import xxhash

from indexer.api.dialects import dynamo
from indexer.api.dialects.dynamo import encode_scores, scores_of
from indexer.api.dialects.dynamo_bodies import Scores
from indexer.index.prefix_query import PublisherHit
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import PROMPT_TOKENS_MAX, World, error_of

BLOCK_TOKENS = 16
PROMPT = list(range(1, 33))
ID = 2**64 - 1
REGISTRATION = {"instance_id": 7, "endpoint": "tcp://10.0.0.7:5557", "model_name": "m", "block_size": BLOCK_TOKENS}


def register(world: World, **values: Any) -> Any:
    return world.client.post("/register", json=REGISTRATION | values)


def unregister(world: World, **values: Any) -> Any:
    return world.client.post("/unregister", json={"instance_id": 7, "model_name": "m", **values})


def query(world: World, **values: Any) -> Any:
    return world.client.post("/query", json={"model_name": "m", "token_ids": PROMPT, **values})


def by_hash(world: World, hashes: Sequence[int | str], **values: Any) -> Any:
    return world.client.post("/query_by_hash", json={"model_name": "m", "block_hashes": hashes, **values})


def store(world: World, worker_id: str, dp_rank: int, tokens: list[int], first_hash: int, medium: str = "GPU") -> None:
    """The engine holds these tokens from the root on."""
    hashes = list(range(first_hash, first_hash + len(tokens) // BLOCK_TOKENS))
    event = ["BlockStored", hashes, None, tokens, BLOCK_TOKENS, None, medium, None]
    payload = msgspec.msgpack.encode([1.0, [event], 0])
    followed = world.registry.find(worker_id, dp_rank)
    assert followed
    followed.index.apply(decode_batch(payload), 0, first_hash)


def local_hashes(tokens: list[int]) -> list[int]:
    """Unsigned, as a router of that dialect makes them, but for the sign."""
    blocks = [tokens[i : i + BLOCK_TOKENS] for i in range(0, len(tokens), BLOCK_TOKENS)]
    return [xxhash.xxh3_64_intdigest(struct.pack(f"<{len(block)}I", *block), 1337) for block in blocks]


def signed(hashes: list[int]) -> list[int]:
    return [h - 2**64 if h >= 2**63 else h for h in hashes]


@pytest.fixture
def holding(world: World) -> World:
    """Instance 7 holds both blocks on rank 0, the first on rank 1; an engine registered natively the first on CPU."""
    assert register(world).status_code == 201
    assert register(world, dp_rank=1, endpoint="tcp://10.0.0.7:5558").status_code == 201
    assert world.register(worker_id="http://w", engine="sglang", endpoint="tcp://10.0.0.8:5557").status_code == 201
    store(world, "7", 0, PROMPT, 1)
    store(world, "7", 1, PROMPT[:16], 11)
    store(world, "http://w", 0, PROMPT[:16], 21, "CPU")
    return world


EXPECTED = {
    "scores": {"7": {"0": 32, "1": 16}, "http://w": {"0": 16}},
    "frequencies": [],
    "instances": {
        "7": {"longest_matched": 32, "gpu": 32, "dp": {"0": 32, "1": 16}, "cpu": 32, "disk": 32},
        "http://w": {"longest_matched": 16, "gpu": 0, "dp": {"0": 16}, "cpu": 16, "disk": 16},
    },
}


def test_scores_are_tokens_held_per_instance_and_rank(holding: World) -> None:
    response = query(holding)
    Scores.model_validate(response.json())
    assert (response.status_code, response.json()) == (200, EXPECTED)


def test_signed_and_unsigned_hashes_give_the_same_answer(holding: World) -> None:
    hashes = local_hashes(PROMPT)
    assert any(h >= 2**63 for h in local_hashes(list(range(1, 1_000))))
    assert by_hash(holding, hashes).json() == by_hash(holding, signed(hashes)).json() == EXPECTED
    assert by_hash(holding, [f"{h:016x}" for h in hashes]).json() == EXPECTED


def test_negative_hashes_are_the_same_64_bits(holding: World) -> None:
    tokens = next(t for i in range(99) if local_hashes(t := list(range(i, i + BLOCK_TOKENS)))[0] >= 2**63)
    store(holding, "7", 0, tokens, 31)
    assert by_hash(holding, signed(local_hashes(tokens))).json()["scores"] == {"7": {"0": BLOCK_TOKENS}}
    odd = json.dumps({"model_name": "m", "block_hashes": signed(local_hashes(tokens))}).replace(
        "block_h", "block\\u005fh"
    )
    assert holding.client.post("/query_by_hash", content=odd).json()["scores"] == {"7": {"0": BLOCK_TOKENS}}


def test_instances_without_a_match_are_absent(holding: World) -> None:
    nothing = {"scores": {}, "frequencies": [], "instances": {}}
    assert query(holding, token_ids=[9] * 32).json() == nothing
    assert query(holding, token_ids=PROMPT[:15]).json() == nothing
    assert by_hash(holding, [1, 2]).json() == nothing


def test_an_empty_prompt_is_answered_with_nothing(holding: World) -> None:
    for response in (query(holding, token_ids=[]), by_hash(holding, [])):
        assert (response.status_code, response.json()["scores"]) == (200, {})


@pytest.mark.parametrize("values", [{"lora_name": "x"}, {"cache_salt": "x"}])
def test_an_adapter_or_a_salt_is_another_prompt(holding: World, values: dict[str, Any]) -> None:
    assert query(holding, **values).json()["scores"] == {}


def test_empty_and_null_mean_the_default(holding: World) -> None:
    for nothing in (None, ""):
        values = dict.fromkeys(("routing_group", "tenant_id", "lora_name", "cache_salt"), nothing)
        assert query(holding, **values).json() == EXPECTED


@pytest.mark.parametrize("name", ["routing_group", "tenant_id"])
def test_routing_groups_are_tenants(holding: World, name: str) -> None:
    values = {name: "other"}
    assert error_of(query(holding, **values)) == (404, "unknown_model", "model_name")
    assert register(holding, instance_id=8, **values).status_code == 201
    followed = holding.registry.find("8", 0)
    assert followed
    assert followed.registration.tenant == "other"
    assert query(holding, **values).json()["scores"] == {}


def test_an_unknown_model_is_a_404(holding: World) -> None:
    assert error_of(query(holding, model_name="x")) == (404, "unknown_model", "model_name")
    assert error_of(query(holding, model_name="x", token_ids=[])) == (404, "unknown_model", "model_name")
    assert error_of(by_hash(holding, [1], model_name="x")) == (404, "unknown_model", "model_name")


def test_unknown_fields_are_passed_over(holding: World) -> None:
    assert query(holding, later_field={"a": [1]}).json() == EXPECTED
    assert register(holding, instance_id=8, later_field=1).status_code == 201


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"token_ids": [1, -1]}, "token_ids[1]"),
        ({"token_ids": "abcd"}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"model_name": ""}, "model_name"),
        ({"model_name": 1}, "model_name"),
        ({"lora_name": 1}, "lora_name"),
    ],
)
def test_a_wrong_value_of_a_query_is_named(holding: World, values: dict[str, Any], field: str) -> None:
    assert error_of(query(holding, **values)) == (422, "invalid_value", field)


@pytest.mark.parametrize(
    ("hashes", "field"),
    [
        ([2**64], "block_hashes[0]"),
        ([1, 10**30], "block_hashes[1]"),
        ([-(2**63) - 1], "block_hashes[0]"),
        (["1"], "block_hashes[0]"),
        ("x", "block_hashes"),
    ],
)
def test_a_wrong_hash_is_named(holding: World, hashes: Any, field: str) -> None:
    assert error_of(by_hash(holding, hashes)) == (422, "invalid_value", field)


def test_prompts_are_bounded_by_tokens_and_by_hashes(holding: World) -> None:
    longest = [9] * PROMPT_TOKENS_MAX
    assert query(holding, token_ids=longest).status_code == 200
    assert error_of(query(holding, token_ids=[*longest, 9])) == (422, "prompt_too_long", "token_ids")
    hashes = [9] * (PROMPT_TOKENS_MAX // BLOCK_TOKENS)
    assert by_hash(holding, hashes).status_code == 200
    assert error_of(by_hash(holding, [*hashes, 9])) == (422, "prompt_too_long", "block_hashes")


@pytest.mark.parametrize("path", ["/query", "/query_by_hash", "/register", "/unregister"])
def test_only_json_is_read(holding: World, path: str) -> None:
    other = {"content-type": "text/plain"}
    assert error_of(holding.client.post(path, content=b"{}", headers=other)) == (415, "unsupported_media_type", None)
    assert error_of(holding.client.post(path, content=b"{")) == (400, "invalid_json", None)
    assert error_of(holding.client.post(path, content=b"{}"))[:2] == (422, "missing_field")
    assert error_of(holding.client.get(path)) == (405, "method_not_allowed", None)


def test_a_registration_is_followed_natively(world: World) -> None:
    response = register(world, instance_id=ID, replay_endpoint="tcp://10.0.0.7:5558", dp_rank=3)
    assert (response.status_code, response.json()) == (201, {"status": "ok"})
    followed = world.registry.find(str(ID), 3)
    assert followed
    registration = followed.registration
    assert (registration.model, registration.tenant, registration.block_size) == ("m", "default", 16)
    assert registration.replay_endpoint == "tcp://10.0.0.7:5558"


def test_registering_again_is_a_conflict_with_any_values(world: World) -> None:
    register(world)
    assert error_of(register(world)) == (409, "publisher_conflict", "instance_id")
    assert error_of(register(world, endpoint="tcp://10.0.0.9:1"))[:2] == (409, "publisher_conflict")


def test_a_model_has_one_block_size(world: World) -> None:
    register(world)
    assert error_of(register(world, instance_id=8, block_size=32)) == (409, "publisher_conflict", "block_size")
    assert register(world, instance_id=8, block_size=32, model_name="other").status_code == 201
    assert register(world, instance_id=9, block_size=32, routing_group="other").status_code == 201


def test_an_engine_that_was_registered_without_a_block_size_fits_any(world: World) -> None:
    world.register(worker_id="w", model="m")
    assert register(world).status_code == 201


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "http://x", "nonsense"])
def test_a_bad_endpoint_is_a_400(world: World, endpoint: str) -> None:
    assert error_of(register(world, endpoint=endpoint)) == (400, "invalid_endpoint", "endpoint")
    assert error_of(register(world, replay_endpoint=endpoint)) == (400, "invalid_endpoint", "replay_endpoint")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"instance_id": -1}, "instance_id"),
        ({"instance_id": 2**64}, "instance_id"),
        ({"instance_id": "7"}, "instance_id"),
        ({"block_size": 0}, "block_size"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": 65_536}, "dp_rank"),
        ({"model_name": "a\n"}, "model_name"),
        ({"model_name": "a\x00"}, "model_name"),
        ({"routing_group": "a\x7f"}, "routing_group"),
        ({"additional_salt": "x"}, "additional_salt"),
    ],
)
def test_a_wrong_value_of_a_registration_is_named(world: World, values: dict[str, Any], field: str) -> None:
    assert error_of(register(world, **values)) == (422, "invalid_value", field)
    assert not world.registry.entries


@pytest.mark.parametrize("field", list(REGISTRATION))
def test_a_missing_field_is_named(world: World, field: str) -> None:
    body = {name: value for name, value in REGISTRATION.items() if name != field}
    assert error_of(world.client.post("/register", json=body)) == (422, "missing_field", field)


def test_unregistering_takes_one_rank_or_all_of_the_model(holding: World) -> None:
    assert error_of(unregister(holding, model_name="x")) == (404, "unknown_publisher", "worker_id")
    assert error_of(unregister(holding, dp_rank=5)) == (404, "unknown_publisher", "worker_id")
    assert unregister(holding, dp_rank=1).json() == {"status": "ok"}
    assert query(holding).json()["scores"] == {"7": {"0": 32}, "http://w": {"0": 16}}
    assert unregister(holding).status_code == 200
    assert query(holding).json()["scores"] == {"http://w": {"0": 16}}
    assert error_of(unregister(holding)) == (404, "unknown_publisher", "worker_id")


def test_nothing_is_answered_before_recovery(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "HEALTH_WAIT_S", 0.1)
    world.life.is_recovered, world.life.lacks = False, ["the index is being recovered"]
    assert error_of(world.client.get("/health")) == (503, "not_ready", None)
    for response in (query(world), by_hash(world, []), register(world), unregister(world)):
        assert error_of(response) == (503, "not_ready", None)


def test_health_is_ok_once_recovered(world: World) -> None:
    assert world.client.get("/health").json() == {"status": "ok"}


def test_no_instance_is_taken_while_stopping(world: World) -> None:
    world.life.is_stopping = True
    assert error_of(register(world)) == (503, "stopping", None)


def test_tiers_are_the_best_of_the_ranks() -> None:
    def hit(rank: int, resident: int, **tiers: int) -> PublisherHit:
        return PublisherHit("7", rank, 0, resident, tiers, "complete", "from_start", None, None)

    scores = scores_of([hit(0, 48, GPU=16, CPU=32, STORAGE=48), hit(1, 32, GPU=32, CPU=32), hit(2, 0, GPU=0, CPU=0)])
    assert msgspec.to_builtins(scores)["instances"]["7"] == {
        "longest_matched": 48,
        "gpu": 32,
        "dp": {0: 48, 1: 32},
        "cpu": 32,
        "disk": 48,
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_are_encoded_as_they_would_be_one_by_one(ranks: int) -> None:
    random = Random(ranks)
    tiers = [{"GPU": 16 * i, "CPU": 16 * i, **({"STORAGE": 16 * i} if i % 3 else {})} for i in range(5)]
    for _ in range(50):
        hits = [
            PublisherHit(f'http://"{number}"é', rank, 0, reach["GPU"], reach, "complete", "from_start", None, None)
            for number in range(random.randrange(6))
            for rank in range(ranks)
            for reach in (random.choice(tiers),)
        ]
        assert encode_scores(hits) == msgspec.json.encode(scores_of(hits))


def test_queries_are_counted_by_route_and_hashes_are_no_tokens(holding: World) -> None:
    query(holding)
    by_hash(holding, local_hashes(PROMPT))
    text = holding.client.get("/metrics").text
    for path in ("/query", "/query_by_hash"):
        assert f'indexer_http_requests_total{{method="POST",route="{path}",status="200"}} 1.0' in text
    assert "indexer_query_seconds_count 2.0" in text
    assert "indexer_query_prompt_tokens_count 1.0" in text


def test_the_examples_of_the_document_are_legal(world: World) -> None:
    paths = world.client.get("/openapi.json").json()["paths"]
    for path, status in (("/register", 201), ("/query", 200), ("/query_by_hash", 200), ("/unregister", 200)):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["examples"]["dynamo"]["value"]
        assert world.client.post(path, json=body).status_code == status
        answers = paths[path]["post"]["responses"][str(status)]["content"]["application/json"]
        if path.startswith("/query"):
            Scores.model_validate(answers["examples"]["dynamo"]["value"])
