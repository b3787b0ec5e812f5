"""How often a publisher's predicted hits were what its engine reported.

Purpose: a wrong setting (EAGLE, block sizes, another engine behind the address) makes answers wrong without making them
look wrong. Routers tell what they were answered, and what the engine then said it had cached.

Invariant: the alarm is raised when more than a share of the last observations are wrong, and ends only at half of that
share, so that it does not flicker.

If broken: an operator would trust hits that are never true, or be woken for nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

ERROR_BOUNDS = (-8_192, -2_048, -512, -128, -32, -1, 0, 32, 128, 512, 2_048, 8_192)
"""Upper bounds of a histogram of errors in tokens: predicted less cached, so what is above 0 was predicted too high."""
CALM_SHARE = 0.5


class PredictionOutcome(StrEnum):
    """Predicted tokens beside those that the engine had cached."""

    TOO_LOW = "too_low"
    EXACT = "exact"
    TOO_HIGH = "too_high"


@dataclass(frozen=True, slots=True)
class PredictionLimits:
    """The alarm looks at the last `prediction_window_max` observations, if there are `prediction_count_min`, or as many
    as it looks at."""

    prediction_window_max: int
    prediction_count_min: int
    prediction_wrong_share_max: float


@dataclass(frozen=True, slots=True)
class WrongPrediction:
    """`at` in seconds since 1970; `content_key`: of the prefix that was predicted or cached, if that was told."""

    predicted_tokens: int
    cached_tokens: int
    content_key: int | None
    at: float


class Predictions:
    """Of one publisher. Cost: 1 us an observation."""

    def __init__(self, limits: PredictionLimits) -> None:
        self._limits = limits
        self._window: deque[PredictionOutcome] = deque(maxlen=limits.prediction_window_max)
        self._in_window: Counter[PredictionOutcome] = Counter()
        self.outcomes: Counter[PredictionOutcome] = Counter()
        self.error_counts = [0] * (len(ERROR_BOUNDS) + 1)
        self.last_wrong: WrongPrediction | None = None
        self.is_alarmed = False
        self.alarm_at: float | None = None  # when that changed last

    def note(self, predicted_tokens: int, cached_tokens: int, content_key: int | None, at: float) -> bool:
        """Whether the alarm was raised or has ended with this observation."""
        error = predicted_tokens - cached_tokens
        self.error_counts[bisect_left(ERROR_BOUNDS, error)] += 1
        outcome = _outcome_of(error)
        self.outcomes[outcome] += 1
        if outcome is not PredictionOutcome.EXACT:
            self.last_wrong = WrongPrediction(predicted_tokens, cached_tokens, content_key, at)
        if len(self._window) == self._window.maxlen:
            self._in_window[self._window[0]] -= 1
        self._window.append(outcome)
        self._in_window[outcome] += 1
        return self._judge(at)

    @property
    def count(self) -> int:
        """Observations that the alarm looks at."""
        return len(self._window)

    @property
    def wrong_share(self) -> float:
        """Of those."""
        exact = self._in_window[PredictionOutcome.EXACT]
        return 1 - exact / self.count if self.count else 0.0

    def in_window(self, outcome: PredictionOutcome) -> int:
        return self._in_window[outcome]

    def _judge(self, at: float) -> bool:
        share_max = self._limits.prediction_wrong_share_max
        if self.is_alarmed:
            is_alarmed = self.wrong_share > CALM_SHARE * share_max
        else:
            count_min = min(self._limits.prediction_count_min, self._limits.prediction_window_max)
            is_alarmed = self.count >= count_min and self.wrong_share > share_max
        has_changed = is_alarmed != self.is_alarmed
        if has_changed:
            self.is_alarmed, self.alarm_at = is_alarmed, at
        return has_changed


def _outcome_of(error: int) -> PredictionOutcome:
    if error == 0:
        return PredictionOutcome.EXACT
    return PredictionOutcome.TOO_LOW if error < 0 else PredictionOutcome.TOO_HIGH
