from __future__ import annotations

import msgspec
import pytest
import xxhash

from indexer.api.formats import hex_key
from indexer.api.inspect import parse_content_key
from indexer.api.schemas import Block, Stats
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import World, error_of

SECOND_KEY = 12466389667045779788  # of tokens 1 to 32
SECOND_LOCAL = 2287610619914608821
FIRST_KEY = 16863443419780771464


@pytest.fixture
def holding(world: World) -> World:
    """Worker `w` holds the two blocks of tokens 1 to 32, the second on two media."""
    world.register()
    stored = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": list(range(1, 33)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    offloaded = {
        **stored,
        "block_hashes": [12],
        "parent_block_hash": 11,
        "token_ids": list(range(17, 33)),
        "medium": "CPU",
    }
    payload = msgspec.msgpack.encode([1.0, [stored, offloaded, offloaded], 0])
    followed = world.registry.find("w", 0)
    assert followed
    followed.index.apply(decode_batch(payload), 0, xxhash.xxh3_64_intdigest(payload))
    return world


def row(medium: str) -> dict[str, object]:
    return {
        "worker_id": "w", "dp_rank": 0, "medium": medium, "group": 0, "owner": "", "content_key": SECOND_KEY,
        "parent_key": FIRST_KEY, "local_hash": SECOND_LOCAL, "position": 16, "block_tokens": 16,
    }  # fmt: skip


@pytest.mark.parametrize("path", [f"{SECOND_KEY:016x}", f"0x{SECOND_KEY:x}", f"0X{SECOND_KEY:X}", str(SECOND_KEY)])
def test_a_block_is_found_by_hex_and_decimal(holding: World, path: str) -> None:
    holding.store.rows.extend([row("CPU"), row("GPU")])
    response = holding.client.get(f"/v1/blocks/{path}")
    body = response.json()
    Block.model_validate(body)
    assert body["content_key"] == f"{SECOND_KEY:016x}"
    assert body["parent_key"] == f"{FIRST_KEY:016x}"
    assert body["local_hash"] == f"{SECOND_LOCAL:016x}"
    assert (body["position"], body["block_tokens"]) == (16, 16)
    holders = [(h["worker_id"], h["medium"], h["group"], h["reference_count"]) for h in body["holders"]]
    assert holders == [("w", "CPU", 0, 2), ("w", "GPU", 0, 1)]


def test_a_block_the_store_does_not_have_yet_shows_its_holders(holding: World) -> None:
    body = holding.client.get(f"/v1/blocks/{SECOND_KEY}").json()
    Block.model_validate(body)
    assert body["parent_key"] is None
    assert len(body["holders"]) == 2


def test_a_block_nobody_holds_is_a_404(holding: World) -> None:
    assert error_of(holding.client.get("/v1/blocks/7")) == (404, "unknown_block", "content_key")


@pytest.mark.parametrize(
    "text", ["", "0x", "xyz", "-1", "1.5", "0x1ffffffffffffffff", str(2**64), "\uff11", "0xg", "9" * 40]
)
def test_what_is_no_key_is_refused(holding: World, text: str) -> None:
    response = holding.client.get(f"/v1/blocks/{text}")
    if text:
        assert error_of(response) == (422, "invalid_value", "content_key")
    else:
        assert error_of(response)[0] == 404


def test_sixteen_digits_are_hexadecimal() -> None:
    assert parse_content_key("1234567890123456") == 0x1234567890123456
    assert parse_content_key("123456789012345") == 123456789012345
    assert parse_content_key("abc") == 0xABC
    assert parse_content_key("0") == 0


@pytest.mark.parametrize("key", [0, 1, 2**53 + 1, 2**63, 2**64 - 1])
def test_a_printed_key_is_read_back(key: int) -> None:
    text = hex_key(key)
    assert text is not None
    assert parse_content_key(text) == key


def test_stats_say_what_is_held(holding: World) -> None:
    body = holding.client.get("/v1/stats").json()
    Stats.model_validate(body)
    assert body["models"][0]["model"] == "m"
    assert body["models"][0]["residencies_by_medium"] == {"CPU": 1, "GPU": 2}


def test_questions_to_a_store_that_is_away_are_a_503(holding: World) -> None:
    holding.store.is_away = True
    for path in ("/v1/audit", "/v1/blocks/7"):
        assert error_of(holding.client.get(path)) == (503, "store_unavailable", None)
    assert holding.ask().status_code == 200
