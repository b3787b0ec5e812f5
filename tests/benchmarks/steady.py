"""The same load for minutes, as a cluster has it: does the store keep up, and what do many quiet publishers cost?

Ours alone: the peer has no store, and its cost per publisher is in the cell `publishers`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tests.benchmarks.feeding import Feed
from tests.benchmarks.http_load import percentile
from tests.benchmarks.publishers import Publishers, Sent
from tests.benchmarks.run import Run
from tests.benchmarks.servers import Ours, running
from tests.benchmarks.streams import SHAPES, TRICKLE, StreamPlan

CELLS = ("steady", "many")
WORKERS = 4
CHANGES_PER_S = 20_000
LIVE_BLOCKS = 100_000
MANY_PUBLISHERS = 200
MANY_BATCHES_PER_S = 1
LOOK_INTERVAL_S = 0.25
SETTLED_AFTER = 1 / 3  # of the time: until then tables and arenas grow to what this load needs
FELL_BEHIND_S = 0.5


@dataclass(slots=True)
class Watched:
    """What was seen of a server, one entry a look, from the first message to the last."""

    at: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    database_cpu_s: float = 0.0
    rows: float = 0.0

    @property
    def lasted_s(self) -> float:
        return self.at[-1] - self.at[0]

    def growth_bytes_per_s(self) -> float:
        """Of resident memory once it has settled: the slope of the straight line that fits best."""
        settled = self.at[0] + SETTLED_AFTER * self.lasted_s
        points = [(at, size) for at, size in zip(self.at, self.resident_bytes, strict=True) if at >= settled]
        return slope(points)


def slope(points: list[tuple[float, int]]) -> float:
    """Least squares; 0 where there are too few points to tell."""
    if len(points) < 2:
        return 0.0
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread


def measure(run: Run) -> None:
    if run.wants("steady"):
        _steady(run)
    if run.wants("many"):
        _many(run)


def _steady(run: Run) -> None:
    """Half stores, half removals, of blocks that live for ten seconds: every one of them costs rows."""
    changes = int(CHANGES_PER_S * run.scale.steady_s)
    plan = StreamPlan(TRICKLE.name, LIVE_BLOCKS + changes // 2, WORKERS, seed=6, live_blocks=LIVE_BLOCKS)
    with Publishers(plan) as publishers, running(None) as servers:
        feed = Feed(servers[0], publishers).attach()
        feed.ingest(LIVE_BLOCKS)
        watched, sent = _watch(run, feed, CHANGES_PER_S, run.scale.steady_s)
        feed.detach()
    _note_pace(run, "steady", sent)
    run.note(f"steady: {sent.stored:,} blocks stored, {sent.removed:,} removed in {sent.ended - sent.started:.0f} s")
    run.add("steady", "flush lag, longest", "s", {"ours": max(watched.lag_s)})
    run.add("steady", "flush lag, median", "s", {"ours": percentile(watched.lag_s, 50)})
    run.add("steady", "memory growth a minute", "MB", {"ours": watched.growth_bytes_per_s() * 60 / 1e6})
    run.add("steady", "resident memory at the end", "MB", {"ours": watched.resident_bytes[-1] / 1e6})
    run.add("steady", "processor", "% of one", {"ours": 100 * watched.cpu_s / watched.lasted_s})
    run.add(
        "steady", "processor of the database", "% of one", {"ours": 100 * watched.database_cpu_s / watched.lasted_s}
    )
    run.add("steady", "rows written or deleted", "1/s", {"ours": watched.rows / watched.lasted_s})


def _many(run: Run) -> None:
    """Many publishers, each with little to say: what is paid per publisher and message, not per block."""
    per_s = MANY_PUBLISHERS * MANY_BATCHES_PER_S * SHAPES[TRICKLE.name].blocks_per_event
    plan = StreamPlan(TRICKLE.name, int(per_s * run.scale.many_s), MANY_PUBLISHERS, seed=7)
    with Publishers(plan) as publishers, running(None) as servers:
        feed = Feed(servers[0], publishers).attach()
        watched, sent = _watch(run, feed, per_s, run.scale.many_s)
        feed.detach()
    _note_pace(run, "many", sent)
    run.add("many", "processor", "% of one", {"ours": 100 * watched.cpu_s / watched.lasted_s})
    run.add("many", "processor of the database", "% of one", {"ours": 100 * watched.database_cpu_s / watched.lasted_s})
    run.add("many", "flush lag, longest", "s", {"ours": max(watched.lag_s)})
    run.add("many", "resident memory at the end", "MB", {"ours": watched.resident_bytes[-1] / 1e6})


def _watch(run: Run, feed: Feed, blocks_per_s: float, seconds: float) -> tuple[Watched, Sent]:
    """Send at this pace and look at the server all the while."""
    server = feed.server
    assert isinstance(server, Ours)
    watched = Watched()
    cpu_s, database_cpu_s = server.tree.cpu_s(), server.tree.database_cpu_s()
    rows = server.metric("indexer_flush_rows_total") or 0.0
    feed.begin_paced(blocks_per_s, seconds)
    while feed.publishers.is_sending():
        watched.at.append(time.monotonic())
        watched.lag_s.append(server.metric("indexer_flush_lag_seconds") or 0.0)
        watched.resident_bytes.append(server.tree.resident_bytes())
        time.sleep(LOOK_INTERVAL_S)
    watched.cpu_s = server.tree.cpu_s() - cpu_s
    watched.database_cpu_s = server.tree.database_cpu_s() - database_cpu_s
    watched.rows = (server.metric("indexer_flush_rows_total") or 0.0) - rows
    return watched, feed.finish_paced()


def _note_pace(run: Run, cell: str, sent: Sent) -> None:
    if sent.fell_behind_s > FELL_BEHIND_S:
        run.note(f"{cell}: the sender fell behind by {sent.fell_behind_s:.1f} s, so the load came in bursts")
