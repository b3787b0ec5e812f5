"""1,000 publishers with 10,000,000 residencies in one process: memory, and how long a restart takes to load them."""

from __future__ import annotations

from tests.benchmarks.feeding import Feed
from tests.benchmarks.publishers import Publishers
from tests.benchmarks.run import Run
from tests.benchmarks.servers import Ours, running
from tests.benchmarks.streams import PREFILL, StreamPlan

CELLS = ("large",)
PUBLISHERS = 1_000
RESIDENCIES = 10_000_000
COPIES = 10


def measure(run: Run) -> None:
    """Ours alone. Every chain is held by ten workers, so there are a million different blocks."""
    plan = StreamPlan(PREFILL.name, RESIDENCIES, PUBLISHERS, seed=30, copies=COPIES)
    with Publishers(plan) as publishers, running(None) as servers:
        feed = Feed(servers[0], publishers).attach()
        before = feed.resident_bytes()
        cost = feed.ingest()
        after = feed.resident_bytes()
        run.add("large", "visible", "blocks/s", {"ours": cost.blocks / cost.visible_s})
        run.add("large", "until all is stored", "s", {"ours": cost.stored_s})
        run.add("large", "resident memory", "MB", {"ours": after / 1e6})
        run.add("large", "memory per entry", "bytes", {"ours": (after - before) / cost.blocks})
        server = servers[0]
        assert isinstance(server, Ours)
        server.stop()
        run.add("large", "start until ready", "s", {"ours": server.start()})
        run.add("large", "load from the store", "s", {"ours": server.metric("indexer_recovery_seconds")})
        run.add("large", "resident memory after the restart", "MB", {"ours": feed.resident_bytes() / 1e6})
        feed.check(plan.blocks)
