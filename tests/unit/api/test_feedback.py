"""`/v1/routed` and `/v1/observed`: what routers tell, and what answers make of it."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from indexer.api import feedback
from indexer.api.access import Caller
from indexer.api.feedback_schemas import OBSERVED_EXAMPLE, ROUTED_EXAMPLE, ROUTED_REQUEST, Observed, Routed
from indexer.api.known_queries import REQUEST_BYTES_MAX, as_input
from indexer.api.schemas import PrefixHits, Publisher
from indexer.client.requests import prefix_hits
from indexer.identity.chain import SEED, chain_keys, local_hashes
from indexer.registration import PublisherKey
from tests.engine_events import decoded, numbers, removed, stored
from tests.unit.api.stand_ins import BODY_BYTES_MAX, World, error_of

PROMPT = numbers(1, 48)
HASHES = local_hashes(array("I", PROMPT).tobytes(), 16, SEED)


def routed(world: World, **values: Any) -> Any:
    body = {"model": "m", "worker_id": "w", "token_ids": PROMPT, **values}
    return world.client.post("/v1/routed", json={name: value for name, value in body.items() if value != "absent"})


def observed(world: World, **values: Any) -> Any:
    return world.client.post(
        "/v1/observed", json={"worker_id": "w", "predicted_tokens": 32, "cached_tokens": 32, **values}
    )


def apply(world: World, *events: Any) -> None:
    publisher = world.index.publisher(PublisherKey("w", 0))
    assert publisher is not None
    number = publisher.checkpoint.sequence_number
    publisher.apply(decoded(*events), 0 if number is None else number + 1, 0)


def hits(world: World, **values: Any) -> list[tuple[str, int, int | None]]:
    answer = world.ask(token_ids=PROMPT, **values).json()
    PrefixHits.model_validate(answer)
    return [(hit["worker_id"], hit["hit_tokens"], hit.get("expected_tokens")) for hit in answer["hits"]]


# ---------------------------------------------------------------------- routed


def test_a_routed_prompt_is_expected_until_its_time_is_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("indexer.api.meters.monotonic", lambda: now)
    world.register()
    world.register(worker_id="x")
    response = routed(world)
    assert response.status_code == 200
    Routed.model_validate(response.json())
    key = f"{chain_keys(None, HASHES)[-1]:016x}"
    assert response.json() == {"hit_tokens": 0, "expected_blocks": 3, "expires_in_s": 2.0, "content_key": key}
    assert hits(world) == [("w", 0, 32)]
    assert hits(world, expected=True) == [("w", 32, 32)]
    assert hits(world, expected=None) == [("w", 0, 32)]
    now += 2.0
    assert hits(world) == []
    routed(world, ttl_s=10)
    now += 9.0
    assert hits(world) == [("w", 0, 32)]


def test_a_burst_goes_where_its_first_prompt_went(world: World) -> None:
    """A router that takes the first hit of the answer."""
    world.register(worker_id="a")
    world.register(worker_id="b")
    publisher = world.index.publisher(PublisherKey("a", 0))
    assert publisher is not None
    publisher.apply(decoded(stored([1], None, PROMPT[:16])), 0, 0)
    assert hits(world, expected=True) == [("a", 16, None)]
    routed(world, worker_id="b")
    assert hits(world, expected=True) == [("b", 32, 32), ("a", 16, None)]
    assert hits(world) == [("a", 16, None), ("b", 0, 32)]


@pytest.mark.parametrize(("expected", "hit_tokens"), [(None, 0), (False, 0), (True, 32)])
def test_the_client_library_asks_for_and_reads_what_is_expected(
    world: World, expected: bool | None, hit_tokens: int
) -> None:
    world.register()
    routed(world)
    asked = prefix_hits("m", PROMPT, None, None, expected=expected)
    answer = world.client.request(
        asked.method, asked.target, content=asked.body, headers={"content-type": asked.content_type}
    )
    (hit,) = asked.read(answer.content).hits
    assert (hit.hit_tokens, hit.expected_tokens) == (hit_tokens, 32)


def test_events_take_the_place_of_expectations(world: World) -> None:
    world.register()
    routed(world)
    apply(world, stored([1, 2, 3], None, PROMPT))
    assert hits(world) == [("w", 32, None)]
    assert routed(world).json() == {
        "hit_tokens": 32,
        "expected_blocks": 0,
        "expires_in_s": 0,
        "content_key": f"{chain_keys(None, HASHES)[-1]:016x}",
    }
    apply(world, removed([3, 2]))
    assert hits(world) == [("w", 16, None)]


def test_local_hashes_stand_for_the_tokens(world: World) -> None:
    world.register(block_size=16)
    digits = [f"{value:016X}" for value in HASHES]
    assert routed(world, token_ids="absent", local_hashes=digits).json()["expected_blocks"] == 3
    assert hits(world) == [("w", 0, 32)]


def test_no_hashes_may_be_said_by_null(world: World) -> None:
    world.register()
    assert routed(world, local_hashes=None).status_code == 200
    assert {"type": "null"} in ROUTED_REQUEST["properties"]["local_hashes"]["anyOf"]


@pytest.mark.parametrize(
    "prompt",
    [
        {"token_ids": PROMPT},
        {"token_ids": array("I", PROMPT).tobytes()},
        {"local_hashes": array("Q", HASHES).tobytes()},
        {"local_hashes": [f"{value:016x}" for value in HASHES]},
    ],
)
def test_msgpack_says_the_same(world: World, prompt: dict[str, Any]) -> None:
    world.register()
    body = msgspec.msgpack.encode({"model": "m", "worker_id": "w", **prompt})
    response = world.client.post("/v1/routed", content=body, headers={"content-type": "application/msgpack"})
    assert response.status_code == 200
    assert msgspec.msgpack.decode(response.content)["expected_blocks"] == 3


def test_a_prompt_shorter_than_a_block_expects_nothing(world: World) -> None:
    world.register()
    assert routed(world, token_ids=[1, 2]).json() == {
        "hit_tokens": 0,
        "expected_blocks": 0,
        "expires_in_s": 0,
        "content_key": None,
    }


def test_images_set_expectations_apart(world: World) -> None:
    world.register()
    image = {"multimodal": [{"identifier": "a", "offset": 0, "length": 4}]}
    routed(world, **image)
    assert hits(world) == []
    assert hits(world, **image) == [("w", 0, 32)]


@pytest.mark.parametrize(
    ("values", "code", "field"),
    [
        ({"token_ids": "absent"}, "missing_field", "token_ids"),
        ({"local_hashes": ["0" * 16]}, "conflicting_fields", "local_hashes"),
        ({"token_ids": "absent", "local_hashes": []}, "empty_prompt", "local_hashes"),
        ({"token_ids": "absent", "local_hashes": ["0" * 16] * 32}, "prompt_too_long", "local_hashes"),
        ({"token_ids": "absent", "local_hashes": ["0" * 16 + "\n"]}, "invalid_value", "local_hashes[0]"),
        ({"token_ids": "absent", "local_hashes": ["0" * 16], "cache_salt": "s"}, "conflicting_fields", "cache_salt"),
        ({"token_ids": "absent", "local_hashes": ["0" * 15]}, "invalid_value", "local_hashes[0]"),
        ({"token_ids": "absent", "local_hashes": [1]}, "invalid_value", "local_hashes[0]"),
        ({"token_ids": []}, "empty_prompt", "token_ids"),
        ({"token_ids": [1] * 501}, "prompt_too_long", "token_ids"),
        ({"token_ids": [-1]}, "invalid_value", "token_ids[0]"),
        ({"ttl_s": 0}, "invalid_value", "ttl_s"),
        ({"ttl_s": 61}, "invalid_value", "ttl_s"),
        ({"ttl_s": "2"}, "invalid_value", "ttl_s"),
        ({"dp_rank": -1}, "invalid_value", "dp_rank"),
        ({"worker_id": "absent"}, "missing_field", "worker_id"),
        ({"model": "absent"}, "missing_field", "model"),
        ({"workers": []}, "unknown_field", "workers"),
        ({"worker_id": "pool"}, "invalid_value", "worker_id"),
    ],
)
def test_a_wrong_value_is_refused_by_name_and_changes_nothing(
    world: World, values: dict[str, Any], code: str, field: str
) -> None:
    world.register()
    world.register(worker_id="pool", kind="pool")
    assert error_of(routed(world, **values)) == (422, code, field)
    assert world.index.expected_room.taken == 0


def test_too_many_local_hashes_are_refused(world: World) -> None:
    world.register()
    for count, code in ((501, "prompt_too_long"), (1, "invalid_value")):
        hashes = bytes(8 * count if count > 1 else 7)
        body = msgspec.msgpack.encode({"model": "m", "worker_id": "w", "local_hashes": hashes})
        assert len(body) <= BODY_BYTES_MAX
        response = world.client.post("/v1/routed", content=body, headers={"content-type": "application/msgpack"})
        assert msgspec.json.decode(response.content)["error"]["code"] == code


@pytest.mark.parametrize("values", [{"worker_id": "x"}, {"dp_rank": 1}, {"model": "other"}, {"tenant": "other"}])
def test_whoever_is_not_registered_so_is_unknown(world: World, values: dict[str, Any]) -> None:
    world.register()
    assert error_of(routed(world, **values)) == (404, "unknown_publisher", "worker_id")


@pytest.mark.parametrize("path", ["/v1/routed", "/v1/observed"])
def test_what_is_no_json_is_refused(world: World, path: str) -> None:
    assert error_of(world.client.post(path, content=b"{")) == (400, "invalid_json", None)
    headers = {"content-type": "text/plain"}
    assert error_of(world.client.post(path, content=b"{}", headers=headers)) == (415, "unsupported_media_type", None)
    assert error_of(world.client.get(path)) == (405, "method_not_allowed", None)
    world.life.is_recovered = False
    assert error_of(world.client.post(path, json={})) == (503, "not_ready", None)


def test_dynamo_scores_say_nothing_of_what_is_expected(world: World) -> None:
    world.register()
    routed(world)
    answer = world.client.post("/query", json={"model_name": "m", "token_ids": PROMPT}).json()
    assert answer["scores"] == {}


def test_the_kernel_leaves_scopes_with_expectations_alone(world: World) -> None:
    """And takes them up again."""
    world.register()
    apply(world, stored([1], None, PROMPT[:16]))
    direct: Any = world.client.app.direct
    body = msgspec.json.encode({"model": "m", "token_ids": PROMPT})
    request = b"POST /v1/prefix-hits HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    memory = bytearray(REQUEST_BYTES_MAX)
    memory[: len(request)] = request

    def answered() -> bytes | None:
        return direct.answer_known(as_input(memory), len(request), [(b"date", b"today")])  # type: ignore[no-any-return]

    before = answered()
    assert before is not None
    assert b"expected" not in before
    routed(world)
    assert answered() is None
    publisher = world.index.publisher(PublisherKey("w", 0))
    assert publisher is not None
    for _ in world.index.expire_expected(float("inf")):
        pass
    assert answered() == before


def test_numbers_of_expectations_are_measured(world: World) -> None:
    world.register()
    routed(world)
    text = world.client.get("/metrics").text
    assert "indexer_routed_prompts_total 1.0" in text
    assert "indexer_expected_blocks 3.0" in text


# ---------------------------------------------------------------------- observed


def test_observations_are_counted_and_shown(world: World) -> None:
    world.register()
    assert world.client.get("/v1/publishers/w").json()["predictions"] is None
    response = observed(world)
    Observed.model_validate(response.json())
    assert response.json() == {"error_tokens": 0, "alarm": False}
    assert observed(world, cached_tokens=0, content_key="00000000000000AF").json()["error_tokens"] == 32
    assert observed(world, cached_tokens=48).json()["error_tokens"] == -16
    observed(world, content_key=None, dp_rank=None)
    shown = world.client.get("/v1/publishers/w").json()
    Publisher.model_validate(shown)
    predictions = shown["predictions"]
    assert predictions["ever"] == predictions["last"] == {"too_low": 1, "exact": 2, "too_high": 1}
    assert (predictions["alarm"], predictions["wrong_share"]) == (False, 0.5)
    assert predictions["last_wrong"]["cached_tokens"] == 48
    observed(world, cached_tokens=0, content_key="00000000000000AF")
    assert world.client.get("/v1/publishers/w").json()["predictions"]["last_wrong"]["content_key"] == f"{0xAF:016x}"


def test_the_alarm_is_logged_when_it_changes(world: World) -> None:
    world.register()
    with capture_logs() as logs:
        answers = [observed(world, cached_tokens=0).json()["alarm"] for _ in range(60)]
    assert answers == [False] * 49 + [True] * 11
    assert [(entry["event"], entry["worker_id"], entry["log_level"]) for entry in logs] == [
        ("prediction_alarm_raised", "w", "warning")
    ]
    with capture_logs() as logs:
        for _ in range(200):
            observed(world)
    assert [entry["event"] for entry in logs] == ["prediction_alarm_ended"]
    assert not world.client.get("/v1/publishers/w").json()["predictions"]["alarm"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"predicted_tokens": -1}, "predicted_tokens"),
        ({"predicted_tokens": None}, "predicted_tokens"),
        ({"cached_tokens": 1.5}, "cached_tokens"),
        ({"content_key": 7}, "content_key"),
        ({"content_key": "7"}, "content_key"),
        ({"dp_rank": 65_536}, "dp_rank"),
        ({"worker_id": ""}, "worker_id"),
    ],
)
def test_a_wrong_observation_is_refused_by_name(world: World, values: dict[str, Any], field: str) -> None:
    world.register()
    assert error_of(observed(world, **values)) == (422, "invalid_value", field)
    assert world.client.get("/v1/publishers/w").json()["predictions"] is None


def test_an_observation_of_nobody_is_refused(world: World) -> None:
    assert error_of(observed(world)) == (404, "unknown_publisher", "worker_id")


def test_a_caller_tells_of_its_own_tenants_only(world: World) -> None:
    world.register()
    world.register(worker_id="x", tenant="mine")
    mine = Caller(frozenset({"mine"}))

    def tell(path: str, **values: Any) -> tuple[int, dict[str, Any]]:
        body = msgspec.json.encode(values)
        request = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        query = world.client.app.direct.find(memoryview(bytearray(request)), len(request))
        assert query is not None
        answer = query.route(body, None, mine)
        return answer.status, msgspec.json.decode(answer.body)

    prompt = {"model": "m", "token_ids": PROMPT}
    status, answer = tell("/v1/routed", worker_id="w", **prompt)
    assert (status, answer["error"]["code"], answer["error"]["field"]) == (403, "tenant_forbidden", "tenant")
    for named in ({"worker_id": "w", "tenant": "mine"}, {"worker_id": "nobody", "tenant": "mine"}):
        status, answer = tell("/v1/routed", **named, **prompt)
        assert (status, answer["error"]["code"]) == (404, "unknown_publisher")
    assert tell("/v1/routed", worker_id="x", tenant="mine", **prompt)[0] == 200
    report = {"predicted_tokens": 1, "cached_tokens": 1}
    assert tell("/v1/observed", worker_id="w", **report)[0] == 404
    assert tell("/v1/observed", worker_id="x", **report)[0] == 200


def test_the_examples_of_the_document_are_taken(world: World) -> None:
    values: dict[str, Any] = {name: ROUTED_EXAMPLE[name] for name in ("worker_id", "model")}
    world.register(**values)
    assert world.client.post("/v1/routed", json=ROUTED_EXAMPLE).status_code == 200
    assert world.client.post("/v1/observed", json=OBSERVED_EXAMPLE).status_code == 200
    document = world.client.get("/openapi.json").json()["paths"]
    for path, body in (
        (feedback.ROUTED_PATH, feedback.JsonRoutedBody),
        (feedback.OBSERVED_PATH, feedback.ObservedBody),
    ):
        schema = document[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == {field.name for field in msgspec.structs.fields(body)}
        assert schema["additionalProperties"] is False
