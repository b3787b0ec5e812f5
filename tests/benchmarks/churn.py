"""What is left after much has come and gone: memory, against a server that was only ever given what lives."""

from __future__ import annotations

from tests.benchmarks.feeding import Feed
from tests.benchmarks.publishers import Publishers, Sent
from tests.benchmarks.run import Run
from tests.benchmarks.servers import running
from tests.benchmarks.streams import PREFILL, StreamPlan

CELLS = ("memory",)
WORKERS = 4


def measure(run: Run) -> None:
    churned = StreamPlan(PREFILL.name, run.scale.churned, WORKERS, seed=5, live_blocks=run.scale.live)
    after, sent = _grown_bytes(run, churned)
    live = sent.stored - sent.removed
    fresh, _ = _grown_bytes(run, StreamPlan(PREFILL.name, live, WORKERS, seed=5))
    name = f"growth, {live:,} live of {sent.stored:,} stored"
    run.add("memory", name, "MB", {server: grown / 1e6 for server, grown in after.items()})
    run.add("memory", f"growth, {live:,} stored", "MB", {server: grown / 1e6 for server, grown in fresh.items()})
    ours = {"ours": after["ours"] / 1e6}
    run.add("memory", "growth after churn, against a fresh load", "MB", ours, fresh["ours"] / 1e6)


def _grown_bytes(run: Run, plan: StreamPlan) -> tuple[dict[str, int], Sent]:
    """Resident bytes more than before the stream, by server."""
    grown = {}
    with Publishers(plan) as publishers, running(run.peer_python) as servers:
        for server in servers:
            feed = Feed(server, publishers).attach()
            before = feed.resident_bytes()
            sent = publishers.send(server.name)
            feed.wait_until_visible(feed.mark())
            grown[server.name] = feed.resident_bytes() - before
    return grown, sent
