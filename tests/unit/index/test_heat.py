"""Which prefixes are hot, from samples of queries."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from indexer.index.heat import SAMPLE_KEYS, Heat, Sample, hot_prefixes, weights_of

EVERY = 4


def sample(*keys: int, at: float = 0.0, granule: int = 16, tenant: str = "t", model: str = "m") -> Sample:
    return Sample(at, tenant, model, granule, np.array(keys, np.uint64))


def hot(samples: list[Sample], count: int = 10, now: float = 0.0) -> list[tuple[int, int, float]]:
    weights = weights_of(samples, EVERY, now, half_life_s=10.0)
    return [(p.content_key, p.end_granules, p.queries) for p in hot_prefixes(samples, weights, count)]


def test_a_prefix_counts_where_queries_part_or_end() -> None:
    system_prompt = (1, 2, 3)
    samples = [sample(*system_prompt, 4, 5), sample(*system_prompt, 6), sample(*system_prompt, 4, 5)]
    assert hot(samples) == [(3, 3, 12.0), (5, 5, 8.0), (6, 4, 4.0)]
    assert hot(samples, 1) == [(3, 3, 12.0)]


def test_the_longest_prefix_that_as_many_had_is_the_one() -> None:
    assert hot([sample(1, 2, 3), sample(1, 2, 3)]) == [(3, 3, 8.0)]
    assert hot([sample(1, 2, 3), sample(1, 2)]) == [(2, 2, 8.0), (3, 3, 4.0)]


def test_old_queries_count_less() -> None:
    assert hot([sample(1), sample(2, at=10.0), sample(2, at=20.0)], now=20.0) == [(2, 1, 6.0), (1, 1, 1.0)]


def test_chains_of_other_granules_are_others() -> None:
    assert hot([sample(1, 2), sample(3, granule=64)]) == [(3, 1, 4.0), (2, 2, 4.0)], "64 tokens, 32 tokens"


def test_queries_that_found_nothing_are_no_prefix() -> None:
    assert hot([sample(), sample(1)]) == [(1, 1, 4.0)]
    assert hot([sample()]) == []
    assert hot([]) == []


def test_only_the_newest_are_kept() -> None:
    heat = Heat(EVERY, 2 * (SAMPLE_KEYS + 3))
    for number in range(5):
        heat.note(sample(number, number, number, model="m" if number % 2 else "n"))
    assert [s.keys[0] for s in heat.samples("t", "m")] == [3]
    assert [s.keys[0] for s in heat.samples("t", "n")] == [4]
    assert heat.samples("other", "m") == []
    heat.note(sample(*range(1_000)))
    assert heat.samples("t", "m") == [], "one that is too long for the bound leaves nothing"


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_counting_every_prefix_gives(seed: int) -> None:
    random = Random(seed)
    paths = [tuple(random.choice("ab") for _ in range(random.randint(0, 6))) for _ in range(40)]
    key_of: dict[tuple[str, ...], int] = {}
    samples = []
    for path in paths:
        prefixes = [path[: end + 1] for end in range(len(path))]
        samples.append(sample(*(key_of.setdefault(prefix, len(key_of) + 1) for prefix in prefixes)))
    counts = Counter(path[: end + 1] for path in paths for end in range(len(path)))
    ends = {
        prefix: count for prefix, count in counts.items() if all(counts[(*prefix, further)] < count for further in "ab")
    }
    expected = {(key_of[prefix], len(prefix), EVERY * float(count)) for prefix, count in ends.items()}
    found = hot(samples, 1_000)
    assert set(found) == expected
    assert [(-queries, -end) for _, end, queries in found] == sorted((-q, -e) for _, e, q in found)
