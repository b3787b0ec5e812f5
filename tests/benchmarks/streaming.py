"""Events as they come while engines work: one-block events, how soon they are visible, what holds the server up."""

from __future__ import annotations

import time

from tests.benchmarks.feeding import Feed
from tests.benchmarks.http_load import KeepAlive, percentile
from tests.benchmarks.loaded import ingest_figures
from tests.benchmarks.publishers import Publishers
from tests.benchmarks.run import Run
from tests.benchmarks.servers import Server, running
from tests.benchmarks.streams import DECODE, PREFILL, TRICKLE, StreamPlan, marker_tokens

CELLS = ("ingest", "freshness", "stall")
WORKERS = 4
FRESH_BLOCKS_PER_S = 10_000
FRESH_FIRST_WORKER = 101
PROBE_INTERVAL_S = 0.02
FIRST_PROBE = 1_000_000
POLL_PAUSE_S = 0.0005
PROBE_LIMIT_S = 10.0
STALL_FIRST_WORKER = 201
STALL_BLOCKS_PER_S = 50_000
STALL_PAUSE_S = 0.002
STALL_PACED_S = 4.0
LOOK_INTERVAL_S = 0.2


def measure(run: Run) -> None:
    with running(run.peer_python) as servers:
        if run.wants("ingest"):
            _one_block_events(run, servers)
        if run.wants("freshness"):
            _freshness(run, servers)
        if run.wants("stall"):
            _stalls(run, servers)


def _one_block_events(run: Run, servers: list[Server]) -> None:
    with Publishers(StreamPlan(DECODE.name, run.scale.one_block_entries, WORKERS)) as publishers:
        costs = {}
        for server in servers:
            feed = Feed(server, publishers).attach()
            costs[server.name] = feed.ingest()
            feed.detach()
    ingest_figures(run, "one-block events", costs)


def _freshness(run: Run, servers: list[Server]) -> None:
    plan = StreamPlan(TRICKLE.name, int(FRESH_BLOCKS_PER_S * (run.scale.freshness_s + 1)), WORKERS, seed=3)
    delays = {}
    with Publishers(plan) as publishers:
        for server in servers:
            feed = Feed(server, publishers, FRESH_FIRST_WORKER).attach()
            feed.begin_paced(FRESH_BLOCKS_PER_S, run.scale.freshness_s, PROBE_INTERVAL_S, FIRST_PROBE)
            seen = _watch_probes(feed)
            sent = feed.finish_paced()
            feed.detach()
            delays[server.name] = [(at - probe) * 1e3 for at, probe in zip(seen, sent.probes, strict=False)]
    for name, percent in (("median", 50), ("p99", 99), ("longest", 100)):
        values = {server: percentile(delay, percent) for server, delay in delays.items()}
        run.add("freshness", f"{name} from sent to visible", "ms", values)


def _watch_probes(feed: Feed) -> list[float]:
    """When each probe was first seen by a query. They come one after another, so one is looked for at a time."""
    seen: list[float] = []
    while True:
        tokens, given_up = marker_tokens(FIRST_PROBE + len(seen)), time.monotonic() + PROBE_LIMIT_S
        while not feed.server.held(tokens):
            if not feed.publishers.is_sending():
                return seen
            if time.monotonic() > given_up:
                raise TimeoutError(f"{feed.server.name}: a block was not visible within {PROBE_LIMIT_S} s")
            time.sleep(POLL_PAUSE_S)
        seen.append(time.monotonic())


def _stalls(run: Run, servers: list[Server]) -> None:
    """Round trips of the cheapest request while events arrive. They include what the machine's other work takes."""
    paced = int(STALL_BLOCKS_PER_S * STALL_PACED_S)
    plan = StreamPlan(PREFILL.name, run.scale.stall_entries + paced, WORKERS, seed=4)
    idle, steady, full = {}, {}, {}
    with Publishers(plan) as publishers:
        for server in servers:
            feed = Feed(server, publishers, STALL_FIRST_WORKER).attach()
            idle[server.name] = _round_trips(feed, until=time.monotonic() + 1.0)
            publishers.begin_send(server.name, paced, blocks_per_s=STALL_BLOCKS_PER_S)
            steady[server.name] = _round_trips(feed)
            feed.finish_paced()
            publishers.begin_send(server.name)
            full[server.name] = _round_trips(feed)
            publishers.sent()
            marker = feed.mark()
            full[server.name] += _round_trips(feed, marker=marker)
            feed.detach()
    run.add("stall", "longest, idle (what the machine adds)", "ms", _longest(idle))
    run.add("stall", "longest, 50,000 blocks/s", "ms", _longest(steady))
    run.add("stall", "p99, 50,000 blocks/s", "ms", {name: percentile(times, 99) for name, times in steady.items()})
    run.add("stall", "longest, full speed while tables grow", "ms", _longest(full))
    run.add("stall", "p99, full speed", "ms", {name: percentile(times, 99) for name, times in full.items()})


def _longest(times: dict[str, list[float]]) -> dict[str, float | None]:
    return {name: max(values) for name, values in times.items()}


def _round_trips(feed: Feed, until: float | None = None, marker: int | None = None) -> list[float]:
    """Milliseconds of each, until a time, or the marker is visible, or else the publishers have sent everything."""
    request = f"GET {feed.server.health_path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
    times: list[float] = []
    look_at = time.monotonic() + LOOK_INTERVAL_S
    with KeepAlive(feed.server.port) as connection:
        while True:
            started = time.perf_counter()
            connection.exchange(request)
            times.append((time.perf_counter() - started) * 1e3)
            time.sleep(STALL_PAUSE_S)
            if until is not None:
                if time.monotonic() > until:
                    return times
            elif marker is None:
                if not feed.publishers.is_sending():
                    return times
            elif time.monotonic() > look_at:
                if feed.is_visible(marker):
                    return times
                look_at = time.monotonic() + LOOK_INTERVAL_S
