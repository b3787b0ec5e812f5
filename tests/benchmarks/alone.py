"""Parts of ours on their own, without the service around them: the index's memory, rows into and out of Postgres."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

from tests.benchmarks.run import Run

CELLS = ("index_memory", "store")


def measure(run: Run) -> None:
    if run.wants("index_memory"):
        for workers in (1, 4):
            figures = _index_memory(run.scale.index_residencies // workers, workers)
            run.add(
                "index_memory", f"per residency, {workers} sharing", "bytes", {"ours": figures["bytes_per_residency"]}
            )
    if run.wants("store"):
        from tests.benchmarks import store_rows  # a fault in one part must not keep the others from being measured

        for name, value in asyncio.run(store_rows.measure(run.scale.store_rows)).items():
            for suffix, unit in (("_rows_per_s", "rows/s"), ("_us_per_row", "us a row"), ("_s", "s")):
                if name.endswith(suffix):
                    run.add("store", name.removesuffix(suffix).replace("_", " "), unit, {"ours": value})
                    break


def _index_memory(blocks: int, workers: int) -> dict[str, float]:
    """In a process of its own, so that nothing else is counted."""
    command = [sys.executable, "-m", "tests.benchmarks.memory", str(blocks), str(workers)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result
