"""A public trace of real requests through simulated engines: what routing by our answers gains over taking turns.

The trace (Mooncake's, see its README) has no text: a request is its time, its lengths and one id for each 512 tokens of
its prompt, where equal ids mean equal prefixes. Tokens are drawn from the ids. An engine here is a pool of such pages,
the least recently used of which is evicted first, tail before head; it publishes every page as 32 blocks of 16 tokens.
Time is the trace's own: an engine computes what it does not hold at a fixed rate, one prompt after another.

Requests are played as fast as they can be, so events have far less time to arrive than they would have in truth.
"""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import zmq

from tests.benchmarks.http_load import percentile
from tests.benchmarks.run import Run
from tests.benchmarks.servers import Server, running
from tests.benchmarks.streams import BLOCK_TOKENS, VOCABULARY, encode_batch

CELLS = ("trace",)
PAGE_TOKENS = 512
PAGE_BLOCKS = PAGE_TOKENS // BLOCK_TOKENS
ENGINES = 4
POOL_BLOCKS = 100_000
PREFILL_TOKENS_PER_S = 12_000
FIRST_WORKER = 1
SUBSCRIBED_WITHIN_MS = 30_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`pages` are the ids of the prompt's pages, of which the last may be short."""

    at_s: float
    prompt_tokens: int
    pages: tuple[int, ...]

    def page_tokens(self, place: int) -> int:
        """The length of the page at this place."""
        return min(PAGE_TOKENS, self.prompt_tokens - place * PAGE_TOKENS)

    def token_ids(self) -> list[int]:
        return [
            token for place, page in enumerate(self.pages) for token in tokens_of_page(page, self.page_tokens(place))
        ]


def read_trace(path: Path, requests_max: int) -> list[TraceRequest]:
    """The first requests of a trace; a name that ends in `.gz` is compressed."""
    opener: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        return [parse_request(line) for line in itertools.islice(lines, requests_max)]


def parse_request(line: str) -> TraceRequest:
    fields = json.loads(line)
    return TraceRequest(fields["timestamp"] / 1e3, fields["input_length"], tuple(fields["hash_ids"]))


def tokens_of_page(page: int, count: int = PAGE_TOKENS) -> list[int]:
    """Always the same for the same id; a shorter page is the beginning of a longer one."""
    tokens: list[int] = np.random.default_rng(page).integers(0, VOCABULARY, PAGE_TOKENS)[:count].tolist()
    return tokens


class LruEngine:
    """A pool of at most `blocks_max` blocks, kept and evicted by pages. A page is held only while all before it are."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._pages: OrderedDict[int, int] = OrderedDict()  # page -> its blocks, least recently used first
        self._blocks = 0
        self.free_at_s = 0.0

    @property
    def blocks(self) -> int:
        return self._blocks

    def resident_tokens(self, request: TraceRequest) -> int:
        """The longest prefix of whole blocks that is held."""
        held = itertools.takewhile(self._pages.__contains__, request.pages)
        return sum(self._pages[page] for page in held) * BLOCK_TOKENS

    def hit_tokens(self, request: TraceRequest) -> int:
        """What it need not compute: whole blocks, and never the last token."""
        most = (request.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return min(self.resident_tokens(request), most)

    def serve(self, request: TraceRequest) -> list[list[object]]:
        """Compute what is missing; the events of that. What of the prompt has no room is not kept."""
        pages = self._pages_that_fit(request)
        for page in reversed(pages):
            if page in self._pages:
                self._pages.move_to_end(page)
        missing = {page: blocks for page, blocks in pages.items() if page not in self._pages}
        events = self._evict(sum(missing.values()))
        events += [self._store(request, place) for place, page in enumerate(pages) if page in missing]
        for page in reversed(missing):
            self._pages[page] = missing[page]
        for page in reversed(pages):
            self._pages.move_to_end(page)
        self._blocks += sum(missing.values())
        return events

    def _pages_that_fit(self, request: TraceRequest) -> dict[int, int]:
        """Pages of the prompt that hold a whole block, with their number of blocks, up to the size of the pool."""
        pages: dict[int, int] = {}
        left = self._blocks_max
        for place, page in enumerate(request.pages):
            blocks = request.page_tokens(place) // BLOCK_TOKENS
            left -= blocks
            if not blocks or left < 0:
                break
            pages[page] = blocks
        return pages

    def _evict(self, needed: int) -> list[list[object]]:
        events: list[list[object]] = []
        while self._blocks + needed > self._blocks_max:
            page, blocks = self._pages.popitem(last=False)
            self._blocks -= blocks
            events.append(["BlockRemoved", _hashes(page, blocks)[::-1], "GPU"])
        return events

    def _store(self, request: TraceRequest, place: int) -> list[object]:
        page, count = request.pages[place], request.page_tokens(place) // BLOCK_TOKENS
        parent = _hashes(request.pages[place - 1], PAGE_BLOCKS)[-1] if place else None
        tokens = tokens_of_page(page, count * BLOCK_TOKENS)
        return ["BlockStored", _hashes(page, count), parent, tokens, BLOCK_TOKENS, None, "GPU", None, None]


def _hashes(page: int, count: int) -> list[int]:
    """What an engine calls the blocks of a page."""
    first = page * PAGE_BLOCKS + 1
    return list(range(first, first + count))


class Routed(NamedTuple):
    """What became of all requests under one way to route them. Waits in seconds of the trace."""

    prompt_tokens: int
    hit_tokens: int
    waits_s: list[float]

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


Choose = Callable[[TraceRequest, Sequence[LruEngine]], int]
Publish = Callable[[int, list[list[object]]], None]


def play(
    requests: Sequence[TraceRequest],
    engines: Sequence[LruEngine],
    choose: Choose,
    publish: Publish = lambda engine, events: None,
) -> Routed:
    """Send every request to the engine that `choose` names; `publish` gets what that engine did."""
    hit_tokens, waits_s = 0, []
    for request in requests:
        number = choose(request, engines)
        engine = engines[number]
        hit = engine.hit_tokens(request)
        hit_tokens += hit
        begins_s = max(engine.free_at_s, request.at_s)
        engine.free_at_s = begins_s + (request.prompt_tokens - hit) / PREFILL_TOKENS_PER_S
        waits_s.append(engine.free_at_s - request.at_s)
        publish(number, engine.serve(request))
    return Routed(sum(request.prompt_tokens for request in requests), hit_tokens, waits_s)


def take_turns() -> Choose:
    turn = itertools.count()
    return lambda request, engines: next(turn) % len(engines)


def soonest(request: TraceRequest, engines: Sequence[LruEngine], hit_tokens: Sequence[int]) -> int:
    """The engine that would have computed the prompt first, given what each holds of it; ties to the least busy."""

    def done(number: int) -> tuple[float, float]:
        waiting_s = max(0.0, engines[number].free_at_s - request.at_s)
        return waiting_s + (request.prompt_tokens - hit_tokens[number]) / PREFILL_TOKENS_PER_S, waiting_s

    return min(range(len(engines)), key=done)


def know_all(request: TraceRequest, engines: Sequence[LruEngine]) -> int:
    """Routing by what the engines themselves say: no index can do better."""
    return soonest(request, engines, [engine.hit_tokens(request) for engine in engines])


@dataclass(slots=True)
class AskServer:
    """Routing by a server's answers."""

    server: Server
    latencies_ms: list[float] = field(default_factory=list)
    answers: int = 0
    equal: int = 0

    def __call__(self, request: TraceRequest, engines: Sequence[LruEngine]) -> int:
        query = self.server.query(request.token_ids())
        started = time.perf_counter()
        status, body = self.server.send(query)
        self.latencies_ms.append((time.perf_counter() - started) * 1e3)
        held = self.server.read_answer(body) if status == 200 else {}
        answers = [held.get(FIRST_WORKER + number, 0) for number in range(len(engines))]
        truth = [engine.resident_tokens(request) for engine in engines]
        self.answers += len(truth)
        self.equal += sum(answer == true for answer, true in zip(answers, truth, strict=True))
        return soonest(request, engines, answers)


class EnginePublishers:
    """One ZMQ socket for each engine, followed by one server."""

    def __init__(self, server: Server) -> None:
        self._context = zmq.Context()
        self._sockets = []
        self._sequence_numbers = [0] * ENGINES
        for number in range(ENGINES):
            socket = self._context.socket(zmq.XPUB)
            socket.set_hwm(0)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            server.register(FIRST_WORKER + number, f"tcp://127.0.0.1:{port}")
            self._sockets.append(socket)
        for socket in self._sockets:
            if not socket.poll(SUBSCRIBED_WITHIN_MS):
                raise TimeoutError(f"{server.name} did not subscribe")
            socket.recv()

    def publish(self, engine: int, events: list[list[object]]) -> None:
        if not events:
            return
        number = self._sequence_numbers[engine]
        self._sequence_numbers[engine] = number + 1
        self._sockets[engine].send_multipart([b"", number.to_bytes(8, "big"), encode_batch(events)])

    def close(self) -> None:
        self._context.destroy(linger=0)


def measure(run: Run) -> None:
    if run.trace_path is None:
        run.note("trace: skipped, there is none (--trace FILE)")
        return
    requests = read_trace(run.trace_path, run.trace_requests)
    routed = {
        "taking turns": play(requests, _engines(), take_turns()),
        "knowing all": play(requests, _engines(), know_all),
    }
    asked: dict[str, AskServer] = {}
    by_server: dict[str, Routed] = {}
    lasted_s = requests[-1].at_s - requests[0].at_s
    with running(run.peer_python) as servers:
        for server in servers:
            asked[server.name] = AskServer(server)
            started = time.monotonic()
            publishers = EnginePublishers(server)
            try:
                by_server[server.name] = play(requests, _engines(), asked[server.name], publishers.publish)
            finally:
                publishers.close()
            speed = lasted_s / (time.monotonic() - started)
            run.note(
                f"trace, {server.name}: {len(requests)} requests of {lasted_s:.0f} s, played {speed:.0f} times as fast"
            )
    for name, result in routed.items():
        run.add("trace", f"token hit rate, {name}", "%", {"ours": 100 * result.hit_rate})
    run.add("trace", "token hit rate, asking the server", "%", {n: 100 * r.hit_rate for n, r in by_server.items()})
    for name, result in routed.items():
        run.add("trace", f"mean wait for the first token, {name}", "s", {"ours": _mean(result.waits_s)})
    waits = {name: _mean(result.waits_s) for name, result in by_server.items()}
    run.add("trace", "mean wait for the first token, asking the server", "s", waits)
    run.add("trace", "answers equal to the engine's", "%", {n: 100 * a.equal / a.answers for n, a in asked.items()})
    for percent in (50, 99):
        latencies = {name: percentile(ask.latencies_ms, percent) for name, ask in asked.items()}
        run.add("trace", f"query p{percent}", "ms", latencies)


def _engines() -> list[LruEngine]:
    return [LruEngine(POOL_BLOCKS) for _ in range(ENGINES)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
