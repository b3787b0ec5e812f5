"""One repair: past batches are asked for until they are there, or until one of its bounds is reached.

Purpose: whatever a replay endpoint does, a repair ends in bounded time. It waits for its turn among all publishers,
asks, and asks again from where the answers broke off, as long as that brings something. Knows no clock and does not
wait: the follower calls `take` when something woke it, and goes on receiving live batches meanwhile.

Bounds: `replay_turn_wait_s` for the turn; then `replay_timeout_s` for all tries together, `replay_idle_timeout_s` for
each silence, `replay_tries_max` tries in a row without progress.

If broken: live batches would wait behind an endpoint that is silent, trickles or never ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from indexer.stream.limits import StreamLimits
from indexer.stream.ports import ReplaySource
from indexer.stream.replay import Replay, ReplayEnd
from indexer.wire.frames import ReplayedBatch

ASKED_AGAIN_AFTER: Final = frozenset({ReplayEnd.GARBAGE, ReplayEnd.UNORDERED, ReplayEnd.HOLE})


class ReplayTurn:
    """The right to run one replay. Whoever waits for it is woken when it is given."""

    __slots__ = ("_turns", "_wake", "is_given")

    def __init__(self, turns: ReplayTurns, wake: Callable[[], None]) -> None:
        self._turns = turns
        self._wake = wake
        self.is_given = False

    def give(self) -> None:
        self.is_given = True
        self._wake()

    def give_back(self) -> None:
        """Or stop waiting for it."""
        self._turns.take_back(self)


class ReplayTurns:
    """A bounded number of replays at once over all publishers; first come, first served."""

    def __init__(self, replays_max: int) -> None:
        self._free = replays_max
        self._waiting: deque[ReplayTurn] = deque()

    def ask(self, wake: Callable[[], None]) -> ReplayTurn:
        turn = ReplayTurn(self, wake)
        self._waiting.append(turn)
        self._give()
        return turn

    def take_back(self, turn: ReplayTurn) -> None:
        if turn.is_given:
            turn.is_given = False
            self._free += 1
        elif turn in self._waiting:
            self._waiting.remove(turn)
        self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft().give()


class Repair:
    """`start`, `first_number`: of the request that runs, what it asked from and the first number answered, if any.

    `brought`: answers of all requests. `end`: why it is over; None = it is not.
    """

    def __init__(
        self,
        start: int,
        turn: ReplayTurn,
        connect: Callable[[], ReplaySource],
        limits: StreamLimits,
        counters: Counter[str],
        now: float,
        *,
        next_number: int,
    ) -> None:
        self.start = start
        self.first_number: int | None = None
        self.end: ReplayEnd | None = None
        self.brought = 0
        self._turn = turn
        self._connect = connect
        self._limits = limits
        self._counters = counters
        self._deadline = now + limits.replay_turn_wait_s
        self._tries_left = limits.replay_tries_max
        self._next_number = next_number
        self._source: ReplaySource | None = None
        self._replay: Replay | None = None

    @property
    def is_waiting_for_turn(self) -> bool:
        return self._replay is None

    def take(self, now: float, batches_max: int) -> list[ReplayedBatch]:
        """Batches that have arrived."""
        if self._replay is None and not self._has_begun(now):
            return []
        assert self._replay is not None
        answers = self._replay.take(now, batches_max)
        if answers and self.first_number is None:
            self.first_number = answers[0].sequence_number
        self.brought += len(answers)
        return answers

    def stop(self, end: ReplayEnd) -> None:
        """What was taken says that this is the end; `HOLE` is asked for again."""
        if self._replay is not None:
            self._replay.end = end
        else:
            self._finish(end)

    def goes_on(self, now: float, next_number: int) -> bool:
        """After what was taken has been used, up to before `next_number`: ask again if that is worth it."""
        end = None if self._replay is None else self._replay.end
        if self.end is None and end is not None and not self._is_asked_again(end, now, next_number):
            self._finish(end)
        return self.end is None

    def wait_s(self, now: float) -> float:
        """How long to wait for news, at most."""
        return max(0.0, self._deadline - now) if self._replay is None else self._replay.wait_s(now)

    def close(self) -> None:
        self._disconnect()
        self._turn.give_back()

    def _has_begun(self, now: float) -> bool:
        if self._turn.is_given:
            self._deadline = now + self._limits.replay_timeout_s
            self._request(self.start, now)
        elif now >= self._deadline:
            self._finish(ReplayEnd.NO_TURN)
        return self._turn.is_given

    def _is_asked_again(self, end: ReplayEnd, now: float, next_number: int) -> bool:
        if end not in ASKED_AGAIN_AFTER or now >= self._deadline:
            return False
        has_progress = next_number > self._next_number
        self._tries_left = self._limits.replay_tries_max if has_progress else self._tries_left - 1
        if not self._tries_left:
            return False
        self._count(end)
        # with the last batch known, which shows that the answers are still those of the same run
        self._request(max(0, next_number - 1) if has_progress or end is ReplayEnd.HOLE else self.start, now)
        self._next_number = next_number
        return True

    def _request(self, start: int, now: float) -> None:
        self._disconnect()
        self.start, self.first_number = start, None
        self._source = self._connect()
        self._replay = Replay(
            self._source,
            start,
            now=now,
            idle_timeout_s=self._limits.replay_idle_timeout_s,
            deadline=self._deadline,
        )

    def _finish(self, end: ReplayEnd) -> None:
        self.end = end
        self._count(end)
        self.close()

    def _count(self, end: ReplayEnd) -> None:
        self._counters["replays"] += 1
        self._counters[f"replays_{end}"] += 1

    def _disconnect(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
