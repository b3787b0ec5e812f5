"""Blocks that no event explains are found in prompts by the engine's own hashes."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from indexer.index import engine_hashes
from indexer.index.content_index import ContentIndex
from indexer.index.engine_hashes import EngineHashes, Hashing, Prompt
from indexer.index.options import EngineHash
from tests.engine_events import Engine, numbers, removed, stored
from tests.naive_vllm_hash import digests, numbers_of
from tests.store_stand_in import DictStore

OPTION = {"engine_hash": {"algorithm": "sha256"}}
PROMPT = numbers(1, 161)  # ten blocks of 16, and a token
FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
MAMBA: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}


def hybrid(options: dict[str, Any] = OPTION) -> Engine:
    """Full attention and Mamba in blocks of 64, hashed in units of 16: one whole block, and partial entries at 112, of
    which only the last 16 tokens are sent and whose parent nobody announced."""
    engine = Engine(ContentIndex(), options=options)
    hashes = numbers_of(PROMPT)
    for fields in (FULL, MAMBA):
        engine.send(stored([hashes[3]], None, PROMPT[:64], 64, **fields))
        engine.send(stored([hashes[6]], hashes[5], PROMPT[96:112], 16, **fields))
    return engine


def test_partial_entries_count_where_the_prompt_has_their_hash() -> None:
    assert hybrid().hit_tokens(PROMPT) == 112
    assert hybrid({}).hit_tokens(PROMPT) == 64
    assert hybrid().hit_tokens(PROMPT[:112]) == 64  # at least one token is computed
    assert hybrid().hit_tokens(PROMPT[:100] + [0] * 60) == 64


def test_another_seed_or_algorithm_matches_nothing() -> None:
    assert hybrid({"engine_hash": {"algorithm": "sha256", "seed": "1"}}).hit_tokens(PROMPT) == 64
    assert hybrid({"engine_hash": {"algorithm": "sha256_cbor"}}).hit_tokens(PROMPT) == 64


def test_a_removed_partial_entry_counts_no_more() -> None:
    engine = hybrid()
    engine.send(removed([numbers_of(PROMPT)[6]], group_idx=1))
    assert engine.hit_tokens(PROMPT) == 64


def test_a_restart_forgets_what_waited() -> None:
    engine = hybrid()
    engine.restart()
    assert engine.hit(PROMPT) is None


def test_a_gap_forgets_what_waited() -> None:
    engine = hybrid()
    engine.publisher.count_gap(4, 4)
    assert engine.hit(PROMPT) is None


def test_a_publisher_of_which_only_partial_entries_are_there_is_found() -> None:
    engine = Engine(ContentIndex(), options=OPTION)
    hashes = numbers_of(PROMPT)
    for fields in (FULL, MAMBA):
        engine.send(stored([1], None, numbers(9_000, 64), 64, **fields))
        engine.send(stored([hashes[2]], hashes[1], PROMPT[32:48], 16, **fields))
    assert engine.hit_tokens(PROMPT) == 48


def test_recovery_keeps_what_waits_and_finds_it_again() -> None:
    engine, store = hybrid(), DictStore()
    store.flush(engine.publisher)
    again = Engine(ContentIndex(), options=OPTION)
    store.recover(again.publisher)
    assert again.hit_tokens(PROMPT) == 112


def test_blocks_whose_parent_was_never_announced_continue_the_prefix() -> None:
    """A service that joined late: full attention goes on from blocks that it did not hear of being stored."""
    engine = Engine(ContentIndex(), options=OPTION)
    hashes = numbers_of(PROMPT)
    engine.send(stored([hashes[0]], None, PROMPT[:16]))
    engine.send(stored([hashes[1]], 77, PROMPT[16:32]))
    engine.send(stored([hashes[2]], 78, PROMPT[32:48]))
    assert engine.hit_tokens(PROMPT) == 48
    engine.send(stored([hashes[4]], 79, PROMPT[64:80]))
    assert engine.hit_tokens(PROMPT) == 48  # there is a hole


def test_a_sparse_event_with_byte_hashes_of_several_units() -> None:
    """vLLM 0.21 to 0.23: a block of 64 is named by four digests. Neither the parent nor a position is known here."""
    engine = Engine(ContentIndex(), options=OPTION)
    units = digests(PROMPT)
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 24}
    engine.send(stored([units[7]], units[3], PROMPT[64:128], 16, **window))
    engine.send(stored([units[6]], units[3], PROMPT[64:128], 16, **window))
    engine.send(stored([b"".join(units[4:8])], b"".join(units[:4]), PROMPT[64:128], 64, **FULL))
    engine.send(stored([b"".join(units[:4])], 5, PROMPT[:64], 64, **FULL))
    assert engine.hit_tokens(PROMPT) == 128
    plain = Engine(ContentIndex())
    plain.send(stored([b"".join(units[4:8])], b"".join(units[:4]), PROMPT[64:128], 64, **FULL))
    assert plain.hit(PROMPT) is None


@pytest.mark.parametrize(("salt", "expected"), [("s", 32), (None, 0), ("t", 0)])
def test_salted_prompts_have_other_hashes(salt: str | None, expected: int) -> None:
    engine = Engine(ContentIndex(), options=OPTION)
    hashes = numbers_of(PROMPT, salt="s")
    engine.send(stored([hashes[0]], 5, PROMPT[:16]))
    engine.send(stored([hashes[1]], 6, PROMPT[16:32]))
    assert engine.hit_tokens(PROMPT, cache_salt=salt) == expected


def test_offloaded_blocks_count_but_not_those_of_others() -> None:
    engine = Engine(ContentIndex(), options=OPTION)
    hashes = numbers_of(PROMPT)
    engine.send(stored([1], None, numbers(9_000, 16)))
    engine.send(stored([hashes[0]], None, [], 0, medium="CPU"))
    assert engine.hit_tokens(PROMPT) == 16
    engine.send(stored([hashes[1]], None, [], 0, medium="CPU", locality="REMOTE"))
    assert engine.hit_tokens(PROMPT) == 16


def test_chunked_local_blocks_after_chunks_that_were_never_stored() -> None:
    engine = Engine(ContentIndex(), options={**OPTION, "attention_chunk_size": {"0": 64}})
    hashes = numbers_of(PROMPT)
    engine.send(
        stored([hashes[8]], hashes[7], PROMPT[128:144], kv_cache_spec_kind="chunked_local_attention", group_idx=0)
    )
    assert engine.hit_tokens(PROMPT) == 144
    assert engine.hit_tokens(PROMPT[:140]) == 128


def test_no_publisher_is_answered_twice_and_plain_ones_stay_plain() -> None:
    index = ContentIndex()
    plain, told = Engine(index, "w0"), Engine(index, "w1", options=OPTION)
    for engine in (plain, told):
        engine.send(stored(numbers_of(PROMPT)[:4], None, PROMPT[:64]))
        assert engine.hit_tokens(PROMPT) == 64
    scope = index.scope("default", "m")
    assert scope is not None
    assert list(scope.asked_always) == [told.publisher]
    index.remove_publisher(told.publisher.registration.key)
    assert not scope.asked_always


# ---------------------------------------------------------------------- how much is hashed

HASHING = Hashing(EngineHash("sha256"), 16)


def prompt(tokens: list[int]) -> Prompt:
    return Prompt(
        array("I", tokens), (), None, None, 16, [hash(tuple(tokens[:end])) for end in range(16, len(tokens) + 1, 16)]
    )


def test_what_is_hashed_for_one_query_is_bounded_and_remembered_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_hashes, "HASHED_BLOCKS_MAX", 128)
    hashes, tokens = EngineHashes(), numbers(0, 300 * 16)
    all_of_them = dict(zip(numbers_of(tokens), range(16, 300 * 16 + 1, 16), strict=True))

    def found() -> int:
        ends = hashes.ends(prompt(tokens), HASHING, frozenset())
        assert {h: end for h, end in ends.items() if isinstance(h, int)}.items() <= all_of_them.items()
        return max(ends.values()) // 16

    assert [found(), found(), found()] == [128, 256, 300]
    tokens[200 * 16] += 1  # another prompt with the same start
    all_of_them = dict(zip(numbers_of(tokens), range(16, 300 * 16 + 1, 16), strict=True))
    assert found() == 300


def test_so_many_segments_are_remembered_and_those_used_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_hashes, "SEGMENTS_MAX", 2)
    monkeypatch.setattr(engine_hashes, "HASHED_BLOCKS_MAX", 64)
    monkeypatch.setattr(engine_hashes, "SEGMENT_BLOCKS", 64)
    hashes = EngineHashes()
    prompts = [prompt(numbers(10_000 * i, 128 * 16)) for i in range(3)]

    def blocks(i: int) -> int:
        return max(hashes.ends(prompts[i], HASHING, frozenset()).values()) // 16

    assert (blocks(0), blocks(1), blocks(2), len(hashes)) == (64, 64, 64, 2)
    assert blocks(1) == 128
    assert blocks(0) == 64  # forgotten


def test_items_are_not_remembered_because_their_place_within_a_granule_is_not_in_content_keys() -> None:
    hashes, tokens = EngineHashes(), numbers(0, 64 * 16)
    ends = [
        hashes.ends(prompt(tokens)._replace(items=[("image", offset, 8)]), HASHING, frozenset()) for offset in (3, 4)
    ]
    assert len(hashes) == 0
    assert ends[0].keys().isdisjoint(ends[1].keys())
