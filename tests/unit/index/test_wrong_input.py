"""What no engine should send: it is counted and bounded, and nothing else of its batch or before it is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from indexer.compiled import IS_COMPILED
from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from tests.engine_events import Engine, numbers, removed, stored
from tests.index_invariants import check_index

PROMPT = numbers(1, 4 * 16)
HASHES = numbers(1_000, 4)
MANY = 100_000 if IS_COMPILED else 10_000


def counted(engine: Engine) -> Counter[str]:
    """Everything that is counted of a publisher's events, under one name each."""
    status = engine.publisher.status()
    return Counter(status.bad_events) + Counter(status.counters)


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
@pytest.mark.parametrize(
    ("event", "counts"),
    [
        (stored([7, 8, 9], HASHES[0], numbers(500, 20)), {"misfit_stores": 1}),  # three hashes, tokens of two blocks
        (stored([7], HASHES[0], numbers(500, 5)), {"misfit_stores": 1}),  # a page that is not full: it waits
        (stored([7], HASHES[0], numbers(500, 16), 0), {}),  # a placeholder with tokens
        (stored([7], HASHES[0], numbers(500, 16), -16), {"bad_block_size": 1}),
        (stored([7, 8, 7], HASHES[0], numbers(500, 48)), {"self_reference": 1}),
        (stored([7], 7, numbers(500, 16)), {"self_reference": 1}),
        (stored([7, 8], 8, numbers(500, 32)), {"self_reference": 1}),
        (stored([7], HASHES[0], numbers(500, 16), medium="x" * 10_000), {"bad_name": 1}),
        (removed([HASHES[0]], "x" * 10_000), {"bad_name": 1}),
        (stored([7], HASHES[0], numbers(500, 16), group_idx=-1), {"bad_group": 1}),
        (removed([HASHES[0]], group_idx=-1), {"bad_group": 1}),
        (removed([HASHES[3], HASHES[3], HASHES[3]]), {"unknown_removals": 3}),
        (stored([], HASHES[0], []), {}),
    ],
)
def test_an_event_that_cannot_be_right_costs_only_itself(event: Any, counts: dict[str, int], medium: str) -> None:
    engine = Engine(ContentIndex())
    engine.send(stored(HASHES[:1], None, PROMPT[:16]))
    if event["medium"] == "GPU" and medium == "CPU":
        event = event | {"medium": medium}
        counts = {name: count for name, count in counts.items() if name != "misfit_stores"}  # it is told by hash alone
    engine.send(stored(HASHES[1:2], HASHES[0], PROMPT[16:32]), event, stored(HASHES[2:3], HASHES[1], PROMPT[32:48]))
    assert engine.resident(PROMPT) == 48
    assert engine.resident([*PROMPT[:16], *numbers(500, 32)]) == 16
    assert counted(engine) == Counter(counts)
    check_index(engine.index)


@pytest.mark.parametrize("parent", [None, 5])
def test_an_event_of_very_many_blocks_is_applied_whole_or_bounded(parent: int | None) -> None:
    """With an unknown parent its blocks wait: as many as may."""
    limits = IndexLimits(orphans_max=1_000)
    engine = Engine(ContentIndex(limits))
    tokens = [1] * MANY * 16
    engine.send(stored(numbers(10_000, MANY), parent, tokens), stored(HASHES[:1], None, PROMPT[:16]))
    assert engine.resident(PROMPT) == 16
    status = engine.publisher.status()
    if parent is None:
        assert engine.resident(tokens) == MANY * 16
        assert status.residencies == MANY + 1
    else:
        assert (status.orphans, status.counters["dropped_orphans"]) == (1_000, MANY - 1_000)


def test_a_placeholder_of_very_many_blocks_is_bounded() -> None:
    engine = Engine(ContentIndex(IndexLimits(unplaced_max=1_000)), options={"blocks_per_chunk": 1_024})
    engine.send(stored(numbers(10_000, MANY), None, [], 0, "CPU"), stored(HASHES[:1], None, PROMPT[:16]))
    status = engine.publisher.status()
    assert (status.unplaced, status.counters["dropped_unplaced"]) == (1_000, MANY - 1_000)
    assert engine.resident(PROMPT) == 16


def test_media_owners_and_groups_are_bounded_together() -> None:
    engine = Engine(ContentIndex(IndexLimits(holders_max=3)))
    engine.send(stored(HASHES[:1], None, PROMPT[:16]))
    engine.send(*(stored(HASHES[:1], None, [], 0, f"medium {i}") for i in range(10)))
    assert len(engine.references()) == 3
    assert counted(engine) == Counter({"too_many_holders": 8})
