"""What requests and queries count in the metrics.

`.labels(...)` costs more than the count itself, so every child is looked up once: here and not where it is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from time import monotonic

import numpy as np

from indexer.api import query_kernels as q
from indexer.api.answer_texts import CAUSES
from indexer.histogram import Observed
from indexer.index.assumptions import SHOWN_IN_ANSWERS
from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import PrefixAnswer, PrefixQuery
from indexer.index.query_warnings import Cause
from indexer.metrics import Metrics

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class RequestMeter:
    """Requests under way, and those that are over; one for all ways into the API.

    Its children are bounded by the routes, METHODS and the statuses that we answer.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.in_flight = 0
        self._metrics = metrics
        self._counts: dict[tuple[str, str, int], Callable[[], None]] = {}
        self._observers: dict[str, Callable[[float], None]] = {}

    def note(self, route: str, method: str, status: int, seconds: float) -> None:
        labels = route, method if method in METHODS else "other", status
        count = self._counts.get(labels)
        if count is None:
            count = self._counts[labels] = self._metrics.http_requests.labels(*labels).inc
            self._observers[route] = self._metrics.http_request_seconds.labels(route).observe
        count()
        self._observers[route](seconds)


class MeasuredIndex:
    """The index as queries ask it: how long it took, how long the prompt was, and what came of it."""

    def __init__(self, index: ContentIndex, metrics: Metrics) -> None:
        self._index = index
        self._sample_every, self._unsampled = index.heat.every, 0
        self._observe_seconds = metrics.query_seconds.observe
        self._observe_tokens = metrics.query_prompt_tokens.observe
        self._hit, self._warned, self._miss = (
            metrics.query_outcomes.labels(outcome).inc for outcome in ("hit", "warned", "miss")
        )
        codes = chain(Cause, SHOWN_IN_ANSWERS)
        self._warnings = {str(code): metrics.query_warnings.labels(code).inc for code in codes}

    def prefix_hits(self, query: PrefixQuery) -> PrefixAnswer:
        started = monotonic()
        answer = self._index.prefix_hits(query, started)
        self._observe_seconds(monotonic() - started)
        if query.local_hashes is None and query.content_keys is None:  # else nobody has said how many there are
            self._observe_tokens(answer.prompt_tokens)
        if answer.warnings:
            for code in {warning.code for warning in answer.warnings}:
                self._warnings[code]()
        (self._hit if _has_hits(answer) else self._warned if answer.warnings else self._miss)()
        self._unsampled += 1
        if self._unsampled == self._sample_every:
            self._unsampled = 0
            self._index.note_heat(query, started)
        return answer


def _has_hits(answer: PrefixAnswer) -> bool:
    """Not counting what is only expected."""
    return any(hit.resident_tokens or hit.hit_tokens for hit in answer.hits)


class KernelTallies:
    """What the kernel counts, added to the metrics when they are read."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        latency, prompt = metrics.query_seconds.bounds, metrics.query_prompt_tokens.bounds
        assert (len(latency), len(prompt), len(CAUSES)) == (q.LATENCY_BOUNDS, q.PROMPT_BOUNDS, q.CAUSE_COUNT)
        self._counts = np.zeros(q.COUNTS, np.int64)
        self._totals = np.zeros(q.TOTALS)
        self._totals[: q.ROUTE_TOTALS] = latency + prompt
        self.arrays = self._counts, self._totals
        metrics.registry.before_reading.append(self.settle)

    def settle(self) -> None:
        metrics, counts = self._metrics, self._counts
        for route, path in enumerate(q.PATHS):
            if counts[q.QUERIES + route]:
                metrics.http_requests.labels(path, "POST", 200).inc(int(counts[q.QUERIES + route]))
                at = q.ROUTE_SECONDS + route * (q.LATENCY_BOUNDS + 1)
                self._add(metrics.http_request_seconds.labels(path), at, q.ROUTE_TOTALS + route)
        self._add(metrics.query_seconds, q.INDEX_SECONDS, q.INDEX_TOTAL)
        self._add(metrics.query_prompt_tokens, q.PROMPT_TOKENS, q.PROMPT_TOTAL)
        for outcome, place in (("hit", q.HITS), ("warned", q.WARNED), ("miss", q.MISSES)):
            metrics.query_outcomes.labels(outcome).inc(int(counts[place]))
        for place, cause in enumerate(CAUSES, q.CAUSES):
            metrics.query_warnings.labels(cause).inc(int(counts[place]))
        counts[:] = 0
        self._totals[q.ROUTE_TOTALS :] = 0

    def _add(self, observed: Observed, first: int, total: int) -> None:
        counts = self._counts[first : first + len(observed.counts)]
        observed.add(counts.tolist(), float(self._totals[total]))
