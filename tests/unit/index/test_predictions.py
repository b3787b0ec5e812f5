"""When predictions are wrong too often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from indexer.index.predictions import ERROR_BOUNDS, PredictionLimits, PredictionOutcome, Predictions

LIMITS = PredictionLimits(prediction_window_max=10, prediction_count_min=5, prediction_wrong_share_max=0.4)
TOO_LOW, EXACT, TOO_HIGH = PredictionOutcome


def noted(*errors: int) -> Predictions:
    predictions = Predictions(LIMITS)
    for error in errors:
        predictions.note(10_000 + error, 10_000, None, 1.0)
    return predictions


def test_observations_are_told_apart_by_the_sign_of_their_error() -> None:
    predictions = noted(0, 16, -16, 16, 0, 0)
    assert predictions.outcomes == {EXACT: 3, TOO_HIGH: 2, TOO_LOW: 1}
    assert predictions.wrong_share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("error", "bound"), [(0, 0), (1, 32), (32, 32), (33, 128), (-1, -1), (-2, -1), (-33, -32), (-9_000, -8_192)]
)
def test_an_error_is_counted_under_the_first_bound_that_is_not_below_it(error: int, bound: int) -> None:
    assert noted(error).error_counts[ERROR_BOUNDS.index(bound)] == 1


def test_an_error_above_all_bounds_is_counted() -> None:
    assert noted(9_000).error_counts[-1] == 1


def test_too_few_observations_raise_no_alarm() -> None:
    assert not noted(1, 1, 1, 1).is_alarmed
    assert noted(1, 1, 1, 1, 1).is_alarmed


def test_a_window_that_is_shorter_than_the_least_count_is_enough() -> None:
    predictions = Predictions(replace(LIMITS, prediction_window_max=2))
    assert [predictions.note(1, 0, None, 1.0) for _ in range(2)] == [False, True]


def test_a_share_that_is_just_allowed_raises_no_alarm() -> None:
    assert not noted(1, 1, 0, 0, 0).is_alarmed
    assert noted(1, 1, 0, 0, 0, 1).is_alarmed


def test_the_alarm_ends_at_half_of_the_share_that_raises_it() -> None:
    predictions = noted(1, 1, 1, 1, 1)
    changes = [predictions.note(0, 0, None, 10.0 + n) for n in range(8)]
    # 5 of 6 to 5 of 10 wrong, then the window moves on: 4, 3 and 2 of 10
    assert changes == [False] * 7 + [True]
    assert (predictions.is_alarmed, predictions.alarm_at) == (False, 17.0)


def test_the_alarm_changes_once_and_not_with_every_wrong_one() -> None:
    predictions = Predictions(LIMITS)
    assert [predictions.note(1, 0, None, 1.0) for _ in range(7)] == [False] * 4 + [True, False, False]


def test_the_last_wrong_one_is_kept() -> None:
    predictions = noted(0)
    assert predictions.last_wrong is None
    predictions.note(32, 16, 5, 2.0)
    predictions.note(16, 16, 6, 3.0)
    last = predictions.last_wrong
    assert last is not None
    assert (last.predicted_tokens, last.cached_tokens, last.content_key, last.at) == (32, 16, 5, 2.0)
