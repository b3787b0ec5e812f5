"""Rows per second into and out of Postgres, on an embedded server with its normal settings.

python -m tests.benchmarks.store_rows [ROWS]
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from indexer.index.state import (
    Checkpoint,
    CountChange,
    GhostRow,
    HolderChanges,
    HolderKey,
    PublisherChanges,
    ResidencyRow,
)
from indexer.registration import Registration
from indexer.store.embedded import EmbeddedPostgres
from indexer.store.postgres import Store

GPU = HolderKey("GPU", 0, "")
FLUSH_ROWS = 20_000


class Counting:
    """Takes what recovery hands over, and counts it."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.rows = 0

    def load(self, **state: object) -> None:
        self.rows = sum(1 for _ in state["residencies"])  # type: ignore[attr-defined]

    def catch_up_with_others(self) -> None:
        """There are none."""


async def measure(rows: int = 400_000) -> dict[str, float]:
    """Seconds and rows per second, by name."""
    directory = Path(tempfile.mkdtemp(prefix="kv-index-bench-"))
    server = EmbeddedPostgres(directory)
    try:
        return await _measure(server, rows)
    finally:
        await server.stop()
        shutil.rmtree(directory)


async def _measure(server: EmbeddedPostgres, rows: int) -> dict[str, float]:
    results = {}
    started = time.perf_counter()
    url = await server.start()
    results["first_start_s"] = time.perf_counter() - started
    await server.stop()
    started = time.perf_counter()
    await server.start()
    results["later_start_s"] = time.perf_counter() - started
    store = Store(url)
    started = time.perf_counter()
    await store.open(wait=False)
    results["open_and_migrate_s"] = time.perf_counter() - started
    registration = await store.save(Registration("http://worker", 0, "model", "tcp://127.0.0.1:5557"))
    results |= await _rates(store, registration, rows)
    await store.close()
    return results


async def _rates(store: Store, registration: Registration, rows: int) -> dict[str, float]:
    dice = random.Random(7)
    hashes = [dice.getrandbits(64) for _ in range(rows)]
    results = {}
    for name, changed in (
        ("insert_rows_per_s", {h: _row(dice) for h in hashes}),
        ("count_change_rows_per_s", {h: CountChange(2) for h in hashes[: rows // 4]}),
        ("overwrite_rows_per_s", {h: _row(dice) for h in hashes[: rows // 4]}),
    ):
        results[name] = await _rate(store, registration, changed)
    counting = Counting(registration)
    started = time.perf_counter()
    await store.recover(counting)  # type: ignore[arg-type]
    results["recover_rows_per_s"] = counting.rows / (time.perf_counter() - started)
    results["delete_rows_per_s"] = await _rate(store, registration, dict.fromkeys(hashes))
    ghosts = {h: GhostRow(h, 1, n) for n, h in enumerate(hashes[: rows // 4])}
    results["ghost_rows_per_s"] = await _rate(store, registration, {}, ghosts)
    return results


async def _rate(store: Store, registration: Registration, rows: dict, ghosts: dict | None = None) -> float:
    portions = list(_portions(registration, rows, ghosts or {}))
    started = time.perf_counter()
    for portion in portions:
        await store.write([portion])
    return (len(rows) + len(ghosts or {})) / (time.perf_counter() - started)


def _portions(registration: Registration, rows: dict, ghosts: dict) -> Iterator[PublisherChanges]:
    residency_items, ghost_items = list(rows.items()), list(ghosts.items())
    for first in range(0, max(len(rows), len(ghosts)), FLUSH_ROWS):
        portion = HolderChanges(GPU, False, dict(residency_items[first : first + FLUSH_ROWS]))
        yield PublisherChanges(
            publisher=registration.key,
            publisher_id=registration.publisher_id,
            checkpoint=Checkpoint(1, first, first),
            granule=16,
            holders=[portion],
            ghosts_cleared=False,
            ghosts=dict(ghost_items[first : first + FLUSH_ROWS]),
            groups=None,
            side_state=None,
        )


def _row(dice: random.Random) -> ResidencyRow:
    return ResidencyRow(dice.getrandbits(64), dice.getrandbits(64), dice.getrandbits(64), 16, 32, 1)


if __name__ == "__main__":
    for name, value in asyncio.run(measure(*map(int, sys.argv[1:]))).items():
        print(f"{name:24} {value:12,.3f}" if name.endswith("_s") and value < 100 else f"{name:24} {value:12,.0f}")
