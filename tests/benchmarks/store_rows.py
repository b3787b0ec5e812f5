"""Rows per second into and out of Postgres, on an embedded server with its normal settings.

python -m tests.benchmarks.store_rows [ROWS]
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from indexer.index.columns import U64, ColumnChanges, PublisherRows, ResidencyColumns
from indexer.index.state import Checkpoint, GhostRow, HolderChanges, HolderKey, PublisherChanges
from indexer.registration import Registration
from indexer.store.embedded import EmbeddedPostgres
from indexer.store.engine import create_database_engine
from indexer.store.postgres import Store
from indexer.store.read_columns import read_residencies
from tests.benchmarks.processes import ProcessTree

GPU = HolderKey("GPU", 0, "")
FLUSH_ROWS = 20_000
NONE: U64 = np.empty(0, np.uint64)


class Counting:
    """Takes what recovery hands over, and counts it."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.rows = 0

    def load(self, rows: PublisherRows) -> None:
        self.rows = sum(map(len, rows.residencies))

    def catch_up_with_others(self) -> None:
        """There are none."""


async def measure(rows: int = 400_000) -> dict[str, float]:
    """Seconds, rows per second, and microseconds of processor time per row (ours and the database's), by name."""
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
    results |= await _rates(store, url, registration, rows)
    await store.close()
    return results


async def _rates(store: Store, url: str, registration: Registration, rows: int) -> dict[str, float]:
    dice = np.random.default_rng(7)
    hashes = _hashes(dice, rows)
    some = hashes[: rows // 4]
    rate = partial(_rate, store, registration)
    results = await rate("insert", [_columns(upserted=_rows(dice, part)) for part in _parts(hashes)])
    results |= await rate("count_change", [_columns(counted=part) for part in _parts(some)])
    results |= await rate("overwrite", [_columns(removed=part, upserted=_rows(dice, part)) for part in _parts(some)])
    results |= await _recovery_rates(store, url, registration)
    results |= await rate("delete", [_columns(removed=part) for part in _parts(hashes)])
    ghosts = [{int(h): GhostRow(int(h), 1, n) for n, h in enumerate(part)} for part in _parts(some)]
    results |= await rate("ghost", ghosts)
    return results


async def _rate(
    store: Store, registration: Registration, name: str, changed: Sequence[ColumnChanges | dict[int, GhostRow]]
) -> dict[str, float]:
    portions = [_portion(registration, number, part) for number, part in enumerate(changed)]
    rows = sum(map(_rows_in, changed))
    tree = ProcessTree(os.getpid())
    started, cpu_started, database_started = time.perf_counter(), time.process_time(), tree.database_cpu_s()
    for portion in portions:
        await store.write([portion])
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return {
        f"{name}_rows_per_s": rows / seconds,
        f"{name}_cpu_us_per_row": cpu_s / rows * 1e6,
        f"{name}_database_cpu_us_per_row": (tree.database_cpu_s() - database_started) / rows * 1e6,
    }


def _rows_in(changed: ColumnChanges | dict[int, GhostRow]) -> int:
    """One that is removed and then written anew is one."""
    if isinstance(changed, dict):
        return len(changed)
    return max(len(changed.removed), len(changed.upserted)) + len(changed.counted)


async def _recovery_rates(store: Store, url: str, registration: Registration) -> dict[str, float]:
    counting = Counting(registration)
    started = time.perf_counter()
    await store.recover(counting)  # type: ignore[arg-type]
    one_by_one_s = time.perf_counter() - started
    engine = create_database_engine(url).execution_options(isolation_level="REPEATABLE READ")
    with engine.begin() as connection:
        started = time.perf_counter()
        rows = sum(map(len, read_residencies(connection, registration.publisher_id)))
        columns_s = time.perf_counter() - started
    engine.dispose()
    return {"recover_rows_per_s": counting.rows / one_by_one_s, "read_columns_rows_per_s": rows / columns_s}


def _portion(registration: Registration, number: int, part: ColumnChanges | dict[int, GhostRow]) -> PublisherChanges:
    return PublisherChanges(
        publisher=registration.key,
        publisher_id=registration.publisher_id,
        checkpoint=Checkpoint(1, number, number),
        granule=16,
        holders=[HolderChanges(GPU, columns=part)] if isinstance(part, ColumnChanges) else [],
        ghosts_cleared=False,
        ghosts={} if isinstance(part, ColumnChanges) else dict(part),
        expired=None,
        groups=None,
        side_state=None,
    )


def _columns(*, removed: U64 = NONE, upserted: ResidencyColumns | None = None, counted: U64 = NONE) -> ColumnChanges:
    no_rows = _rows(np.random.default_rng(0), NONE)
    return ColumnChanges(
        removed,
        no_rows if upserted is None else upserted,
        counted,
        np.full(len(counted), 2, np.uint32),
        np.zeros(len(counted), np.int32),
    )


def _rows(dice: np.random.Generator, hashes: U64) -> ResidencyColumns:
    count = len(hashes)
    return ResidencyColumns(
        engine_hashes=hashes,
        content_keys=_hashes(dice, count),
        parent_keys=_hashes(dice, count),
        has_parent=np.ones(count, np.bool_),
        local_hashes=_hashes(dice, count),
        has_local=np.ones(count, np.bool_),
        block_tokens=np.full(count, 16, np.uint32),
        positions=np.full(count, 32, np.uint64),
        reference_counts=np.ones(count, np.uint32),
        cohorts=np.zeros(count, np.int32),
    )


def _parts(hashes: U64) -> Iterator[U64]:
    return (hashes[first : first + FLUSH_ROWS] for first in range(0, len(hashes), FLUSH_ROWS))


def _hashes(dice: np.random.Generator, count: int) -> U64:
    return dice.integers(0, 2**64, count, dtype=np.uint64)


if __name__ == "__main__":
    for name, value in asyncio.run(measure(*map(int, sys.argv[1:]))).items():
        print(f"{name:34} {value:12,.3f}" if value < 100 else f"{name:34} {value:12,.0f}")
