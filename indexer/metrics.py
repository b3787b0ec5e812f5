"""What the service counts and measures, in one object; base units, labels only from small closed sets.

Every `Metrics` has its own registry, so that tests and several services in one process do not share numbers. What can
be read from the index and the followers at scrape time is not kept here: `collector.py` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from indexer.histogram import Histogram

_LATENCY_BUCKETS_S = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
_PROMPT_BUCKETS_TOKENS = (128, 512, 2_048, 8_192, 32_768, 131_072, 524_288, 1_000_000)


# A second series for every counter, which nobody asked for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Registry(CollectorRegistry):
    """`before_reading`: called before the numbers are read, to add what was counted elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.before_reading: list[Callable[[], None]] = []

    def collect(self) -> Iterator[Metric]:
        for settle in self.before_reading:
            settle()
        yield from super().collect()


class Metrics:
    """All counters, gauges and histograms of one service."""

    def __init__(self) -> None:
        self.registry = registry = Registry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

        self.http_requests = Counter(
            "indexer_http_requests", "HTTP requests answered.", ("route", "method", "status"), registry=registry
        )
        self.http_request_seconds = Histogram(
            "indexer_http_request_seconds",
            "Time from request to answer.",
            _LATENCY_BUCKETS_S,
            registry,
            label="route",
        )
        self.query_prompt_tokens = Histogram(
            "indexer_query_prompt_tokens",
            "Prompt length of prefix-hit queries.",
            _PROMPT_BUCKETS_TOKENS,
            registry,
        ).labels()
        self.query_seconds = Histogram(
            "indexer_query_seconds",
            "Time the index took for a prefix-hit query.",
            _LATENCY_BUCKETS_S,
            registry,
        ).labels()
        self.query_outcomes = Counter(
            "indexer_query_outcomes",
            "Prefix-hit queries by outcome: hit, miss or warned (no hit, with a warning).",
            ("outcome",),
            registry=registry,
        )
        self.query_warnings = Counter(
            "indexer_query_warnings",
            "Queries that were answered with a warning, by its code.",
            ("code",),
            registry=registry,
        )

        self.routed_prompts = Counter(
            "indexer_routed_prompts", "Prompts that routers have told to be sent to a worker.", registry=registry
        )
        self.expected_blocks = Gauge(
            "indexer_expected_blocks", "Blocks expected of prompts that were sent to a worker.", registry=registry
        )
        self.watchers = Gauge("indexer_watchers", "Streams of GET /v1/watch.", registry=registry)

        self.access_files_refused = Counter(
            "indexer_access_files_refused",
            "Changed files of keys or certificates that could not be used.",
            registry=registry,
        )
        self.store_reachable = Gauge(
            "indexer_store_reachable", "1 if the last contact with Postgres succeeded.", registry=registry
        )
        self.recovery_seconds = Gauge(
            "indexer_recovery_seconds", "Time it took to load the index from Postgres at start.", registry=registry
        )
        self.ready = Gauge("indexer_ready", "1 if /readyz answers 200.", registry=registry)
