"""What this project wants of itself: by cell and figure. Ratios are of one run, 4 workers, 1,000,000 entries."""

from __future__ import annotations

from tests.benchmarks.report import Against, Target


def _times_the_peer(most: float) -> Target:
    return Target(Against.PEER, most)


def _times_our_own(most: float) -> Target:
    return Target(Against.BASE, most)


def _at_most(most: float) -> Target:
    return Target(Against.LIMIT, most)


TARGETS: dict[tuple[str, str], Target] = {
    ("query", "CPU, 512 tokens, JSON"): _times_the_peer(1.2),
    ("query", "CPU, 4096 tokens, JSON"): _times_the_peer(0.6),
    ("query", "CPU, 8192 tokens, JSON"): _times_the_peer(0.45),
    ("query", "CPU, 32768 tokens, JSON"): _times_the_peer(0.3),
    ("query", "CPU, 8192 tokens, binary (peer: JSON)"): _times_the_peer(0.3),
    ("query", "CPU, 32768 tokens, binary (peer: JSON)"): _times_the_peer(0.1),
    ("query", "CPU, 8192 tokens, by hash"): _times_the_peer(1.0),
    ("query", "p50, 512 tokens, JSON"): _times_the_peer(1.2),
    ("query", "p50, 8192 tokens, JSON"): _times_the_peer(0.5),
    ("ingest", "CPU per block, 32-block events, until visible"): _times_the_peer(0.5),
    ("ingest", "CPU per block, 32-block events, until stored"): _times_the_peer(0.5),
    ("ingest", "CPU per block, one-block events, until visible"): _times_the_peer(0.4),
    ("ingest", "CPU per block, one-block events, until stored"): _times_the_peer(0.4),
    ("memory", "per entry"): _times_the_peer(0.6),
    ("memory", "growth after churn, against a fresh load"): _times_our_own(1.5),
    ("mixed", "query p99, against an idle server"): _times_our_own(2.0),
    ("growth", "query CPU, full index against 10,000 entries"): _times_our_own(1.3),
    ("workers", "query CPU, 256 workers against 1"): _times_our_own(2.0),
    ("freshness", "p99 from sent to visible"): _at_most(20.0),
    ("stall", "longest, 50,000 blocks/s"): _at_most(5.0),
    ("stall", "longest, full speed while tables grow"): _at_most(20.0),
    ("recovery", "start until ready"): _at_most(10.0),
    ("steady", "flush lag, longest"): _at_most(2.0),
    ("steady", "memory growth a minute"): _at_most(5.0),
    ("many", "processor"): _at_most(50.0),
    ("large", "resident memory"): _at_most(1_000.0),
    ("large", "load from the store"): _at_most(5.0),
}
