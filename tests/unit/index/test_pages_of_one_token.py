"""What pages of one token cost at 100,000 tokens: as many residencies as tokens. docs/performance.md says how much."""

from __future__ import annotations

from random import Random
from time import process_time

import numpy as np
import pytest

from indexer.compiled import IS_COMPILED
from indexer.index.content_index import ContentIndex
from indexer.index.prefix_hits import PrefixQuery
from indexer.wire.columns import read_batch
from tests.engine_events import MODEL, READER, Engine, payload, stored

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
