"""One repair: its turn, its tries, its bounds; without sockets and without time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from indexer.stream.limits import StreamLimits
from indexer.stream.repair import Repair, ReplayTurns
from indexer.stream.replay import ReplayEnd
from tests.stream_stand_ins import END_MARKER, number_frame

LIMITS = StreamLimits(
    replay_turn_wait_s=10.0, replay_idle_timeout_s=2.0, replay_timeout_s=60.0, replay_tries_max=3, replays_max=1
)
GARBAGE = [b"garbage"]


def batch(number: int) -> list[bytes]:
    return [b"", number_frame(number), b"p%d" % number]


class Endpoint:
    """Answers each request by the next script; the last one is used again and again."""

    def __init__(self, *scripts: list[list[bytes]]) -> None:
        self.scripts = list(scripts)
        self.requests: list[int] = []
        self.open = 0

    def connect(self) -> Endpoint:
        self.open += 1
        return self

    def request(self, start: int) -> None:
        self.requests.append(start)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.waiting = list(script)

    def drain(self, messages_max: int) -> list[list[bytes]]:
        taken, self.waiting = self.waiting[:messages_max], self.waiting[messages_max:]
        return taken

    def close(self) -> None:
        self.open -= 1


class Case:
    def __init__(self, endpoint: Endpoint, start: int = 0, turns: ReplayTurns | None = None) -> None:
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        self.woken = 0
        turn = (turns or ReplayTurns(1)).ask(self.wake)
        self.now, self.next_number = 0.0, start
        self.repair = Repair(start, turn, endpoint.connect, LIMITS, self.counters, 0.0, next_number=start)

    def wake(self) -> None:
        self.woken += 1

    def step(self) -> bool:
        """Take what is there; False: it is over."""
        for number, _ in self.repair.take(self.now, 64):
            self.next_number = max(self.next_number, number + 1)
        return self.repair.goes_on(self.now, self.next_number)

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> ReplayEnd:
        while self.step():
            self.now += 0.1
            meanwhile()
            assert self.now < 1_000
        assert self.repair.end is not None
        assert self.endpoint.open == 0
        return self.repair.end


def test_everything_up_to_the_end_marker() -> None:
    case = Case(Endpoint([batch(0), batch(1), END_MARKER]))
    assert case.run() is ReplayEnd.MARKER
    assert (case.repair.brought, case.next_number, case.endpoint.requests) == (2, 2, [0])
    assert case.counters == {"replays": 1, "replays_marker": 1}


def test_a_turn_is_given_in_order_and_given_back() -> None:
    turns = ReplayTurns(1)
    first, second, third = (Case(Endpoint([END_MARKER]), turns=turns) for _ in range(3))
    assert [case.repair.is_waiting_for_turn for case in (first, second, third)] == [True, True, True]
    assert not first.step()
    assert (second.woken, third.woken) == (1, 0)
    second.repair.close()
    assert third.woken == 1
    assert third.run() is ReplayEnd.MARKER


def test_waiting_for_a_turn_has_a_limit() -> None:
    turns = ReplayTurns(1)
    turns.ask(lambda: None)
    case = Case(Endpoint([END_MARKER]), turns=turns)
    assert case.repair.wait_s(4.0) == 6.0
    assert case.run() is ReplayEnd.NO_TURN
    assert 9.9 < case.now < 10.2
    assert case.endpoint.requests == []


@pytest.mark.parametrize("pause_s", [1.9, 0.0], ids=["trickling", "endless"])
def test_an_endpoint_that_never_ends_is_given_up_after_the_time_for_all_tries(pause_s: float) -> None:
    endpoint = Endpoint([])
    case = Case(endpoint)
    answers = iter(range(10**6))
    due = 0.0

    def answer() -> None:
        nonlocal due
        if case.now >= due:
            due = case.now + pause_s
            endpoint.waiting.append(batch(next(answers)))

    assert case.run(answer) is ReplayEnd.DEADLINE
    assert LIMITS.replay_timeout_s <= case.now < LIMITS.replay_timeout_s + 1


def test_tries_without_progress_are_few() -> None:
    case = Case(Endpoint([GARBAGE]), start=7)
    assert case.run() is ReplayEnd.GARBAGE
    assert case.endpoint.requests == [7, 7, 7]
    assert case.counters["replays_garbage"] == 3


def test_progress_allows_more_tries_and_overlaps_by_one_batch() -> None:
    case = Case(Endpoint([batch(0), GARBAGE], [batch(0), batch(1), GARBAGE], [batch(1), batch(2), END_MARKER]))
    assert case.run() is ReplayEnd.MARKER
    assert case.endpoint.requests == [0, 0, 1]
    assert case.next_number == 3


def test_endless_garbage_with_progress_ends_by_the_time_for_all_tries() -> None:
    endpoint = Endpoint([GARBAGE])
    case = Case(endpoint)

    def progress() -> None:
        case.next_number += 1

    assert case.run(progress) in (ReplayEnd.GARBAGE, ReplayEnd.DEADLINE)
    assert case.now < LIMITS.replay_timeout_s + 1


@pytest.mark.parametrize("end", [ReplayEnd.RESTARTED, ReplayEnd.FOREIGN, ReplayEnd.REPAIRED, ReplayEnd.HELD_FULL])
def test_what_the_answers_say_ends_it(end: ReplayEnd) -> None:
    case = Case(Endpoint([batch(0)]))
    assert case.step()
    case.repair.stop(end)
    assert case.run() is end


def test_it_can_be_stopped_while_it_waits_for_its_turn() -> None:
    turns = ReplayTurns(1)
    holder = turns.ask(lambda: None)
    case = Case(Endpoint([END_MARKER]), turns=turns)
    case.repair.stop(ReplayEnd.HELD_FULL)
    assert case.run() is ReplayEnd.HELD_FULL
    holder.give_back()
    assert Case(Endpoint([END_MARKER]), turns=turns).run() is ReplayEnd.MARKER
