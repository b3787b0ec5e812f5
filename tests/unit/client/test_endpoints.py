from __future__ import annotations

from indexer.client.answers import Reason
from indexer.client.endpoints import COOL_DOWN_MAX_S, COOL_DOWN_S, SILENCE_S, Attempt, Endpoints

FIRST, SECOND = 0, 1
DEADLINE_S = 0.010


def chosen(endpoints: Endpoints, now: float, *tried: int, insists: bool = False) -> Attempt | None:
    return endpoints.choose(now, now + DEADLINE_S, set(tried), insists=insists)


def place(attempt: Attempt | None) -> int | None:
    return None if attempt is None else attempt.endpoint


def test_the_first_is_preferred_and_gets_half_of_the_time_if_another_is_left() -> None:
    endpoints = Endpoints(["a", "b"])
    assert chosen(endpoints, 100.0) == Attempt(FIRST, 100.0, 100.0 + DEADLINE_S / 2)
    assert chosen(endpoints, 100.0, FIRST) == Attempt(SECOND, 100.0, 100.0 + DEADLINE_S)
    assert chosen(endpoints, 100.0, FIRST, SECOND) is None


def test_one_that_failed_is_left_alone_and_then_probed_by_one_call() -> None:
    endpoints = Endpoints(["a", "b"])
    endpoints.failed(Attempt(FIRST, 100.0, 100.1), Reason.UNREACHABLE, 100.0)
    assert place(chosen(endpoints, 100.0 + COOL_DOWN_S * 0.9)) == SECOND
    probe = chosen(endpoints, 100.0 + COOL_DOWN_S)
    assert place(probe) == FIRST
    assert place(chosen(endpoints, 100.0 + COOL_DOWN_S)) == SECOND, "while it is probed"
    assert probe is not None
    endpoints.answered(probe)
    assert place(chosen(endpoints, 100.0 + COOL_DOWN_S)) == FIRST


def test_a_probe_that_never_ends_is_followed_by_another() -> None:
    endpoints = Endpoints(["a"])
    endpoints.failed(Attempt(FIRST, 100.0, 100.1), Reason.UNREACHABLE, 100.0)
    assert place(chosen(endpoints, 101.0)) == FIRST
    assert chosen(endpoints, 101.0) is None
    assert place(chosen(endpoints, 101.0 + DEADLINE_S)) == FIRST


def test_cool_downs_double_up_to_a_bound() -> None:
    endpoints = Endpoints(["a"])
    now, pauses = 100.0, []
    for _ in range(100):
        attempt = chosen(endpoints, now)
        assert attempt is not None
        endpoints.failed(attempt, Reason.UNREACHABLE, now)
        pause = COOL_DOWN_S
        while chosen(endpoints, now + pause * 0.999) is None and chosen(endpoints, now + pause) is None:
            pause *= 2
            if pause > COOL_DOWN_MAX_S:
                pause = COOL_DOWN_MAX_S
                break
        pauses.append(pause)
        now += 1_000
    assert pauses[:4] == [COOL_DOWN_S, COOL_DOWN_S * 2, COOL_DOWN_S * 4, COOL_DOWN_S * 8]
    assert pauses[-1] == COOL_DOWN_MAX_S


def test_attempts_under_way_together_are_one_failure() -> None:
    endpoints = Endpoints(["a"])
    attempts = [chosen(endpoints, 100.0) for _ in range(5)]
    for attempt in attempts:
        assert attempt is not None
        endpoints.failed(attempt, Reason.UNREACHABLE, 100.001)
    assert place(chosen(endpoints, 100.001 + COOL_DOWN_S)) == FIRST


def test_missed_deadlines_are_a_failure_only_after_some_silence() -> None:
    endpoints = Endpoints(["a"])
    endpoints.failed(Attempt(FIRST, 100.0, 100.01), Reason.DEADLINE, 100.01)
    assert place(chosen(endpoints, 100.01)) == FIRST
    endpoints.failed(Attempt(FIRST, 100.01, 100.02), Reason.DEADLINE, 100.001 + SILENCE_S)
    assert chosen(endpoints, 100.001 + SILENCE_S) is None


def test_an_answer_ends_the_silence() -> None:
    endpoints = Endpoints(["a"])
    endpoints.failed(Attempt(FIRST, 100.0, 100.01), Reason.DEADLINE, 100.01)
    endpoints.answered(Attempt(FIRST, 100.02, 100.03))
    endpoints.failed(Attempt(FIRST, 100.04, 100.05), Reason.DEADLINE, 100.001 + SILENCE_S)
    assert place(chosen(endpoints, 100.001 + SILENCE_S)) == FIRST


def test_a_probe_that_is_late_is_a_failure_at_once() -> None:
    endpoints = Endpoints(["a"])
    endpoints.failed(Attempt(FIRST, 100.0, 100.1), Reason.UNREACHABLE, 100.0)
    probe = chosen(endpoints, 101.0)
    assert probe is not None
    endpoints.failed(probe, Reason.DEADLINE, 101.01)
    assert chosen(endpoints, 101.01 + COOL_DOWN_S) is None
    assert place(chosen(endpoints, 101.01 + 2 * COOL_DOWN_S)) == FIRST


def test_a_call_that_insists_asks_one_that_is_left_alone() -> None:
    endpoints = Endpoints(["a", "b"])
    for attempt in (Attempt(FIRST, 100.0, 100.1), Attempt(SECOND, 100.0, 100.1)):
        endpoints.failed(attempt, Reason.UNREACHABLE, 100.0)
    assert chosen(endpoints, 100.0) is None
    assert place(chosen(endpoints, 100.0, insists=True)) == FIRST
    assert place(chosen(endpoints, 100.0, FIRST, insists=True)) == SECOND
    assert chosen(endpoints, 100.0, FIRST, SECOND, insists=True) is None
