"""`make bench`: the numbers of this machine, beside the floors that this project sets itself.

Ingest and queries run against the service as a user starts it; memory and rows in processes of their own. A few
minutes. `--json FILE` writes the same as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

from tests.benchmarks import served, store_rows

FLOORS = {
    ("ingest, 32-block events", "blocks_per_s"): 150_000,
    ("query, 512 tokens", "p50_ms"): 0.8,
    ("query, 8192 tokens", "p50_ms"): 3.0,
    ("memory, 1 worker", "bytes_per_residency"): 300,
    ("store", "insert_rows_per_s"): 20_000,
}


def memory(blocks: int, workers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.memory", str(blocks), str(workers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    results = served.measure()
    results["memory, 1 worker"] = memory(500_000, 1)
    results["memory, 4 workers"] = memory(250_000, 4)
    results["store"] = asyncio.run(store_rows.measure())
    for name, figures in results.items():
        for figure, value in figures.items():
            floor = FLOORS.get((name, figure))
            text = f"{value:,.0f}" if value >= 1_000 else f"{value:,.2f}"
            print(f"{name:<26} {figure:<24} {text:>12}" + (f"   (floor {floor:,})" if floor else ""))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
