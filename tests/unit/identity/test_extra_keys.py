from __future__ import annotations

from typing import Any

import pytest

from indexer.identity.chain import identifier_bytes
from indexer.identity.extra_keys import NO_EXTRA_KEYS, ExtraKeys, from_event, from_query
from indexer.wire.errors import WireError

A, B, DIGEST = identifier_bytes("img-a"), identifier_bytes("img-b"), identifier_bytes(b"d" * 32)


def keys(
    extra_keys: Any,
    *,
    lora_name: str | None = None,
    block_tokens: int = 16,
    granule: int = 16,
    at_root: bool = True,
    carried: frozenset[str] = frozenset(),
) -> ExtraKeys:
    return from_event(
        extra_keys, lora_name=lora_name, block_tokens=block_tokens, granule=granule, at_root=at_root, carried=carried
    )


@pytest.mark.parametrize("none", [None, [], [None], [None, None], [[]], [[], None], [()]])
def test_every_way_to_say_nothing_means_no_extra_keys(none: Any) -> None:
    assert keys(none) == NO_EXTRA_KEYS


def test_the_adapters_own_name_is_no_extra_key() -> None:
    result = keys([["my-lora"], ["my-lora"]], lora_name="my-lora")
    assert (result.items, result.cache_salt) == ({}, None)


def test_the_salt_of_the_first_block_is_taken_out() -> None:
    assert keys([["salt"], None]).cache_salt == "salt"
    result = keys([["my-lora", "salt"], ["my-lora"]], lora_name="my-lora")
    assert (result.items, result.cache_salt) == ({}, "salt")


def test_a_salt_named_like_the_adapter_is_a_salt_all_the_same() -> None:
    assert keys([["x", "x"]], lora_name="x").cache_salt == "x"


def test_a_bare_text_away_from_the_root_is_an_items_identifier() -> None:
    result = keys([["img-a"]], at_root=False)
    assert (result.items, result.cache_salt, result.carried) == ({0: A}, None, frozenset({"img-a"}))


def test_a_located_item_is_folded_where_it_starts() -> None:
    result = keys([None, [["img-a", 3]], [["img-a", -13], ["img-b", 15]]])
    assert result.items == {1: A, 2: B}


def test_an_item_that_began_before_the_run_is_not_folded_again() -> None:
    assert keys([[["img-a", -1]], [["img-a", -17]]], at_root=False).items == {}


def test_in_a_block_of_several_granules_the_offset_chooses_the_granule() -> None:
    result = keys([None, [["img-a", 17], ["img-b", 63]]], block_tokens=64)
    assert result.items == {5: A, 7: B}


def test_items_of_one_granule_are_folded_in_prompt_order() -> None:
    assert keys([[["img-b", 1], ["img-a", 9]]]).items == {0: B + A}


def test_the_same_item_twice_is_folded_twice() -> None:
    assert keys([[["img-a", 1], ["img-a", 9]]]).items == {0: A + A}


def test_a_digest_is_folded_where_its_block_starts() -> None:
    assert keys([None, [b"d" * 32]], block_tokens=64).items == {4: DIGEST}


def test_an_item_that_starts_in_the_lookahead_tokens_belongs_to_its_blocks_hash_alone() -> None:
    result = keys([[["img-a", 16]], [["img-a", 0], ["img-b", 17]]])
    assert (result.items, result.lookahead) == ({1: A}, {0: A, 1: B})


def test_bare_identifiers_of_old_versions_are_folded_where_they_are_new() -> None:
    result = keys([None, ["img-a"], ["img-a"], ["img-a", "img-b"], ["img-b"]])
    assert result.items == {1: A, 3: B}
    assert result.carried == frozenset({"img-b"})


def test_a_bare_identifier_carried_on_from_the_block_before_is_not_new() -> None:
    assert keys([["img-a"]], at_root=False, carried=frozenset({"img-a"})).items == {}


def test_a_bare_identifier_in_block_0_and_1_is_no_salt() -> None:
    result = keys([["img-a"], ["img-a"]])
    assert (result.items, result.cache_salt) == ({0: A}, None)


def test_an_adapter_an_item_and_a_salt_stand_together() -> None:
    result = keys([["my-lora", ["img-a", 5], "salt"]], lora_name="my-lora")
    assert (result.items, result.cache_salt) == ({0: A}, "salt")


@pytest.mark.parametrize(
    "garbage",
    [
        [5],
        ["text"],
        [{"a": 1}],
        [[5]],
        [[1.5]],
        [[None, "x"]],
        [[["img", "x"]]],
        [[[1, "img"]]],
        [[["img"]]],
        [[["img", 1, 2]]],
        [[[b"img", 1]]],
        [[{}]],
        [None, [[["img", 0]]]],
    ],
)
def test_extra_keys_of_an_unknown_shape_are_refused(garbage: Any) -> None:
    with pytest.raises(WireError) as refused:
        keys(garbage)
    assert refused.value.reason == "bad_extra_keys"


def test_a_query_folds_items_by_absolute_offset_in_prompt_order() -> None:
    assert from_query([("img-b", 40), ("img-a", 33), ("img-a", 0)], 16) == {0: A, 2: A + B}
    assert from_query([], 16) == {}
