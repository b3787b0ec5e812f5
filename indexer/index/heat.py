"""Which prefixes queries ask for: an estimate, from a sample of them.

Purpose: every so many-th query leaves the content keys of what it found held, so that a query costs what it did. All
else is worked out when somebody asks: a key stands for its whole prefix, so the queries that have it in common are
those that share that prefix.

Invariants: no more than `keys_max` keys are kept, the newest; never a token. If broken: memory would grow with queries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.index.columns import U64

F64: TypeAlias = npt.NDArray[np.float64]

SAMPLE_KEYS = 16  # as much memory as so many keys is what a sample takes besides
EQUAL = 1 - 1e-9
NO_KEYS: U64 = np.empty(0, np.uint64)


class Sample(NamedTuple):
    """One query: when, by a clock that only goes on, and the keys of the longest prefix that anybody held of it."""

    at: float
    tenant: str
    model: str
    granule: int
    keys: U64


class HotPrefix(NamedTuple):
    """`queries`: how many asked for it, the older the less they count."""

    granule: int
    content_key: int
    end_granules: int
    queries: float


class Heat:
    """Samples of all scopes, `every` so many queries one; 0 = none. Cost: 2 us a sample."""

    def __init__(self, every: int, keys_max: int) -> None:
        self.every = every
        self._keys_max = keys_max
        self._samples: deque[Sample] = deque()
        self._keys = 0

    def note(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._keys += SAMPLE_KEYS + len(sample.keys)
        while self._keys > self._keys_max:
            self._keys -= SAMPLE_KEYS + len(self._samples.popleft().keys)

    def samples(self, tenant: str, model: str) -> list[Sample]:
        return [sample for sample in self._samples if (sample.tenant, sample.model) == (tenant, model)]


class WeighedKeys(NamedTuple):
    """Of one granule: each key once, how many queries had it, how long its prefix is in granules, and how many of these
    queries went on alike."""

    keys: U64
    queries: F64
    ends: npt.NDArray[np.int64]
    went_on: F64


def weights_of(samples: Sequence[Sample], every: int, now: float, half_life_s: float) -> F64:
    """How many queries each sample stands for now."""
    ages = now - np.array([sample.at for sample in samples])
    weights: F64 = every * np.exp2(-ages / half_life_s)
    return weights


def weigh(samples: Sequence[Sample], weights: F64, granule: int) -> WeighedKeys:
    """Cost: 0.15 us a key: not for the event loop."""
    chosen = [(s.keys, weight) for s, weight in zip(samples, weights.tolist(), strict=True) if s.granule == granule]
    lengths = np.array([len(keys) for keys, _ in chosen], np.int64)
    columns = [keys for keys, _ in chosen]
    keys = np.concatenate(columns) if columns else np.empty(0, np.uint64)
    places = np.concatenate([np.arange(1, length + 1) for length in lengths]) if columns else np.empty(0, np.int64)
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    by_place = np.repeat(np.array([weight for _, weight in chosen]), lengths)
    queries = np.bincount(inverse, by_place, len(distinct)).astype(np.float64)
    went_on = np.zeros(len(distinct))
    if len(keys) > 1:
        is_followed = places[1:] > 1  # by the next key of the same query
        np.maximum.at(went_on, inverse[:-1][is_followed], queries[inverse[1:]][is_followed])
    return WeighedKeys(distinct, queries, places[first].astype(np.int64), went_on)


def hot_prefixes(samples: Sequence[Sample], weights: F64, count: int) -> list[HotPrefix]:
    """The prefixes that most queries had, the longer first of those that as many had; each only where its queries end
    or part. Cost: see `weigh`."""
    found: list[HotPrefix] = []
    for granule in sorted({sample.granule for sample in samples}):
        weighed = weigh(samples, weights, granule)
        ends = np.flatnonzero(weighed.went_on < weighed.queries * EQUAL)
        ends = ends[np.lexsort((-weighed.ends[ends], -weighed.queries[ends]))][:count]
        columns = (column[ends].tolist() for column in (weighed.keys, weighed.ends, weighed.queries))
        found += [HotPrefix(granule, *prefix) for prefix in zip(*columns, strict=True)]
    return sorted(found, key=lambda prefix: (-prefix.queries, -prefix.end_granules * prefix.granule))[:count]
