"""Several prompts in one call."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer.api.access import Caller
from indexer.api.prefix_hits_schemas import BATCH_OPENAPI, BATCH_PROMPTS_MAX, PrefixHitsBatch
from indexer.registration import Registration
from tests.engine_events import decoded, stored
from tests.unit.api.stand_ins import PROMPT_TOKENS_MAX, World, error_of

PATH = "/v1/prefix-hits:batch"
MSGPACK = {"content-type": "application/msgpack"}
TOKENS = list(range(1, 33))


@pytest.fixture
def holding(world: World) -> World:
    """Workers `w` and `v` hold the two blocks of tokens 1 to 32."""
    for worker_id in ("w", "v"):
        registration = Registration(worker_id, 0, "m", "tcp://127.0.0.1:1", block_size=16, publisher_id=1)
        world.index.add_publisher(registration).apply(decoded(stored([11, 12], None, TOKENS, 16)), 0, 0)
    return world


def ask(world: World, *prompts: Any, **shared: Any) -> Any:
    return world.client.post(PATH, json={"prompts": list(prompts), **shared})


def test_prompts_are_answered_in_their_order(holding: World) -> None:
    response = ask(holding, {"token_ids": TOKENS}, {"token_ids": [7] * 20, "workers": ["x"]}, model="m")
    PrefixHitsBatch.model_validate(response.json())
    assert response.json()["answers"] == [
        holding.ask(token_ids=TOKENS).json(),
        holding.ask(token_ids=[7] * 20, workers=["x"]).json(),
    ]


def test_what_a_prompt_does_not_say_is_taken_from_what_all_say(holding: World) -> None:
    shared = {"model": "nobody's", "limit": 1, "workers": ["w"], "detail": "tiers"}
    answers = ask(
        holding,
        {"token_ids": TOKENS},
        {"token_ids": TOKENS, "model": "m"},
        {"token_ids": TOKENS, "model": "m", "workers": None, "limit": 2, "detail": False},
        {"token_ids": TOKENS, "model": "m", "workers": ["v"], "min_hit_tokens": 0},
        **shared,
    ).json()["answers"]
    assert [[hit["worker_id"] for hit in answer["hits"]] for answer in answers] == [[], ["w"], ["w"], ["v"]]
    assert ["tier_tokens" in hit for answer in answers for hit in answer["hits"]] == [True, False, True]
    assert answers[0]["warnings"][0]["code"] == "unknown_model"


def test_msgpack_gives_the_same_answers(holding: World) -> None:
    packed = b"".join(token.to_bytes(4, "little") for token in TOKENS)
    keys = [2**63 + 1, 5]
    texts = [f"{key:016x}" for key in keys]
    expected = ask(holding, {"token_ids": TOKENS}, {"content_keys": texts}, {"local_hashes": texts}, model="m").json()
    binary = b"".join(key.to_bytes(8, "little") for key in keys)
    for prompts in (
        [{"token_ids": packed}, {"content_keys": binary}, {"local_hashes": binary}],
        [{"token_ids": TOKENS}, {"content_keys": texts}, {"local_hashes": texts}],
    ):
        body = msgspec.msgpack.encode({"model": "m", "prompts": prompts})
        response = holding.client.post(PATH, content=body, headers=MSGPACK)
        assert response.headers["content-type"] == "application/msgpack"
        assert msgspec.msgpack.decode(response.content) == expected


GOOD = {"token_ids": [1, 2]}
HALF = {"token_ids": [1] * (PROMPT_TOKENS_MAX // 2)}


@pytest.mark.parametrize(
    ("prompts", "shared", "code", "field"),
    [
        ([], {}, "invalid_value", "prompts"),
        ([GOOD] * (BATCH_PROMPTS_MAX + 1), {}, "invalid_value", "prompts"),
        ([GOOD, GOOD, GOOD, {"token_ids": [1, -1]}], {}, "invalid_value", "prompts[3].token_ids[1]"),
        ([GOOD, {"token_ids": []}], {}, "empty_prompt", "prompts[1].token_ids"),
        ([GOOD, {"token_ids": [1] * (PROMPT_TOKENS_MAX + 1)}], {}, "prompt_too_long", "prompts[1].token_ids"),
        ([HALF, HALF, GOOD], {}, "prompt_too_long", "prompts"),
        ([GOOD, {}], {}, "missing_field", "prompts[1].token_ids"),
        ([GOOD, {"content_keys": ["x" * 16]}], {}, "invalid_value", "prompts[1].content_keys[0]"),
        ([GOOD, {"content_keys": ["0" * 16]}], {"lora_name": "x"}, "conflicting_fields", "prompts[1].lora_name"),
        ([{"content_keys": ["0" * 16], **GOOD}], {}, "conflicting_fields", "prompts[0].content_keys"),
        ([GOOD, {**GOOD, "lora": 1}], {}, "unknown_field", "prompts[1].lora"),
        ([GOOD], {"token_ids": [1]}, "unknown_field", "token_ids"),
        ([{**GOOD, "model": "m"}, GOOD], {"model": None}, "missing_field", "prompts[1].model"),
        (7, {}, "invalid_value", "prompts"),
    ],
)
def test_one_bad_prompt_refuses_all_and_is_named(
    holding: World, prompts: Any, shared: dict[str, Any], code: str, field: str
) -> None:
    body = {"model": "m", "prompts": prompts, **shared}
    assert error_of(holding.client.post(PATH, json=body)) == (422, code, field)
    for outcome in ("hit", "miss", "warned"):
        name, labels = "indexer_query_outcomes_total", {"outcome": outcome}
        assert holding.metrics.registry.get_sample_value(name, labels) == 0, "nothing was looked up"


def test_as_much_as_one_prompt_may_be_is_answered(holding: World) -> None:
    assert ask(holding, HALF, HALF, model="m").status_code == 200
    assert (
        len(ask(holding, *[{"token_ids": [1]}] * BATCH_PROMPTS_MAX, model="m").json()["answers"]) == BATCH_PROMPTS_MAX
    )


def test_a_body_that_is_not_of_its_format_is_a_400(holding: World) -> None:
    assert error_of(holding.client.post(PATH, content=b"{")) == (400, "invalid_json", None)
    assert error_of(holding.client.post(PATH, content=b"\xc1", headers=MSGPACK)) == (400, "invalid_msgpack", None)
    assert error_of(holding.client.post(PATH, content=b"{}", headers={"content-type": "text/plain"}))[0] == 415
    assert error_of(holding.client.get(PATH)) == (405, "method_not_allowed", None)


def test_a_caller_asks_for_its_own_tenants_only(holding: World) -> None:
    route = holding.client.app.direct._routes[PATH.encode()]
    own = Caller(frozenset({"own"}))
    for prompts, tenant, status in (
        ([GOOD], "own", 200),
        ([GOOD], "other", 403),
        ([GOOD], None, 403),
        ([GOOD, {**GOOD, "tenant": "other"}], "own", 403),
        ([{**GOOD, "tenant": "own"}], "other", 200),
    ):
        body = msgspec.json.encode({"model": "m", "tenant": tenant, "prompts": prompts})
        answer = route(body, None, own)
        assert answer.status == status, (prompts, tenant)
        if status == 403:
            assert msgspec.json.decode(answer.body)["error"]["field"] == f"prompts[{len(prompts) - 1}].tenant"


def test_the_example_of_the_document_is_legal(holding: World) -> None:
    content = BATCH_OPENAPI["openapi_extra"]["requestBody"]["content"]["application/json"]
    response = holding.client.post(PATH, json={**content["example"], "model": "m"})
    assert [len(answer["hits"]) for answer in response.json()["answers"]] == [2, 2]
