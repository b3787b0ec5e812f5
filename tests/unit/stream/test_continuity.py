"""Whether a stream goes on: each live batch in each state, each end of each replay, then what it does over time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from indexer.index.state import Checkpoint, Coverage, CoverageReason, ProvenBatch
from indexer.stream.continuity import WARM_UP_S, Ask, Continuity, Purpose, Verdict
from indexer.stream.held import HeldBatches, NumberedBatch
from indexer.stream.limits import StreamLimits
from indexer.stream.replay import ReplayEnd
from tests.stream_stand_ins import RecordingPublisher, payload, registration

APPLY, DROP, AGAIN, ASK, WAIT = Verdict.APPLY, Verdict.DROP, Verdict.AGAIN, Verdict.ASK, Verdict.WAIT
PROVE, FILL, REBUILD = Purpose.PROVE, Purpose.FILL, Purpose.REBUILD
LIMITS = StreamLimits(replay_cool_down_s=30.0)


def batch(number: int, run: int = 1, sent_at: float | None = None) -> NumberedBatch:
    data = payload(ts=1_000.0 * run + number if sent_at is None else sent_at)
    return NumberedBatch(number, 1_000_000 * run + number, data)


class Stream:
    """A machine, what it drives, and the queue in front of it. `after` works on the queue as a follower does."""

    def __init__(self, *, has_replay: bool = True, checkpoint: Checkpoint | None = None) -> None:
        self.index = RecordingPublisher(registration(), checkpoint)
        self.counters: Counter[str] = Counter()
        self.now = 100.0
        self.held = HeldBatches(100, 1_000_000)
        self.machine = Continuity(
            self.index, self.counters, LIMITS, has_replay=has_replay, now=lambda: self.now, wall=lambda: self.now
        )

    def connect(self) -> Stream:
        self.machine.connection_changed(self.held, is_connected=True)
        self.machine.wants_to_ask(self.held)
        return self

    def disconnect(self) -> Stream:
        self.machine.connection_changed(self.held, is_connected=False)
        return self

    def hold(self, *batches: NumberedBatch) -> Stream:
        for each in batches:
            self.held.extend([each])
        return self

    def live(self, each: NumberedBatch) -> Verdict:
        """What is done with this batch, once nothing has to be looked at again."""
        self.hold(each)
        verdict = AGAIN
        while verdict is AGAIN and self.held.first:
            verdict = self.machine.live(each, self.held)
        if verdict in (APPLY, DROP):
            self.held.pop()
        if verdict is APPLY:
            self.take(each)
        return verdict

    def take(self, each: NumberedBatch) -> None:
        self.index.applied.append(each.sequence_number)
        self.index._move(sequence_number=each.sequence_number, fingerprint=each.fingerprint)

    def follow(self, *numbers: int, run: int = 1) -> Stream:
        for number in numbers:
            assert self.live(batch(number, run)) is APPLY, number
        return self

    def ask(self) -> Ask:
        assert self.machine.wants_to_ask(self.held)
        return self.machine.ask(self.held)

    def answer(self, *answers: NumberedBatch, end: ReplayEnd = ReplayEnd.MARKER) -> ReplayEnd:
        """One request, answered; returns why it was over."""
        start = self.ask().start
        for place, each in enumerate(answers):
            said = self.machine.answered(each, self.held, start=start, is_first=place == 0)
            if isinstance(said, ReplayEnd):
                end = said
                break
            if said is APPLY:
                self.take(each)
        self.machine.ended(end, self.held)
        return end

    @property
    def reason(self) -> str:
        return str(self.index.checkpoint.reason)

    @property
    def wanted(self) -> Purpose | None:
        return self.machine._wanted if self.machine.wants_to_ask(self.held) else None


def checkpoint_3() -> Checkpoint:
    return Checkpoint(1, 3, batch(3).fingerprint)


# ---------------------------------------------------------------------- live batches


def fresh() -> Stream:
    return Stream(has_replay=False).connect()


def fresh_with_replay() -> Stream:
    stream = Stream().connect()
    stream.answer()
    return stream


def from_checkpoint() -> Stream:
    return Stream(has_replay=False, checkpoint=checkpoint_3()).connect()


def followed() -> Stream:
    return fresh().follow(0, 1, 2, 3)


def followed_with_replay() -> Stream:
    return fresh_with_replay().follow(0, 1, 2, 3)


def reconnected() -> Stream:
    return followed().disconnect().connect()


def reconnected_and_proven() -> Stream:
    stream = followed_with_replay().disconnect().connect()
    stream.answer(batch(3))
    return stream


def reconnected_and_silent() -> Stream:
    stream = followed_with_replay().disconnect().connect()
    stream.answer(end=ReplayEnd.SILENT)
    return stream


def replayed() -> Stream:
    stream = Stream().connect()
    stream.answer(*map(batch, range(4)))
    return stream


def replayed_late() -> Stream:
    stream = Stream().connect()
    stream.answer(batch(2), batch(3))
    return stream


LIVE = [batch(0), batch(0, 2), batch(3), batch(3, 2), batch(4), batch(6)]
# What is done in the end with each of these batches (number, run), and why coverage is then what it is.
TABLE: dict[Callable[[], Stream], list[tuple[Verdict, str]]] = {
    fresh: [
        (APPLY, "from_start"),
        (APPLY, "from_start"),
        (APPLY, "joined_late"),
        (APPLY, "joined_late"),
        (APPLY, "joined_late"),
        (APPLY, "joined_late"),
    ],
    fresh_with_replay: [
        (APPLY, "from_start"),
        (APPLY, "from_start"),
        (ASK, "from_start"),
        (ASK, "from_start"),
        (ASK, "from_start"),
        (ASK, "from_start"),
    ],
    from_checkpoint: [
        (WAIT, "continuity_unproven"),
        (WAIT, "continuity_unproven"),
        (DROP, "proven"),
        (APPLY, "joined_late"),
        (APPLY, "continuity_unproven"),
        (APPLY, "gap"),
    ],
    followed: [
        (DROP, "from_start"),
        (APPLY, "from_start"),
        (DROP, "from_start"),
        (APPLY, "joined_late"),
        (APPLY, "from_start"),
        (APPLY, "gap"),
    ],
    followed_with_replay: [
        (DROP, "from_start"),
        (APPLY, "from_start"),
        (DROP, "from_start"),
        (ASK, "from_start"),
        (APPLY, "from_start"),
        (ASK, "from_start"),
    ],
    reconnected: [
        (APPLY, "from_start"),
        (APPLY, "from_start"),
        (APPLY, "joined_late"),
        (APPLY, "joined_late"),
        (APPLY, "continuity_unproven"),
        (APPLY, "gap"),
    ],
    reconnected_and_proven: [
        (APPLY, "from_start"),
        (APPLY, "from_start"),
        (ASK, "from_start"),
        (ASK, "from_start"),
        (ASK, "from_start"),
        (ASK, "from_start"),
    ],
    reconnected_and_silent: [
        (APPLY, "from_start"),
        (APPLY, "from_start"),
        (APPLY, "joined_late"),
        (APPLY, "joined_late"),
        (APPLY, "continuity_unproven"),
        (APPLY, "gap"),
    ],
    replayed: [
        (DROP, "proven"),
        (APPLY, "from_start"),
        (DROP, "proven"),
        (ASK, "from_start"),
        (ASK, "replayed"),
        (ASK, "replayed"),
    ],
    replayed_late: [
        (APPLY, "from_start"),
        (APPLY, "from_start"),
        (DROP, "replay_starts_later"),
        (ASK, "from_start"),
        (ASK, "replay_starts_later"),
        (ASK, "replay_starts_later"),
    ],
}


@pytest.mark.parametrize(
    ("state", "column"),
    list(itertools.product(TABLE, range(len(LIVE)))),
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_every_live_batch_in_every_state(state: Callable[[], Stream], column: int) -> None:
    stream = state()
    verdict = stream.live(LIVE[column])
    assert (verdict, stream.reason) == TABLE[state][column]


# ---------------------------------------------------------------------- ends of replays

ENDS = [
    ReplayEnd.MARKER,
    ReplayEnd.SILENT,
    ReplayEnd.IDLE,
    ReplayEnd.DEADLINE,
    ReplayEnd.GARBAGE,
    ReplayEnd.UNORDERED,
    ReplayEnd.NO_TURN,
    ReplayEnd.HELD_FULL,
    ReplayEnd.HOLE,
    ReplayEnd.PASSED,
]


@pytest.mark.parametrize("end", ENDS)
def test_a_gap_that_brings_nothing_is_lost_and_the_batch_is_applied(end: ReplayEnd) -> None:
    stream = followed_with_replay()
    assert stream.live(batch(6)) is ASK
    assert stream.answer(batch(3), end=end) is end
    assert stream.machine.live(batch(6), stream.held) is APPLY
    assert ("gap", 4, 5) in stream.index.told
    assert stream.reason == "gap"


@pytest.mark.parametrize("end", ENDS[1:8])
def test_a_failed_proof_leaves_a_doubt_that_a_later_one_settles(end: ReplayEnd) -> None:
    stream = followed_with_replay().disconnect().connect()
    stream.answer(end=end)
    assert stream.reason == "continuity_unproven"
    assert stream.wanted is None
    stream.follow(4)
    stream.now += LIMITS.replay_cool_down_s
    assert stream.wanted is PROVE
    stream.hold(batch(5))
    assert stream.answer(batch(3), batch(4), batch(5)) is ReplayEnd.MARKER
    assert stream.reason == "proven"
    assert stream.index.coverage is Coverage.COMPLETE


def test_pauses_of_an_endpoint_that_fails_grow_up_to_ten_times() -> None:
    stream = followed_with_replay().disconnect().connect()
    pauses = []
    for _ in range(6):
        stream.answer(end=ReplayEnd.SILENT)
        pauses.append((stream.machine.cool_until - stream.now) / LIMITS.replay_cool_down_s)
        stream.now = stream.machine.cool_until
    assert pauses == [1, 2, 4, 8, 10, 10]


# ---------------------------------------------------------------------- what is asked for


def test_a_gap_is_asked_for_with_the_batch_before_it_and_must_reach_the_one_after_it() -> None:
    stream = followed_with_replay()
    assert stream.live(batch(6)) is ASK
    assert stream.answer(batch(3), batch(4), batch(5), batch(6)) is ReplayEnd.REPAIRED
    assert stream.counters["gaps_repaired"] == 1
    assert stream.index.applied == [0, 1, 2, 3, 4, 5]
    assert stream.machine.live(batch(6), stream.held) is APPLY
    assert stream.reason == "from_start"


def test_a_new_run_behind_a_proxy_is_found_at_its_first_gap() -> None:
    stream = followed_with_replay()
    assert stream.live(batch(6, 2)) is ASK
    assert stream.answer(*(batch(n, 2) for n in (3, 4, 5, 6))) is ReplayEnd.RESTARTED
    assert stream.index.told[-1] == ("restart",)
    assert stream.wanted is PROVE
    assert stream.answer(*(batch(n, 2) for n in range(7))) is ReplayEnd.MARKER
    assert (stream.reason, stream.index.coverage) == ("proven", Coverage.COMPLETE)
    assert stream.machine.live(batch(6, 2), stream.held) is DROP


def test_a_lead_in_that_does_not_fit_drops_nothing_if_the_held_batch_is_not_there_either() -> None:
    stream = followed_with_replay()
    assert stream.live(batch(6)) is ASK
    assert stream.answer(*(batch(n, 9) for n in (3, 4, 5, 6))) is ReplayEnd.FOREIGN
    assert ("restart",) not in stream.index.told
    assert stream.machine.is_distrusted
    assert stream.index.applied == [0, 1, 2, 3]
    assert stream.machine.live(batch(6), stream.held) is APPLY
    assert stream.reason == "gap"


def test_a_foreign_endpoint_at_the_start_is_found_by_the_first_live_batch() -> None:
    stream = Stream().connect()
    stream.answer(*(batch(n, 9) for n in range(4)))
    assert stream.reason == "replayed"
    assert stream.live(batch(4)) is ASK
    assert stream.answer(batch(3, 9), batch(4, 9)) is ReplayEnd.FOREIGN
    assert stream.machine.live(batch(4), stream.held) is ASK
    assert stream.answer(*(batch(n, 9) for n in range(5))) is ReplayEnd.FOREIGN
    assert stream.machine.is_distrusted
    assert stream.live(batch(4)) is APPLY
    assert (stream.reason, stream.index.checkpoint.since) == ("replay_is_foreign", 4)
    assert stream.wanted is None


def test_an_endpoint_is_not_blamed_while_the_connection_is_lost() -> None:
    stream = followed_with_replay()
    assert stream.live(batch(6)) is ASK
    ask = stream.ask()
    stream.disconnect()
    for n in (3, 4, 5):
        assert stream.machine.answered(batch(n, 2), stream.held, start=ask.start, is_first=n == 3) is DROP
    assert stream.machine.answered(batch(6, 2), stream.held, start=3, is_first=False) is ReplayEnd.FOREIGN
    stream.machine.ended(ReplayEnd.FOREIGN, stream.held)
    assert not stream.machine.is_distrusted
    assert stream.machine.live(batch(6), stream.held) in (AGAIN, APPLY)


def test_a_connection_takes_effect_when_the_queue_has_come_to_it() -> None:
    stream = followed_with_replay().hold(batch(4)).disconnect().connect()
    assert stream.wanted is None
    assert stream.machine.live(batch(4), stream.held) is APPLY
    stream.take(stream.held.pop())
    assert stream.wanted is PROVE
    assert stream.ask().start == 4


def test_proof_and_join_have_to_be_of_one_run() -> None:
    """The endpoint of the old process answers once more, then that of the new one."""
    stream = followed_with_replay().disconnect().connect()
    stream.answer(batch(3))
    assert stream.live(batch(4, 2)) is ASK
    assert stream.ask().start == 3
    stream.machine.answered(batch(3, 2), stream.held, start=3, is_first=True)
    end = stream.machine.answered(batch(4, 2), stream.held, start=3, is_first=False)
    assert end is ReplayEnd.RESTARTED


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (ProvenBatch(1, 4, batch(4).fingerprint), "proven"),
        (ProvenBatch(1, 3, batch(3).fingerprint), "continuity_unproven"),  # before the doubt
        (ProvenBatch(1, 4, batch(4, run=2).fingerprint), "continuity_unproven"),  # another run, or we are
        (ProvenBatch(2, 4, batch(4).fingerprint), "continuity_unproven"),  # they saw a restart that we did not
        (ProvenBatch(1, 6, batch(6).fingerprint), "continuity_unproven"),  # we are not so far yet
    ],
)
def test_what_another_replica_has_proven_is_proven_for_the_same_batches(told: ProvenBatch, reason: str) -> None:
    stream = from_checkpoint().follow(4, 5)
    assert stream.reason == "continuity_unproven"
    stream.machine.others_are_at(told)
    assert stream.reason == reason


def test_with_a_replay_endpoint_other_replicas_prove_nothing() -> None:
    stream = followed_with_replay().disconnect().connect()
    stream.answer(end=ReplayEnd.SILENT)
    stream.follow(4)
    stream.machine.others_are_at(ProvenBatch(1, 4, batch(4).fingerprint))
    assert stream.reason == "continuity_unproven"


def test_answers_from_before_what_was_asked_for_prove_nothing() -> None:
    stream = followed_with_replay().disconnect().connect().hold(batch(1, 2))
    assert stream.answer(batch(1, 2), batch(2, 2)) is ReplayEnd.MARKER
    assert not stream.machine.is_distrusted
    assert stream.index.told[-1] == ("restart",)  # it ended below the batch that was to be proven


def test_an_answer_that_begins_right_after_what_is_known_proves_nothing() -> None:
    stream = followed_with_replay().disconnect().connect()
    stream.answer(batch(4), batch(5))
    assert stream.reason == "continuity_unproven"
    assert stream.live(batch(6)) is ASK
    assert stream.answer(batch(5), batch(6)) is ReplayEnd.REPAIRED
    assert stream.reason == "continuity_unproven"


def test_a_resync_of_a_healthy_stream_that_fails_raises_no_doubt() -> None:
    stream = followed_with_replay()
    stream.machine.resync(is_full=False)
    stream.answer(end=ReplayEnd.SILENT)
    assert stream.reason == "from_start"
    assert stream.wanted is None


# ---------------------------------------------------------------------- start from a checkpoint


def test_batches_from_before_a_checkpoint_are_no_restart_if_its_own_follows() -> None:
    stream = from_checkpoint().hold(batch(1), batch(2))
    assert stream.machine.live(batch(1), stream.held) is WAIT
    stream.hold(batch(3), batch(4))
    assert stream.machine.live(batch(1), stream.held) is AGAIN
    assert stream.held.first == batch(3)
    assert stream.machine.live(batch(3), stream.held) is DROP
    assert stream.reason == "proven"
    assert ("restart",) not in stream.index.told


def test_batches_from_before_a_checkpoint_are_a_restart_if_nothing_follows() -> None:
    stream = from_checkpoint()
    assert stream.live(batch(0, 2)) is WAIT
    assert stream.machine.wakes_at == stream.now + WARM_UP_S
    stream.now += WARM_UP_S
    assert stream.machine.live(batch(0, 2), stream.held) is AGAIN
    assert stream.index.told[-1] == ("restart",)


def test_a_doubt_of_an_earlier_follower_stays() -> None:
    doubted = Checkpoint(1, 3, batch(3).fingerprint, Coverage.DEGRADED, reason=CoverageReason.CONTINUITY_UNPROVEN)
    stream = Stream(checkpoint=doubted).connect()
    stream.answer(batch(3))
    assert stream.live(batch(4)) is ASK
    stream.answer(batch(3), batch(4))
    assert stream.reason == "continuity_unproven"
    stream.machine.resync(is_full=True)
    assert stream.ask() == (REBUILD, 0)
    for n in range(4):
        assert stream.machine.answered(batch(n), stream.held, start=0, is_first=n == 0) is APPLY
        stream.take(batch(n))
    assert stream.machine.answered(batch(4), stream.held, start=0, is_first=False) is ReplayEnd.REPAIRED
    stream.machine.ended(ReplayEnd.REPAIRED, stream.held)
    assert (stream.reason, stream.index.coverage) == ("proven", Coverage.COMPLETE)


# ---------------------------------------------------------------------- clocks


def test_a_clock_that_went_back_over_a_reconnect_is_told() -> None:
    stream = reconnected()
    assert stream.live(batch(4, 2, sent_at=5.0)) is APPLY
    assert stream.reason == "clock_went_back"


def test_a_late_batch_of_an_earlier_run_is_dropped_but_not_two_in_a_row() -> None:
    stream = fresh().follow(0, 1, 2).follow(0, 1, run=2)
    assert stream.live(batch(7)) is DROP
    assert stream.counters["late_batches"] == 1
    assert stream.follow(2, run=2).reason == "from_start"
    assert stream.live(batch(8)) is DROP or stream.reason == "gap"
    assert stream.live(batch(9)) is APPLY


@pytest.mark.parametrize("data", [b"", b"\x93", b"\x93\xcb\x7f\xf8" + b"\0" * 7, b"\x80" * 20])
def test_a_batch_that_does_not_say_when_is_no_problem(data: bytes) -> None:
    each: Any = NumberedBatch(4, 7, data)
    assert each.sent_at is None
    assert reconnected().live(each) is APPLY
