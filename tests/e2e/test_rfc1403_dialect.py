"""A router written for RFC #1403 against this service as its users start it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import xxhash

from tests.e2e.service_process import Engine, ServiceProcess, wait_for

PROMPT = list(range(100, 148))
QUERY = {"model": "m", "block_size": 16}
INSTANCE = {"instance_id": "vllm-1", "modelname": "m", "dp_rank": 0}


def seq_hashes(tokens: list[int]) -> list[int]:
    chain: list[int] = []
    for i in range(0, len(tokens), 16):
        local = xxhash.xxh3_64_intdigest(struct.pack("<16I", *tokens[i : i + 16]), 1337)
        chain.append(xxhash.xxh3_64_intdigest(struct.pack("<QQ", chain[-1], local), 1337) if chain else local)
    return chain


def held(longest: int) -> Any:
    match = {"longest_matched": longest, "GPU": longest, "CPU": 0, "DISK": 0, "DP": {"0": longest}}
    return 200, {"default": {"vllm-1": match}}


def test_register_query_restart_unregister(data_dir: Path) -> None:
    by_tokens, by_hashes = QUERY | {"token_ids": PROMPT}, QUERY | {"seq_hashes": seq_hashes(PROMPT)}
    with Engine("vllm-1") as engine:
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            assert service.call("POST", "/query", by_tokens) == (200, {"default": {}})
            registration = {**INSTANCE, "endpoint": engine.endpoint, "block_size": 16, "type": "vLLM"}
            for _ in range(2):
                assert service.call("POST", "/register", registration) == (
                    200,
                    {"status": "registered successfully", "instance_id": "vllm-1"},
                )
            engine.wait_for_subscription()
            assert service.call("POST", "/query", by_tokens) == held(0)
            engine.store(1, None, PROMPT)
            wait_for(lambda: service.call("POST", "/query", by_tokens) == held(48), "the blocks are held")
            assert service.call("POST", "/query_by_hash", by_hashes) == held(48)
            assert service.call("POST", "/query", by_tokens | {"block_size": 32}) == held(32)
            assert service.stop() == 0
        with ServiceProcess(data_dir) as service:
            service.wait_until_ready()
            assert service.call("POST", "/query_by_hash", by_hashes) == held(48)
            assert service.call("GET", "/services")[1]["services"][0]["InstanceID"] == "vllm-1"
            removed = {"status": "unregistered successfully", "removed_instances": ["vllm-1|default|0"]}
            assert service.call("POST", "/unregister", INSTANCE) == (200, removed)
            assert service.call("POST", "/unregister", INSTANCE)[0] == 404
            assert service.stop() == 0
