"""Figures, the targets they are held against, and the table that shows both. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum


class Against(Enum):
    """What a figure is compared with."""

    PEER = "peer"
    """The peer's figure of the same run."""
    BASE = "own"
    """Another figure of ours in the same run, without the load or the size that is being looked at."""
    LIMIT = "limit"
    """A number."""


@dataclass(frozen=True, slots=True)
class Target:
    """At most `most`: times the peer's or our own other figure, or in the figure's own unit."""

    against: Against
    most: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. Smaller is better wherever there is a target."""

    cell: str
    name: str
    unit: str
    ours: float | None
    peer: float | None = None
    base: float | None = None
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        """To the peer, or to our own other figure if the target says so."""
        other = self.base if self.target is not None and self.target.against is Against.BASE else self.peer
        return None if self.ours is None or not other else self.ours / other

    @property
    def verdict(self) -> str:
        """`ok`, `miss`, or nothing if there is no target or nothing to hold against it."""
        if self.target is None:
            return ""
        measured = self.ours if self.target.against is Against.LIMIT else self.ratio
        if measured is None:
            return ""
        return "ok" if measured <= self.target.most else "miss"


@dataclass(slots=True)
class Report:
    """All figures of a run, in order, and what a reader must know of each cell."""

    targets: dict[tuple[str, str], Target]
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        cell: str,
        name: str,
        unit: str,
        ours: float | None,
        peer: float | None = None,
        base: float | None = None,
    ) -> None:
        self.figures.append(Figure(cell, name, unit, ours, peer, base, self.targets.get((cell, name))))

    def as_json(self) -> dict[str, object]:
        return {
            "figures": [_figure_as_json(figure) for figure in self.figures],
            "notes": self.notes,
            "seconds": self.seconds,
        }


def _figure_as_json(figure: Figure) -> dict[str, object]:
    plain: dict[str, object] = asdict(figure)
    if figure.target is not None:
        plain["target"] = {"against": figure.target.against.value, "most": figure.target.most}
    return plain | {"ratio": figure.ratio, "verdict": figure.verdict}


HEADINGS = ("cell", "figure", "unit", "ours", "peer", "ratio", "target", "")


def format_table(figures: Iterable[Figure]) -> str:
    """Cell by cell, in the order of their first figures; columns as wide as they need to be, numbers to the right."""
    figures = list(figures)
    cells = list(dict.fromkeys(figure.cell for figure in figures))
    rows: list[Sequence[str]] = [HEADINGS]
    cell = ""
    for figure in sorted(figures, key=lambda figure: cells.index(figure.cell)):
        rows.append(_row(figure, figure.cell if figure.cell != cell else ""))
        cell = figure.cell
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(_line(row, widths) for row in rows)


def _row(figure: Figure, cell: str) -> Sequence[str]:
    numbers = format_number(figure.ours), format_number(figure.peer), format_number(figure.ratio)
    return (cell, figure.name, figure.unit, *numbers, format_target(figure.target), figure.verdict)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    parts = [
        text.rjust(width) if 3 <= column <= 5 else text.ljust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()


def format_number(value: float | None) -> str:
    """Three figures, or all those before the point."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def format_target(target: Target | None) -> str:
    if target is None:
        return ""
    what = {Against.PEER: " x peer", Against.BASE: " x own", Against.LIMIT: ""}[target.against]
    return f"<= {target.most:g}{what}"
