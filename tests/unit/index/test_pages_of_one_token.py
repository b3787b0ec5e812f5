"""What pages of one token cost at 100,000 tokens: as many residencies as tokens. docs/performance.md says how much."""

from __future__ import annotations

from random import Random
from time import process_time
from typing import Any

import numpy as np
import pytest

from indexer.compiled import IS_COMPILED
from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from indexer.index.prefix_query import PrefixQuery
from indexer.wire.columns import read_batch
from tests.engine_events import MODEL, READER, Engine, numbers, payload, removed, stored
from tests.index_invariants import check_index
from tests.store_stand_in import DictStore

TOKENS = 100_000
BYTES_PER_PAGE = 100  # of the holder's table and the key space's, which double when they are full
APPLY_CPU_S, QUERY_CPU_S = 0.4, 0.08  # some ten times what they take


@pytest.mark.skipif(not IS_COMPILED, reason="what compiled kernels cost")
def test_a_long_prompt_in_pages_of_one_token_is_bounded_in_memory_and_time() -> None:
    random = Random(1)
    index = ContentIndex()
    engine = Engine(index, engine="sglang")
    tokens = [random.randrange(100_000) for _ in range(TOKENS)]
    engine.send(stored([1], None, [7], 1))
    hashes = [random.getrandbits(63) - (1 << 62) for _ in tokens]
    batch = read_batch(payload(stored(hashes, None, tokens, 1)), READER)
    start = process_time()
    engine.publisher.apply(batch, 1, 0)
    applied = process_time()
    query = PrefixQuery(MODEL, np.array(tokens, np.uint32).tobytes())
    (hit,) = index.prefix_hits(query).hits
    answered = process_time()
    assert (hit.hit_tokens, hit.resident_tokens) == (TOKENS - 1, TOKENS)
    assert (applied - start < APPLY_CPU_S, answered - applied < QUERY_CPU_S) == (True, True)

    space = engine.publisher.space
    assert space is not None
    (holder,) = engine.publisher.residents.holders.values()
    tables = [holder.table, space.table]
    assert sum(table.slots.nbytes for table in tables) / TOKENS < BYTES_PER_PAGE


# ---------------------------------------------------------------------- coarser

PROMPT = numbers(1, 100)
PAGES = numbers(1_000, 100)


def pages(first: int, last: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    return stored(PAGES[first:last], parent, PROMPT[first:last], 1, **fields)


def coarse_engine(ghosts_max: int = 8_192) -> Engine:
    limits = IndexLimits(block_tokens_min=16, ghosts_max=ghosts_max)
    return Engine(ContentIndex(limits), engine="sglang")


def test_of_small_blocks_only_those_on_the_step_are_kept() -> None:
    engine = coarse_engine()
    engine.send(pages(0, 100))
    kept = [PAGES[i] for i in (15, 31, 47, 63, 79, 95)]
    assert set(engine.references()) == {("GPU", 0, "", engine_hash) for engine_hash in kept}
    assert (engine.hit_tokens(PROMPT), engine.resident(PROMPT)) == (96, 96)
    assert (engine.hit_tokens(PROMPT[:96]), engine.resident(PROMPT[:96])) == (80, 96)
    check_index(engine.index)
    engine.send(removed(PAGES[60:]))
    assert engine.resident(PROMPT) == 48


def test_a_long_prompt_costs_what_blocks_of_that_size_would() -> None:
    engine = coarse_engine()
    tokens = numbers(1, 20_000)
    engine.send(stored(numbers(10**6, 20_000), None, tokens, 1))
    status = engine.publisher.status()
    assert (status.residencies, engine.resident(tokens)) == (1_250, 20_000)
    assert status.ghosts <= 8_192


def test_rows_say_where_the_kept_blocks_start() -> None:
    """The second run starts within a step: of its first block nobody has the whole content at hand."""
    engine, store = coarse_engine(), DictStore()
    engine.send(pages(0, 20))
    engine.send(pages(20, 50, PAGES[19]))
    store.flush(engine.publisher)
    rows = {h: row for (_, h), row in store.rows.items()}
    one, two, three = (rows[PAGES[i]] for i in (15, 31, 47))
    assert [(r.position, r.block_tokens, r.reference_count) for r in (one, two, three)] == [
        (0, 16, 1),
        (16, 16, 1),
        (32, 16, 1),
    ]
    assert (one.parent_key, two.parent_key, three.parent_key) == (None, None, two.content_key)
    assert (one.local_hash is None, two.local_hash is None, three.local_hash is None) == (False, True, False)


def test_prefixes_branch_anywhere_and_go_on_from_any_block() -> None:
    engine = coarse_engine()
    branch = [*PROMPT[:21], *numbers(5_000, 40)]
    engine.send(pages(0, 10))
    engine.send(pages(10, 40, PAGES[9]))
    engine.send(stored(numbers(7_000, 40), PAGES[20], branch[21:], 1, medium="CPU_PINNED"))
    assert (engine.resident(PROMPT), engine.resident(branch)) == (32, 48)
    hit = engine.hit(branch)
    assert hit is not None
    assert hit.tiers == {"GPU": 16, "CPU": 48}


def test_blocks_between_are_forgotten_at_the_bound_of_ghosts_unless_they_are_of_use() -> None:
    engine = coarse_engine(ghosts_max=32)
    engine.send(pages(0, 20))
    for i in range(4):
        engine.send(stored(numbers(7_000 + 100 * i, 20), PAGES[4], numbers(9_000 + 100 * i, 20), 1))
    assert not engine.publisher.waiting.orphans
    engine.send(stored([6_000], PAGES[2], [6], 1))
    assert engine.publisher.waiting.orphans == 1


def test_orphans_and_recovered_blocks_keep_the_step() -> None:
    engine, store = coarse_engine(), DictStore()
    engine.send(pages(20, 40, PAGES[19]), pages(0, 20))
    assert engine.resident(PROMPT) == 32
    assert len(engine.references()) == 2
    store.flush(engine.publisher)
    recovered = coarse_engine()
    store.recover(recovered.publisher)
    recovered.sequence_number = 1
    recovered.send(pages(40, 50, PAGES[39]))
    assert recovered.resident(PROMPT) == 48


def test_blocks_that_are_large_enough_are_kept_as_ever() -> None:
    limits = IndexLimits(block_tokens_min=16)
    for size in (16, 24, 32):
        engine = Engine(ContentIndex(limits))
        engine.send(stored([1, 2], None, numbers(1, 2 * size), size))
        assert len(engine.references()) == 2
        assert engine.resident(numbers(1, 2 * size)) == 2 * size


def test_of_windows_every_block_is_kept() -> None:
    engine = Engine(ContentIndex(IndexLimits(block_tokens_min=16)))
    engine.send(stored([1, 2], None, [1, 2, 3, 4], 2, kv_cache_spec_kind="sliding_window", group_idx=0))
    assert len(engine.references()) == 2
