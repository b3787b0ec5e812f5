"""What `python -m tests.benchmarks` measures when it is told what to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks.report import Report
from tests.benchmarks.run import QUICK, Run
from tests.benchmarks.targets import TARGETS


def make_run(*cells: str) -> Run:
    return Run(Report(TARGETS), QUICK, frozenset(cells))


def test_cells_are_named_with_commas_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.parse(["--only", "query,trace"]).only == {"query", "trace"}
    with pytest.raises(SystemExit):
        benchmarks.parse(["--only", "query,speed"])
    assert "no such cell: speed" in capsys.readouterr().err


def test_every_target_belongs_to_a_cell() -> None:
    assert {cell for cell, _ in TARGETS} <= set(benchmarks.CELLS)


def test_without_a_trace_its_cell_is_skipped_and_says_so() -> None:
    run = make_run("trace")
    assert benchmarks.measure(run) == []
    assert (run.report.figures, len(run.report.notes)) == ([], 1)


def test_a_part_that_fails_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(run: Run) -> None:
        raise RuntimeError("no server")

    def works(run: Run) -> None:
        run.add("trace", "query p50", "ms", {"ours": 1.0})
        run.add("query", "not wanted", "us", {"ours": 1.0})

    fails.__module__, works.__module__ = "tests.benchmarks.first", "tests.benchmarks.second"
    monkeypatch.setattr(benchmarks, "PARTS", ((("trace",), fails), (("trace",), works)))
    run = make_run("trace")
    assert benchmarks.measure(run) == ["first"]
    assert [figure.name for figure in run.report.figures] == ["query p50"]
    assert run.report.notes[0] == "first: failed and is not complete: no server"


def test_a_peer_needs_root_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.os, "geteuid", lambda: 1_000)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--peer", str(Path("python"))])
    monkeypatch.delenv(benchmarks.IN_NAMESPACE, raising=False)
    with pytest.raises(SystemExit) as ended:
        benchmarks.main()
    assert "needs root" in str(ended.value.code)
