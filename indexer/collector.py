"""Numbers that are read from the index, the followers and the writer when /metrics is asked.

Purpose: nothing is counted twice. `refresh` reads all publishers, a slice at a time, and keeps plain sums; `collect`
only formats them.

Invariant: counters never fall, although publishers come and go: what each publisher has added since the last refresh is
added to a total that stays. What a publisher counted between its last refresh and its removal is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from indexer.api.ports import FollowedPublisher, RegistryPort
from indexer.index.predictions import ERROR_BOUNDS, Predictions
from indexer.index.publisher import PublisherIndex
from indexer.index.publisher_status import PublisherStatus
from indexer.index.tiers import TIER_ORDER, Media, is_credited
from indexer.store.lease import LeaseKeeper
from indexer.store.writer import Writer

SLICE = 100  # publishers read between two chances for other work on the loop
_ERROR_BUCKETS = [*map(floatToGoString, ERROR_BOUNDS), "+Inf"]
_PUBLISHER_LABELS = ("worker_id", "dp_rank")

Name = tuple[str, str]  # of a counter: its family and its label


@dataclass(slots=True)
class _Gauges:
    states: Counter[str] = field(default_factory=Counter)
    coverages: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    residencies: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    publishers: list[tuple[tuple[str, str], PublisherStatus, float | None]] = field(default_factory=list)
    predictions: list[tuple[tuple[str, str], Predictions]] = field(default_factory=list)
    alarms: int = 0


class IndexCollector(Collector):
    """Per-publisher numbers leave only while there are at most `per_publisher_max` publishers."""

    def __init__(self, registry: RegistryPort, per_publisher_max: int) -> None:
        self.writer: Writer | None = None  # there is none before the store is open
        self.leases: LeaseKeeper | None = None
        self._registry = registry
        self._per_publisher_max = per_publisher_max
        self._gauges = _Gauges()
        self._totals: Counter[Name] = Counter()
        self._seen: dict[int, tuple[PublisherIndex, Counter[Name]]] = {}
        self._one_refresh = asyncio.Lock()

    async def refresh(self) -> None:
        async with self._one_refresh:
            gauges = _Gauges()
            followed = list(self._registry.followed())
            for number, publisher in enumerate(followed, 1):
                self._read(publisher, gauges, is_listed=len(followed) <= self._per_publisher_max)
                if number % SLICE == 0:
                    await asyncio.sleep(0)
            present = {id(publisher.index) for publisher in followed}
            self._seen = {key: seen for key, seen in self._seen.items() if key in present}
            self._gauges = gauges

    def _read(self, followed: FollowedPublisher, gauges: _Gauges, is_listed: bool) -> None:
        index = followed.index
        status = index.status()
        gauges.states[str(followed.state)] += 1
        gauges.coverages[str(index.trust.coverage)] += 1
        gauges.reasons[str(index.trust.reason)] += 1
        for name in ("orphans", "ghosts", "unplaced", "unverified"):
            gauges.waiting[name] += getattr(status, name)
        for medium, count in status.residencies_by_medium.items():
            gauges.residencies[_tier_label(index.media, medium)] += count
        predictions = index.predictions
        gauges.alarms += predictions is not None and predictions.is_alarmed
        if is_listed:
            key = (followed.registration.worker_id, str(followed.registration.dp_rank))
            gauges.publishers.append((key, status, followed.last_batch_at))
            if predictions is not None:
                gauges.predictions.append((key, predictions))
        counted = _counters(status, followed)
        _, seen = self._seen.get(id(index), (index, Counter[Name]()))
        self._totals.update({name: max(0, count - seen[name]) for name, count in counted.items()})
        self._seen[id(index)] = (index, counted)

    def collect(self) -> Iterator[Metric]:
        yield from self._publisher_gauges()
        yield from self._counters()
        yield from self._per_publisher()
        if self.writer is not None:
            yield from _of_writer(self.writer)
        if self.leases is not None:
            yield from _of_leases(self.leases)

    def _publisher_gauges(self) -> Iterator[Metric]:
        gauges = self._gauges
        yield _gauge("indexer_publishers", "Registered publishers by state.", "state", gauges.states)
        yield _gauge("indexer_coverage", "Registered publishers by coverage.", "coverage", gauges.coverages)
        yield _gauge("indexer_coverage_reasons", "Registered publishers by why.", "reason", gauges.reasons)
        yield _gauge("indexer_residencies", "Residencies in memory by tier.", "tier", gauges.residencies)
        for name, text in (
            ("orphans", "Blocks that wait for an unknown parent."),
            ("ghosts", "Evicted hashes that are still resolvable as a parent."),
            ("unplaced", "Residencies at a still unknown position."),
            ("unverified", "Residencies from before a gap, not credited until they are proven."),
        ):
            yield GaugeMetricFamily(f"indexer_{name}", text, gauges.waiting[name])
        yield GaugeMetricFamily(
            "indexer_prediction_alarms", "Publishers of which too many predictions were wrong.", gauges.alarms
        )

    def _counters(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "indexer_registrations_expired",
            "Publishers unregistered because they were disconnected for too long.",
            self._registry.registrations_expired,
        )
        for name, text in (
            ("batches_applied", "Event batches applied."),
            ("gaps", "Gaps in sequence numbers that could not be repaired."),
            ("missing_batches", "Batches lost in gaps."),
        ):
            yield CounterMetricFamily(f"indexer_{name}", text, self._totals[name, ""])
        for name, text, label in (
            ("bad_events", "Events or batches that could not be read, by reason.", "reason"),
            ("index_outcomes", "What became of events, by name.", "name"),
            ("stream_outcomes", "What followers did, by name.", "name"),
            ("predictions", "Predicted hits beside what engines reported, by outcome.", "outcome"),
        ):
            family = CounterMetricFamily(f"indexer_{name}", text, labels=[label])
            for (kind, value), count in sorted(self._totals.items()):
                if kind == name:
                    family.add_metric([value], count)
            yield family

    def _per_publisher(self) -> Iterator[Metric]:
        residencies = GaugeMetricFamily(
            "indexer_publisher_residencies", "Residencies of one publisher.", labels=_PUBLISHER_LABELS
        )
        age = GaugeMetricFamily(
            "indexer_publisher_last_event_age_seconds", "Time since its last batch arrived.", labels=_PUBLISHER_LABELS
        )
        now = time.time()
        for key, status, last_batch_at in self._gauges.publishers:
            residencies.add_metric(key, status.residencies)
            if last_batch_at is not None:
                age.add_metric(key, max(0.0, now - last_batch_at))
        yield residencies
        yield age
        yield from self._predictions()

    def _predictions(self) -> Iterator[Metric]:
        """Without a sum, as errors may be below 0."""
        errors = HistogramMetricFamily(
            "indexer_publisher_prediction_error_tokens",
            "Predicted tokens less those that the engine had cached, of one publisher.",
            labels=_PUBLISHER_LABELS,
        )
        alarm = GaugeMetricFamily(
            "indexer_publisher_prediction_alarm",
            "1 if too many of its last predictions were wrong.",
            labels=_PUBLISHER_LABELS,
        )
        for key, predictions in self._gauges.predictions:
            buckets = list(zip(_ERROR_BUCKETS, accumulate(predictions.error_counts), strict=True))
            errors.add_metric(key, buckets, None)
            alarm.add_metric(key, predictions.is_alarmed)
        yield errors
        yield alarm


def _counters(status: PublisherStatus, followed: FollowedPublisher) -> Counter[Name]:
    counted: Counter[Name] = Counter()
    counted["batches_applied", ""] = status.batches_applied
    counted["gaps", ""] = status.gaps
    counted["missing_batches", ""] = status.missing_batches
    for family, counters in (
        ("bad_events", status.bad_events),
        ("index_outcomes", status.counters),
        ("stream_outcomes", followed.counters),
    ):
        for label, count in counters.items():
            counted[family, label] = count
    predictions = followed.index.predictions
    for outcome, count in predictions.outcomes.items() if predictions is not None else ():
        counted["predictions", outcome] = count
    return counted


def _of_writer(writer: Writer) -> Iterator[Metric]:
    yield CounterMetricFamily("indexer_flushes", "Flushes to Postgres that wrote something.", writer.flushes)
    yield CounterMetricFamily("indexer_flush_failures", "Flushes to Postgres that failed.", writer.flush_failures)
    yield CounterMetricFamily("indexer_flush_rows", "Rows written or deleted by flushes.", writer.rows_written)
    yield CounterMetricFamily(
        "indexer_flush_values_refused",
        "Flushes of a publisher held back for a value that Postgres refuses.",
        writer.values_refused,
    )
    yield CounterMetricFamily(
        "indexer_fenced_flushes", "Flushes refused because another replica writes the publisher.", writer.fenced_flushes
    )
    yield CounterMetricFamily(
        "indexer_takeovers", "Publishers taken over from another replica, rows compared.", writer.takeovers
    )
    yield CounterMetricFamily(
        "indexer_reconciled_rows", "Rows that differed from memory at a take-over.", writer.rows_reconciled
    )
    yield CounterMetricFamily(
        "indexer_kept_changes_dropped",
        "Times that too much was kept of a publisher whose writer does not write.",
        writer.kept_dropped,
    )
    yield GaugeMetricFamily(
        "indexer_kept_changes", "Changes kept until the replica that writes them has written them.", writer.kept
    )
    yield GaugeMetricFamily(
        "indexer_flush_pending_changes", "Changes in memory that Postgres does not have yet.", writer.pending
    )
    yield GaugeMetricFamily(
        "indexer_flush_lag_seconds", "Age of the oldest change that Postgres does not have yet.", writer.lag_s
    )
    if writer.last_flush_s is not None and writer.last_flush_at is not None:
        yield GaugeMetricFamily("indexer_last_flush_seconds", "Time the last flush took.", writer.last_flush_s)
        yield GaugeMetricFamily(
            "indexer_last_flush_timestamp_seconds", "When the last flush ended, since 1970.", writer.last_flush_at
        )


def _of_leases(leases: LeaseKeeper) -> Iterator[Metric]:
    counts = Counter(held=leases.held, of_others=max(0, leases.publishers - leases.held))
    yield _gauge("indexer_leases", "Publishers that this replica writes, and that others do.", "state", counts)


def _gauge(name: str, text: str, label: str, values: Counter[str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family


def _tier_label(media: Media, medium: str) -> str:
    """Media are the engines' words: all but the usual tiers share a label."""
    if not is_credited(medium):
        return "remote"
    tier = media.tier_of(medium)
    return tier if tier in TIER_ORDER else "other"
