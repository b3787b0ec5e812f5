"""An index loaded in steps up to its full size, then asked: ingest, memory, query, growth, mixed, recovery."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from tests.benchmarks import http_load
from tests.benchmarks.feeding import Feed, Ingested
from tests.benchmarks.publishers import Publishers
from tests.benchmarks.run import Run
from tests.benchmarks.servers import Ours, Request, Server, running
from tests.benchmarks.streams import BLOCK_TOKENS, CHAIN_BLOCKS, PREFILL, StreamPlan, chain_tokens

CELLS = ("ingest", "memory", "query", "growth", "mixed", "recovery")
WORKERS = 4
FIRST_ENTRIES = 10_000
MIDDLE_ENTRIES = 100_000
PROMPT_TOKENS = (512, 4_096, 8_192, 32_768)
USUAL_TOKENS = 8_192
BODIES_MAX = 64
BODY_TOKENS_MAX = 1_000_000
MANY_CONNECTIONS = 8
MIXED_BLOCKS_PER_S = 50_000
MIXED_SEED = 2
MIXED_FIRST_WORKER = 101
MIXED_LEAD_S = 1.0

Make = Callable[[Server, Sequence[int]], Request | None]


def measure(run: Run) -> None:
    plan = StreamPlan(PREFILL.name, run.scale.entries, WORKERS)
    with Publishers(plan) as publishers, running(run.peer_python) as servers:
        feeds = [Feed(server, publishers).attach() for server in servers]
        _load_in_steps(run, feeds)
        if run.wants("query"):
            _query(run, feeds)
        if run.wants("mixed"):
            _mixed(run, feeds)
        if run.wants("recovery"):
            _recovery(run, feeds[0])


def _load_in_steps(run: Run, feeds: list[Feed]) -> None:
    entries = run.scale.entries
    before = {feed.audience: feed.resident_bytes() for feed in feeds}
    loaded: dict[str, Ingested] = {}
    first_cpu: dict[str, float | None] = {}
    for step in (FIRST_ENTRIES, MIDDLE_ENTRIES, entries):
        costs = {feed.audience: feed.ingest(step) for feed in feeds}
        loaded = {name: loaded[name] + cost if loaded else cost for name, cost in costs.items()}
        for feed in feeds:
            feed.check(step)
        if step > FIRST_ENTRIES:
            run.add("growth", f"ingest CPU per block, up to {step:,} entries", "us", _per_block(costs, "cpu_s"))
        if run.wants("growth"):
            first_cpu = _growth(run, feeds, step, first_cpu)
        if step == entries:
            _memory(run, feeds, before)
    ingest_figures(run, "32-block events", loaded)


def _growth(run: Run, feeds: list[Feed], step: int, first: dict[str, float | None]) -> dict[str, float | None]:
    """The cost of the usual query at this size; returns that at the first size."""
    cpu: dict[str, float | None] = {
        feed.audience: _load(run, feed, _as_json, USUAL_TOKENS, step).cpu_us for feed in feeds
    }
    run.add("growth", f"query CPU at {step:,} entries", "us", cpu)
    if first and step == run.scale.entries:
        run.add("growth", "query CPU, full index against 10,000 entries", "us", {"ours": cpu["ours"]}, first["ours"])
    return first or cpu


def _memory(run: Run, feeds: list[Feed], before: dict[str, int]) -> None:
    after = {feed.audience: feed.resident_bytes() for feed in feeds}
    entries = run.scale.entries
    run.add("memory", "per entry", "bytes", {name: (after[name] - before[name]) / entries for name in after})
    run.add("memory", "before the load", "MB", {name: size / 1e6 for name, size in before.items()})
    run.add("memory", f"with {entries:,} entries", "MB", {name: size / 1e6 for name, size in after.items()})
    run.add("memory", "of the database", "MB", {"ours": feeds[0].server.tree.database_bytes() / 1e6})


def ingest_figures(run: Run, shape: str, costs: dict[str, Ingested]) -> None:
    """The same five figures for every shape of event."""
    run.add("ingest", f"CPU per block, {shape}, until visible", "us", _per_block(costs, "cpu_s"))
    run.add("ingest", f"CPU per block, {shape}, until stored", "us", _per_block(costs, "stored_cpu_s"))
    run.add("ingest", f"{shape}, visible", "blocks/s", {n: cost.blocks / cost.visible_s for n, cost in costs.items()})
    ours = costs["ours"]
    run.add("ingest", f"{shape}, stored", "blocks/s", {"ours": ours.blocks / ours.stored_s})
    run.add("ingest", f"database CPU per block, {shape}", "us", {"ours": ours.database_cpu_s / ours.blocks * 1e6})


def _per_block(costs: dict[str, Ingested], name: str) -> dict[str, float | None]:
    return {server: getattr(cost, name) / cost.blocks * 1e6 for server, cost in costs.items()}


def _query(run: Run, feeds: list[Feed]) -> None:
    for tokens in PROMPT_TOKENS:
        results = {feed.audience: _load(run, feed, _as_json, tokens) for feed in feeds}
        cpu = {name: result.cpu_us for name, result in results.items()}
        run.add("query", f"CPU, {tokens} tokens, JSON", "us", cpu)
        run.add("query", f"p50, {tokens} tokens, JSON", "us", {name: r.p50_us for name, r in results.items()})
        run.add("query", f"p99, {tokens} tokens, JSON", "us", {name: r.p99_us for name, r in results.items()})
        if tokens >= USUAL_TOKENS:
            binary = _load(run, feeds[0], _as_binary, tokens)
            run.add("query", f"CPU, {tokens} tokens, binary (peer: JSON)", "us", cpu | {"ours": binary.cpu_us})
            run.add("query", f"p50, {tokens} tokens, binary", "us", {"ours": binary.p50_us})
    _query_by_hash(run, feeds)
    results = {feed.audience: _load(run, feed, _as_json, USUAL_TOKENS, connections=MANY_CONNECTIONS) for feed in feeds}
    name = f"{USUAL_TOKENS} tokens, JSON, {MANY_CONNECTIONS} connections"
    run.add("query", f"CPU, {name}", "us", {server: result.cpu_us for server, result in results.items()})
    run.add("query", f"rate, {name}", "1/s", {server: result.per_s for server, result in results.items()})


def _query_by_hash(run: Run, feeds: list[Feed]) -> None:
    asked = [feed for feed in feeds if feed.server.query_by_hash([0] * BLOCK_TOKENS) is not None]
    results = {feed.audience: _load(run, feed, _by_hash, USUAL_TOKENS) for feed in asked}
    if "ours" not in results:
        run.note("ours does not serve the dialect's routes: asked natively, and not by hash")
    run.add("query", f"CPU, {USUAL_TOKENS} tokens, by hash", "us", {name: r.cpu_us for name, r in results.items()})
    run.add("query", f"p50, {USUAL_TOKENS} tokens, by hash", "us", {name: r.p50_us for name, r in results.items()})


def _load(
    run: Run, feed: Feed, make: Make, tokens: int, entries: int | None = None, connections: int = 1
) -> http_load.Loaded:
    """Prompts that are held to their last block, among the first `entries` entries (None: all)."""
    requests = _requests(feed, make, tokens, run.scale.entries if entries is None else entries)
    return http_load.measure(feed.server, requests, run.scale.load_s, connections)


def _requests(feed: Feed, make: Make, tokens: int, entries: int) -> list[Request]:
    """Of chains chosen at random, and the same at each call; as many as are worth their memory."""
    depth = tokens // BLOCK_TOKENS
    assert depth <= CHAIN_BLOCKS
    chains = feed.plan.chains_within(entries, depth)
    chosen = random.Random(tokens).sample(chains, min(len(chains), BODIES_MAX, BODY_TOKENS_MAX // tokens))
    prompts = (chain_tokens(feed.plan.seed, chain, depth) for chain in chosen)
    requests = [make(feed.server, prompt) for prompt in prompts]
    return [request for request in requests if request is not None]


def _as_json(server: Server, prompt: Sequence[int]) -> Request:
    return server.query(prompt)


def _as_binary(server: Server, prompt: Sequence[int]) -> Request | None:
    return server.query_binary(prompt)


def _by_hash(server: Server, prompt: Sequence[int]) -> Request | None:
    return server.query_by_hash(prompt)


def _mixed(run: Run, feeds: list[Feed]) -> None:
    """The usual query on an idle server, and while other publishers' events arrive at a steady pace."""
    lasting_s = run.scale.load_s + MIXED_LEAD_S + 3.0
    plan = StreamPlan(PREFILL.name, int(MIXED_BLOCKS_PER_S * lasting_s), WORKERS, MIXED_SEED)
    idle = {feed.audience: _quieter(run, feed) for feed in feeds}
    busy = {}
    with Publishers(plan) as publishers:
        for feed in feeds:
            other = Feed(feed.server, publishers, MIXED_FIRST_WORKER).attach()
            other.begin_paced(MIXED_BLOCKS_PER_S, lasting_s)
            time.sleep(MIXED_LEAD_S)
            busy[feed.audience] = _load(run, feed, _as_json, USUAL_TOKENS)
            if not publishers.is_sending():
                run.note(f"mixed, {feed.audience}: the events ended before the queries")
            sent = other.finish_paced()
            other.detach()
            if sent.fell_behind_s > 0.1:
                run.note(f"mixed, {feed.audience}: the sender fell behind by {sent.fell_behind_s:.1f} s")
    run.add("mixed", "query p99, idle server", "us", {name: result.p99_us for name, result in idle.items()})
    p99 = {name: result.p99_us for name, result in busy.items()}
    run.add("mixed", "query p99, against an idle server", "us", p99, idle["ours"].p99_us)
    run.add("mixed", "query p50", "us", {name: result.p50_us for name, result in busy.items()})
    run.add("mixed", "queries", "1/s", {name: result.per_s for name, result in busy.items()})


def _quieter(run: Run, feed: Feed) -> http_load.Loaded:
    """The better of two tries: a base that a neighbour disturbed would let every loaded figure pass."""
    return min((_load(run, feed, _as_json, USUAL_TOKENS) for _ in range(2)), key=lambda result: result.p99_us)


def _recovery(run: Run, feed: Feed) -> None:
    """Stop ours as an operator would and start it on the same data."""
    server = feed.server
    assert isinstance(server, Ours)
    feed.wait_until_stored()
    run.add("recovery", "clean stop", "s", {"ours": server.stop()})
    run.add("recovery", "start until ready", "s", {"ours": server.start()})
    run.add("recovery", "of it, loading from the store", "s", {"ours": server.metric("indexer_recovery_seconds")})
    run.add("recovery", "memory after it", "MB", {"ours": feed.resident_bytes() / 1e6})
    feed.check(run.scale.entries)
