"""`/v1/hot-prefixes` and `/v1/workers/{id}/drain-impact`."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest

from indexer.api.access import Caller
from indexer.api.fleet_schemas import DrainImpacts, HotPrefixes
from indexer.api.known_queries import REQUEST_BYTES_MAX, as_input
from indexer.compiled import IS_COMPILED
from indexer.identity.chain import SEED, chain_keys, local_hashes
from indexer.index.heat import Sample
from indexer.index.prefix_query import PrefixQuery
from indexer.registration import PublisherKey, Registration
from tests.engine_events import decoded, numbers, stored
from tests.unit.api.stand_ins import World, empty_world, error_of

TURN_MAX_S = 0.010
SHARED, PROMPT = numbers(1, 32), numbers(1, 64)
KEYS = [f"{key:016x}" for key in chain_keys(None, local_hashes(array("I", PROMPT).tobytes(), 16, SEED))]


def holding(world: World, worker_id: str, tokens: list[int], **values: Any) -> None:
    world.register(worker_id=worker_id, **values)
    publisher = world.index.publisher(PublisherKey(worker_id, 0))
    assert publisher is not None
    hashes = numbers(2**40, len(tokens) // 16)
    publisher.apply(decoded(stored(hashes, None, tokens)), 0, 0)


@pytest.fixture
def fleet(world: World) -> World:
    """Two workers hold the first two blocks of the prompt, one all four. All queries are sampled from here on."""
    world.index.heat.every = 1
    holding(world, "a", PROMPT)
    holding(world, "b", SHARED)
    return world


def note(world: World, tokens: list[int], times: int = 1) -> None:
    """As a sampled query does."""
    for _ in range(times):
        query = PrefixQuery("m", tokens)
        world.index.note_heat(query, time.monotonic())


def test_hot_prefixes_are_named_with_their_holders(fleet: World) -> None:
    note(fleet, [*PROMPT, 7], 2)
    note(fleet, [*SHARED, 7], 3)
    note(fleet, numbers(900, 32))
    response = fleet.client.get("/v1/hot-prefixes?model=m")
    body = response.json()
    HotPrefixes.model_validate(body)
    assert (body["tenant"], body["model"], body["samples"]) == ("default", "m", 6)
    assert body["queries"] == pytest.approx(6, abs=0.1)
    on_gpu = {"dp_rank": 0, "tiers": ["GPU"]}
    prefixes = [{**prefix, "queries": round(prefix["queries"])} for prefix in body["prefixes"]]
    assert prefixes == [
        {
            "content_key": KEYS[1],
            "tokens": 32,
            "queries": 5,
            "share": pytest.approx(5 / 6, abs=1e-3),
            "copies": 2,
            "holders": [{"worker_id": "a", **on_gpu}, {"worker_id": "b", **on_gpu}],
        },
        {
            "content_key": KEYS[3],
            "tokens": 64,
            "queries": 2,
            "share": pytest.approx(2 / 6, abs=1e-3),
            "copies": 1,
            "holders": [{"worker_id": "a", **on_gpu}],
        },
    ]
    assert len(fleet.client.get("/v1/hot-prefixes?model=m&limit=1").json()["prefixes"]) == 1
    assert not any(str(token) in response.text.replace(key, "") for token in (901,) for key in KEYS)


def test_a_hot_prefix_that_is_gone_has_no_copies(fleet: World) -> None:
    note(fleet, [*SHARED, 7])
    for worker in "ab":
        fleet.index.publisher(PublisherKey(worker, 0)).restart()  # type: ignore[union-attr]
    (prefix,) = fleet.client.get("/v1/hot-prefixes?model=m").json()["prefixes"]
    assert (prefix["content_key"], prefix["copies"], prefix["holders"]) == (KEYS[1], 0, [])


def test_nothing_was_asked_yet(fleet: World) -> None:
    body = fleet.client.get("/v1/hot-prefixes?model=m").json()
    HotPrefixes.model_validate(body)
    assert (body["queries"], body["prefixes"]) == (0, [])


@pytest.mark.parametrize(
    ("query", "status", "code", "field"),
    [
        ("", 422, "missing_field", "model"),
        ("?model=", 422, "invalid_value", "model"),
        ("?model=m&tenant=", 422, "invalid_value", "tenant"),
        ("?model=m&limit=0", 422, "invalid_value", "limit"),
        ("?model=m&limit=1001", 422, "invalid_value", "limit"),
        ("?model=m&limit=x", 422, "invalid_value", "limit"),
        ("?model=x", 404, "unknown_model", "model"),
        ("?model=m&tenant=x", 404, "unknown_model", "model"),
    ],
)
def test_a_wrong_question_is_refused_by_name(fleet: World, query: str, status: int, code: str, field: str) -> None:
    assert error_of(fleet.client.get("/v1/hot-prefixes" + query)) == (status, code, field)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_one_query_in_so_many_is_noted_whoever_answers_it(by_kernel: bool) -> None:
    """The kernel notes what the other way notes."""
    world = empty_world()
    holding(world, "a", PROMPT)
    every = world.index.heat.every
    direct: Any = world.client.app.direct
    memory = bytearray(REQUEST_BYTES_MAX)
    for number in range(2 * every):
        tokens = [[*PROMPT, 7], [*SHARED, 7]][number >= every]
        body = msgspec.json.encode({"model": "m", "token_ids": tokens})
        request = b"POST /v1/prefix-hits HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        memory[: len(request)] = request
        if by_kernel:
            assert direct.answer_known(as_input(memory), len(request), []) is not None
        else:
            assert direct.find(memoryview(memory), len(request)).route(body, None).status == 200
    first, second = world.index.heat.samples("default", "m")
    assert [f"{key:016x}" for key in first.keys.tolist()] == KEYS
    assert [f"{key:016x}" for key in second.keys.tolist()] == KEYS[:2]
    assert (first.granule, second.granule) == (16, 16)


def test_a_drain_is_told_what_it_would_cost(fleet: World) -> None:
    note(fleet, [*PROMPT, 7], 2)
    note(fleet, [*SHARED, 7], 3)
    body = fleet.client.get("/v1/workers/a/drain-impact").json()
    DrainImpacts.model_validate(body)
    (impact,) = body.pop("models")
    assert body == {"worker_id": "a"}
    assert {name: impact[name] for name in ("tenant", "model", "dp_ranks")} == {
        "tenant": "default",
        "model": "m",
        "dp_ranks": [0],
    }
    assert (impact["held_blocks"], impact["held_tokens"]) == (4, 64)
    assert (impact["only_here_blocks"], impact["only_here_tokens"]) == (2, 32)
    assert impact["queried_only_here_tokens"] == pytest.approx(2 * 32, abs=1)
    assert impact["queried_share"] == pytest.approx(64 / (2 * 64 + 3 * 32), abs=1e-3)
    assert fleet.client.get("/v1/workers/b/drain-impact").json()["models"][0]["only_here_tokens"] == 0


def test_a_worker_is_asked_for_all_its_models_or_one(world: World) -> None:
    url = "http://10.0.0.7:8000"
    world.register(worker_id=url)
    world.register(worker_id=url, dp_rank=1, model="other")
    world.register(worker_id=url, dp_rank=2)
    for path in (url, quote(url, safe="")):
        models = world.client.get(f"/v1/workers/{path}/drain-impact").json()["models"]
        assert [(impact["model"], impact["dp_ranks"]) for impact in models] == [("m", [0, 2]), ("other", [1])]
    (only,) = world.client.get(f"/v1/workers/{url}/drain-impact?model=other").json()["models"]
    assert only["model"] == "other"
    assert error_of(world.client.get(f"/v1/workers/{url}/drain-impact?model=x")) == (
        404,
        "unknown_publisher",
        "worker_id",
    )
    assert error_of(world.client.get("/v1/workers/nobody/drain-impact")) == (404, "unknown_publisher", "worker_id")


def test_a_caller_asks_of_its_own_tenants_only(fleet: World) -> None:
    fleet.register(worker_id="a", dp_rank=1, tenant="mine")

    async def ask(path: str) -> httpx.Response:
        async def as_caller(scope: Any, receive: Any, send: Any) -> None:
            await fleet.client.app({**scope, "caller": Caller(frozenset({"mine"}))}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(as_caller), base_url="http://service") as client:
            return await client.get(path)

    assert error_of(asyncio.run(ask("/v1/hot-prefixes?model=m"))) == (403, "tenant_forbidden", "tenant")
    assert asyncio.run(ask("/v1/hot-prefixes?model=m&tenant=mine")).status_code == 200
    (impact,) = asyncio.run(ask("/v1/workers/a/drain-impact")).json()["models"]
    assert (impact["tenant"], impact["dp_ranks"], impact["held_tokens"]) == ("mine", [1], 0)
    assert error_of(asyncio.run(ask("/v1/workers/b/drain-impact"))) == (404, "unknown_publisher", "worker_id")


def test_neither_question_holds_up_the_loop() -> None:
    """Two workers with a million blocks between them, and as many keys of heat as are kept. Others on this machine may
    hold us up, too, so it is the processor time of the loop's thread that counts."""
    blocks, prompts = 50_000 if IS_COMPILED else 200, 14
    world = empty_world()
    a, b = (world.index.add_publisher(Registration(n, 0, "m", "tcp://127.0.0.1:1", publisher_id=1)) for n in "ab")
    for number in range(prompts):
        tokens = np.arange(16 * blocks, dtype=np.uint32) + np.uint32(number << 24)
        hashes = (np.arange(blocks, dtype=np.uint64) + np.uint64(number << 40)).tolist()
        a.apply(decoded(stored(hashes, None, tokens.tolist())), number, 0)
        b.apply(decoded(stored(hashes[: blocks // 2], None, tokens[: 8 * blocks].tolist())), number, 0)
        keys, _ = a.space.table.items(blocks)  # type: ignore[union-attr]
        world.index.heat.note(Sample(time.monotonic(), "default", "m", 16, keys))

    async def longest_turn(path: str) -> tuple[float, Any]:
        longest, is_over = 0.0, False

        async def watch() -> None:
            nonlocal longest
            before = time.thread_time()
            while not is_over:
                await asyncio.sleep(0)
                now = time.thread_time()
                longest, before = max(longest, now - before), now

        transport = httpx.ASGITransport(world.client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            watching = asyncio.ensure_future(watch())
            answer = await client.get(path)
        is_over = True
        await watching
        assert answer.status_code == 200
        return longest, answer.json()

    for path in ("/v1/workers/a/drain-impact", "/v1/hot-prefixes?model=m"):
        turn_s, answer = asyncio.run(longest_turn(path))
        assert turn_s < TURN_MAX_S
        if path.endswith("drain-impact"):
            (impact,) = answer["models"]
            assert (impact["held_blocks"], impact["only_here_blocks"]) == (blocks * prompts, blocks * prompts // 2)
