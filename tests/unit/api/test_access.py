"""Who may do what: with keys of every role, of all tenants and of one."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from starlette.requests import Request

from indexer.api.access import AccessControl, Caller, Keyring, LastCaller, holds_of
from indexer.identity.chain import chain_seed, local_hashes
from indexer.keys import Key, Role, new_key
from tests.engine_events import decoded, stored
from tests.unit.api.stand_ins import World, empty_world, error_of

TOKENS: dict[str, str] = {}
KEYS: list[Key] = []
for _role in ("query", "operate", "admin"):
    for _name, _tenants in ((_role, None), (f"{_role} of a", ["a"])):
        TOKENS[_name], _key = new_key(_name.replace(" ", "-"), _role, _tenants)
        KEYS.append(_key)
KEY = "ad00a3dbbbe5f2d4"
PROBES = ("/healthz", "/readyz", "/health")


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[name]}"}


@pytest.fixture
def world() -> World:
    """Tenants a and b have one worker each, with the same block; of b there is a rank of a's worker, too."""
    world = empty_world(Keyring(KEYS))
    register(world, "a", "w-a", 0)
    register(world, "b", "w-b", 0)
    register(world, "b", "w-a", 1)
    for publisher in world.index.publishers():
        publisher.apply(decoded(stored([7], None, [1, 2], 2)), 0, 0)
    return world


def register(world: World, tenant: str, worker_id: str, dp_rank: int) -> None:
    body = {
        "worker_id": worker_id,
        "dp_rank": dp_rank,
        "tenant": tenant,
        "model": "m",
        "endpoint": "tcp://127.0.0.1:1",
        "replay_endpoint": "tcp://127.0.0.1:2",
        "block_size": 2,
    }
    assert world.client.request("POST", "/v1/publishers", json=body, headers=as_("admin")).status_code == 201


def operations(world: World) -> list[tuple[str, str]]:
    paths = world.client.app.openapi()["paths"]
    return [(method.upper(), path) for path in paths for method in paths[path]]


def concrete(path: str) -> str:
    return path.replace("{worker_id}", "w-a").replace("{content_key}", KEY)


def registrations(world: World) -> set[tuple[str, int, str]]:
    return {(*f.registration.key, f.registration.tenant) for f in world.registry.followed()}


# ---------------------------------------------------------------------- 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer kvi_wrong"},
        {"authorization": TOKENS["admin"]},
        {"authorization": f"Basic {TOKENS['admin']}"},
        {"authorization": f"Bearer {TOKENS['admin']}x"},
        {"authorization": f"Bearer {TOKENS['admin'][:-1]}"},
        [("authorization", f"Bearer {TOKENS['admin']}"), ("authorization", f"Bearer {TOKENS['admin']}")],
    ],
)
def test_without_a_token_nothing_but_probes_is_answered(world: World, headers: Any) -> None:
    before = registrations(world)
    for method, path in [*operations(world), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing")]:
        answer = world.client.request(method, concrete(path), headers=headers, content=b"{")
        if path in PROBES:
            assert answer.status_code == 200
        else:
            assert error_of(answer) == (401, "unauthenticated", None), path
            assert answer.headers["www-authenticate"].startswith("Bearer ")
            assert "kvi_" not in answer.text
    assert registrations(world) == before


def test_the_scheme_is_of_any_case(world: World) -> None:
    for scheme in ("bearer", "BEARER"):
        headers = {"authorization": f"{scheme}  {TOKENS['query']}"}
        assert world.client.request("GET", "/v1/stats", headers=headers).status_code == 200


# ---------------------------------------------------------------------- 403 by role


def test_every_route_needs_the_role_that_its_document_says(world: World) -> None:
    document = world.client.app.openapi()["paths"]
    world.client.app.watch_feed.close()  # else its stream would never end
    for method, path in operations(world):
        if path in PROBES:
            continue
        needed = document[path][method.lower()]["x-role"]
        for role in Role:
            answer = world.client.request(method, concrete(path), headers=as_(str(role)), content=b"{")
            is_refused = answer.status_code == 403 and error_of(answer)[1] == "forbidden_role"
            assert is_refused == (role < Role[needed.upper()]), (method, path, role)


ROLES = {
    "query": [
        "GET /v1/publishers",
        "POST /v1/prefix-hits",
        "GET /v1/publishers/{worker_id}",
        "GET /v1/blocks/{content_key}",
        "GET /v1/stats",
        "GET /v1/hot-prefixes",
        "GET /v1/workers/{worker_id}/drain-impact",
        "GET /v1/watch",
        "POST /v1/routed",
        "POST /v1/observed",
        "GET /metrics",
        "POST /query",
        "POST /query_by_hash",
    ],
    "operate": [
        "POST /v1/publishers",
        "DELETE /v1/publishers/{worker_id}",
        "POST /v1/publishers/{worker_id}/clear",
        "POST /v1/publishers/{worker_id}/resync",
        "POST /register",
        "POST /unregister",
    ],
    "admin": ["GET /v1/audit"],
}


@pytest.mark.parametrize("role", ROLES)
def test_changes_are_for_operators(world: World, role: str) -> None:
    document = world.client.app.openapi()["paths"]
    for route in ROLES[role]:
        method, _, path = route.partition(" ")
        operation = document[path][method.lower()]
        assert (operation["x-role"], operation["security"]) == (role, [{"key": []}]), route
        assert {"401", "403"} <= operation["responses"].keys()


def test_without_keys_the_document_asks_for_none() -> None:
    document = empty_world().client.app.openapi()
    assert "securitySchemes" not in document["components"]
    assert "401" not in document["paths"]["/v1/stats"]["get"]["responses"]


# ---------------------------------------------------------------------- tenants


REQUESTS_OF_A_TENANT: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/prefix-hits": ("tenant", {"model": "m", "token_ids": [1, 2, 3]}),
    "/query": ("routing_group", {"model_name": "m", "token_ids": [1, 2, 3]}),
    "/query_by_hash": ("routing_group", {"model_name": "m", "block_hashes": [1]}),
    "/v1/publishers": ("tenant", {"worker_id": "new", "model": "m", "endpoint": "tcp://127.0.0.1:9"}),
    "/register": (
        "routing_group",
        {"instance_id": 5, "model_name": "m", "endpoint": "tcp://127.0.0.1:9", "block_size": 2},
    ),
    "/unregister": ("routing_group", {"instance_id": 5, "model_name": "m"}),
}


@pytest.mark.parametrize("path", REQUESTS_OF_A_TENANT)
def test_another_tenant_cannot_be_named(world: World, path: str) -> None:
    field, body = REQUESTS_OF_A_TENANT[path]
    before = registrations(world)
    answers = []
    for tenant in ("b", "nobody"):
        answer = world.client.request("POST", path, json={**body, field: tenant}, headers=as_("operate of a"))
        assert error_of(answer) == (403, "tenant_forbidden", field)
        answers.append(answer.text.replace(repr(tenant), "?"))
    assert error_of(world.client.request("POST", path, json=body, headers=as_("operate of a")))[1] == "tenant_forbidden"
    assert answers[0] == answers[1]
    assert registrations(world) == before
    own = world.client.request("POST", path, json={**body, field: "a"}, headers=as_("operate of a"))
    assert own.status_code in (200, 201, 404), own.text


def test_nothing_is_looked_up_for_a_tenant_that_is_not_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("looked up")

    for name in ("scope", "prefix_hits"):
        monkeypatch.setattr(world.index, name, fail)
    for path, (field, body) in REQUESTS_OF_A_TENANT.items():
        answer = world.client.request("POST", path, json={**body, field: "b"}, headers=as_("operate of a"))
        assert answer.status_code == 403, answer.text


def test_publishers_of_others_do_not_exist(world: World) -> None:
    listed = world.client.request("GET", "/v1/publishers", headers=as_("query of a")).json()["publishers"]
    assert [(p["worker_id"], p["dp_rank"], p["tenant"]) for p in listed] == [("w-a", 0, "a")]
    for method, path in [
        ("GET", "/v1/publishers/{}?dp_rank=0"),
        ("DELETE", "/v1/publishers/{}"),
        ("DELETE", "/v1/publishers/{}?dp_rank=0"),
        ("POST", "/v1/publishers/{}/clear"),
        ("POST", "/v1/publishers/{}/resync"),
        ("POST", "/v1/publishers/{}/resync?full=true"),
    ]:
        others, nobodys = (
            world.client.request(method, path.format(worker_id), headers=as_("operate of a"))
            for worker_id in ("w-b", "nobody")
        )
        assert error_of(others) == (404, "unknown_publisher", "worker_id")
        assert others.text == nobodys.text.replace("nobody", "w-b")
    rank = world.client.request("GET", "/v1/publishers/w-a?dp_rank=1", headers=as_("query of a"))
    assert error_of(rank) == (404, "unknown_publisher", "worker_id")
    assert world.registry.resyncs == []
    assert len(registrations(world)) == 3


def test_of_a_worker_that_two_tenants_share_only_ones_own_ranks_are_changed(world: World) -> None:
    held = {p.registration.key: p.status().residencies for p in world.index.publishers()}
    assert set(held.values()) == {1}
    for path in ("clear", "resync"):
        answer = world.client.request("POST", f"/v1/publishers/w-a/{path}", headers=as_("operate of a"))
        assert answer.json() == {"publishers": 1}
    assert world.registry.resyncs == [("w-a", 0, False)]
    held = {tuple(p.registration.key): p.status().residencies for p in world.index.publishers()}
    assert held == {("w-a", 0): 0, ("w-a", 1): 1, ("w-b", 0): 1}
    assert world.client.request("DELETE", "/v1/publishers/w-a", headers=as_("operate of a")).json() == {"removed": 1}
    assert registrations(world) == {("w-b", 0, "b"), ("w-a", 1, "b")}


def test_of_a_name_that_is_taken_no_more_is_told(world: World) -> None:
    body = {"worker_id": "w-b", "model": "m", "endpoint": "tcp://127.0.0.1:1", "tenant": "a"}
    answer = world.client.request("POST", "/v1/publishers", json=body, headers=as_("operate of a"))
    assert error_of(answer) == (409, "publisher_conflict", "worker_id")
    assert "tenant" not in answer.text
    own = {**body, "worker_id": "w-a", "endpoint": "tcp://127.0.0.1:3"}
    answer = world.client.request("POST", "/v1/publishers", json=own, headers=as_("operate of a"))
    assert error_of(answer) == (409, "publisher_conflict", "endpoint")
    numbered = {"instance_id": 5, "model_name": "m", "endpoint": "tcp://127.0.0.1:1", "block_size": 2}
    register(world, "b", "5", 0)
    answer = world.client.request("POST", "/register", json={**numbered, "tenant_id": "a"}, headers=as_("operate of a"))
    assert error_of(answer) == (409, "publisher_conflict", "instance_id")


def test_warnings_do_not_tell_of_workers_of_others(world: World) -> None:
    body = {"model": "m", "token_ids": [1, 2, 3], "tenant": "a", "workers": ["w-a", "w-b", "nobody"]}
    answer = world.client.request("POST", "/v1/prefix-hits", json=body, headers=as_("query of a")).json()
    assert [hit["worker_id"] for hit in answer["hits"]] == ["w-a"]
    warned = "".join(warning["message"] for warning in answer["warnings"] if warning["code"] == "unknown_worker")
    assert ("w-b" in warned, "nobody" in warned, "w-a" in warned) == (True, True, False)


def test_blocks_and_totals_are_of_ones_own_tenants(world: World) -> None:
    key = int(local_hashes(array("I", [1, 2]), 2, chain_seed(None))[0])  # of a first block, that is its content key
    path = f"/v1/blocks/{key:016x}"
    own = {"worker_id": "w-a", "dp_rank": 0, "tenant": "a", "medium": "GPU", "group": 0, "owner": ""}
    world.store.rows = [
        {**own, "worker_id": w, "dp_rank": r, "tenant": t, "content_key": key, "parent_key": None}
        | {"local_hash": 5, "position": 0, "block_tokens": 2}
        for w, r, t in (("w-a", 0, "a"), ("w-a", 1, "b"), ("w-b", 0, "b"))
    ]
    everybody = world.client.request("GET", path, headers=as_("query")).json()
    assert len(everybody["holders"]) == 3
    mine = world.client.request("GET", path, headers=as_("query of a")).json()
    assert [(h["worker_id"], h["dp_rank"]) for h in mine["holders"]] == [("w-a", 0)]
    assert world.client.request("DELETE", "/v1/publishers/w-a", headers=as_("operate of a")).status_code == 200
    gone = world.client.request("GET", path, headers=as_("query of a"))
    never = world.client.request("GET", f"/v1/blocks/{key ^ 1:016x}", headers=as_("query of a"))
    assert error_of(gone) == error_of(never) == (404, "unknown_block", "content_key")
    totals = world.client.request("GET", "/v1/stats", headers=as_("query of a")).json()
    assert totals == {"models": []}
    assert [m["tenant"] for m in world.client.request("GET", "/v1/stats", headers=as_("query")).json()["models"]] == [
        "b"
    ]


@pytest.mark.parametrize("path", ["/metrics", "/v1/audit", "/metrics%0A", "/v1/audit%0A"])
def test_what_tells_of_all_tenants_is_for_keys_of_all(world: World, path: str) -> None:
    assert error_of(world.client.request("GET", path, headers=as_("admin of a")))[1] == "tenant_forbidden"
    if not path.endswith("%0A"):
        assert world.client.request("GET", path, headers=as_("admin")).status_code == 200


# ---------------------------------------------------------------------- keys


def test_a_key_that_is_taken_back_opens_nothing() -> None:
    keyring, last = Keyring(KEYS[:1]), LastCaller()
    header = f"Bearer {TOKENS['query']}".encode()
    assert keyring.find_again(header, last) == keyring.find_again(header, last) == Caller(None, Role.QUERY)
    keyring.replace(KEYS[1:])
    assert keyring.find_again(header, last) is None
    keyring.replace(KEYS[:1])
    assert keyring.find_again(header, last) == Caller(None, Role.QUERY)
    assert keyring.find_again(header + b"x", last) is None


def test_every_key_is_compared_with_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(first)
        return first == second

    monkeypatch.setattr("indexer.api.access.compare_digest", compare)
    keyring = Keyring(KEYS)
    for token in (*TOKENS.values(), "kvi_wrong"):
        compared.clear()
        keyring.find(f"Bearer {token}".encode())
        assert compared == [key.digest for key in KEYS]


def test_an_answer_without_end_is_told_when_its_key_is_taken_back_or_bound_otherwise() -> None:
    keyring, told = Keyring(KEYS), []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        holds = holds_of(Request(scope))
        told.append(holds())
        keyring.replace([])
        told.append(holds())

    name, token = next(iter(TOKENS.items()))
    headers = [(b"authorization", f"Bearer {token}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/v1/watch", "headers": headers}
    asyncio.run(AccessControl(app, keyring, [])(scope, None, None))  # type: ignore[arg-type]
    assert told == [True, False], name
    assert holds_of(Request({"type": "http"}))()
