"""What a query costs besides tokens and look-up: processor time of the HTTP server per request.

`python -m tests.benchmarks.http_cost [--repeats 5] [--asgi] [--keys 10]`; wrk must be installed. Of several runs of a
second the cheapest is shown: others on the machine only ever add. The server runs in a process of its own, as in the
service but over an index that was filled by hand: no Postgres, no followers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import uvloop

from indexer.api.access import Keyring
from indexer.http_server import HttpServer
from indexer.index.content_index import ContentIndex
from indexer.keys import Key, Role, digest_of, new_key
from indexer.registration import Registration
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import application

CLOCK_TICKS_S = os.sysconf("SC_CLK_TCK")
BLOCK_TOKENS = 16
TOKEN = "kvi_" + "x" * 43
KEY = Key("used", digest_of(TOKEN.encode()), Role.QUERY, frozenset({"default"}))
PROMPT = list(range(100_000, 100_512))
LONG_PROMPT = list(range(100_000, 108_192))
MANY_WORKERS = 256
HELD = (("few", 4, PROMPT), ("lengthy", 4, LONG_PROMPT), ("many", MANY_WORKERS, PROMPT[:BLOCK_TOKENS]))

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one token, nothing held": ("/v1/prefix-hits", {"model": "none", "token_ids": [1]}),
    "no token, of Dynamo": ("/query", {"model_name": "few", "token_ids": []}),
    "512 tokens, 4 hits": ("/v1/prefix-hits", {"model": "few", "token_ids": PROMPT}),
    "512 tokens, of Dynamo": ("/query", {"model_name": "few", "token_ids": PROMPT}),
    "17 tokens, 256 hits": ("/v1/prefix-hits", {"model": "many", "token_ids": PROMPT[:17]}),
}
LUA = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer %s"
wrk.body = [[%s]]
done = function(s, latency, _)
  local failed = s.errors.status + s.errors.connect + s.errors.read + s.errors.write + s.errors.timeout
  io.write(string.format("CELL %%d %%d %%d %%d\\n", s.requests, s.duration, latency:percentile(50), failed))
end
"""


def filled_index() -> ContentIndex:
    """Of model `none` nothing is held; of `few` 4 workers hold all of the prompt, of `lengthy` all of the long one; of
    `many` 256 its first block."""
    index = ContentIndex()
    index.add_publisher(Registration("1", 0, "none", "tcp://127.0.0.1:5557", publisher_id=1))
    for model, workers, tokens in HELD:
        payload = stored(tokens)
        for number in range(workers):
            worker_id = f"{len(model)}{number}"
            endpoint = "tcp://127.0.0.1:5557"
            registration = Registration(worker_id, 0, model, endpoint, block_size=BLOCK_TOKENS, publisher_id=1)
            index.add_publisher(registration).apply(decode_batch(payload), 0, number)
    return index


def stored(tokens: list[int]) -> bytes:
    hashes = list(range(1, len(tokens) // BLOCK_TOKENS + 1))
    return msgspec.msgpack.encode([1.0, [["BlockStored", hashes, None, tokens, BLOCK_TOKENS, None, "GPU", None]], 0])


async def serve(is_direct: bool, keys: int) -> None:
    keyring = Keyring([*(new_key(f"k{i}", "query")[1] for i in range(keys - 1)), KEY]) if keys else None
    app = application(filled_index(), keyring)
    gc.freeze()
    with HttpServer(app, "127.0.0.1", 0, app.direct if is_direct else None) as server:
        print(server.url, flush=True)
        await server.serve()


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[tuple[str, int]]:
    """URL and process of a running server."""
    command = [sys.executable, "-m", "tests.benchmarks.http_cost", "--serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout
    try:
        yield process.stdout.readline().decode().strip(), process.pid
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_S


def load(url: str, pid: int, path: str, body: object, connections: int) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA % (TOKEN, json.dumps(body, separators=(",", ":"))))
        script.flush()
        before = cpu_s(pid)
        command = ["wrk", "-t1", f"-c{connections}", "-d1s", "-s", script.name, url + path]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        used = cpu_s(pid) - before
    requests, duration_us, p50_us, failed = map(int, re.findall(r"CELL (\d+) (\d+) (\d+) (\d+)", output)[0])
    return {
        "cpu_us": used / requests * 1e6,
        "p50_us": p50_us,
        "per_s": requests / duration_us * 1e6,
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--asgi", action="store_true", help="let the application answer all queries")
    parser.add_argument("--keys", type=int, default=0, help="how many there are; the last one is used")
    parser.add_argument("--serve", action="store_true", help="be the server (what the benchmark starts)")
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve(not arguments.asgi, arguments.keys))
        return
    with server(*["--asgi"] * arguments.asgi, "--keys", str(arguments.keys)) as (url, pid):
        for name, (path, body) in CASES.items():
            for connections in (1, 8):
                runs = [load(url, pid, path, body, connections) for _ in range(1 + arguments.repeats)]
                figures = min(runs, key=lambda run: run["cpu_us"])
                print(f"{name:<24} -c{connections}  " + "  ".join(f"{k} {v:8,.1f}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
