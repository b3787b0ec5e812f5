from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog
import xxhash
from starlette.types import Message

from indexer.api.schemas import PREFIX_HITS_OPENAPI, PrefixHits
from indexer.index.state import Coverage, CoverageReason, Trust
from indexer.registration import PublisherKey
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import BODY_BYTES_MAX, PROMPT_TOKENS_MAX, World, error_of

JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": "application/msgpack"}


@pytest.fixture
def holding(world: World) -> World:
    """Worker `w` holds the two blocks of tokens 1 to 32."""
    world.register()
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": list(range(1, 33)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    payload = msgspec.msgpack.encode([1.0, [event], 0])
    followed = world.registry.find("w", 0)
    assert followed
    followed.index.apply(decode_batch(payload), 0, xxhash.xxh3_64_intdigest(payload))
    return world


def test_a_cached_prompt_is_answered_in_json(holding: World) -> None:
    response = holding.ask(token_ids=list(range(1, 41)))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    PrefixHits.model_validate(body)
    assert body == {
        "prompt_tokens": 40,
        "hits": [
            {
                "worker_id": "w",
                "dp_rank": 0,
                "hit_tokens": 32,
                "resident_tokens": 32,
                "tiers": {"GPU": 32, "CPU": 32},
                "coverage": "complete",
                "coverage_reason": "from_start",
                "coverage_at": None,
                "sequence_number": 0,
            }
        ],
        "warnings": [],
    }


@pytest.mark.parametrize("content_type", ["application/msgpack", "application/x-msgpack", "Application/MsgPack; v=1"])
@pytest.mark.parametrize("as_bin", [False, True])
def test_msgpack_gives_the_same_answer(holding: World, content_type: str, as_bin: bool) -> None:
    tokens: Any = list(range(1, 41))
    if as_bin:
        tokens = b"".join(token.to_bytes(4, "little") for token in tokens)
    body = msgspec.msgpack.encode({"model": "m", "token_ids": tokens})
    response = holding.client.post("/v1/prefix-hits", content=body, headers={"content-type": content_type})
    assert response.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(response.content) == holding.ask(token_ids=list(range(1, 41))).json()


def test_a_hit_says_where_its_prefix_lies_if_asked(holding: World) -> None:
    plain = holding.ask(token_ids=list(range(1, 33))).json()["hits"][0]
    detailed = holding.ask(token_ids=list(range(1, 33)), detail=True).json()["hits"][0]
    assert detailed.pop("spans") == [{"start": 0, "end": 32, "tier": "GPU", "worker_id": "w"}]
    assert detailed == plain
    assert holding.ask(token_ids=list(range(1, 33)), detail=False).json()["hits"] == [plain]
    assert error_of(holding.ask(token_ids=[1], detail=1)) == (422, "invalid_value", "detail")


def test_no_content_type_means_json(holding: World) -> None:
    response = holding.client.post("/v1/prefix-hits", content=b'{"model": "m", "token_ids": [1]}')
    assert response.status_code == 200


def test_null_means_the_default(holding: World) -> None:
    nothing = dict.fromkeys(("tenant", "lora_name", "cache_salt", "multimodal", "workers"))
    tokens = list(range(1, 33))
    assert holding.ask(token_ids=tokens, **nothing).json() == holding.ask(token_ids=tokens).json()


def test_an_adapter_or_a_salt_or_an_image_changes_the_prompt(holding: World) -> None:
    tokens = list(range(1, 33))
    image = {"identifier": "a", "offset": 0, "length": 4}
    for other in ({"lora_name": "x"}, {"cache_salt": "x"}, {"multimodal": [image]}, {"tenant": "x"}):
        assert holding.ask(token_ids=tokens, **other).json()["hits"] == []


def test_an_unknown_model_is_no_error_but_a_warning(holding: World) -> None:
    response = holding.ask(model="nobody serves it")
    assert response.status_code == 200
    assert response.json()["hits"] == []
    assert [w["code"] for w in response.json()["warnings"]] == ["unknown_model"]
    assert "nobody serves it" in response.json()["warnings"][0]["message"]


def test_unknown_workers_are_named_in_the_warnings(holding: World) -> None:
    body = holding.ask(token_ids=list(range(1, 33)), workers=["w", "gone"]).json()
    assert [h["worker_id"] for h in body["hits"]] == ["w"]
    assert any("gone" in w["message"] for w in body["warnings"])


def test_who_may_hold_more_than_is_known_is_named_unless_its_hit_says_so(holding: World) -> None:
    held, unheld = list(range(1, 33)), [7] * 32
    publisher = holding.index.publisher(PublisherKey("w", 0))
    assert publisher is not None

    def warned(**query: Any) -> list[str]:
        warnings = holding.ask(**query).json()["warnings"]
        return [w["message"] for w in warnings if w["code"] == "coverage_below_complete"]

    assert not warned(token_ids=unheld)
    publisher.set_coverage(Coverage.DEGRADED, CoverageReason.GAP, 1.0)
    assert "w rank 0" in warned(token_ids=unheld)[0]
    assert not warned(token_ids=held), "its hit says so"
    assert not warned(token_ids=unheld, workers=["other"])
    publisher.set_coverage(Coverage.COMPLETE, CoverageReason.FROM_START, 2.0)
    assert not warned(token_ids=unheld)
    publisher.show(Trust(Coverage.DISCONNECTED, CoverageReason.CONNECTION_LOST, 3.0))
    assert warned(token_ids=unheld)
    for number in range(5):
        holding.register(worker_id=f"other {number}")
        other = holding.index.publisher(PublisherKey(f"other {number}", 0))
        assert other is not None
        assert "and more" not in warned(token_ids=unheld)[0]
        other.set_coverage(Coverage.SINCE, CoverageReason.JOINED_LATE, 3.5, since=7)
    assert "other 4 rank 0 and more" in warned(token_ids=unheld)[0]
    assert warned(token_ids=unheld, workers=["w"]) == ["no hit, but perhaps not all is known: w rank 0"]
    holding.index.remove_publisher(PublisherKey("w", 0))
    publisher.show(None)
    publisher.set_coverage(Coverage.DEGRADED, CoverageReason.GAP, 4.0)
    assert "w rank 0" not in warned(token_ids=unheld)[0], "it is gone"


def test_only_the_workers_asked_for_are_answered(holding: World) -> None:
    assert holding.ask(token_ids=list(range(1, 33)), workers=[]).json()["hits"] == []


@pytest.mark.parametrize("token", [2**32, 2**62, 2**63 - 1])
def test_wide_token_ids_are_legal(holding: World, token: int) -> None:
    assert holding.ask(token_ids=[token]).status_code == 200


WRONG_VALUES = [
    ({"token_ids": [1, 2, 3, -1]}, "token_ids[3]"),
    ({"token_ids": [2**63]}, "token_ids[0]"),
    ({"token_ids": [1, 2**64 - 1, -1]}, "token_ids[1]"),
    ({"token_ids": [1.0]}, "token_ids[0]"),
    ({"token_ids": ["1"]}, "token_ids[0]"),
    ({"token_ids": [True]}, "token_ids[0]"),
    ({"token_ids": [None]}, "token_ids[0]"),
    ({"token_ids": [[1]]}, "token_ids[0]"),
    ({"token_ids": "abcd"}, "token_ids"),
    ({"token_ids": {}}, "token_ids"),
    ({"model": ""}, "model"),
    ({"model": 7}, "model"),
    ({"model": None}, "model"),
    ({"model": "m" * 1025}, "model"),
    ({"tenant": ""}, "tenant"),
    ({"lora_name": ""}, "lora_name"),
    ({"lora_name": 1}, "lora_name"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"multimodal": {}}, "multimodal"),
    ({"multimodal": [{"identifier": "a", "offset": -1, "length": 1}]}, "multimodal[0].offset"),
    ({"multimodal": [{"identifier": "a", "offset": 0, "length": -1}]}, "multimodal[0].length"),
    ({"multimodal": [{"identifier": 1, "offset": 0, "length": 1}]}, "multimodal[0].identifier"),
    ({"multimodal": [{"identifier": "a", "offset": 2**63, "length": 1}]}, "multimodal[0].offset"),
    ({"workers": "w"}, "workers"),
    ({"workers": [1]}, "workers[0]"),
]


BEYOND_MSGPACK = [({"token_ids": [1, 2**64]}, "token_ids[1]"), ({"token_ids": [10**30]}, "token_ids[0]")]


@pytest.mark.parametrize(("values", "field"), WRONG_VALUES + BEYOND_MSGPACK)
def test_a_wrong_value_is_refused_by_name(holding: World, values: dict[str, Any], field: str) -> None:
    assert error_of(holding.ask(**values)) == (422, "invalid_value", field)


@pytest.mark.parametrize(("values", "field"), WRONG_VALUES)
def test_a_wrong_value_in_msgpack_is_refused_alike(holding: World, values: dict[str, Any], field: str) -> None:
    body = msgspec.msgpack.encode({"model": "m", "token_ids": [1], **values})
    response = holding.client.post("/v1/prefix-hits", content=body, headers=MSGPACK)
    assert error_of(response) == (422, "invalid_value", field)


@pytest.mark.parametrize(
    ("values", "code", "field"),
    [
        ({"lora": "x"}, "unknown_field", "lora"),
        ({"multimodal": [{"id": "a", "offset": 0, "length": 1}]}, "unknown_field", "multimodal[0].id"),
        ({"multimodal": [{"offset": 0, "length": 1}]}, "missing_field", "multimodal[0].identifier"),
        ({"token_ids": []}, "empty_prompt", "token_ids"),
        ({"token_ids": [1] * (PROMPT_TOKENS_MAX + 1)}, "prompt_too_long", "token_ids"),
    ],
)
def test_other_faults_are_named_too(holding: World, values: dict[str, Any], code: str, field: str) -> None:
    assert error_of(holding.ask(**values)) == (422, code, field)


def test_the_longest_prompt_is_still_answered(holding: World) -> None:
    assert holding.ask(token_ids=[1] * PROMPT_TOKENS_MAX).json()["prompt_tokens"] == PROMPT_TOKENS_MAX


@pytest.mark.parametrize("field", ["model", "token_ids"])
def test_a_missing_field_is_named(holding: World, field: str) -> None:
    body = {"model": "m", "token_ids": [1]}
    del body[field]
    response = holding.client.post("/v1/prefix-hits", json=body)
    assert error_of(response) == (422, "missing_field", field)


@pytest.mark.parametrize(("length", "code"), [(0, "empty_prompt"), (3, "invalid_value"), (4005, "invalid_value")])
def test_a_bin_of_the_wrong_length_is_refused(holding: World, length: int, code: str) -> None:
    body = msgspec.msgpack.encode({"model": "m", "token_ids": bytes(length)})
    response = holding.client.post("/v1/prefix-hits", content=body, headers=MSGPACK)
    assert error_of(response) == (422, code, "token_ids")


def test_a_bin_in_json_is_no_base64(holding: World) -> None:
    assert error_of(holding.ask(token_ids="AAAA")) == (422, "invalid_value", "token_ids")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model": "m", "token_ids": [1]} x',
        b'{"model": "m", "token_ids": [NaN]}',
        b'{"model": "\\ud800", "token_ids": [1]}',
        b'{"model": "\xff", "token_ids": [1]}',
    ],
)
def test_a_body_that_is_not_json_is_a_400(holding: World, body: bytes) -> None:
    response = holding.client.post("/v1/prefix-hits", content=body, headers=JSON)
    assert error_of(response) == (400, "invalid_json", None)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x82\xa5model", b"\x81\xa5model\xa1\xff"])
def test_a_body_that_is_not_msgpack_is_a_400(holding: World, body: bytes) -> None:
    response = holding.client.post("/v1/prefix-hits", content=body, headers=MSGPACK)
    assert error_of(response) == (400, "invalid_msgpack", None)


@pytest.mark.parametrize("body", [b"[]", b"7", b'"text"', b"null"])
def test_json_that_is_no_object_is_refused(holding: World, body: bytes) -> None:
    response = holding.client.post("/v1/prefix-hits", content=body, headers=JSON)
    assert error_of(response) == (422, "invalid_value", None)


def test_a_deeply_nested_body_does_no_harm(holding: World) -> None:
    body = b'{"model": "m", "token_ids": ' + b"[" * 2000
    response = holding.client.post("/v1/prefix-hits", content=body, headers=JSON)
    assert response.status_code in (400, 422)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_another_content_type_is_a_415(holding: World, content_type: str) -> None:
    response = holding.client.post("/v1/prefix-hits", content=b"{}", headers={"content-type": content_type})
    assert error_of(response) == (415, "unsupported_media_type", None)


def test_a_body_that_says_it_is_too_large_is_a_413(holding: World) -> None:
    assert error_of(holding.ask(cache_salt="x" * BODY_BYTES_MAX)) == (413, "body_too_large", None)


def test_a_body_that_streams_too_much_is_a_413(holding: World) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * (BODY_BYTES_MAX // 4)

    response = holding.client.post("/v1/prefix-hits", content=chunks(), headers=JSON)
    assert error_of(response) == (413, "body_too_large", None)


def test_a_body_that_trickles_is_given_up(holding: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.api.bounds.BODY_DEADLINE_S", 0.05)

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    response = holding.client.post("/v1/prefix-hits", content=trickle(), headers=JSON)
    assert error_of(response) == (408, "body_too_slow", None)


def test_a_caller_who_leaves_in_the_midst_of_a_body_is_no_fault_of_ours(holding: World) -> None:
    sent: list[Message] = []

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/prefix-hits", "headers": [], "query_string": b""}
    with structlog.testing.capture_logs() as logs:
        asyncio.run(holding.client.app(scope, leave, send))
    assert (sent, logs) == ([], [])


def test_a_fault_of_ours_is_a_500_in_the_envelope(holding: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(holding.index, "prefix_hits", fail)
    response = holding.ask()
    assert error_of(response) == (500, "internal_error", None)
    assert "secret" not in response.text
    assert holding.client.get("/healthz").status_code == 200


def test_nothing_is_answered_before_recovery(holding: World) -> None:
    holding.life.is_recovered, holding.life.lacks = False, ["the index is being recovered"]
    response = holding.ask()
    assert error_of(response) == (503, "not_ready", None)
    assert response.headers["retry-after"] == "1"
    for path in ("/v1/publishers", "/v1/publishers/w", "/v1/stats", "/v1/audit", "/v1/blocks/1"):
        assert error_of(holding.client.get(path)) == (503, "not_ready", None)


def test_the_examples_of_the_document_are_legal(holding: World) -> None:
    content = PREFIX_HITS_OPENAPI["openapi_extra"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        response = holding.client.post("/v1/prefix-hits", content=json.dumps(example["value"]), headers=JSON)
        assert response.status_code == 200
