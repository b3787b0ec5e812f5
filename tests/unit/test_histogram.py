from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from indexer.histogram import Histogram

BOUNDS = (0.001, 0.5, 2, 1_000_000)
VALUES = (0.0, 0.001, 0.0011, 0.5, 1.0, 2.0, 2.5, 1e6, 1e9)


def test_the_text_is_that_of_the_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("x_seconds", "What.", BOUNDS, ours, label="route")
    other = prometheus_client.Histogram("x_seconds", "What.", ("route",), buckets=BOUNDS, registry=theirs)
    for route in ("a", "b"):
        for value in VALUES:
            mine.labels(route).observe(value)
            other.labels(route).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_without_a_label_there_are_numbers_from_the_start() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    Histogram("x_seconds", "What.", BOUNDS, ours).labels()
    prometheus_client.Histogram("x_seconds", "What.", buckets=BOUNDS, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
