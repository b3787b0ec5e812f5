from __future__ import annotations

import time
from typing import Any, get_args
from urllib.parse import quote

import pytest

from indexer.api.schemas import Affected, Engine, Publisher, PublisherList, Removed
from indexer.errors import StoreUnavailable
from indexer.index.state import Coverage, CoverageReason
from indexer.wire.decode import decode_batch
from tests.engine_events import numbers, payload, stored
from tests.unit.api.stand_ins import World, error_of


def test_a_new_publisher_is_created_and_described(world: World) -> None:
    response = world.register(worker_id="http://10.0.0.7:8000", options={"eagle": True})
    assert response.status_code == 201
    body = response.json()
    Publisher.model_validate(body)
    assert (body["worker_id"], body["dp_rank"], body["tenant"], body["engine"]) == (
        "http://10.0.0.7:8000",
        0,
        "default",
        "auto",
    )
    assert body["dialect"] is None
    assert body["options"] == {"eagle": True}
    assert body["sequence_number"] is None
    assert body["last_event_age_s"] is None


def test_the_same_values_again_are_no_error(world: World) -> None:
    assert world.register().status_code == 201
    assert world.register().status_code == 200
    assert world.register(tenant=None, dp_rank=None, options=None).status_code == 200


def test_other_values_conflict(world: World) -> None:
    world.register()
    assert error_of(world.register(endpoint="tcp://127.0.0.1:6000")) == (409, "publisher_conflict", "endpoint")


@pytest.mark.parametrize("engine", get_args(Engine))
def test_known_engines_are_taken(world: World, engine: str) -> None:
    assert world.register(engine=engine).status_code == 201


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"engine": "tensorflow"}, "engine"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": "0"}, "dp_rank"),
        ({"dp_rank": True}, "dp_rank"),
        ({"dp_rank": 65_536}, "dp_rank"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": -16}, "block_size"),
        ({"block_size": 16.5}, "block_size"),
        ({"block_size": 1_048_577}, "block_size"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": 7}, "worker_id"),
        ({"worker_id": "a\x00b"}, "worker_id"),
        ({"worker_id": "a" * 513}, "worker_id"),
        ({"model": ""}, "model"),
        ({"model": "line\nbreak"}, "model"),
        ({"tenant": ""}, "tenant"),
        ({"options": []}, "options"),
        ({"options": {"eagle": "yes"}}, "options.eagle"),
        ({"options": {"eagle_groups": [-1]}}, "options.eagle_groups[0]"),
        ({"options": {"attention_chunk_size": {"0": 0}}}, "options.attention_chunk_size.0"),
        ({"options": {"blocks_per_chunk": 0}}, "options.blocks_per_chunk"),
        ({"options": {"blocks_per_chunk": 1_025}}, "options.blocks_per_chunk"),
        ({"options": {"clear_scope": "gpu"}}, "options.clear_scope"),
        ({"options": {"counting": "maybe"}}, "options.counting"),
        ({"options": {"eagle_groups": [1_024]}}, "options.eagle_groups[0]"),
        ({"options": {"eagle": False, "eagle_groups": [0]}}, "options.eagle_groups"),
        ({"options": {"attention_chunk_size": {"a": 64}}}, "options.attention_chunk_size.a.[key]"),
        ({"options": {"no_removals": True}}, "options.no_removals"),
        ({"options": {"no_removals": {}}}, "options.no_removals"),
        ({"options": {"no_removals": {"blocks_max": 0}}}, "options.no_removals.blocks_max"),
        ({"options": {"no_removals": {"expire_after_s": 0}}}, "options.no_removals.expire_after_s"),
        ({"options": {"lora_aliases": {"a": ""}}}, "options.lora_aliases.a"),
        ({"options": {"engine_hash": {"algorithm": "md5"}}}, "options.engine_hash.algorithm"),
        ({"options": {"engine_hash": {"algorithm": "sha256", "seed": 0}}}, "options.engine_hash.seed"),
        ({"options": {"engine_hash": {"algorithm": "xxhash"}}}, "options.engine_hash.seed"),
        ({"options": {"engine_hash": {"algorithm": "xxhash_cbor", "seed": None}}}, "options.engine_hash.seed"),
        ({"options": {"note": "a\x00b"}}, "options"),
        ({"options": {"note": "a" * 3_000}}, "options"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(world: World, values: dict[str, Any], field: str) -> None:
    status, code, named = error_of(world.register(**values))
    assert (status, code, named) == (422, "invalid_value", field)
    assert not world.registry.entries


def test_a_pool_says_which_workers_it_serves(world: World) -> None:
    body = world.register(kind="pool", serves=["b", "a", "b"]).json()
    Publisher.model_validate(body)
    assert (body["kind"], body["serves"], body["options"]) == ("pool", ["a", "b"], {})
    assert world.register(kind="pool", serves=["a", "b"]).status_code == 200
    assert error_of(world.register(kind="pool"))[:2] == (409, "publisher_conflict")
    assert world.register(worker_id="all", kind="pool").json()["serves"] is None
    assert world.register(worker_id="engine").json()["kind"] == "engine"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"kind": "router"}, "kind"),
        ({"kind": "pool", "serves": "w"}, "serves"),
        ({"kind": "pool", "serves": [""]}, "serves[0]"),
        ({"serves": ["w"]}, "serves"),
        ({"options": {"pool": ["w"]}}, "options"),
    ],
)
def test_a_pool_that_is_none_is_refused(world: World, values: dict[str, Any], field: str) -> None:
    assert error_of(world.register(**values)) == (422, "invalid_value", field)


def test_a_publisher_shows_what_its_events_have_told_of_the_engine(world: World) -> None:
    world.register()
    followed = world.registry.find("w", 0)
    assert followed
    followed.index.apply(decode_batch(payload(stored([1], None, numbers(1, 16)))), 0, 0)
    body = world.client.get("/v1/publishers/w").json()
    Publisher.model_validate(body)
    assert (body["engine"], body["dialect"]) == ("auto", "vllm")
    assert world.register(worker_id="said", engine="rfc1527").json()["dialect"] == "rfc1527"


def test_half_a_surrogate_pair_is_refused(world: World) -> None:
    body = b'{"worker_id": "w", "model": "m", "endpoint": "tcp://h:1", "options": {"a": "\\ud800"}}'
    response = world.client.post("/v1/publishers", content=body, headers={"content-type": "application/json"})
    assert error_of(response) == (422, "invalid_value", "options")
    body = body.replace(b'"w"', b'"\\ud800"')
    response = world.client.post("/v1/publishers", content=body, headers={"content-type": "application/json"})
    assert error_of(response)[0] == 422


def test_every_known_option_is_kept_as_given_and_shown(world: World) -> None:
    options = {
        "eagle": True,
        "eagle_groups": [1],
        "attention_chunk_size": {"0": 64},
        "blocks_per_chunk": 4,
        "counting": "set",
        "no_removals": {"expire_after_s": 3600, "blocks_max": 1_000_000},
        "lora_aliases": {"sql-v7": "sql"},
        "engine_hash": {"algorithm": "sha256_cbor", "seed": "0"},
    }
    assert world.register(options=options).json()["options"] == options
    assert world.register(options=options).status_code == 200
    assert world.client.get("/v1/publishers/w").json()["options"] == options


def test_what_is_assumed_of_a_publisher_is_shown(world: World) -> None:
    assert world.register().json()["assumptions"] == ["eagle_off"]
    assert world.register(worker_id="other", options={"eagle": False}).json()["assumptions"] == []
    assert world.register(worker_id="store", engine="mooncake", options={"no_removals": {"blocks_max": 9}}).json()[
        "assumptions"
    ] == ["no_removals"]


def test_a_field_that_an_option_does_not_have_is_refused_by_name(world: World) -> None:
    options = {"engine_hash": {"algorithm": "sha256", "salt": "x"}}
    assert error_of(world.register(options=options)) == (422, "unknown_field", "options.engine_hash.salt")
    assert error_of(world.register(options={"engine_hash": {}})) == (
        422,
        "missing_field",
        "options.engine_hash.algorithm",
    )


def test_unknown_options_are_kept_and_shown(world: World) -> None:
    assert world.register(options={"later": {"a": [1, None]}}).json()["options"] == {"later": {"a": [1, None]}}


@pytest.mark.parametrize("field", ["worker_id", "model", "endpoint"])
def test_a_missing_field_is_named(world: World, field: str) -> None:
    body = {"worker_id": "w", "model": "m", "endpoint": "tcp://h:1"}
    del body[field]
    assert error_of(world.client.post("/v1/publishers", json=body)) == (422, "missing_field", field)
    assert error_of(world.register(**{field: None})) == (422, "missing_field", field)


def test_an_unknown_field_is_refused_by_name(world: World) -> None:
    assert error_of(world.register(worker="w")) == (422, "unknown_field", "worker")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5557",
        "tcp://0.0.0.0:5557",
        "tcp://[::]:5557",
        "tcp://:5557",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:*",
        "host:5557",
        "http://host:5557",
        "tcp://ho st:5557",
        "tcp://[::1:5557",
        "ipc://",
    ],
)
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_nobody_can_connect_to_is_refused(world: World, field: str, endpoint: str) -> None:
    assert error_of(world.register(**{field: endpoint})) == (422, "invalid_endpoint", field)


def test_an_empty_endpoint_is_refused(world: World) -> None:
    assert error_of(world.register(endpoint="")) == (422, "invalid_value", "endpoint")


@pytest.mark.parametrize("endpoint", ["tcp://::1:5557", "tcp://[::1]:5557", "tcp://[0:0::1]:5557"])
def test_ipv6_is_taken_with_and_without_brackets(world: World, endpoint: str) -> None:
    assert world.register(endpoint=endpoint).json()["endpoint"] == "tcp://[::1]:5557"


def test_one_publisher_too_many_is_refused(world: World) -> None:
    world.registry.publishers_max = 1
    world.register()
    assert error_of(world.register(dp_rank=1)) == (422, "too_many_publishers", None)
    assert world.register().status_code == 200


def test_a_store_that_is_away_is_a_503(world: World) -> None:
    world.registry.failure = StoreUnavailable("the database is away")
    response = world.register()
    assert error_of(response) == (503, "store_unavailable", None)
    assert response.headers["retry-after"] == "1"


def test_no_publisher_is_taken_while_stopping(world: World) -> None:
    world.life.is_stopping = True
    assert error_of(world.register()) == (503, "stopping", None)


def test_a_body_that_is_not_json_is_a_400(world: World) -> None:
    response = world.client.post("/v1/publishers", content=b"{", headers={"content-type": "application/json"})
    assert error_of(response) == (400, "invalid_json", None)


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"7", b"null", b""])
def test_json_that_is_no_object_is_refused(world: World, body: bytes) -> None:
    response = world.client.post("/v1/publishers", content=body, headers={"content-type": "application/json"})
    assert error_of(response)[0] == 422


def test_another_content_type_is_a_415(world: World) -> None:
    response = world.client.post("/v1/publishers", content=b"worker_id=w", headers={"content-type": "text/plain"})
    assert error_of(response) == (415, "unsupported_media_type", None)


AWKWARD_NAMES = ["http://10.0.0.7:8000", "a/b//c/", "ranks?dp_rank=3#x", "100%25", "a:b", "ü 名", "a+b"]


@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_a_worker_is_found_by_its_encoded_name_whatever_it_holds(world: World, name: str) -> None:
    world.register(worker_id=name)
    path = f"/v1/publishers/{quote(name, safe='')}"
    assert world.client.get(path).json()["worker_id"] == name
    assert world.client.delete(path).json() == {"removed": 1}


def test_a_worker_is_found_by_its_raw_url(world: World) -> None:
    world.register(worker_id="http://10.0.0.7:8000", dp_rank=1)
    path = "/v1/publishers/http://10.0.0.7:8000?dp_rank=1"
    assert world.client.get(path).json()["dp_rank"] == 1
    assert world.client.delete(path).json() == {"removed": 1}


def test_without_a_rank_the_first_is_shown_and_all_are_removed(world: World) -> None:
    for rank in (2, 0, 1):
        world.register(dp_rank=rank)
    assert world.client.get("/v1/publishers/w").json()["dp_rank"] == 0
    removed = world.client.delete("/v1/publishers/w")
    Removed.model_validate(removed.json())
    assert removed.json() == {"removed": 3}
    assert world.client.get("/v1/publishers").json() == {"publishers": []}


def test_one_rank_is_removed_by_itself(world: World) -> None:
    world.register(dp_rank=0)
    world.register(dp_rank=1)
    assert world.client.delete("/v1/publishers/w?dp_rank=1").json() == {"removed": 1}
    assert world.client.get("/v1/publishers/w").status_code == 200


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_unknown_publisher_is_a_404(world: World, method: str) -> None:
    world.register()
    for path in ("/v1/publishers/x", "/v1/publishers/w?dp_rank=1", "/v1/publishers/", "/v1/publishers/w/"):
        assert error_of(world.client.request(method, path)) == (404, "unknown_publisher", "worker_id")


@pytest.mark.parametrize("rank", ["-1", "x", "1.5", "99999999999999999999"])
def test_a_rank_that_is_none_is_refused(world: World, rank: str) -> None:
    assert error_of(world.client.get(f"/v1/publishers/w?dp_rank={rank}")) == (422, "invalid_value", "dp_rank")


def test_the_list_is_sorted_and_complete(world: World) -> None:
    for worker_id, rank in (("b", 0), ("a", 1), ("a", 0)):
        world.register(worker_id=worker_id, dp_rank=rank)
    body = world.client.get("/v1/publishers").json()
    PublisherList.model_validate(body)
    assert [(p["worker_id"], p["dp_rank"]) for p in body["publishers"]] == [("a", 0), ("a", 1), ("b", 0)]


def test_coverage_and_age_are_shown(world: World) -> None:
    world.register()
    followed = world.registry.find("w", 0)
    assert followed
    followed.index.set_coverage(Coverage.SINCE, CoverageReason.JOINED_LATE, 12.5, since=7)
    followed.last_batch_at = time.time() - 5
    followed.state, followed.last_error = "failed", "it broke"
    body = world.client.get("/v1/publishers/w").json()
    assert (body["coverage"], body["since"], body["state"], body["last_error"]) == ("since", 7, "failed", "it broke")
    assert (body["coverage_reason"], body["coverage_at"], body["credited"]) == ("joined_late", 12.5, True)
    assert 5 <= body["last_event_age_s"] < 60


WORKERS = ["w", "http://10.0.0.7:8000", "a/clear", "b/resync", "w?x=1 ü"]


@pytest.mark.parametrize("worker_id", WORKERS)
def test_a_worker_is_cleared_whatever_its_name(world: World, worker_id: str) -> None:
    for rank in (0, 1):
        world.register(worker_id=worker_id, dp_rank=rank)
    body = world.client.post(f"/v1/publishers/{quote(worker_id, safe='')}/clear").json()
    Affected.model_validate(body)
    assert body == {"publishers": 2}
    followed = world.registry.find(worker_id, 0)
    assert followed is not None
    assert followed.index.counters["clears"] == 1
    if "?" not in worker_id:
        assert world.client.post(f"/v1/publishers/{worker_id}/clear?dp_rank=1").json() == {"publishers": 1}


@pytest.mark.parametrize("worker_id", WORKERS)
def test_a_worker_is_asked_again_whatever_its_name(world: World, worker_id: str) -> None:
    world.register(worker_id=worker_id, replay_endpoint="tcp://127.0.0.1:5558")
    path = f"/v1/publishers/{quote(worker_id, safe='')}/resync"
    assert world.client.post(path).json() == {"publishers": 1}
    assert world.client.post(f"{path}?dp_rank=0&full=true").json() == {"publishers": 1}
    assert world.registry.resyncs == [(worker_id, 0, False), (worker_id, 0, True)]


def test_what_cannot_be_cleared_or_asked_again_says_why(world: World) -> None:
    world.register()
    for action in ("clear", "resync"):
        assert error_of(world.client.post(f"/v1/publishers/x/{action}")) == (404, "unknown_publisher", "worker_id")
        refused = world.client.post(f"/v1/publishers/w/{action}?dp_rank=-1")
        assert error_of(refused) == (422, "invalid_value", "dp_rank")
    assert error_of(world.client.post("/v1/publishers/w/resync")) == (409, "no_replay_endpoint", "worker_id")


def test_how_the_replay_endpoint_does_is_shown(world: World) -> None:
    world.register(worker_id="with", replay_endpoint="tcp://127.0.0.1:5558")
    world.register(worker_id="without", endpoint="tcp://127.0.0.1:5559")
    assert world.client.get("/v1/publishers/with").json()["replay"]["state"] == "idle"
    assert world.client.get("/v1/publishers/without").json()["replay"] is None
