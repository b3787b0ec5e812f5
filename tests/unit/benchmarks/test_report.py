"""Ratios, verdicts and the table of `make bench`."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.report import Against, Figure, Report, Target, format_number, format_table
from tests.benchmarks.targets import TARGETS

HALF_THE_PEER = Target(Against.PEER, 0.5)
TWICE_OUR_OWN = Target(Against.BASE, 2.0)
AT_MOST_20 = Target(Against.LIMIT, 20.0)


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("query", "CPU", "us", 50.0, 100.0, None, HALF_THE_PEER), "ok"),
        (Figure("query", "CPU", "us", 51.0, 100.0, None, HALF_THE_PEER), "miss"),
        (Figure("query", "CPU", "us", 50.0, None, None, HALF_THE_PEER), ""),
        (Figure("query", "CPU", "us", None, 100.0, None, HALF_THE_PEER), ""),
        (Figure("query", "CPU", "us", 50.0, 0.0, None, HALF_THE_PEER), ""),
        (Figure("mixed", "p99", "us", 200.0, 1.0, 100.0, TWICE_OUR_OWN), "ok"),
        (Figure("mixed", "p99", "us", 201.0, 900.0, 100.0, TWICE_OUR_OWN), "miss"),
        (Figure("stall", "longest", "ms", 20.0, 1.0, None, AT_MOST_20), "ok"),
        (Figure("stall", "longest", "ms", 20.1, None, None, AT_MOST_20), "miss"),
        (Figure("query", "p99", "us", 1.0, 100.0), ""),
    ],
)
def test_a_verdict_needs_a_target_and_something_to_hold_against_it(figure: Figure, verdict: str) -> None:
    assert figure.verdict == verdict


def test_the_ratio_is_to_the_peer_unless_the_target_speaks_of_our_own_figure() -> None:
    assert Figure("query", "CPU", "us", 50.0, 100.0).ratio == 0.5
    assert Figure("mixed", "p99", "us", 150.0, 300.0, 100.0, TWICE_OUR_OWN).ratio == 1.5


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.00"), (1.234, "1.23"), (45.67, "45.7"), (99.96, "100.0"), (1234567.8, "1,234,568")],
)
def test_numbers_show_three_figures_or_all_before_the_point(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_the_table_gathers_a_cell_and_names_it_once() -> None:
    table = format_table(
        [
            Figure("ingest", "CPU per block", "us", 4.0, 1.0, None, HALF_THE_PEER),
            Figure("query", "CPU", "us", 400.0, 1_000.0, None, HALF_THE_PEER),
            Figure("ingest", "rate", "blocks/s", 123_456.0),
        ]
    )
    assert table.splitlines() == [
        "cell    figure         unit         ours   peer  ratio  target",
        "ingest  CPU per block  us           4.00   1.00   4.00  <= 0.5 x peer  miss",
        "        rate           blocks/s  123,456      -      -",
        "query   CPU            us            400  1,000   0.40  <= 0.5 x peer  ok",
    ]


def test_a_report_finds_targets_by_cell_and_name_and_becomes_json() -> None:
    report = Report({("query", "CPU"): HALF_THE_PEER})
    report.add("query", "CPU", "us", 40.0, 100.0)
    report.add("query", "p50", "us", 40.0)
    first, second = json.loads(json.dumps(report.as_json()))["figures"]
    assert (first["ratio"], first["verdict"], first["target"]) == (0.4, "ok", {"against": "peer", "most": 0.5})
    assert (second["ratio"], second["verdict"], second["target"]) == (None, "", None)


def test_every_target_asks_for_a_positive_bound() -> None:
    assert all(target.most > 0 for target in TARGETS.values())
