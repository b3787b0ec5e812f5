"""What becomes of other dialects' events in the index, and what an engine that nobody named turns out to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from indexer.identity.chain import chain_keys, chain_seed, local_hashes
from indexer.index.content_index import ContentIndex
from indexer.wire.columns import read_batch
from tests.engine_events import MODEL, READER, Engine, G, cleared, numbers, payload, removed, stored
from tests.index_invariants import check_index

PROMPT = numbers(1, 65)  # four whole blocks and a token
BLOCKS = [PROMPT[i * G : (i + 1) * G] for i in range(4)]


def standard_hashes(tokens: Sequence[int], lora_name: str | None = None) -> list[int]:
    """Content keys of granules of G, by the public rule."""
    whole = np.array(tokens[: len(tokens) // G * G], np.uint32).tobytes()
    return chain_keys(None, local_hashes(whole, G, chain_seed(lora_name)))


def rfc(event_type: str = "stored", **fields: Any) -> dict[str, Any]:
    return {"event_type": event_type, "model_name": MODEL, "block_size": G} | fields


def trt_block(block_hash: int, token_ids: Sequence[int], level: int = 0, **fields: Any) -> dict[str, Any]:
    tokens = [{"token_id": t, "token_extra_id": 0} for t in token_ids]
    return {"type": "stored_block", "block_hash": block_hash, "tokens": tokens, "cache_level": level} | fields


def trt(data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"event_id": 0, "data": data} | fields


def trt_stored(*blocks: dict[str, Any], parent: int | None = None, **fields: Any) -> dict[str, Any]:
    return trt({"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **fields)


def trt_removed(*hashes: int, **fields: Any) -> dict[str, Any]:
    return trt({"type": "removed", "block_hashes": list(hashes)}, **fields)


def engine_of(dialect: str, **fields: Any) -> Engine:
    return Engine(ContentIndex(), engine=dialect, **fields)


# ---------------------------------------------------------------------- RFC #1527


def test_standard_events_with_tokens_are_placed_like_any_others() -> None:
    engine = engine_of("rfc1527")
    engine.send(rfc(seq_hashes=[1, 2], token_ids=PROMPT[: 2 * G], parent_hash=None, backend_id="w0"))
    engine.send(rfc(seq_hashes=[3], token_ids=BLOCKS[2], parent_hash=2, base_block_idx=2))
    assert engine.hit_tokens(PROMPT) == 3 * G
    engine.send(rfc("removed", seq_hashes=[3]))
    assert engine.hit_tokens(PROMPT) == 2 * G
    engine.send(rfc("cleared"))
    assert engine.hit_tokens(PROMPT) == 0


def test_standard_hashes_without_tokens_are_content_keys() -> None:
    engine = engine_of("rfc1527")
    keys = standard_hashes(PROMPT)
    engine.send(rfc(seq_hashes=keys[:2], base_block_idx=0), rfc(seq_hashes=keys[2:3], parent_hash=keys[1]))
    assert engine.hit_tokens(PROMPT) == 3 * G
    assert engine.hit_tokens(PROMPT, lora_name="l") == 0
    engine.send(rfc("removed", seq_hashes=keys[1:2]))
    assert engine.hit_tokens(PROMPT) == G
    check_index(engine.index)


def test_standard_hashes_of_an_adapters_prompt_match_that_alone() -> None:
    engine = engine_of("rfc1527")
    engine.send(rfc(seq_hashes=standard_hashes(PROMPT, "l"), base_block_idx=0, lora_name="l"))
    assert (engine.hit_tokens(PROMPT, lora_name="l"), engine.hit_tokens(PROMPT)) == (4 * G, 0)


def test_two_workers_meet_under_standard_hashes_and_tokens() -> None:
    index = ContentIndex()
    hashing, telling = Engine(index, "a", engine="rfc1527"), Engine(index, "b", engine="vllm")
    hashing.send(rfc(seq_hashes=standard_hashes(PROMPT), base_block_idx=0))
    telling.send(stored([1, 2], None, PROMPT[: 2 * G]))
    assert (hashing.resident(PROMPT), telling.resident(PROMPT)) == (4 * G, 2 * G)


def test_hashes_by_another_granule_are_names_only() -> None:
    engine = engine_of("rfc1527", block_size=G)
    engine.send(rfc(seq_hashes=[1, 2], base_block_idx=0, block_size=4 * G))
    assert (engine.hit_tokens(PROMPT), engine.publisher.status().unplaced) == (0, 2)


@pytest.mark.parametrize("position", [{}, {"parent_hash": 77}])
def test_standard_hashes_at_an_unknown_place_wait(position: dict[str, Any]) -> None:
    engine = engine_of("rfc1527")
    engine.send(rfc(seq_hashes=standard_hashes(PROMPT)[1:2], **position))
    assert (engine.resident(PROMPT), engine.publisher.status().unplaced) == (0, 1)


def test_a_key_that_is_said_to_end_elsewhere_than_it_does_is_not_believed() -> None:
    index = ContentIndex()
    honest, wrong = Engine(index, "a"), Engine(index, "b", engine="rfc1527")
    honest.send(stored([1, 2, 3, 4], None, PROMPT[: 4 * G]))
    wrong.send(rfc(seq_hashes=standard_hashes(PROMPT)[:2], base_block_idx=7))
    assert wrong.publisher.status().counters["contradicted_positions"] == 2
    assert (honest.hit_tokens(PROMPT), wrong.resident(PROMPT)) == (4 * G, 0)
    check_index(index)


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_a_content_key_may_be_any_number(key: int) -> None:
    engine = engine_of("rfc1527")
    engine.send(rfc(seq_hashes=[key], base_block_idx=0))
    check_index(engine.index)
    engine.send(rfc("removed", seq_hashes=[key]))
    assert engine.references() == {}
    check_index(engine.index)


def test_blocks_that_waited_for_a_standard_hash_are_placed_behind_it() -> None:
    engine = engine_of("rfc1527")
    keys = standard_hashes(PROMPT)
    engine.send(rfc(seq_hashes=[9], token_ids=BLOCKS[1], parent_hash=keys[0]))
    assert engine.publisher.status().orphans == 1
    engine.send(rfc(seq_hashes=keys[:1], base_block_idx=0))
    assert engine.hit_tokens(PROMPT) == 2 * G


def test_objects_of_a_store_come_and_go_by_their_keys() -> None:
    engine = engine_of("mooncake")
    keys = standard_hashes(PROMPT)
    objects = [{"object_key": f"o{i}", "medium": "cpu", "backend_id": "n1"} for i in range(2)]
    engine.send(*[rfc(seq_hashes=keys[i : i + 1], base_block_idx=i, **objects[i]) for i in range(2)])
    assert engine.resident(PROMPT) == 2 * G
    engine.send(rfc(seq_hashes=keys[1:2], base_block_idx=1, **objects[1]))  # once more, which counts once
    engine.send(rfc("removed", **objects[1] | {"backend_id": "n2"}))
    assert engine.resident(PROMPT) == 2 * G
    engine.send(rfc("removed", **objects[1]))
    assert engine.resident(PROMPT) == G


def test_an_object_of_several_blocks_counts_where_blocks_are_of_its_size() -> None:
    engine = engine_of("mooncake")
    keys = standard_hashes(PROMPT)
    engine.send(stored([1, 2], None, PROMPT[: 4 * G], 2 * G), removed([2]))
    engine.send(rfc(seq_hashes=keys[2:4], base_block_idx=2, object_key="o", medium="cpu"))
    assert engine.hit_tokens(PROMPT) == 4 * G


def test_events_for_others_change_nothing_and_are_counted() -> None:
    engine = engine_of("rfc1527")
    engine.send(rfc(seq_hashes=[1], token_ids=BLOCKS[0], parent_hash=None, model_name="other"))
    status = engine.publisher.status()
    assert (engine.resident(PROMPT), status.counters["events_for_others"], status.bad_events) == (0, 1, {})


# ---------------------------------------------------------------------- TensorRT-LLM


def test_a_run_of_dictionaries_is_placed_and_removed_block_by_block() -> None:
    engine = engine_of("trtllm")
    engine.send(trt({"type": "created"}), trt_stored(trt_block(1, BLOCKS[0]), trt_block(2, BLOCKS[1])))
    engine.send(trt_stored(trt_block(3, BLOCKS[2]), parent=2))
    assert engine.hit_tokens(PROMPT) == 3 * G
    engine.send(trt_removed(3))
    assert engine.hit_tokens(PROMPT) == 2 * G


def test_a_block_that_moves_to_the_host_is_reached_there() -> None:
    engine = engine_of("trtllm")
    engine.send(trt_stored(trt_block(1, BLOCKS[0]), trt_block(2, BLOCKS[1])))
    moved = {"type": "updated", "block_hash": 2, "cache_level": {"old_value": 0, "new_value": 1}}
    engine.send(trt(moved))
    hit = engine.hit(PROMPT)
    assert hit is not None
    assert (hit.tiers["GPU"], hit.tiers["CPU"]) == (G, 2 * G)
    engine.send(trt_removed(2))
    assert engine.resident(PROMPT) == G
    check_index(engine.index)


def test_a_repeated_store_counts_once_and_a_removal_ends_it_on_every_level() -> None:
    engine = engine_of("trtllm")
    engine.send(*[trt_stored(trt_block(1, BLOCKS[0], level)) for level in (0, 0, 1)])
    engine.send(trt_removed(1))
    assert engine.references() == {}
    engine.send(trt_removed(1))
    assert engine.publisher.status().counters["unknown_removals"] == 1


def test_what_goes_on_from_a_block_of_unknown_content_is_no_root() -> None:
    engine = engine_of("trtllm")
    engine.send(trt_stored(trt_block(1, BLOCKS[0], lora_id=3), trt_block(2, BLOCKS[1])))
    status = engine.publisher.status()
    assert (status.unplaced, status.orphans, engine.resident(BLOCKS[1])) == (1, 1, 0)
    engine.send(trt_removed(1, 2))
    status = engine.publisher.status()
    assert (status.unplaced, status.orphans, status.counters.get("unknown_removals", 0)) == (0, 0, 0)


def test_each_window_size_is_a_group_and_all_must_hold_a_block() -> None:
    engine = engine_of("trtllm")
    for window in (4096, 128):
        engine.send(trt_stored(trt_block(1, BLOCKS[0]), trt_block(2, BLOCKS[1]), window_size=window))
    assert engine.hit_tokens(PROMPT) == 2 * G
    engine.send(trt_removed(2, window_size=128))
    assert engine.hit_tokens(PROMPT) == G
    assert [group.group for group in engine.publisher.status().groups] == [128, 4096]


def test_any_number_of_window_sizes_takes_bounded_room() -> None:
    engine = engine_of("trtllm")
    engine.send(*[trt_stored(trt_block(1, BLOCKS[0]), window_size=window) for window in range(1, 1_400)])
    status = engine.publisher.status()
    assert (len(status.groups), status.counters["ignored_sizes"]) == (1_024, 375)
    assert len(engine.publisher.residents.holders) == 256
    assert status.bad_events == {"too_many_holders": 1_399 - 256}


def test_a_created_cache_is_empty_on_every_level() -> None:
    engine = engine_of("trtllm")
    engine.send(trt_stored(trt_block(1, BLOCKS[0]), trt_block(2, BLOCKS[1], 1)), trt({"type": "created"}))
    assert engine.references() == {}


# ---------------------------------------------------------------------- engines that nobody named


def both_tiers(**fields: Any) -> list[dict[str, Any]]:
    return [stored([1], None, BLOCKS[0], **fields), stored([1], None, BLOCKS[0], medium="CPU_PINNED", **fields)]


def test_a_clear_of_an_unnamed_engine_empties_what_its_dialect_says() -> None:
    for marks, left in (({"group_idx": 0}, ["CPU_PINNED"]), ({"cache_salt": "s"}, [])):
        engine = engine_of("auto")
        engine.send(*both_tiers(**marks))
        engine.send(cleared())
        assert sorted(key[0] for key in engine.references()) == left


@pytest.mark.parametrize("engine", ["vllm", "auto"])
def test_what_a_known_vllm_has_on_the_host_is_a_connectors_whether_it_was_named_or_found(engine: str) -> None:
    publisher = engine_of(engine)
    publisher.send(stored([1], None, BLOCKS[0], group_idx=0), stored([1], None, BLOCKS[0], medium="CPU"))
    publisher.send(cleared())
    assert [key[0] for key in publisher.references()] == ["CPU"]


def test_host_stores_of_an_unnamed_engine_tell_content_once_it_is_known_to_be_sglang() -> None:
    engine = engine_of("auto")
    assert engine.publisher.dialect is None
    engine.send(stored([2**64 - 1], None, BLOCKS[0]))
    assert engine.publisher.dialect == "vllm"
    sglang = engine_of("auto")
    sglang.send({**stored([-1], None, BLOCKS[0]), "cache_salt": None})
    sglang.send(stored([-2], -1, BLOCKS[1], medium="CPU_PINNED"))
    assert (sglang.publisher.dialect, sglang.resident(PROMPT)) == ("sglang", 2 * G)


def test_an_unnamed_engine_is_applied_by_columns_once_it_is_known() -> None:
    engine = engine_of("auto")
    assert not engine.publisher.takes_columns
    engine.send(stored([1], None, BLOCKS[0]))
    assert engine.publisher.takes_columns
    batch = read_batch(payload(stored([2], 1, BLOCKS[1]), removed([9])), READER)
    assert batch.columns is not None
    assert engine.publisher.apply_columns(batch.columns, [(1, 0, batch.payload)]) == 1
    assert engine.hit_tokens(PROMPT) == 2 * G


def test_pairs_of_an_engine_not_known_yet_are_not_promised_to_the_last_token() -> None:
    """Recovered, an unnamed engine is not known again before its next store."""
    pairs = [[t, t + 1] for t in PROMPT[: 2 * G]]
    engine = engine_of("auto")
    engine.send(stored([-1, -2], None, pairs))
    assert engine.publisher.dialect == "sglang"
    assert (engine.hit_tokens(PROMPT[: 2 * G + 1]), engine.hit_tokens(PROMPT[: 2 * G + 2])) == (G, 2 * G)


def test_a_store_without_groups_shows_its_block_size_wherever_it_lies_and_one_with_groups_on_the_gpu_alone() -> None:
    store = engine_of("lmcache")
    store.send(stored([1], None, PROMPT[: 4 * G], 4 * G, medium="cpu"))
    assert store.hit_tokens(PROMPT) == 4 * G
    engine = engine_of("sglang")
    engine.send(
        stored([1], None, BLOCKS[0], group_idx=0), stored([2], None, PROMPT[: 2 * G], 2 * G, "CPU", group_idx=1)
    )
    assert [group.group for group in engine.publisher.status().groups] == [0]


def test_what_a_store_has_shown_of_blocks_is_forgotten_once_its_engine_shows_its_own() -> None:
    engine = engine_of("lmcache")
    engine.send(stored([1], None, PROMPT[: 4 * G], 4 * G, medium="cpu"))
    engine.send(stored([2, 3], None, PROMPT[: 2 * G], group_idx=0))
    engine.send(stored([4], None, numbers(1_000, 4 * G), 4 * G, medium="cpu"))
    (group,) = engine.publisher.status().groups
    assert (group.sizes, engine.hit_tokens(PROMPT[: 2 * G + 1])) == ((G,), 2 * G)
