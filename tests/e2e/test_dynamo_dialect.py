"""A router written for Dynamo's standalone indexer against this service as its users start it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import xxhash

from tests.e2e.service_process import Engine, ServiceProcess, wait_for

ID = 2**63 + 5
MODEL = {"model_name": "m"}
PROMPT = list(range(100, 148))


def scores(service: ServiceProcess, path: str, **values: Any) -> Any:
    status, body = service.call("POST", path, MODEL | values)
    assert status == 200
    return body["scores"]


def block_hashes(tokens: list[int]) -> list[int]:
    """Signed, as that API has them."""
    blocks = [struct.pack("<16I", *tokens[i : i + 16]) for i in range(0, len(tokens), 16)]
    return [struct.unpack("<q", struct.pack("<Q", xxhash.xxh3_64_intdigest(block, 1337)))[0] for block in blocks]


def check_dump(answer: tuple[int, Any]) -> None:
    """Three blocks, each the parent of the next, as they were after the first batch."""
    status, models = answer
    assert (status, list(models)) == (200, ["m:default"])
    events = [dumped["event"] for dumped in models["m:default"]["events"]]
    stored = [event["data"]["stored"] for event in events]
    assert [blocks["blocks"][0]["tokens_hash"] for blocks in stored] == [h % 2**64 for h in block_hashes(PROMPT)]
    keys = [blocks["blocks"][0]["block_hash"] for blocks in stored]
    assert [blocks["parent_hash"] for blocks in stored] == [None, *keys[:-1]]
    assert {event["event_id"] for event in events} == {0}
    (cut,) = models["m:default"]["publishers"]
    assert (cut["instance_id"], cut["dp_rank"], cut["block_size"], cut["sequence_number"]) == (ID, 0, 16, 0)


def test_register_query_restart_unregister(data_dir: Path) -> None:
    instance = {**MODEL, "instance_id": ID}
    held = {str(ID): {"0": 48}}
    with Engine(str(ID)) as engine:
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            assert service.call("GET", "/health") == (200, {"status": "ok"})
            assert service.call("POST", "/query", {**MODEL, "token_ids": PROMPT})[0] == 404
            registration = {**instance, "endpoint": engine.endpoint, "block_size": 16}
            assert service.call("POST", "/register", registration) == (201, {"status": "ok"})
            assert service.call("POST", "/register", registration)[0] == 409
            assert scores(service, "/query", token_ids=[]) == {}
            engine.wait_for_subscription()
            engine.store(1, None, PROMPT)
            wait_for(lambda: scores(service, "/query", token_ids=PROMPT) == held, "the blocks are held")
            assert scores(service, "/query_by_hash", block_hashes=block_hashes(PROMPT)) == held
            (worker,) = service.call("GET", "/workers?model_name=m")[1]
            assert (worker["instance_id"], worker["status"], worker["endpoints"]) == (
                ID,
                "active",
                {"0": engine.endpoint},
            )
            check_dump(service.call("GET", "/dump"))
            assert service.stop() == 0
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            assert scores(service, "/query", token_ids=PROMPT) == held
            assert service.call("POST", "/unregister", instance) == (200, {"status": "ok"})
            assert service.call("POST", "/unregister", instance)[0] == 404
            assert service.call("POST", "/query", {**MODEL, "token_ids": PROMPT})[0] == 404
            assert service.stop() == 0
