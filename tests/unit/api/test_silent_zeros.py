"""An answer without hits says why, where that can be found out; and it is counted by cause."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from indexer.api.formats import encode_json
from indexer.index import content_index, names_seen, query_warnings
from indexer.index.columns import PublisherRows
from indexer.index.publisher import REFUSED_BATCHES_MIN, PublisherIndex
from indexer.index.query_warnings import Cause
from indexer.index.state import Coverage, CoverageReason, Trust
from indexer.registration import PublisherKey, Registration
from tests.engine_events import decoded, stored
from tests.unit.api.stand_ins import World

TOKENS = list(range(1, 33))
OTHERS = [7] * 32
IMAGE = {"identifier": "image", "offset": 4, "length": 8}


def publisher_of(world: World, worker_id: str, dp_rank: int = 0, **values: Any) -> PublisherIndex:
    registration = Registration(worker_id, dp_rank, **{"model": "m", "endpoint": "tcp://127.0.0.1:1", **values})
    return world.index.add_publisher(registration)


@pytest.fixture
def holding(world: World) -> World:
    """Worker `w` holds the two blocks of tokens 1 to 32."""
    publisher_of(world, "w").apply(decoded(stored([11, 12], None, TOKENS, 16)), 0, 0)
    return world


def ask(world: World, **fields: Any) -> dict[str, str]:
    """The warnings by their codes."""
    answer = world.ask(**fields).json()
    return {warning["code"]: warning["message"] for warning in answer["warnings"]}


def counted(world: World, code: str) -> float | None:
    return world.metrics.registry.get_sample_value("indexer_query_warnings_total", {"code": code})


def test_an_answer_with_hits_or_a_plain_miss_says_nothing(holding: World) -> None:
    assert ask(holding, token_ids=TOKENS) == {}
    assert ask(holding, token_ids=OTHERS) == {}


# ---------------------------------------------------------------------- unknown names


def test_the_nearest_models_of_the_tenant_are_named(world: World) -> None:
    for number, model in enumerate(("meta-llama/Llama-3.1-8B-Instruct", "qwen", "meta-llama/Llama-3.1-70B-Instruct")):
        publisher_of(world, f"w{number}", model=model)
    publisher_of(world, "x", model="Llama-3.1-8B", tenant="another")
    message = ask(world, model="Llama-3.1-8B-Instruct")["unknown_model"]
    assert "nearest names are 'meta-llama/Llama-3.1-8B-Instruct', 'meta-llama/Llama-3.1-70B-Instruct'" in message
    assert "nearest" not in ask(world, model="something else")["unknown_model"]
    assert "nearest" not in ask(world, model="Llama-3.1-8B-Instruct", tenant="nobody")["unknown_model"]
    assert counted(world, "unknown_model") == 3


def test_what_is_nearest_changes_with_the_models(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_index, "UNKNOWN_MODELS_MAX", 2)
    publisher_of(world, "w", model="llama")
    for model in ("lama", "llamas", "lamas", "lama"):
        assert "'llama'" in ask(world, model=model)["unknown_model"]
    publisher_of(world, "v", model="lamar")
    assert "'lamar'" in ask(world, model="lama")["unknown_model"]
    world.index.remove_publisher(PublisherKey("w", 0))
    assert "'llama'" not in ask(world, model="lama")["unknown_model"]


def test_few_and_short_names_are_compared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_warnings, "COMPARED_MODELS_MAX", 1)
    monkeypatch.setattr(query_warnings, "COMPARED_LENGTH_MAX", 4)
    for number, model in enumerate(("aaaaa", "aaab", "aaac")):
        publisher_of(world, f"w{number}", model=model)
    assert "nearest names are 'aaab'" in ask(world, model="aaad")["unknown_model"]
    assert "nearest" not in ask(world, model="aaaaad")["unknown_model"]


def test_workers_of_other_tenants_are_unknown(holding: World) -> None:
    publisher_of(holding, "theirs", tenant="theirs")
    publisher_of(holding, "ours", model="another")
    message = ask(holding, token_ids=TOKENS, workers=["w", "ours", "theirs"])["unknown_worker"]
    assert "'theirs'" in message
    holding.index.remove_publisher(holding.index.publishers()[0].registration.key)
    assert "'ours'" in ask(holding, token_ids=TOKENS, workers=["w", "ours"])["unknown_worker"]


def test_a_worker_is_known_as_long_as_any_rank_is(holding: World) -> None:
    second = publisher_of(holding, "w", 1)
    holding.index.remove_publisher(second.registration.key)
    assert ask(holding, token_ids=TOKENS, workers=["w"]) == {}
    assert list(ask(holding, token_ids=TOKENS, workers=["w", "x", "y"])) == ["unknown_worker"]
    assert counted(holding, "unknown_worker") == 1, "once per answer, however many are named"


# ---------------------------------------------------------------------- who cannot be heard


def test_nobody_connected(holding: World) -> None:
    (publisher,) = holding.index.publishers()
    gone = Trust(Coverage.DISCONNECTED, CoverageReason.CONNECTION_LOST, 1.0)
    publisher.show(gone)
    assert "no_publisher_connected" in ask(holding, token_ids=OTHERS)
    assert "no_publisher_connected" not in ask(holding, token_ids=TOKENS), "there are hits"
    other = publisher_of(holding, "v")
    assert "no_publisher_connected" not in ask(holding, token_ids=OTHERS)
    other.show(gone)
    assert "no_publisher_connected" in ask(holding, token_ids=OTHERS)
    publisher.show(None)
    assert "no_publisher_connected" not in ask(holding, token_ids=OTHERS)
    holding.index.remove_publisher(publisher.registration.key)
    assert "no_publisher_connected" in ask(holding, token_ids=OTHERS)


def test_a_rank_that_never_spoke(holding: World) -> None:
    silent = publisher_of(holding, "w", 1)
    assert "w rank 1" in ask(holding, token_ids=OTHERS)["publisher_never_spoke"]
    assert ask(holding, token_ids=TOKENS) == {}, "there are hits"
    assert "publisher_never_spoke" not in ask(holding, token_ids=OTHERS, workers=["v"])
    assert "publisher_never_spoke" in ask(holding, token_ids=OTHERS, workers=["w"])
    silent.apply(decoded(), 0, 0)
    assert ask(holding, token_ids=OTHERS) == {}
    silent.restart()
    assert ask(holding, token_ids=OTHERS) == {}, "it has spoken before"
    for number in range(7):
        publisher_of(holding, "x", number)
    message = ask(holding, token_ids=OTHERS)["publisher_never_spoke"]
    assert "x rank 0, x rank 1, x rank 2, x rank 3, x rank 4 and more" in message
    for number in range(7):
        holding.index.remove_publisher(Registration("x", number, "m", "").key)
    assert ask(holding, token_ids=OTHERS) == {}


def test_one_that_was_recovered_has_spoken(holding: World) -> None:
    (known,) = holding.index.publishers()
    recovered = publisher_of(holding, "v")
    recovered.load(PublisherRows(known.checkpoint, 16))
    assert ask(holding, token_ids=OTHERS) == {}


UNREADABLE = {"type": "SomethingNew"}
FOR_OTHERS = {"event_type": "stored", "model_name": "another", "block_size": 16, "seq_hashes": [1], "token_ids": TOKENS}


def test_one_whose_events_are_all_refused(holding: World) -> None:
    (publisher,) = holding.index.publishers()
    for number in range(REFUSED_BATCHES_MIN):
        assert ask(holding, token_ids=OTHERS) == {}
        publisher.apply(decoded(UNREADABLE), number + 1, 0)
    assert "w rank 0" in ask(holding, token_ids=OTHERS)["events_refused"]
    assert ask(holding, token_ids=TOKENS) == {}, "there are hits"
    publisher.apply(decoded(), 8, 0)
    assert "events_refused" in ask(holding, token_ids=OTHERS), "an empty batch says nothing"
    publisher.apply(decoded(UNREADABLE, stored([13], 12, range(33, 49), 16)), 9, 0)
    assert ask(holding, token_ids=OTHERS) == {}
    for number in range(REFUSED_BATCHES_MIN):
        publisher.skip(10 + number, 0, "unreadable")
    assert "events_refused" in ask(holding, token_ids=OTHERS)
    holding.index.remove_publisher(publisher.registration.key)
    assert "events_refused" not in ask(holding, token_ids=OTHERS)


def test_a_contradiction_in_every_event_is_a_refusal_too(holding: World) -> None:
    (publisher,) = holding.index.publishers()
    for number in range(REFUSED_BATCHES_MIN):
        publisher.apply(decoded(stored([20, 20], None, TOKENS, 16)), number + 1, 0)
    assert "events_refused" in ask(holding, token_ids=OTHERS)


def test_who_speaks_for_others_only_is_refused_unless_anything_was_ever_for_it(world: World) -> None:
    from indexer.index.publisher import addressee_of
    from indexer.wire.columns import PayloadReader, read_batch
    from tests.engine_events import payload

    reader = PayloadReader()
    publishers = [publisher_of(world, name, model="m") for name in ("new", "known")]
    publishers[1].apply(decoded(stored([11, 12], None, TOKENS, 16)), 0, 0)
    for publisher in publishers:
        for number in range(1, REFUSED_BATCHES_MIN + 1):
            batch = read_batch(payload(FOR_OTHERS), reader, addressee_of(publisher.registration))
            assert batch.for_others == 1
            publisher.apply(batch, number, 0)
    message = ask(world, token_ids=OTHERS)["events_refused"]
    assert "new rank 0" in message
    assert "known rank 0" not in message


# ---------------------------------------------------------------------- the prompt


def test_a_prompt_shorter_than_any_block(holding: World) -> None:
    message = ask(holding, token_ids=TOKENS[:15])["prompt_too_short"]
    assert ("15 tokens" in message, "16 tokens" in message) == (True, True)
    assert ask(holding, token_ids=OTHERS[:16]) == {}
    (publisher,) = holding.index.publishers()
    fine = publisher_of(holding, "v", block_size=4)
    fine.apply(decoded(stored([1], None, [9, 9, 9, 9], 4)), 0, 0)
    assert ask(holding, token_ids=TOKENS[:15]) == {}
    holding.index.remove_publisher(fine.registration.key)
    assert "prompt_too_short" in ask(holding, token_ids=TOKENS[:15])
    holding.index.remove_publisher(publisher.registration.key)
    publisher_of(holding, "new").apply(decoded(), 0, 0)
    assert ask(holding, token_ids=TOKENS[:1]) == {}, "nobody has shown a block yet"


def test_an_adapter_that_no_event_has_named(holding: World) -> None:
    (publisher,) = holding.index.publishers()
    assert "'other'" in ask(holding, token_ids=TOKENS, lora_name="other")["adapter_never_seen"]
    assert ask(holding, token_ids=OTHERS, lora_name="other") == {}, "without it there is no hit either"
    publisher.apply(decoded(stored([21], None, OTHERS[:16], 16, lora_name="other")), 1, 0)
    assert ask(holding, token_ids=TOKENS, lora_name="other") == {}, "a miss like others"


def test_a_salt_that_no_event_has_named(holding: World) -> None:
    (publisher,) = holding.index.publishers()
    assert list(ask(holding, token_ids=TOKENS, cache_salt="salt")) == ["salt_never_seen"]
    assert "secret" not in str(ask(holding, token_ids=TOKENS, cache_salt="secret"))
    publisher.apply(decoded(stored([21], None, OTHERS[:16], 16, extra_keys=[["salt"]])), 1, 0)
    assert ask(holding, token_ids=TOKENS, cache_salt="salt") == {}


def test_items_that_keep_a_prompt_from_matching(holding: World) -> None:
    assert list(ask(holding, token_ids=TOKENS, multimodal=[IMAGE])) == ["items_never_match"]
    assert ask(holding, token_ids=TOKENS, multimodal=[IMAGE | {"offset": 20}]) == {}, "the first block is a hit"
    assert ask(holding, token_ids=OTHERS, multimodal=[IMAGE]) == {}


def test_only_what_stands_in_the_way_is_named(holding: World) -> None:
    """The salt alone does, though an adapter was named that is not known either."""
    (publisher,) = holding.index.publishers()
    wrong = {"lora_name": "x", "cache_salt": "salt", "multimodal": [IMAGE]}
    assert set(ask(holding, token_ids=TOKENS, **wrong)) == {
        "adapter_never_seen",
        "salt_never_seen",
        "items_never_match",
    }
    publisher.apply(decoded(stored([31], None, OTHERS[:16], 16, lora_name="x")), 1, 0)
    assert list(ask(holding, token_ids=OTHERS, lora_name="x", cache_salt="salt")) == ["salt_never_seen"]
    holding.index.scope("default", "m").names.adapters.clear()  # type: ignore[union-attr]
    assert list(ask(holding, token_ids=OTHERS, lora_name="x", cache_salt="salt")) == ["salt_never_seen"]


def test_of_names_that_are_not_all_kept_nothing_is_said(holding: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (publisher,) = holding.index.publishers()
    monkeypatch.setattr(names_seen, "ADAPTERS_MAX", 1)
    monkeypatch.setattr(names_seen, "SALTS_MAX", 1)
    assert list(ask(holding, token_ids=TOKENS, lora_name="x", cache_salt="x")) == [
        "adapter_never_seen",
        "salt_never_seen",
    ]
    event = stored([21], None, OTHERS[:16], 16, lora_name="a", extra_keys=[["a", "salt"]])
    publisher.apply(decoded(event), 1, 0)
    assert ask(holding, token_ids=TOKENS, lora_name="x") == ask(holding, token_ids=TOKENS, cache_salt="x") == {}


def test_only_the_beginning_of_a_prompt_is_asked_again(holding: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_warnings, "PROBED_TOKENS", 15)
    assert ask(holding, token_ids=TOKENS, lora_name="x") == {}
    monkeypatch.setattr(query_warnings, "PROBED_TOKENS", 16)
    assert list(ask(holding, token_ids=TOKENS, lora_name="x")) == ["adapter_never_seen"]
    assert list(ask(holding, token_ids=[*TOKENS, 2**40], lora_name="x")) == ["adapter_never_seen"]


def test_hashes_that_look_ahead_are_not_found_by_hashes(world: World) -> None:
    event = stored([1, 2], None, TOKENS, 16, lookahead_token_ids=[[17], [33]])
    publisher_of(world, "ahead").apply(decoded(event), 0, 0)
    keys = [f"{key:016x}" for key in array("Q", [1, 2])]
    assert "ahead rank 0" in ask(world, token_ids=None, content_keys=keys)["tokens_needed"]
    assert ask(world, token_ids=OTHERS) == {}


def test_every_cause_has_its_counter(world: World) -> None:
    """Dynamo's routes show no warnings, so there the counter is all that tells."""
    assert all(counted(world, cause) == 0 for cause in Cause)
    publisher_of(world, "w")
    body = encode_json({"model_name": "m", "token_ids": TOKENS})
    assert world.client.post("/query", content=body).status_code == 200
    assert counted(world, "publisher_never_spoke") == 1
