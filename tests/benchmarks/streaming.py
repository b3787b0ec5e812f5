"""Events as they come while engines work: one-block events, how soon they are visible, what holds the server up."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.benchmarks.feeding import Feed
from tests.benchmarks.http_load import KeepAlive, percentile
from tests.benchmarks.loaded import ingest_figures
from tests.benchmarks.processes import own_thread_waited_s
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
STALL_IDLE_S = 1.0
LOOK_INTERVAL_S = 0.1


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


class RoundTrip(NamedTuple):
    """Milliseconds that one request took, and how many are left without the time that client and server waited for a
    processor, which other programs had."""

    raw_ms: float
    net_ms: float


def _stalls(run: Run, servers: list[Server]) -> None:
    """Round trips of the cheapest request while events arrive: as long as the event loop is held, so long it takes.

    The server's waiting is that of its main thread, where the loop of ours runs; the peer has many threads.
    """
    paced = int(STALL_BLOCKS_PER_S * STALL_PACED_S)
    plan = StreamPlan(PREFILL.name, run.scale.stall_entries + paced, WORKERS, seed=4)
    idle, steady, full = {}, {}, {}
    with Publishers(plan) as publishers:
        for server in servers:
            feed = Feed(server, publishers, STALL_FIRST_WORKER).attach()
            idle[server.name] = _round_trips(server, functools.partial(_is_past, time.monotonic() + STALL_IDLE_S))
            publishers.begin_send(server.name, paced, blocks_per_s=STALL_BLOCKS_PER_S)
            steady[server.name] = _round_trips(server, lambda: not publishers.is_sending())
            feed.finish_paced()
            publishers.begin_send(server.name)
            full[server.name] = _round_trips(server, lambda: not publishers.is_sending())
            publishers.sent()
            full[server.name] += _round_trips(server, functools.partial(feed.is_visible, feed.mark()))
            feed.detach()
    _stall_figures(run, "idle", idle)
    _stall_figures(run, "50,000 blocks/s", steady)
    _stall_figures(run, "full speed while tables grow", full)


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


def _stall_figures(run: Run, when: str, trips: dict[str, list[RoundTrip]]) -> None:
    run.add("stall", f"longest, {when}", "ms", {"ours": max(trip.net_ms for trip in trips["ours"])})
    raw = {name: [trip.raw_ms for trip in of_server] for name, of_server in trips.items()}
    run.add("stall", f"longest, {when}, as seen", "ms", {name: max(times) for name, times in raw.items()})
    run.add("stall", f"p99, {when}, as seen", "ms", {name: percentile(times, 99) for name, times in raw.items()})


def _round_trips(server: Server, is_over: Callable[[], bool]) -> list[RoundTrip]:
    """One after another until it is over, which is asked every LOOK_INTERVAL_S."""
    request = f"GET {server.health_path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
    trips: list[RoundTrip] = []
    look_at = time.monotonic() + LOOK_INTERVAL_S
    tree = server.tree
    with KeepAlive(server.port) as connection:
        while time.monotonic() < look_at or not is_over():
            if time.monotonic() >= look_at:
                look_at += LOOK_INTERVAL_S
            waited_s = tree.main_thread_waited_s() + own_thread_waited_s()
            started = time.perf_counter()
            connection.exchange(request)
            took_s = time.perf_counter() - started
            waited_s = tree.main_thread_waited_s() + own_thread_waited_s() - waited_s
            trips.append(RoundTrip(took_s * 1e3, max(0.0, took_s - waited_s) * 1e3))
            time.sleep(STALL_PAUSE_S)
    return trips
