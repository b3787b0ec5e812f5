"""Events that no sound engine sends: each is counted, takes bounded room, and costs nothing else of its batch."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.compiled import IS_COMPILED
from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from tests.engine_events import Engine, G, numbers, removed, stored
from tests.index_invariants import check_index

PROMPT = numbers(1, 65)
THIRD = PROMPT[2 * G : 3 * G]
MANY = 100_000 if IS_COMPILED else 10_000

HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("tokens for half a block", stored([3], 2, THIRD[:8]), "misfit_stores"),
    ("tokens for a block and one", stored([3], 2, PROMPT[2 * G : 3 * G + 1]), "misfit_stores"),
    ("tokens for one block of three", stored([3, 4, 5], 2, THIRD), "misfit_stores"),
    ("a block size of a billion", stored([3], 2, THIRD, 10**9), "misfit_stores"),
    ("a block size that no block has", stored([3], 2, PROMPT[2 * G : 3 * G + 1], 10), "misfit_stores"),
    ("a negative block size", stored([3], 2, THIRD, -G), "bad_block_size"),
    ("a hash twice", stored([3, 4, 3], 2, THIRD + PROMPT[: 2 * G]), "self_reference"),
    ("a hash twice in a sparse event", stored([3, 3], 2, PROMPT[: 3 * G]), "self_reference"),
    ("a parent that is the block itself", stored([3], 3, THIRD), "self_reference"),
    ("a parent that is a later block", stored([3, 4], 4, THIRD + THIRD), "self_reference"),
    ("a medium of 10 kB", stored([3], 2, THIRD, medium="x" * 10_000), "bad_name"),
    ("a locality of 10 kB", stored([3], 2, THIRD, locality="x" * 10_000), "bad_name"),
    ("an owner of 10 kB", stored([3], 2, THIRD, ownership="x" * 10_000), "bad_name"),
    ("a kind of 10 kB", stored([3], 2, THIRD, kv_cache_spec_kind="x" * 10_000), "bad_name"),
    ("a LoRA name of 10 kB", stored([3], 2, THIRD, lora_name="x" * 10_000), "bad_name"),
    ("a salt of 10 kB", stored([3], 2, THIRD, cache_salt="x" * 10_000), "bad_name"),
    ("a removal from a medium of 10 kB", removed([2], medium="x" * 10_000), "bad_name"),
    ("a clear of a medium of 10 kB", {"type": "TierBlocksCleared", "medium": "x" * 10_000}, "bad_name"),
    ("a negative group", stored([3], 2, THIRD, group_idx=-1), "bad_group"),
    ("a removal from a negative group", removed([2], group_idx=-1), "bad_group"),
    ("a group of 2^40", stored([3], 2, THIRD, group_idx=2**40), "bad_group"),
    ("a window of less than nothing", stored([3], 2, THIRD, kv_cache_spec_sliding_window=-1), "bad_window"),
]
FIELDS_OF_OURS = ["tokens", "skipped_tokens", "content_keys", "hash_tokens", "start_tokens"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "auto"])
@pytest.mark.parametrize(("event", "reason"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_event_is_counted_and_nothing_else_of_its_batch_is_lost(
    engine: str, event: dict[str, Any], reason: str
) -> None:
    publisher = Engine(ContentIndex(), engine=engine)
    publisher.send(stored([1], None, PROMPT[:G]))
    groups = publisher.publisher.groups.states()
    publisher.send(stored([2], 1, PROMPT[G : 2 * G]), event, stored([5], 2, THIRD), stored([6], 5, PROMPT[3 * G : -1]))
    status = publisher.publisher.status()
    assert {**status.bad_events, **status.counters}[reason] == 1
    assert publisher.hit_tokens(PROMPT) == 4 * G
    assert (publisher.publisher.granule, publisher.publisher.groups.states()) == (G, groups)
    check_index(publisher.index)


@pytest.mark.parametrize("value", [5, "text", [1], None, {"a": 1}])
@pytest.mark.parametrize("field", FIELDS_OF_OURS)
def test_fields_that_only_decoding_sets_cannot_be_sent(field: str, value: Any) -> None:
    publisher = Engine(ContentIndex())
    publisher.send(stored([1, 2], None, PROMPT[: 2 * G]) | {field: value, "token_count": 7}, stored([3], 2, THIRD))
    assert publisher.hit_tokens(PROMPT) == 3 * G


@pytest.mark.parametrize("made_by_us", ["StandardStored", "RemovedEverywhere"])
def test_events_that_only_decoding_makes_cannot_be_sent(made_by_us: str) -> None:
    publisher = Engine(ContentIndex())
    publisher.send(stored([1], None, PROMPT[:G], type=made_by_us, content_keys=[1], hash_tokens=G), [made_by_us, [1]])
    assert publisher.publisher.status().bad_events == {"unknown_event": 2}


@pytest.mark.parametrize("block_size", [1, G])
def test_an_event_of_100_000_blocks_is_one_among_others(block_size: int) -> None:
    publisher = Engine(ContentIndex(), block_size=block_size)
    long_prompt = [i % 50_000 for i in range(MANY * block_size)]
    publisher.send(
        stored([2**40], None, numbers(60_000, block_size), block_size),
        stored(range(1, MANY + 1), None, long_prompt, block_size),
        stored([2**41], 2**40, numbers(70_000, block_size), block_size),
    )
    assert publisher.hit_tokens([*long_prompt, 7]) == MANY * block_size
    both = [*numbers(60_000, block_size), *numbers(70_000, block_size), 7]
    assert publisher.hit_tokens(both) == 2 * block_size
    publisher.send(removed(range(1, MANY + 1)), removed([2**41]))
    assert (publisher.resident(long_prompt), publisher.hit_tokens(both)) == (0, block_size)
    status = publisher.publisher.status()
    assert status.residencies == 1
    assert 0 < status.ghosts <= IndexLimits().ghosts_max


def test_a_block_with_100_000_items_is_one_among_others() -> None:
    """What they are folded into grows in place: copied for each of them, it would take half a minute."""
    publisher = Engine(ContentIndex())
    items = [[f"i{i}", 3] for i in range(MANY)]
    publisher.send(stored([1], None, PROMPT[:G], extra_keys=[items]), stored([2], 1, PROMPT[G : 2 * G]))
    assert publisher.resident(PROMPT, multimodal=[(name, 3, 1) for name, _ in items]) == 2 * G
    assert publisher.resident(PROMPT) == 0


def test_bare_identifiers_are_carried_on_only_as_far_as_they_are_short() -> None:
    publisher = Engine(ContentIndex())
    publisher.send(stored([1, 2], None, PROMPT[: 2 * G], extra_keys=[["i" * 10_000], ["i" * 10_000]]))
    publisher.send(stored([3], 2, THIRD, extra_keys=[["i" * 10_000]]))
    assert publisher.publisher.status().counters["forgotten_carried_identifiers"] == 2
    assert publisher.resident(PROMPT, multimodal=[("i" * 10_000, 0, 3 * G)]) == 2 * G


def test_100_000_blocks_that_hang_in_the_air_take_bounded_room() -> None:
    publisher = Engine(ContentIndex())
    publisher.send(
        stored([1], None, PROMPT[:G]),
        stored(range(10, MANY + 10), 2**50, [i % 50_000 for i in range(MANY * G)]),
        stored(range(2 * MANY, 2 * MANY + 20_000), None, ()),
        stored([2], 1, PROMPT[G : 2 * G]),
    )
    status, limits = publisher.publisher.status(), IndexLimits()
    assert (status.orphans, status.unplaced) == (limits.orphans_max, limits.unplaced_max)
    assert status.counters["dropped_orphans"] == MANY - limits.orphans_max
    assert status.counters["dropped_unplaced"] == 20_000 - limits.unplaced_max
    assert publisher.hit_tokens(PROMPT) == 2 * G
