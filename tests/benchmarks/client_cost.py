"""What the client library costs: the round trip of a query by it, beside bare sockets and httpx, in one run.

`python -m tests.benchmarks.client_cost [--rounds 5] [--calls 500]`. Rounds take turns, and of each way the best round
is shown: others on the machine only ever add. The server is that of `http_cost`, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from indexer.client import AsyncIndexClient, IndexClient, local_hashes
from tests.benchmarks.http_cost import BLOCK_TOKENS, LONG_PROMPT, PROMPT, server
from tests.benchmarks.http_load import KeepAlive, encode_request, percentile
from tests.benchmarks.servers import Request

MSGPACK = "application/msgpack"
PATH = "/v1/prefix-hits"
DEADLINE_S = 10.0
WARM_UP = 20
CASES = {"512": ("few", PROMPT), "8192": ("lengthy", LONG_PROMPT)}


def timed(call: Callable[[], Any], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def ways(url: str, model: str, prompt: list[int], runner: asyncio.Runner) -> dict[str, Callable[[int], list[float]]]:
    """By name: so many calls, and the seconds that each took."""
    packed = array("I", prompt)
    body = msgspec.msgpack.encode({"model": model, "token_ids": packed.tobytes()})
    bare = KeepAlive(int(url.rpartition(":")[2]))
    request = encode_request(int(url.rpartition(":")[2]), Request(PATH, MSGPACK, body))
    client, a_client = IndexClient(url, deadline_s=DEADLINE_S), AsyncIndexClient(url, deadline_s=DEADLINE_S)
    x_client, ax_client = httpx.Client(trust_env=False), httpx.AsyncClient(trust_env=False)
    named = {"content": body, "headers": {"content-type": MSGPACK}}
    decode = msgspec.msgpack.decode

    def asked(**question: Any) -> Callable[[int], list[float]]:
        answer = client.prefix_hits(model, **question)
        assert answer.failure is None, answer.failure
        return lambda calls: timed(lambda: client.prefix_hits(model, **question), calls)

    def awaited(call: Callable[[], Any]) -> Callable[[int], list[float]]:
        async def repeat(calls: int) -> list[float]:
            times = []
            for _ in range(calls):
                began = time.perf_counter()
                await call()
                times.append(time.perf_counter() - began)
            return times

        return lambda calls: runner.run(repeat(calls))

    found: dict[str, Callable[[int], list[float]]] = {
        "bare socket, nothing decoded": lambda calls: timed(lambda: bare.exchange(request), calls),
        "httpx.Client": lambda calls: timed(lambda: decode(x_client.post(url + PATH, **named).content), calls),
        "IndexClient, array of u32": asked(token_ids=packed),
        "IndexClient, list": asked(token_ids=prompt),
    }
    if client.prefix_hits(model, local_hashes=[1], granule=BLOCK_TOKENS).is_signal:
        found["IndexClient, hashed by it"] = asked(token_ids=packed, granule=BLOCK_TOKENS)
        found["IndexClient, hashed before"] = asked(local_hashes=local_hashes(packed, BLOCK_TOKENS))
    found["hashing alone"] = lambda calls: timed(lambda: local_hashes(packed, BLOCK_TOKENS), calls)
    found["httpx.AsyncClient"] = awaited(lambda: ax_client.post(url + PATH, **named))
    found["AsyncIndexClient, array of u32"] = awaited(lambda: a_client.prefix_hits(model, packed))
    return found


def import_ms() -> float:
    """In a fresh process, beside what the interpreter itself has loaded; the best of five."""
    program = "import time; t = time.perf_counter(); import indexer.client; print((time.perf_counter() - t) * 1e3)"
    command = [sys.executable, "-c", program]
    return min(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=500)
    arguments = parser.parse_args()
    print(f"import indexer.client: {import_ms():.0f} ms")
    with server() as (url, _), asyncio.Runner() as runner:
        for tokens, (model, prompt) in CASES.items():
            by_name = ways(url, model, prompt, runner)
            best: dict[str, tuple[float, float]] = {}
            for _ in range(arguments.rounds):
                for name, way in by_name.items():
                    way(WARM_UP)
                    times = way(arguments.calls)
                    figures = percentile(times, 50) * 1e6, percentile(times, 99) * 1e6
                    best[name] = min(figures, best.get(name, figures))
            for name, (p50, p99) in best.items():
                print(f"{tokens:>5} tokens  {name:<32} p50 {p50:7.0f} us  p99 {p99:7.0f} us")


if __name__ == "__main__":
    main()
