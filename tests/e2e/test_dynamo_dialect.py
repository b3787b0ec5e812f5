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


def test_register_query_restart_unregister(tmp_path: Path) -> None:
    instance = {**MODEL, "instance_id": ID}
    held = {str(ID): {"0": 48}}
    with Engine(str(ID)) as engine:
        with ServiceProcess(tmp_path) as service:
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
            assert service.stop() == 0
        with ServiceProcess(tmp_path) as service:
            service.wait_until_ready()
            assert scores(service, "/query", token_ids=PROMPT) == held
            assert service.call("POST", "/unregister", instance) == (200, {"status": "ok"})
            assert service.call("POST", "/unregister", instance)[0] == 404
            assert service.call("POST", "/query", {**MODEL, "token_ids": PROMPT})[0] == 404
            assert service.stop() == 0
