"""One replay: a request for past batches, its answers read and checked, its deadlines kept.

Purpose: turn what a replay endpoint sends into numbered batches, in ascending order, and always come to an end: at the
end marker, at the first thing that makes no sense, or at a deadline. Knows no sockets and no clock: the source is a
port, and time is passed in.

If broken: an endpoint that is silent or sends garbage would hold up the live batches of its engine for ever.
"""

from __future__ import annotations

from enum import StrEnum

from indexer.stream.ports import ReplaySource
from indexer.wire.errors import WireError
from indexer.wire.frames import END_OF_REPLAY, ReplayedBatch, split_replay


class ReplayEnd(StrEnum):
    """Why a replay is over. Used as a counter's name."""

    MARKER = "marker"  # the endpoint said so
    SILENT = "silent"  # no answer at all within the idle deadline
    IDLE = "idle"  # answers, then silence without an end marker
    DEADLINE = "deadline"  # it took too long, with all its tries
    GARBAGE = "garbage"  # an answer that cannot be read
    UNORDERED = "unordered"  # numbers do not ascend
    # ended by the follower:
    NO_TURN = "no_turn"  # too many replays of others were running
    REPAIRED = "repaired"  # the answers have reached the waiting live batch, and it is the same
    PASSED = "passed"  # the answers went beyond the waiting live batch
    FOREIGN = "foreign"  # the answers have another batch in the place of the waiting live batch
    HOLE = "hole"  # numbers are missing inside the answers
    HELD_FULL = "held_full"  # too many live batches are waiting
    RESTARTED = "restarted"  # the answers are of another run of the engine
    REBUILD = "rebuild"  # the index asked to begin from 0
    STOPPED = "stopped"  # the service stops


class Replay:
    """The answers to one request. Call `take` whenever the source woke, and after `wait_s` seconds without."""

    def __init__(self, source: ReplaySource, start: int, *, now: float, idle_timeout_s: float, deadline: float) -> None:
        self.end: ReplayEnd | None = None
        self.batches = 0
        self.last_number: int | None = None
        self._source = source
        self._idle_timeout_s = idle_timeout_s
        self._deadline = deadline
        self._quiet_since: float | None = now
        source.request(start)

    def take(self, now: float, batches_max: int) -> list[ReplayedBatch]:
        """Batches that have arrived; sets `end` when there will be no more. Time spent applying is not silence."""
        answers = self._source.drain(batches_max)
        if answers:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        batches = self._read(answers)
        if self.end is None:
            self._check_deadlines(now)
        return batches

    def wait_s(self, now: float) -> float:
        """How long to wait for the source, at most."""
        quiet_since = now if self._quiet_since is None else self._quiet_since
        return max(0.0, min(quiet_since + self._idle_timeout_s, self._deadline) - now)

    def _read(self, answers: list[list[bytes]]) -> list[ReplayedBatch]:
        batches: list[ReplayedBatch] = []
        for frames in answers:
            try:
                answer = split_replay(frames)
            except WireError:
                self.end = ReplayEnd.GARBAGE
                break
            if answer is END_OF_REPLAY:
                self.end = ReplayEnd.MARKER
                break
            if self.last_number is not None and answer.sequence_number <= self.last_number:
                self.end = ReplayEnd.UNORDERED
                break
            self.last_number = answer.sequence_number
            batches.append(answer)
        self.batches += len(batches)
        return batches

    def _check_deadlines(self, now: float) -> None:
        if self._quiet_since is not None and now >= self._quiet_since + self._idle_timeout_s:
            self.end = ReplayEnd.IDLE if self.batches else ReplayEnd.SILENT
        elif now >= self._deadline:
            self.end = ReplayEnd.DEADLINE if self.batches else ReplayEnd.SILENT
