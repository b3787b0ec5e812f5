"""Which endpoint to ask, for how long, and which to leave alone. Pure: time is passed in; safe among threads.

Endpoints are in order of preference. The first that is well is asked; if it fails, the next at once, within the same
deadline. While another one is left to be asked, an attempt gets half of the time that is left.

One that failed is left alone for a cool-down, which doubles with each failure up to COOL_DOWN_MAX_S. The first call
after that is the probe; the others go on leaving it alone meanwhile. A missed deadline is not yet a failure of the
endpoint (it may have paused, as everything does): only silence for SILENCE_S is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from indexer.client.answers import Counts, Failure, Reason, failure_of
from indexer.client.http1 import Response
from indexer.client.requests import Request

COOL_DOWN_S, COOL_DOWN_MAX_S = 0.05, 10.0
SILENCE_S = 0.05
VERBS = {Reason.UNREACHABLE: "cannot be reached:", Reason.DEADLINE: "gave", Reason.MALFORMED: "sent"}
T = TypeVar("T")


@dataclass(slots=True)
class Standing:
    """How one endpoint does. `silent_since`: begin of the first of the attempts that were not answered in time."""

    failures: int = 0
    failed_at: float = 0.0
    left_alone_until: float = 0.0
    silent_since: float | None = None


class Attempt(NamedTuple):
    endpoint: int
    began: float
    deadline: float


class Endpoints:
    """How all endpoints do, and what was counted."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self._standings = [Standing() for _ in urls]
        self._lock = threading.Lock()
        self._answered = 0
        self._no_signal: Counter[Reason] = Counter()
        self._failed_over: Counter[Reason] = Counter()

    def choose(self, now: float, deadline: float, tried: set[int], *, insists: bool) -> Attempt | None:
        """The next to ask. `insists`: if all are left alone, one that was not tried is asked all the same."""
        with self._lock:
            untried = [place for place in range(len(self.urls)) if place not in tried]
            usable = [place for place in untried if self._standings[place].left_alone_until <= now]
            if not usable and insists:
                usable = untried
            if not usable:
                return None
            until = now + (deadline - now) / 2 if len(usable) > 1 else deadline
            standing = self._standings[usable[0]]
            if standing.failures:
                standing.left_alone_until = until  # by the others, while it is probed
            return Attempt(usable[0], now, until)

    def answered(self, attempt: Attempt) -> None:
        """It is well, whatever it answered."""
        standing = self._standings[attempt.endpoint]
        if standing.failures or standing.silent_since is not None:
            with self._lock:
                self._standings[attempt.endpoint] = Standing()

    def failed(self, attempt: Attempt, reason: Reason, now: float) -> None:
        """Attempts that were under way together count as one failure."""
        with self._lock:
            standing = self._standings[attempt.endpoint]
            if reason is Reason.DEADLINE and not standing.failures:
                if standing.silent_since is None:
                    standing.silent_since = attempt.began
                if now - standing.silent_since < SILENCE_S:
                    return
            if attempt.began >= standing.failed_at:
                cool_down_s = min(COOL_DOWN_S * 2.0**standing.failures, COOL_DOWN_MAX_S)
                standing.failures = min(standing.failures + 1, 64)
                standing.failed_at, standing.left_alone_until = now, now + cool_down_s

    def count(self, failure: Failure | None, passed_over: Sequence[Reason]) -> None:
        """One call is over. `passed_over`: failures of endpoints before the last."""
        with self._lock:
            if failure is None:
                self._answered += 1
            else:
                self._no_signal[failure.reason] += 1
            self._failed_over.update(passed_over)

    def counts(self) -> Counts:
        with self._lock:
            return Counts(self._answered, dict(self._no_signal), dict(self._failed_over))


class Trip(Generic[T]):
    """One call's way along the endpoints: ask what `next` says, tell how it went, until there is no next."""

    def __init__(self, endpoints: Endpoints, request: Request[T], deadline: float, *, insists: bool) -> None:
        self.response: Response | None = None
        self.answer: T | None = None
        self.failure: Failure | None = None
        self._endpoints = endpoints
        self._request = request
        self._deadline = deadline
        self._insists = insists
        self._tried: set[int] = set()
        self._passed_over: list[Reason] = []
        self._is_over = False

    def next(self, now: float) -> Attempt | None:
        if self._is_over or (self._tried and now >= self._deadline):
            return None
        attempt = self._endpoints.choose(now, self._deadline, self._tried, insists=self._insists)
        if attempt is not None:
            self._tried.add(attempt.endpoint)
        return attempt

    def failed(self, attempt: Attempt, reason: Reason, message: str, now: float) -> None:
        self._endpoints.failed(attempt, reason, now)
        url = self._endpoints.urls[attempt.endpoint]
        self._note(Failure(reason, f"{url} {VERBS[reason]} {message}", url))

    def gave_up(self, message: str) -> None:
        """Out of time for a cause of our own, which no endpoint is blamed for."""
        self._note(Failure(Reason.DEADLINE, message))
        self._is_over = True

    def answered(self, attempt: Attempt, response: Response, now: float) -> None:
        """It is over, unless another endpoint may do better: after a refusal none would."""
        url = self._endpoints.urls[attempt.endpoint]
        failure = failure_of(response.status, response.body, url)
        if failure is None:
            try:
                self.answer = self._request.read(response.body)
            except (ValueError, RecursionError) as error:
                message = f"{url} answered what this client cannot read: {error}"
                failure = Failure(Reason.MALFORMED, message, url, response.status)
        if failure is not None:
            self._note(failure)
            if response.status >= 500 or failure.reason is Reason.MALFORMED:
                self._endpoints.failed(attempt, failure.reason, now)
                return
        self.response = response
        self._endpoints.answered(attempt)
        self._is_over = True
        if failure is None and self.failure is not None:
            self._passed_over.append(self.failure.reason)
            self.failure = None

    def end(self) -> Failure | None:
        """Counts the call. Why there is no answer, if there is none."""
        if not self._tried and self.failure is None:
            message = f"{', '.join(self._endpoints.urls)}: failed shortly before, and not asked again yet"
            self.failure = Failure(Reason.COOLING_DOWN, message)
        self._endpoints.count(self.failure, self._passed_over)
        return self.failure

    def _note(self, failure: Failure) -> None:
        if self.failure is not None:
            self._passed_over.append(self.failure.reason)
        self.failure = failure
