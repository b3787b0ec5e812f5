"""One replay: answers read and checked, deadlines kept, without sockets and without time."""

from __future__ import annotations

import pytest

from indexer.stream.replay import Replay, ReplayEnd
from indexer.wire.frames import ReplayedBatch
from tests.stream_stand_ins import END_MARKER, number_frame

IDLE_S, TOTAL_S = 2.0, 10.0


class Script:
    """A source that has just these messages."""

    def __init__(self, *messages: list[bytes]) -> None:
        self.messages = list(messages)
        self.requests: list[int] = []

    def request(self, start: int) -> None:
        self.requests.append(start)

    def drain(self, messages_max: int) -> list[list[bytes]]:
        taken, self.messages = self.messages[:messages_max], self.messages[messages_max:]
        return taken

    def close(self) -> None: ...


def replay(source: Script, start: int = 0, now: float = 100.0) -> Replay:
    return Replay(source, start, now=now, idle_timeout_s=IDLE_S, deadline=now + TOTAL_S)


def batch(number: int, form: int = 4) -> list[bytes]:
    return (
        [b"", b"topic", number_frame(number), b"p%d" % number][-form:]
        if form < 4
        else [b"", b"topic", number_frame(number), b"p%d" % number]
    )


@pytest.mark.parametrize("form", [2, 3, 4])
def test_answers_come_out_in_order_until_the_end_marker(form: int) -> None:
    source = Script(batch(5, form), batch(6, form), END_MARKER[-form:], batch(7, form))
    asked = replay(source, start=5)
    assert source.requests == [5]
    assert asked.take(100.1, 64) == [ReplayedBatch(5, b"p5"), ReplayedBatch(6, b"p6")]
    assert asked.end is ReplayEnd.MARKER
    assert (asked.batches, asked.last_number) == (2, 6)


def test_answers_are_taken_in_bursts() -> None:
    asked = replay(Script(batch(0), batch(1), batch(2)))
    assert len(asked.take(100.1, 2)) == 2
    assert len(asked.take(100.1, 2)) == 1
    assert asked.end is None


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ([b"data"], ReplayEnd.GARBAGE),
        ([b"", b"\x05", b"data"], ReplayEnd.GARBAGE),
        ([b"", b"", b"\xff" * 8, b"data"], ReplayEnd.GARBAGE),
        (batch(1), ReplayEnd.UNORDERED),
        (batch(0), ReplayEnd.UNORDERED),
    ],
)
def test_the_first_thing_that_makes_no_sense_ends_it_and_what_came_before_counts(
    message: list[bytes], end: ReplayEnd
) -> None:
    asked = replay(Script(batch(0), batch(1), message, batch(2), END_MARKER))
    assert [b.sequence_number for b in asked.take(100.1, 64)] == [0, 1]
    assert asked.end is end


def test_no_answer_at_all_ends_it_after_the_idle_deadline() -> None:
    asked = replay(Script())
    assert asked.take(101.9, 64) == []
    assert asked.end is None
    assert asked.wait_s(101.9) == pytest.approx(0.1)
    asked.take(102.0, 64)
    assert asked.end is ReplayEnd.SILENT


def test_silence_without_an_end_marker_ends_it_after_the_idle_deadline() -> None:
    source = Script(batch(0))
    asked = replay(source)
    assert len(asked.take(101.5, 64)) == 1
    assert asked.wait_s(103.0) == pytest.approx(2.0)  # applying until 103.0 was not silence
    asked.take(103.0, 64)
    assert asked.end is None
    asked.take(105.0, 64)
    assert asked.end is ReplayEnd.IDLE


def test_an_endpoint_that_trickles_is_given_up_at_the_total_deadline() -> None:
    source = Script()
    asked = replay(source)
    now = 100.0
    while asked.end is None:
        now += 1.0
        source.messages.append(batch(int(now)))
        asked.take(now, 64)
    assert asked.end is ReplayEnd.DEADLINE
    assert now == 110.0
