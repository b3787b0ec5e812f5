"""Resident memory per residency, measured in a process of its own: `python -m tests.benchmarks.memory BLOCKS WORKERS`.

Prints one JSON object. The changes for the store are taken as the writer would, so only the index itself is counted.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from indexer.index.content_index import ContentIndex
from indexer.registration import Registration
from indexer.wire.decode import decode_batch
from tests.benchmarks.streams import PREFILL, encode_stream


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(blocks: int, workers: int) -> dict[str, float]:
    payloads = encode_stream(PREFILL, blocks)
    index = ContentIndex()
    warm = index.add_publisher(Registration("warm", 0, "warm", "tcp://127.0.0.1:1", publisher_id=1))
    for number, payload in enumerate(payloads[:8]):
        warm.apply(decode_batch(payload), number, 0)
    gc.collect()
    before = resident_bytes()
    for worker in range(workers):
        publisher = index.add_publisher(
            Registration(f"w{worker}", 0, "m", "tcp://127.0.0.1:1", publisher_id=worker + 2)
        )
        for number, payload in enumerate(payloads):
            publisher.apply(decode_batch(payload), number, 0)
            publisher.take_changes()
    gc.collect()
    residencies = workers * sum(1 for _ in publisher.residencies())
    return {
        "workers": workers,
        "residencies": residencies,
        "bytes_per_residency": (resident_bytes() - before) / residencies,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))) + "\n")
