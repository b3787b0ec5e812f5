"""A prompt may be given by the local hash of each granule, or by the content keys: the answer is that of its tokens."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from indexer.api.schemas import PrefixHits
from indexer.identity.chain import chain_keys, local_hashes
from indexer.registration import Registration
from tests.engine_events import decoded, stored
from tests.unit.api.stand_ins import World, error_of

MSGPACK = {"content-type": "application/msgpack"}
TOKENS = list(range(1, 33))
LOCALS = local_hashes(array("I", TOKENS).tobytes(), 16, 1337)
KEYS = chain_keys(None, LOCALS)
FIELDS = {"local_hashes": LOCALS, "content_keys": KEYS}


@pytest.fixture
def holding(world: World) -> World:
    """Worker `w` holds the two blocks of tokens 1 to 32."""
    registration = Registration("w", 0, "m", "tcp://127.0.0.1:1", block_size=16, publisher_id=1)
    world.index.add_publisher(registration).apply(decoded(stored([11, 12], None, TOKENS, 16)), 0, 0)
    return world


def hexes(numbers: list[int]) -> list[str]:
    return [f"{number:016x}" for number in numbers]


def packed(numbers: list[int]) -> bytes:
    return array("Q", numbers).tobytes()


def ask(world: World, **fields: Any) -> Any:
    return world.client.post("/v1/prefix-hits", json={"model": "m", **fields})


def ask_in_msgpack(world: World, **fields: Any) -> Any:
    body = msgspec.msgpack.encode({"model": "m", **fields})
    return world.client.post("/v1/prefix-hits", content=body, headers=MSGPACK)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("upper", [False, True])
def test_hashes_are_answered_as_the_tokens_they_are_of(holding: World, name: str, upper: bool) -> None:
    texts = [text.upper() if upper else text for text in hexes(FIELDS[name])]
    expected = ask(holding, token_ids=TOKENS).json()
    answer = ask(holding, **{name: texts}).json()
    PrefixHits.model_validate(answer)
    assert answer == expected
    assert answer["hits"][0]["hit_tokens"] == 16  # at least one token of the 32 is always computed
    assert ask(holding, **{name: texts}, granule=16, token_ids=None).json() == expected


@pytest.mark.parametrize("name", FIELDS)
def test_in_msgpack_they_may_be_one_bin(holding: World, name: str) -> None:
    expected = ask(holding, token_ids=TOKENS).json()
    for given in (hexes(FIELDS[name]), packed(FIELDS[name])):
        assert msgspec.msgpack.decode(ask_in_msgpack(holding, **{name: given}).content) == expected


def test_what_follows_an_unknown_hash_is_no_hit(holding: World) -> None:
    hit = ask(holding, content_keys=hexes([KEYS[0], 7, KEYS[1]])).json()["hits"][0]
    assert hit["resident_tokens"] == 16
    assert ask(holding, content_keys=hexes([7, *KEYS])).json()["hits"] == []


@pytest.mark.parametrize("name", FIELDS)
def test_another_granule_is_answered_from_its_own_key_space(holding: World, name: str) -> None:
    """No hashes of 4 tokens are kept: there is no hit whatever the hashes are, and a warning says why."""
    answer = ask(holding, granule=4, **{name: hexes(FIELDS[name])}).json()
    assert (answer["prompt_tokens"], answer["hits"]) == (8, [])
    assert "by 4 tokens, only by 16" in next(w["message"] for w in answer["warnings"] if w["code"] == "unknown_granule")
    registration = Registration("fine", 0, "m", "tcp://127.0.0.1:1", block_size=4, publisher_id=1)
    fine = local_hashes(array("I", TOKENS).tobytes(), 4, 1337)
    holding.index.add_publisher(registration).apply(decoded(stored([1, 2], None, TOKENS[:8], 4)), 0, 0)
    given = hexes(fine if name == "local_hashes" else chain_keys(None, fine))
    for granule in (4, None):
        answer = ask(holding, granule=granule, **{name: given}).json()
        assert [hit["worker_id"] for hit in answer["hits"]] == ["fine"]
        assert answer["prompt_tokens"] == 32
    assert [hit["worker_id"] for hit in ask(holding, **{name: hexes(FIELDS[name])}).json()["hits"]] == ["w"]
    assert ask(holding, **{name: hexes(FIELDS[name])}).json()["prompt_tokens"] == 32


REFUSED = [
    ({}, "missing_field", "token_ids"),
    ({"token_ids": None, "content_keys": None}, "missing_field", "token_ids"),
    ({"token_ids": [1], "local_hashes": hexes(LOCALS)}, "conflicting_fields", "local_hashes"),
    ({"token_ids": [], "content_keys": hexes(KEYS)}, "conflicting_fields", "content_keys"),
    ({"local_hashes": hexes(LOCALS), "content_keys": hexes(KEYS)}, "conflicting_fields", "content_keys"),
    ({"local_hashes": hexes(LOCALS), "lora_name": "x"}, "conflicting_fields", "lora_name"),
    ({"content_keys": hexes(KEYS), "cache_salt": "x"}, "conflicting_fields", "cache_salt"),
    (
        {"content_keys": hexes(KEYS), "multimodal": [{"identifier": "a", "offset": 0, "length": 1}]},
        "conflicting_fields",
        "multimodal",
    ),
    ({"token_ids": [1], "granule": 16}, "conflicting_fields", "granule"),
    ({"local_hashes": []}, "empty_prompt", "local_hashes"),
    ({"content_keys": []}, "empty_prompt", "content_keys"),
    ({"content_keys": hexes(KEYS), "granule": 0}, "invalid_value", "granule"),
    ({"content_keys": hexes([1] * 32)}, "prompt_too_long", "content_keys"),
    ({"local_hashes": hexes([1] * 5), "granule": 101}, "prompt_too_long", "local_hashes"),
    ({"content_keys": [*hexes(KEYS), "0" * 15]}, "invalid_value", "content_keys[2]"),
    ({"content_keys": [*hexes(KEYS), "0" * 17]}, "invalid_value", "content_keys[2]"),
    ({"content_keys": [*hexes(KEYS), "0x" + "0" * 14]}, "invalid_value", "content_keys[2]"),
    ({"content_keys": [*hexes(KEYS), "00 " + "0" * 13]}, "invalid_value", "content_keys[2]"),
    ({"content_keys": [*hexes(KEYS), "\u0661" * 16]}, "invalid_value", "content_keys[2]"),
    ({"local_hashes": [7]}, "invalid_value", "local_hashes[0]"),
    ({"local_hashes": "0" * 16}, "invalid_value", "local_hashes"),
    ({"token_ids": [1], "limit": 0}, "invalid_value", "limit"),
    ({"token_ids": [1], "min_hit_tokens": -1}, "invalid_value", "min_hit_tokens"),
    ({"token_ids": [1], "detail": "all"}, "invalid_value", "detail"),
]


@pytest.mark.parametrize(("fields", "code", "field"), REFUSED)
def test_what_contradicts_itself_is_refused_by_name(
    holding: World, fields: dict[str, Any], code: str, field: str
) -> None:
    assert error_of(ask(holding, **fields)) == (422, code, field)
    assert error_of(ask_in_msgpack(holding, **fields)) == (422, code, field)


@pytest.mark.parametrize(("length", "code"), [(0, "empty_prompt"), (12, "invalid_value"), (8 * 32, "prompt_too_long")])
def test_a_bin_of_hashes_of_the_wrong_length_is_refused(holding: World, length: int, code: str) -> None:
    assert error_of(ask_in_msgpack(holding, content_keys=bytes(length))) == (422, code, "content_keys")


def test_as_many_hashes_as_a_prompt_may_have_tokens_are_answered(holding: World) -> None:
    assert ask(holding, content_keys=hexes([1] * 31)).json()["prompt_tokens"] == 496
