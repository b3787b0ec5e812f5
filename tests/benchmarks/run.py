"""What every cell is given: how big, against whom, and where its figures go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.report import Report


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. Entries are residencies: a block held by a worker."""

    entries: int = 1_000_000
    one_block_entries: int = 250_000
    churned: int = 2_000_000
    live: int = 100_000
    stall_entries: int = 500_000
    spread_entries: int = 250_000
    load_s: int = 3
    freshness_s: float = 6.0
    steady_s: float = 60.0
    many_s: float = 120.0
    index_residencies: int = 500_000
    store_rows: int = 200_000


QUICK = Scale(
    entries=200_000,
    one_block_entries=50_000,
    churned=300_000,
    stall_entries=100_000,
    spread_entries=60_000,
    load_s=1,
    freshness_s=2.0,
    steady_s=6.0,
    many_s=6.0,
    index_residencies=100_000,
    store_rows=50_000,
)


@dataclass(slots=True)
class Run:
    """One call of the benchmarks. `wanted` are the cells to measure."""

    report: Report
    scale: Scale
    wanted: frozenset[str]
    peer_python: Path | None = None
    trace_path: Path | None = None
    trace_requests: int = 2_000

    def wants(self, *cells: str) -> bool:
        """Any of them."""
        return not self.wanted.isdisjoint(cells)

    def add(
        self, cell: str, name: str, unit: str, values: Mapping[str, float | None], base: float | None = None
    ) -> None:
        """`values` by the name of the server; nothing if the cell is not wanted."""
        if self.wants(cell):
            self.report.add(cell, name, unit, values.get("ours"), values.get("peer"), base)

    def note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)
