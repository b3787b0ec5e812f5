"""The contract of Mooncake RFC #1403, exact JSON, and that of the later form of its service."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
import xxhash

from indexer.api.dialects.rfc1403_bodies import GlobalView, LaterErrorAnswer, LaterMatches, ServiceList
from indexer.errors import EndpointError, StoreUnavailable
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import PROMPT_TOKENS_MAX, World, error_of

BLOCK = 16
PROMPT = list(range(1, 49))
MSGPACK = {"content-type": "application/msgpack"}
REGISTRATION = {
    "endpoint": "tcp://10.0.0.7:5557",
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "vllm-1",
    "block_size": BLOCK,
    "dp_rank": 0,
}


def register(world: World, path: str = "/register", **values: Any) -> Any:
    return world.client.post(path, json=REGISTRATION | values)


def unregister(world: World, path: str = "/unregister", **values: Any) -> Any:
    return world.client.post(path, json={"instance_id": "vllm-1"} | values)


def query(world: World, path: str = "/query", **values: Any) -> Any:
    return world.client.post(path, json={"model": "m", "token_ids": PROMPT, "block_size": BLOCK} | values)


def by_hash(world: World, path: str = "/query_by_hash", **values: Any) -> Any:
    return world.client.post(path, json={"model": "m", "block_size": BLOCK} | values)


def packed(world: World, path: str, **values: Any) -> Any:
    return world.client.post(path, content=msgspec.msgpack.encode(values), headers=MSGPACK)


def publish(world: World, dp_rank: int, *events: list[Any]) -> None:
    followed = world.registry.find("vllm-1", dp_rank)
    assert followed
    followed.index.apply(decode_batch(msgspec.msgpack.encode([1.0, list(events), 0])), 0, 1)


def stored(tokens: list[int], medium: str = "GPU") -> list[Any]:
    return ["BlockStored", list(range(1, len(tokens) // BLOCK + 1)), None, tokens, BLOCK, None, medium, None]


def seq_hashes(tokens: list[int]) -> list[int]:
    """The rule of the RFC, written down from its text."""
    blocks = [struct.pack(f"<{BLOCK}I", *tokens[i : i + BLOCK]) for i in range(0, len(tokens) // BLOCK * BLOCK, BLOCK)]
    chain: list[int] = []
    for local in (xxhash.xxh3_64_intdigest(block, 1337) for block in blocks):
        chain.append(xxhash.xxh3_64_intdigest(struct.pack("<QQ", chain[-1], local), 1337) if chain else local)
    return chain


@pytest.fixture
def holding(world: World) -> World:
    """vllm-1 has one block on the GPU and three on the CPU of rank 0, two on the GPU of rank 1; vllm-2 has none."""
    assert register(world).status_code == 200
    assert register(world, dp_rank=1, endpoint="tcp://10.0.0.7:5558").status_code == 200
    assert register(world, instance_id="vllm-2", endpoint="tcp://10.0.0.8:5557").status_code == 200
    publish(world, 0, stored(PROMPT), stored(PROMPT, "CPU"), ["BlockRemoved", [2, 3], "GPU"])
    publish(world, 1, stored(PROMPT[:32]))
    return world


NOTHING = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}}
HELD = {"longest_matched": 48, "GPU": 32, "CPU": 48, "DISK": 0, "DP": {"0": 48, "1": 32}}
EXPECTED = {"default": {"vllm-1": HELD, "vllm-2": NOTHING}}
LATER_NOTHING = {
    "longest_matched": 0,
    "dp": {"0": 0},
    "rank_matches": {"0": {"gpu": 0, "cpu": 0, "disk": 0}},
    "gpu": 0,
    "cpu": 0,
    "disk": 0,
}
LATER_EXPECTED = {
    "instances": {
        "vllm-1": {
            "longest_matched": 48,
            "dp": {"0": 48, "1": 32},
            "rank_matches": {"0": {"gpu": 16, "cpu": 48, "disk": 48}, "1": {"gpu": 32, "cpu": 32, "disk": 32}},
            "gpu": 32,
            "cpu": 48,
            "disk": 48,
        },
        "vllm-2": LATER_NOTHING,
    }
}


# ---------------------------------------------------------------------- registration


def test_a_registration_is_followed_natively(world: World) -> None:
    response = register(world, replay_endpoint="tcp://10.0.0.7:5558", tenant_id="t", dp_rank=3)
    expected = {"status": "registered successfully", "instance_id": "vllm-1"}
    assert (response.status_code, response.json()) == (200, expected)
    followed = world.registry.find("vllm-1", 3)
    assert followed
    registration = followed.registration
    assert (registration.model, registration.tenant, registration.block_size) == ("m", "t", BLOCK)
    assert (registration.engine, registration.replay_endpoint) == ("vllm", "tcp://10.0.0.7:5558")


def test_registering_again_with_the_same_values_changes_nothing(world: World) -> None:
    register(world)
    assert register(world).status_code == 200
    assert error_of(register(world, endpoint="tcp://10.0.0.9:1"))[:2] == (409, "publisher_conflict")


def test_a_store_is_a_pool_for_all_of_its_model(world: World) -> None:
    assert register(world, type="Mooncake", instance_id="store").status_code == 200
    followed = world.registry.find("store", 0)
    assert followed
    assert (followed.registration.engine, followed.registration.is_pool) == ("mooncake", True)
    assert query(world).json() == {"default": {}}


@pytest.mark.parametrize("field", list(REGISTRATION))
def test_a_missing_field_of_a_registration_is_named(world: World, field: str) -> None:
    body = {name: value for name, value in REGISTRATION.items() if name != field}
    if field == "modelname":  # it is told by this one
        assert error_of(world.client.post("/register", json=body))[:2] == (422, "missing_field")
    else:
        assert error_of(world.client.post("/register", json=body)) == (422, "missing_field", field)
    fault = world.client.post("/conductor/register", json=body)
    assert (fault.status_code, fault.json()) == (
        400,
        {"error": f"{field} is required", "reason": "missing", "field": field},
    )
    assert not world.registry.entries


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        ({"type": "TGI"}, "type", "invalid_value"),
        ({"instance_id": 7}, "instance_id", "invalid_type"),
        ({"block_size": 0}, "block_size", "out_of_range"),
        ({"dp_rank": -1}, "dp_rank", "out_of_range"),
        ({"dp_rank": "0"}, "dp_rank", "invalid_type"),
        ({"additionalsalt": "w8a8"}, "additionalsalt", "invalid_value"),
        ({"additional_salt": "w8a8"}, "additional_salt", "invalid_value"),
        ({"endpoint": "nonsense"}, "endpoint", "invalid_value"),
    ],
)
def test_a_wrong_value_of_a_registration_is_named(
    world: World, values: dict[str, Any], field: str, reason: str
) -> None:
    status, code, named = error_of(register(world, **values))
    assert (status, named) == (422, field)
    assert code in ("invalid_value", "invalid_endpoint")
    fault = register(world, "/conductor/register", **values)
    assert fault.status_code == 400
    assert (fault.json()["reason"], fault.json()["field"]) == (reason, field)
    assert not world.registry.entries


def test_unregistering_takes_one_rank_or_all(holding: World) -> None:
    response = unregister(holding, dp_rank=1, type="vLLM", modelname="m", block_size=BLOCK)
    expected = {"status": "unregistered successfully", "removed_instances": ["vllm-1|default|1"]}
    assert (response.status_code, response.json()) == (200, expected)
    register(holding, dp_rank=4)
    assert unregister(holding).json()["removed_instances"] == ["vllm-1|default|0", "vllm-1|default|4"]
    assert error_of(unregister(holding)) == (404, "unknown_publisher", "worker_id")


@pytest.mark.parametrize("values", [{"tenant_id": "other"}, {"modelname": "x"}, {"dp_rank": 9}])
def test_what_is_not_registered_so_is_not_removed(holding: World, values: dict[str, Any]) -> None:
    assert error_of(unregister(holding, **values)) == (404, "unknown_publisher", "worker_id")
    assert unregister(holding, "/conductor/unregister", **values).json()["reason"] == "unknown_publisher"
    assert len(holding.registry.entries) == 3


def test_an_instance_id_that_is_a_number_speaks_dynamos_words(world: World) -> None:
    fault = world.client.post("/unregister", json={"instance_id": 7})
    assert error_of(fault) == (422, "missing_field", "model_name")


# ---------------------------------------------------------------------- queries


def test_tokens_held_per_tenant_and_instance(holding: World) -> None:
    response = query(holding)
    assert (response.status_code, response.json()) == (200, EXPECTED)
    assert query(holding, tenant_id="", lora_name="", cache_salt=None, instance_id=None).json() == EXPECTED


def test_a_tier_that_adds_nothing_is_0(holding: World) -> None:
    assert query(holding, token_ids=PROMPT[:32]).json()["default"]["vllm-1"] == {
        "longest_matched": 32,
        "GPU": 32,
        "CPU": 0,
        "DISK": 0,
        "DP": {"0": 32, "1": 32},
    }


def test_one_instance_only(holding: World) -> None:
    assert query(holding, instance_id="vllm-2").json() == {"default": {"vllm-2": NOTHING}}
    assert query(holding, instance_id="unknown").json() == {"default": {}}


def test_another_tenant_or_model_has_nothing(holding: World) -> None:
    assert query(holding, tenant_id="other").json() == {"other": {}}
    assert query(holding, model="x").json() == {"default": {}}


@pytest.mark.parametrize("values", [{"lora_name": "x"}, {"lora_id": "x"}, {"cache_salt": "x"}])
def test_an_adapter_or_a_salt_is_another_prompt(holding: World, values: dict[str, Any]) -> None:
    assert query(holding, **values).json()["default"]["vllm-1"]["longest_matched"] == 0


@pytest.mark.parametrize("lora_id", [None, 0, -1, ""])
def test_no_adapter_is_the_base_model(holding: World, lora_id: object) -> None:
    assert query(holding, lora_id=lora_id).json() == EXPECTED


@pytest.mark.parametrize("values", [{"lora_id": 3}, {"lora_id": "a", "lora_name": "a"}, {"lora_id": 1.5}])
def test_an_adapter_is_known_by_one_name(holding: World, values: dict[str, Any]) -> None:
    assert error_of(query(holding, **values)) == (422, "invalid_value", "lora_id")


@pytest.mark.parametrize(("block", "longest"), [(8, 48), (32, 32), (48, 48), (64, 0)])
def test_answers_are_in_whole_blocks_of_the_size_that_is_asked_for(holding: World, block: int, longest: int) -> None:
    answer = query(holding, block_size=block).json()["default"]["vllm-1"]
    assert answer["longest_matched"] == longest
    assert answer["DP"] == {"0": longest, "1": 32 // block * block}


def test_standard_hashes_give_the_same_answer_under_both_names(holding: World) -> None:
    hashes = seq_hashes(PROMPT)
    assert by_hash(holding, seq_hashes=hashes).json() == EXPECTED
    assert by_hash(holding, block_hash=hashes).json() == EXPECTED
    assert by_hash(holding, seq_hashes=[f"{h:016x}" for h in hashes]).json() == EXPECTED
    signed = [h - 2**64 if h >= 2**63 else h for h in hashes]
    assert signed != hashes
    assert by_hash(holding, seq_hashes=signed).json() == EXPECTED


def test_hashes_count_up_to_the_first_that_is_not_held(holding: World) -> None:
    hashes = seq_hashes(PROMPT)
    answer = by_hash(holding, seq_hashes=[hashes[0], 5, hashes[2]]).json()["default"]["vllm-1"]
    assert answer == {"longest_matched": 16, "GPU": 16, "CPU": 0, "DISK": 0, "DP": {"0": 16, "1": 16}}
    assert by_hash(holding, seq_hashes=[]).json()["default"]["vllm-1"]["longest_matched"] == 0


def test_hashes_of_blocks_of_another_size_are_refused(holding: World) -> None:
    assert error_of(by_hash(holding, seq_hashes=[1], block_size=32)) == (422, "invalid_value", "block_size")
    fault = by_hash(holding, "/conductor/query_by_hash", seq_hashes=[1], block_size=32)
    assert (fault.status_code, fault.json()["field"]) == (400, "block_size")


@pytest.mark.parametrize(
    ("values", "code", "field"),
    [
        ({}, "missing_field", "seq_hashes"),
        ({"seq_hashes": [1], "block_hash": [1]}, "invalid_value", "block_hash"),
        ({"seq_hashes": [1, 2**64]}, "invalid_value", "seq_hashes[1]"),
        ({"block_hash": [2**64]}, "invalid_value", "block_hash[0]"),
        ({"seq_hashes": ["xyz"]}, "invalid_value", "seq_hashes[0]"),
        ({"seq_hashes": 1}, "invalid_value", "seq_hashes"),
    ],
)
def test_a_wrong_hash_is_named(holding: World, values: dict[str, Any], code: str, field: str) -> None:
    assert error_of(by_hash(holding, **values)) == (422, code, field)


def test_prompts_are_bounded_by_tokens_and_by_hashes(holding: World) -> None:
    assert query(holding, token_ids=[9] * PROMPT_TOKENS_MAX).status_code == 200
    assert error_of(query(holding, token_ids=[9] * (PROMPT_TOKENS_MAX + 1)))[:2] == (422, "prompt_too_long")
    hashes = [9] * (PROMPT_TOKENS_MAX // BLOCK)
    assert by_hash(holding, seq_hashes=hashes).status_code == 200
    assert error_of(by_hash(holding, seq_hashes=[*hashes, 9]))[:2] == (422, "prompt_too_long")


def test_a_request_in_both_dialects_is_dynamos(holding: World) -> None:
    assert "scores" in query(holding, model_name="m").json()
    assert error_of(query(holding, model_name=1)) == (422, "invalid_value", "model_name")


# ---------------------------------------------------------------------- the later form


def test_below_its_prefix_the_later_form_is_spoken(holding: World) -> None:
    response = query(holding, "/conductor/query")
    LaterMatches.model_validate(response.json())
    assert (response.status_code, response.json()) == (200, LATER_EXPECTED)
    assert by_hash(holding, "/conductor/query_by_hash", seq_hashes=seq_hashes(PROMPT)).json() == LATER_EXPECTED
    only = query(holding, "/conductor/query", instance_id="vllm-2").json()
    assert only == {"instances": {"vllm-2": LATER_NOTHING}}
    assert query(holding, "/conductor/query", model="x").json() == {"instances": {}}
    assert unregister(holding, "/conductor/unregister", dp_rank=0).json() == {
        "status": "unregistered successfully",
        "removed_instances": ["vllm-1|default|0"],
    }


@pytest.mark.parametrize("prefix", ["", "/conductor"])
def test_msgpack_is_the_later_form(holding: World, prefix: str) -> None:
    asked = {"model": "m", "block_size": BLOCK}
    hashes = seq_hashes(PROMPT)
    for response in (
        packed(holding, prefix + "/query", token_ids=PROMPT, **asked),
        packed(holding, prefix + "/query", token_ids=struct.pack("<48I", *PROMPT), **asked),
        packed(holding, prefix + "/query_by_hash", seq_hashes=hashes, **asked),
        packed(holding, prefix + "/query_by_hash", seq_hashes=struct.pack("<3Q", *hashes), **asked),
        packed(holding, prefix + "/query_by_hash", block_hash=hashes, **asked),
    ):
        assert response.headers["content-type"] == "application/msgpack"
        assert (response.status_code, msgspec.msgpack.decode(response.content)) == (200, LATER_EXPECTED)


def test_registrations_may_be_msgpack(world: World) -> None:
    response = packed(world, "/register", **REGISTRATION)
    assert msgspec.msgpack.decode(response.content) == {
        "status": "registered successfully",
        "instance_id": "vllm-1",
    }
    response = packed(world, "/unregister", instance_id="vllm-1")
    assert msgspec.msgpack.decode(response.content)["removed_instances"] == ["vllm-1|default|0"]


def test_bad_input_is_a_400_with_reason_field_and_index(holding: World) -> None:
    fault = query(holding, "/conductor/query", token_ids=[1, -1])
    assert (fault.status_code, fault.json()) == (
        400,
        {
            "error": "token_ids[1]: expected int >= 0",
            "reason": "out_of_range",
            "field": "token_ids",
            "index": 1,
        },
    )
    fault = query(holding, "/conductor/query", token_ids=[1, "2"])
    assert (fault.json()["reason"], fault.json()["index"]) == ("invalid_type", 1)
    fault = world_post(holding, b"{")
    assert (fault.status_code, fault.json()["reason"]) == (400, "invalid_json")
    fault = packed(holding, "/query", model="m", block_size=BLOCK)
    assert (fault.status_code, fault.json()) == (
        400,
        {"error": "token_ids is required", "reason": "missing", "field": "token_ids"},
    )
    fault = packed(holding, "/query", model="m", block_size=BLOCK, token_ids=b"123")
    assert (fault.status_code, fault.json()["field"]) == (400, "token_ids")
    fault = packed(holding, "/query_by_hash", model="m", block_size=BLOCK, seq_hashes=b"123")
    assert (fault.status_code, fault.json()["field"]) == (400, "seq_hashes")


def world_post(world: World, content: bytes) -> Any:
    return world.client.post("/conductor/query", content=content)


def test_a_conflict_is_a_bad_registration(holding: World) -> None:
    fault = register(holding, "/conductor/register", endpoint="tcp://10.0.0.9:1")
    assert fault.status_code == 400
    assert (fault.json()["reason"], fault.json()["field"]) == ("invalid_registration", "endpoint")


# ---------------------------------------------------------------------- what is registered


def test_services_and_global_view(holding: World) -> None:
    register(holding, type="Mooncake", instance_id="store", endpoint="tcp://10.0.0.9:5557", lora_name="a")
    services = holding.client.get("/services").json()
    ServiceList.model_validate(services)
    assert services["count"] == 4
    assert services["services"][0] == {
        "Endpoint": "tcp://10.0.0.9:5557",
        "ReplayEndpoint": "",
        "Type": "Mooncake",
        "ModelName": "m",
        "LoraName": "a",
        "TenantID": "default",
        "InstanceID": "store",
        "BlockSize": 16,
        "DPRank": 0,
        "AdditionalSalt": "",
    }
    view = holding.client.get("/global_view").json()
    GlobalView.model_validate(view)
    assert view == {
        "context_count": 1,
        "contexts": [
            {
                "model_name": "m",
                "lora_name": "",
                "block_size": 16,
                "tenant_id": "default",
                "prefix_count": 3,
                "instances": {"vllm-1": [0, 1], "vllm-2": [0]},
            }
        ],
    }
    assert holding.client.get("/conductor/services").json() == services
    assert holding.client.get("/conductor/global_view").json() == view


def test_nothing_is_answered_before_recovery(world: World) -> None:
    world.life.is_recovered, world.life.lacks = False, ["the index is being recovered"]
    for response in (
        query(world),
        register(world),
        unregister(world),
        world.client.get("/services"),
        world.client.get("/global_view"),
    ):
        assert error_of(response) == (503, "not_ready", None)
    message = "not ready yet: the index is being recovered"
    for response in (
        query(world, "/conductor/query"),
        by_hash(world, "/conductor/query_by_hash", seq_hashes=[1]),
        packed(world, "/query"),
        packed(world, "/query_by_hash"),
        register(world, "/conductor/register"),
        unregister(world, "/conductor/unregister"),
        packed(world, "/register"),
        packed(world, "/unregister"),
        world.client.get("/conductor/services"),
        world.client.get("/conductor/global_view"),
    ):
        assert later_fault(response) == (503, {"error": message, "reason": "not_ready"})
        assert response.headers["retry-after"] == "1"


def later_fault(response: Any) -> tuple[int, dict[str, Any]]:
    LaterErrorAnswer.model_validate_json(response.content)
    return response.status_code, response.json()


def register_later(world: World) -> list[tuple[int, dict[str, Any]]]:
    """By both ways."""
    responses = register(world, "/conductor/register"), packed(world, "/register", **REGISTRATION)
    return [later_fault(response) for response in responses]


def test_the_later_form_has_its_own_words_for_every_refusal_of_a_registration(world: World) -> None:
    world.registry.failure = StoreUnavailable("the database is away")
    away = {"error": "the database is away", "reason": "store_unavailable"}
    assert error_of(register(world)) == (503, "store_unavailable", None)
    assert register_later(world) == [(503, away)] * 2
    assert register(world, "/conductor/register").headers["retry-after"] == "1"
    world.registry.failure = EndpointError("nonsense")
    assert error_of(register(world)) == (422, "refused_value", None)
    assert register_later(world) == [(400, {"error": "nonsense", "reason": "refused_value"})] * 2
    world.registry.failure, world.registry.publishers_max = None, 0
    assert error_of(register(world)) == (422, "too_many_publishers", None)
    assert [(status, fault["reason"]) for status, fault in register_later(world)] == [(400, "too_many_publishers")] * 2
    world.life.is_stopping = True
    stopping = {"error": "the service is stopping", "reason": "stopping"}
    assert error_of(register(world)) == (503, "stopping", None)
    assert register_later(world) == [(503, stopping)] * 2
