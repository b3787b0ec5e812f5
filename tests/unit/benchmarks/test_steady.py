"""How memory's growth is told from its noise."""

from __future__ import annotations

import pytest

from tests.benchmarks.steady import Watched, slope


def test_the_slope_is_that_of_the_line_through_the_points() -> None:
    assert slope([(0.0, 10), (1.0, 12), (2.0, 14)]) == pytest.approx(2.0)
    assert slope([(0.0, 10), (1.0, 14), (2.0, 10)]) == pytest.approx(0.0)
    assert slope([(5.0, 7)]) == slope([]) == 0.0


def test_growth_is_counted_once_memory_has_settled() -> None:
    watched = Watched(
        at=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], resident_bytes=[0, 500, 1_000, 1_001, 1_002, 1_003, 1_004]
    )
    assert watched.lasted_s == 6.0
    assert watched.growth_bytes_per_s() == pytest.approx(1.0)
