"""Whatever is posted to the paths of the dialects, the answer is one that the OpenAPI document lists for the path, and
never a fault of the service."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.api.stand_ins import ApiClient, empty_world

PATHS = (
    *("/register", "/unregister", "/query", "/query_by_hash"),
    *("/conductor/register", "/conductor/unregister", "/conductor/query", "/conductor/query_by_hash"),
    *("/lookup", "/v1/scores", "/register_peer", "/deregister_peer"),
)
NUMBERS = st.sampled_from((-(2**63), -1, 0, 1, 16, 2**32, 2**63, 2**64 - 1, 2**64)) | st.integers(0, 64)
TEXTS = st.sampled_from(("", "m", "w", "default", "vLLM", "Mooncake", "tcp://10.0.0.7:5557", "ea06fc71a5ee6e88", "a\n"))
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS | st.just(1.5)
VALUES = PLAIN | st.lists(NUMBERS | TEXTS, max_size=3) | st.dictionaries(TEXTS, PLAIN, max_size=2)
FITTING: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("model", "model_name", "modelname"), st.just("m")),
    **dict.fromkeys(("tenant_id", "routing_group", "tenant"), st.sampled_from(("", "default", "t"))),
    **dict.fromkeys(("lora_name", "lora_id", "cache_salt", "replay_endpoint", "additionalsalt"), TEXTS | st.none()),
    **dict.fromkeys(("token_ids", "tokens"), st.lists(st.integers(0, 2**32), max_size=40)),
    **dict.fromkeys(("block_hashes", "seq_hashes", "block_hash"), st.lists(NUMBERS | TEXTS, max_size=4)),
    "instance_id": st.just(7) | st.just("w"),
    "endpoint": st.just("tcp://10.0.0.7:5557"),
    "url": st.just("http://peer"),
    "type": st.sampled_from(("vLLM", "SGLang", "Mooncake")),
    "block_size": st.sampled_from((16, 32)),
    "dp_rank": st.integers(0, 2),
    "pods": st.lists(TEXTS, max_size=2),
    "tier_weights": st.dictionaries(TEXTS, st.floats(0, 2), max_size=2),
}
BODIES = st.fixed_dictionaries({}, optional={name: fits | VALUES for name, fits in FITTING.items()})


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_one_that_is_documented(path: str) -> None:
    document = empty_world().client.get("/openapi.json").json()
    documented = {int(status) for status in document["paths"][path]["post"]["responses"]}
    client = ApiClient(empty_world().client.app)

    @settings(max_examples=60, deadline=None)
    @given(BODIES, st.sampled_from(("application/json", "application/msgpack", "text/plain")))
    def check(body: dict[str, Any], content_type: str) -> None:
        packs = content_type == "application/msgpack" and not _is_beyond_64_bits(body)
        content = (msgspec.msgpack if packs else msgspec.json).encode(body)
        response = client.post(path, content=content, headers={"content-type": content_type})
        assert response.status_code in documented, response.text

    check()


def _is_beyond_64_bits(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_is_beyond_64_bits, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64
