"""Which hits are answered, and how much they say."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.api.schemas import PrefixHits
from indexer.index.state import Coverage, CoverageReason
from indexer.registration import PublisherKey, Registration
from tests.engine_events import decoded, stored
from tests.unit.api.stand_ins import World

TOKENS = list(range(1, 49))


@pytest.fixture
def holding(world: World) -> World:
    """Of three blocks `w1` holds one, `w2` two and `w3` all."""
    for number in (1, 2, 3):
        registration = Registration(f"w{number}", 0, "m", "tcp://127.0.0.1:1", block_size=16, publisher_id=1)
        events = stored(list(range(1, number + 1)), None, TOKENS[: 16 * number], 16)
        world.index.add_publisher(registration).apply(decoded(events), 0, 0)
    return world


def workers(world: World, **fields: Any) -> list[str]:
    return [hit["worker_id"] for hit in ask(world, **fields)["hits"]]


def ask(world: World, **fields: Any) -> Any:
    answer = world.ask(token_ids=[*TOKENS, 0], **fields).json()
    PrefixHits.model_validate(answer)
    return answer


def test_the_best_so_many(holding: World) -> None:
    everybody = ["w3", "w2", "w1"]
    assert (
        workers(holding) == workers(holding, limit=None, min_hit_tokens=None) == workers(holding, limit=9) == everybody
    )
    assert workers(holding, limit=2) == ["w3", "w2"]
    assert workers(holding, min_hit_tokens=32) == ["w3", "w2"]
    assert workers(holding, min_hit_tokens=33) == ["w3"]
    assert workers(holding, min_hit_tokens=16, limit=1, workers=["w1", "w2"]) == ["w2"]
    assert workers(holding, min_hit_tokens=0) == everybody


def test_hits_that_are_left_out_are_no_reason_to_warn(holding: World) -> None:
    """Neither is `w1` taken for one without a hit, nor is this an answer without hits."""
    publisher = holding.index.publisher(PublisherKey("w1", 0))
    assert publisher is not None
    publisher.set_coverage(Coverage.DEGRADED, CoverageReason.GAP, 1.0)
    holding.register(worker_id="silent")
    assert ask(holding, limit=1)["warnings"] == []
    assert ask(holding, min_hit_tokens=1000) == {"prompt_tokens": 49, "hits": [], "warnings": []}


def test_a_summary_is_what_it_always_was(holding: World) -> None:
    expected = holding.ask(token_ids=TOKENS).content
    for detail in (None, False, "summary"):
        assert holding.ask(token_ids=TOKENS, detail=detail).content == expected


@pytest.mark.parametrize(
    ("detail", "name", "value"),
    [
        (True, "spans", [{"start": 0, "end": 48, "tier": "GPU", "worker_id": "w3"}]),
        ("intervals", "spans", [{"start": 0, "end": 48, "tier": "GPU", "worker_id": "w3"}]),
        ("tiers", "tier_tokens", {"GPU": 48, "CPU": 0}),
        ("groups", "groups", [{"group": 0, "kind": "unknown", "window": None, "block_tokens": 16, "held_tokens": 48}]),
    ],
)
def test_every_detail_adds_one_thing(holding: World, detail: Any, name: str, value: Any) -> None:
    plain, detailed = ask(holding), ask(holding, detail=detail)
    assert detailed["hits"][0].pop(name) == value
    for hit in detailed["hits"][1:]:
        del hit[name]
    assert detailed == plain
