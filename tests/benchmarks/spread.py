"""How costs grow with the number of workers that share a prompt, and with the number of publishers."""

from __future__ import annotations

from tests.benchmarks import http_load
from tests.benchmarks.feeding import Feed, Ingested
from tests.benchmarks.publishers import Publishers
from tests.benchmarks.run import Run
from tests.benchmarks.servers import Server, running
from tests.benchmarks.streams import PREFILL, StreamPlan, chain_tokens

CELLS = ("workers", "publishers")
PROMPT_BLOCKS = 512
SHARING = (1, 16, 256)
PUBLISHERS = (4, 256)


def measure(run: Run) -> None:
    with running(run.peer_python) as servers:
        if run.wants("workers"):
            _workers(run, servers)
        if run.wants("publishers"):
            _publishers(run, servers)


def _workers(run: Run, servers: list[Server]) -> None:
    """One prompt held by 1 worker, one by 16, one by 256; all are 8,192 tokens long."""
    first: dict[str, float] = {}
    for number, workers in enumerate(SHARING, 1):
        plan = StreamPlan(PREFILL.name, PROMPT_BLOCKS * workers, workers, seed=10 + number, copies=workers)
        cpu, p50 = {}, {}
        with Publishers(plan) as publishers:
            for server in servers:
                feed = Feed(server, publishers, 1_000 * number).attach()
                feed.ingest()
                feed.check(plan.blocks, PROMPT_BLOCKS)
                prompt = chain_tokens(plan.seed, 0, PROMPT_BLOCKS)
                result = http_load.measure(server, [server.query(prompt)], run.scale.load_s)
                cpu[server.name], p50[server.name] = result.cpu_us, result.p50_us
                feed.detach()
        first = first or cpu
        run.add("workers", f"query CPU, shared by {workers}", "us", cpu)
        run.add("workers", f"query p50, shared by {workers}", "us", p50)
    run.add("workers", "query CPU, 256 workers against 1", "us", {"ours": cpu["ours"]}, first["ours"])


def _publishers(run: Run, servers: list[Server]) -> None:
    """The same number of blocks from few publishers and from many."""
    for number, count in enumerate(PUBLISHERS, 1):
        plan = StreamPlan(PREFILL.name, run.scale.spread_entries, count, seed=20 + number)
        with Publishers(plan) as publishers:
            costs: dict[str, Ingested] = {}
            for server in servers:
                feed = Feed(server, publishers, 10_000 * number).attach()
                costs[server.name] = feed.ingest()
                feed.detach()
        cpu = {name: cost.cpu_s / cost.blocks * 1e6 for name, cost in costs.items()}
        run.add("publishers", f"ingest CPU per block, {count} publishers", "us", cpu)
