"""docs/operations.md and docs/api.md say what the code says.

`python -m tests.unit.test_operations_doc` prints the tables of settings and metrics anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from pydantic.fields import FieldInfo

from indexer.collector import IndexCollector, _of_leases, _of_writer
from indexer.index.state import CoverageReason
from indexer.metrics import Metrics
from indexer.settings import Settings, environment_variable
from indexer.stream.replay import ReplayEnd
from tests.unit.api.stand_ins import StandInRegistry

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "operations.md"
API_DOCUMENT = ROOT / "docs" / "api.md"


class IdleWriter:
    """What a writer shows that has flushed once."""

    flushes = flush_failures = rows_written = values_refused = pending = 0
    fenced_flushes = takeovers = rows_reconciled = kept_dropped = kept = 0
    lag_s = 0.0
    last_flush_s = last_flush_at = 1.0


class IdleLeases:
    held = publishers = 0


def settings_table() -> str:
    lines = ["| setting | environment | default | bounds | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        cells = (f"`{name}`", f"`{environment_variable(name)}`", _default(field), _bounds(field), field.description)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    default = field.default
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:,}" if isinstance(default, int | float) and default != 8090 else f"`{default}`"


def _bounds(field: FieldInfo) -> str:
    bounds: dict[str, Any] = {
        name: getattr(item, name) for item in field.metadata for name in ("ge", "le") if hasattr(item, name)
    }
    return f"{bounds['ge']:,} to {bounds['le']:,}" if len(bounds) == 2 else ""


def families() -> list[Metric]:
    collector = IndexCollector(StandInRegistry(None), 10)  # type: ignore[arg-type]
    own = [f for f in Metrics().registry.collect() if f.name.startswith("indexer_")]
    of_database = *_of_writer(IdleWriter()), *_of_leases(IdleLeases())  # type: ignore[arg-type]
    return [*own, *collector.collect(), *of_database]


def metrics_table() -> str:
    lines = ["| metric | kind | meaning |", "| --- | --- | --- |"]
    for family in sorted(families(), key=lambda f: f.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(lines)


def test_every_setting_is_in_the_table() -> None:
    assert settings_table() in DOCUMENT.read_text()


def test_every_metric_is_in_the_table() -> None:
    assert metrics_table() in DOCUMENT.read_text()


def test_every_reason_of_coverage_is_explained() -> None:
    table = DOCUMENT.read_text().partition("## Coverage")[2].partition("## Counters")[0]
    assert {str(reason) for reason in CoverageReason} <= set(re.findall(r"`([a-z_]+)`", table))


def in_source(folder: str, *patterns: str) -> set[str]:
    """Every name that one of the patterns finds in the code of a folder."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "indexer" / folder).glob("*.py")))
    return {name for pattern in patterns for name in re.findall(pattern, text)}


def test_every_counter_is_explained() -> None:
    counters = r'counters\["(\w+)"\]'
    reasons = in_source("wire", r'WireError\(\s*"(\w+)"', r'return "(\w+)"') - in_source("wire", r'"(sequence_\w+)"')
    reasons |= in_source("identity", r'WireError\(\s*"(\w+)"') | in_source("index", r'WireError\(\s*"(\w+)"')
    names = in_source("index", counters) | in_source("stream", counters) | {str(end) for end in ReplayEnd} | reasons
    explained = set(re.findall(r"`([a-z_]+)`", DOCUMENT.read_text()))
    assert len(names) > 50
    assert names - {"frame_count"} <= explained


def test_every_error_code_is_explained() -> None:
    codes = in_source("api", r'ApiError\(\d+, "(\w+)"', r'error_response\(\d+, "(\w+)"', r'return "(\w+)", f"')
    codes |= in_source("api/dialects", r'ApiError\(\d+, "(\w+)"')
    codes |= in_source("index", r'QueryWarning\("(\w+)"')
    assert len(codes) > 20
    assert codes <= set(re.findall(r"`([a-z_]+)`", API_DOCUMENT.read_text()))


def test_names_carry_their_unit_last() -> None:
    for name, field in Settings.model_fields.items():
        if field.annotation in (int, float) and name not in ("port", "replicas", "heat_sample_every"):
            assert re.search(r"_(max|min|s)$", name), name


if __name__ == "__main__":
    print(settings_table(), metrics_table(), sep="\n\n")  # noqa: T201
