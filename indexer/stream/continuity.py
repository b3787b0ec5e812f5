"""Does the stream go on? What to do with each batch, what to ask the replay endpoint for, and what coverage may say.

Purpose: decide, from numbers, fingerprints and connections alone, so that everything that can happen to a stream can be
tested without sockets, tasks or a clock. It drives the index's coverage, and tells the follower what to do with a batch
(`Verdict`). `sequence.py` knows the numbers; here is what follows from them:

* A connection was made: everything since the last batch applied is asked for, that batch included (`PROVE`). The same
  fingerprint *proves* that this is the run we know; another one, or a newest number below it, that the engine began
  again. Without an answer the run is in doubt: coverage says so, residencies stay credited. The batch that is to be
  proven stays the same until it is, also while the stream goes on in doubt.
* Numbers are missing before the first held batch: they are asked for (`FILL`), again from the last batch applied on, as
  a lead-in that shows whose batches the answers are. They must end with the very batch that is held.
* Live stream and replay are *joined* when a batch of this connection has come both ways. As long as they are not, the
  endpoint may be that of another run, or of another engine, so the next live batch is looked up there before it is
  applied. Once a replay contradicts the held batch, either the engine has just begun again or the endpoint is foreign:
  what is known is dropped, and asked for once more; the second time in a row, the endpoint is distrusted. A lead-in
  that does not fit drops nothing unless the answers reach the held batch.
* The index has to be built anew (`REBUILD`): this run from its first number on.

An endpoint that failed is left alone for a while, twice as long each time; meanwhile what is missing is lost.

Invariants: a number is applied at most once and in order, between two times of beginning again; coverage says
`complete` only if every batch since number 0 was applied, and no doubt is left; nothing of an earlier run is applied
after beginning again, but for what a PUB socket cannot do.

If broken: an index with batches missing, doubled or of two runs mixed, whose coverage says it is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple, assert_never

from indexer.index.state import DOUBTS, Coverage, CoverageReason, ProvenBatch
from indexer.stream.held import HeldBatches, NumberedBatch
from indexer.stream.limits import StreamLimits
from indexer.stream.ports import FollowedIndex
from indexer.stream.replay import ReplayEnd
from indexer.stream.sequence import Gap, KnownBatch, Sequence, Step

CONTRADICTIONS_MAX: Final = 2
"""In a row, before the replay endpoint is distrusted."""
COOL_DOWNS_MAX: Final = 10
"""Longest pause of an endpoint that fails again and again, and of one that is distrusted, in cool-downs."""
WARM_UP_S: Final = 2.0
"""How long batches from before a checkpoint wait for the checkpoint's own batch to follow them."""

FAILED: Final = frozenset(
    {
        ReplayEnd.SILENT,
        ReplayEnd.IDLE,
        ReplayEnd.DEADLINE,
        ReplayEnd.GARBAGE,
        ReplayEnd.UNORDERED,
        ReplayEnd.NO_TURN,
        ReplayEnd.HELD_FULL,
    }
)


class Verdict(Enum):
    """What to do with a batch."""

    APPLY = auto()
    DROP = auto()
    AGAIN = auto()  # something has changed: look at it again
    ASK = auto()  # a replay is wanted first, see `Continuity.ask`
    WAIT = auto()  # until `wakes_at`, or for more batches


class Purpose(Enum):
    """What a replay is asked for."""

    PROVE = "prove"
    FILL = "fill"
    REBUILD = "rebuild"


class Ask(NamedTuple):
    purpose: Purpose
    start: int


class _Asked:
    """What is known of the replay that runs."""

    __slots__ = ("expected", "fits", "has_lost", "held_before", "highest", "is_disturbed", "missing", "purpose")

    def __init__(
        self,
        purpose: Purpose,
        expected: KnownBatch | None,
        missing: Gap | None,
        held_before: int,
        is_disturbed: bool,
    ) -> None:
        self.purpose = purpose
        self.expected = expected  # the batch it was asked from
        self.missing = missing  # what is wanted, of FILL
        self.held_before = held_before  # live batches received before it was asked for
        self.is_disturbed = is_disturbed  # the held batches came through another connection, or none is there now
        self.fits: bool | None = None  # whether `expected` was among the answers; False = another in its place
        self.highest: int | None = None
        self.has_lost = False

    @property
    def ended_below(self) -> bool:
        """The batch it was asked from was not reached."""
        below = self.highest is None or (self.expected is not None and self.highest < self.expected.sequence_number)
        return self.expected is not None and below


def _ignore(event: str, **facts: object) -> None: ...


class Continuity:
    """See the module. `now`: any clock of seconds, for pauses; `wall`: seconds since 1970, to show."""

    def __init__(
        self,
        index: FollowedIndex,
        counters: Counter[str],
        limits: StreamLimits,
        *,
        has_replay: bool,
        now: Callable[[], float],
        wall: Callable[[], float],
        report: Callable[..., None] = _ignore,
    ) -> None:
        checkpoint = index.checkpoint
        self.sequence = Sequence(checkpoint.sequence_number, checkpoint.fingerprint)
        self.is_joined = checkpoint.reason is not CoverageReason.REPLAYED
        self.is_distrusted = False
        self.cool_until = 0.0
        self._index = index
        self._counters = counters
        self._limits = limits
        self._has_replay = has_replay
        self._now = now
        self._wall = wall
        self._report = report
        self._wanted: Purpose | None = None
        self._asked: _Asked | None = None
        self._to_prove: KnownBatch | None = None
        self._is_connected = False
        self._waits_for_connection = False  # until the next one, the endpoint speaks of another run than what is held
        self._has_fitted = False  # a replay had that one, but no live batch of this connection
        self._has_old_doubt = checkpoint.reason in DOUBTS  # of an earlier follower: nobody knows any more from where on
        self._connections = 0
        self._contradictions = 0
        self._failures = 0
        self._rebuilds = 0
        self._warm_until: float | None = None
        self._is_first_live = True
        self._last_live: NumberedBatch | None = None
        self._first_sent_at: float | None = None
        self._late_number: int | None = None
        self._held_of_old_run = 0  # batches received before a replay has shown a new run

    # ------------------------------------------------------------------ connections

    def connection_changed(self, held: HeldBatches, *, is_connected: bool) -> None:
        """Seen now; what has been received by now is looked at first."""
        self._is_connected = is_connected
        if self._asked is not None:
            self._asked.is_disturbed = True
        if is_connected:
            held.mark()

    def _connected(self) -> None:
        """The queue of live batches has come to the first one of another connection."""
        self._connections += 1
        self._contradictions, self._waits_for_connection = 0, False
        self._is_first_live = True
        if self._connections > 1:
            self.sequence.reconnected()
        elif self.sequence.newest is not None:
            self._warm_until = self._now() + WARM_UP_S
        if self._has_replay and self.sequence.newest is not None:
            self.is_joined = False
        self._prove()
        if self._to_prove is not None and not self._may_ask:
            self._doubt(CoverageReason.CONTINUITY_UNPROVEN)

    def resync(self, *, is_full: bool) -> None:
        """An operator's word: ask again, whatever is thought of the endpoint. `is_full`: for everything it has."""
        self.cool_until, self._failures, self._contradictions, self.is_distrusted = 0.0, 0, 0, False
        self._prove()
        if is_full and self._has_replay:
            self._wanted = Purpose.REBUILD

    def others_are_at(self, batch: ProvenBatch) -> None:
        """Another replica has followed this publisher so far, and has no doubt. If we have applied the same batch after
        the one that is to be proven, then nothing came between for us either. Where there is a replay endpoint, that is
        asked: it may be foreign to the others, too.
        """
        to_prove = self._to_prove
        if self._has_replay or to_prove is None or batch.sequence_number <= to_prove.sequence_number:
            return
        is_same_run = batch.generation == self._index.checkpoint.generation
        if is_same_run and self.sequence.has_applied(batch.sequence_number, batch.fingerprint):
            self._settle()

    def _prove(self) -> None:
        """That the run is the one we know, as soon as that can be asked."""
        self._has_fitted = False
        self._to_prove = self._to_prove or self.sequence.newest
        if self._has_replay and self._wanted is not Purpose.REBUILD:
            self._wanted = Purpose.PROVE

    # ------------------------------------------------------------------ what to ask for

    def wants_to_ask(self, held: HeldBatches) -> bool:
        while held.marks and held.takes_mark():
            self._connected()
        return self._wanted is not None and self._now() >= self.cool_until

    @property
    def wakes_at(self) -> float | None:
        """When to look again although nothing has happened."""
        if self._wanted is not None:
            return self.cool_until
        is_warming = self._warm_until is not None and self._now() < self._warm_until
        return self._warm_until if is_warming else None

    @property
    def _may_ask(self) -> bool:
        return self._has_replay and not self._waits_for_connection and self._now() >= self.cool_until

    def ask(self, held: HeldBatches) -> Ask:
        """Of the replay endpoint. Its answers go to `answered`, its end to `ended`."""
        assert self._wanted is not None, "see `wants_to_ask`"
        purpose, self._wanted = self._wanted, None
        expected = None
        if purpose is not Purpose.REBUILD:
            is_proof = purpose is Purpose.PROVE or not self.is_joined
            expected = (self._to_prove if is_proof else None) or self.sequence.newest
        missing = None
        if purpose is Purpose.FILL and held.first and held.first.sequence_number > self.sequence.next_number:
            missing = Gap(self.sequence.next_number, held.first.sequence_number - 1)
        is_disturbed = not self._is_connected or bool(held.marks)
        self._asked = _Asked(purpose, expected, missing, len(held), is_disturbed)
        if purpose is Purpose.REBUILD:
            return Ask(purpose, 0)
        return Ask(purpose, self.sequence.next_number if expected is None else expected.sequence_number)

    def needs_replay(self) -> bool:
        """The index cannot go on from what it has. False: it has to, with coverage degraded."""
        self._index.set_coverage(Coverage.DEGRADED, CoverageReason.GRANULE_REFINED, self._wall())
        if not self._may_ask or self._rebuilds >= self._limits.replay_tries_max:
            return False
        self._rebuilds += 1
        self._counters["rebuilds"] += 1
        self._wanted = Purpose.REBUILD
        return True

    # ------------------------------------------------------------------ live batches

    def live(self, batch: NumberedBatch, held: HeldBatches) -> Verdict:
        """What to do with the first held batch."""
        if (self._is_first_live or not self.is_joined) and (verdict := self._check_first(batch)):
            return verdict
        outcome = self.sequence.live(batch.sequence_number, batch.fingerprint)
        if outcome is Step.APPLY:
            self._last_live = batch
            return Verdict.APPLY
        if outcome is Step.DUPLICATE:
            self._counters["duplicates"] += 1
            self._note_repeated(KnownBatch(batch.sequence_number, batch.fingerprint))
            return Verdict.DROP
        if outcome is Step.RESTART:
            return self._restarted_live(batch, held)
        return self._missing_before(batch, outcome)

    def in_a_row(self, batches: list[NumberedBatch], held: HeldBatches) -> int:
        """How many of these first held batches `live` would let apply, from the first on."""
        if self._is_first_live or not self.is_joined or held.marks:
            return 0
        return self.sequence.in_a_row(batch.sequence_number for batch in batches)

    def take_in_a_row(self, batches: list[NumberedBatch]) -> None:
        """As if `live` had been asked for each of these, which `in_a_row` has counted."""
        self._last_live = batches[-1]
        self.sequence.take_in_a_row(
            [batch.sequence_number for batch in batches], [batch.fingerprint for batch in batches]
        )

    def _check_first(self, batch: NumberedBatch) -> Verdict | None:
        """Batches that are to be looked at more closely: of a new connection, or of one that is not joined yet."""
        number, sequence = batch.sequence_number, self.sequence
        is_beyond_live = sequence.last_live is None or number > sequence.last_live
        if not self.is_joined and is_beyond_live and sequence.has_applied(number, batch.fingerprint):
            self._join(has_fitted=self._has_fitted)
        if number != sequence.next_number:
            return None
        if not self.is_joined and self._may_ask:
            self._wanted = Purpose.FILL
            return Verdict.ASK
        if self._is_first_live:
            self._note_first(batch)
        return None

    def _note_first(self, batch: NumberedBatch) -> None:
        """It will be applied."""
        self._is_first_live, self._warm_until = False, None
        if self.sequence.applied is None:
            self._first_sent_at = batch.sent_at
        if self._to_prove is not None and _is_earlier(batch, self._last_live):
            self._doubt(CoverageReason.CLOCK_WENT_BACK)

    def _restarted_live(self, batch: NumberedBatch, held: HeldBatches) -> Verdict:
        """Its number cannot be of the run we know."""
        if self._warm_until is not None and self.sequence.last_live is None and self.is_joined:
            newest = self.sequence.newest
            if newest is not None and held.holds(*newest):  # sent before the checkpoint was read
                self._counters["duplicates"] += held.drop_before(*newest)
                return Verdict.AGAIN
            is_below = newest is not None and batch.sequence_number < newest.sequence_number
            if is_below and self._now() < self._warm_until and held.room > 0:
                return Verdict.WAIT
        if not self.is_joined and (self.sequence.last_live is None or batch.sequence_number > self.sequence.last_live):
            self._contradicted(is_disturbed=not self._is_connected or bool(held.marks))
        else:
            self._begin_again()
        return Verdict.AGAIN

    def _missing_before(self, batch: NumberedBatch, gap: Gap) -> Verdict:
        if self._is_late(batch):
            self._late_number = batch.sequence_number
            self._counters["late_batches"] += 1
            return Verdict.DROP
        if self._may_ask:
            self._wanted = Purpose.FILL
            return Verdict.ASK
        is_foreign = self.is_distrusted and self.sequence.applied is None
        self._lose(gap, CoverageReason.REPLAY_IS_FOREIGN if is_foreign else CoverageReason.JOINED_LATE)
        return Verdict.AGAIN

    def _is_late(self, batch: NumberedBatch) -> bool:
        """Sent before this run of the engine began: left over from an earlier one, but if the next one is so, too, the
        clock has stepped back."""
        if self._first_sent_at is None or self.sequence.applied is None:
            return False
        sent_at = batch.sent_at
        is_next_of_late = self._late_number is not None and batch.sequence_number == self._late_number + 1
        return sent_at is not None and sent_at < self._first_sent_at and not is_next_of_late

    # ------------------------------------------------------------------ answers of the replay endpoint

    def answered(self, batch: NumberedBatch, held: HeldBatches, *, start: int, is_first: bool) -> Verdict | ReplayEnd:
        """What to do with an answer to the request that asked from `start`, or why the replay is over."""
        asked, held_first = self._asked, held.nth(self._held_of_old_run)
        assert asked is not None, "somebody asked"
        number = batch.sequence_number
        if asked.purpose is Purpose.REBUILD and asked.highest is None:
            self._rewind()
        if is_first and asked.highest is not None and number > start:
            asked.fits = None  # asked again, and the batch that it went on from is gone
            self._doubt_for_good()
        asked.highest = number
        if asked.expected is not None and number < asked.expected.sequence_number:
            return Verdict.DROP  # nobody asked for it
        if asked.expected is not None and number == asked.expected.sequence_number:
            asked.fits = batch.fingerprint == asked.expected.fingerprint
            if not asked.fits and asked.purpose is Purpose.PROVE:
                return ReplayEnd.RESTARTED
        if held_first is not None and number >= held_first.sequence_number and (end := self._meet(batch, held_first)):
            return end
        if asked.fits is False:
            return Verdict.DROP
        return self._take_answer(batch, held_first, start, is_first)

    def _meet(self, batch: NumberedBatch, held_first: NumberedBatch) -> ReplayEnd | None:
        """An answer that is not below the first held batch."""
        assert self._asked is not None
        if batch.sequence_number > held_first.sequence_number:
            return ReplayEnd.PASSED if self._asked.fits is False else None
        if batch.fingerprint != held_first.fingerprint:
            return ReplayEnd.FOREIGN
        if self._asked.fits is False:
            return ReplayEnd.RESTARTED
        self._join(has_fitted=self._asked.fits is True)
        return None

    def _take_answer(
        self, batch: NumberedBatch, held_first: NumberedBatch | None, start: int, is_first: bool
    ) -> Verdict | ReplayEnd:
        asked, sequence, number = self._asked, self.sequence, batch.sequence_number
        assert asked is not None
        is_wanted_no_more = asked.purpose is not Purpose.PROVE and held_first and number == held_first.sequence_number
        if is_wanted_no_more and number == sequence.next_number:
            return ReplayEnd.REPAIRED
        outcome = sequence.replayed(number, batch.fingerprint)
        if isinstance(outcome, Gap):
            if held_first and outcome.gap_first <= held_first.sequence_number <= outcome.gap_last:
                return ReplayEnd.PASSED
            if not is_first and outcome.gap_first > start + 1:
                return ReplayEnd.HOLE
            asked.has_lost = True
            self._lose(outcome, CoverageReason.REPLAY_STARTS_LATER)
            return self._take_answer(batch, held_first, start, is_first)
        if outcome is Step.RESTART:
            return ReplayEnd.RESTARTED
        if outcome is Step.DUPLICATE:
            return Verdict.DROP
        if asked.expected is not None and asked.fits is None:
            self._doubt_for_good()
        if asked.fits is not True and not (held_first and number >= held_first.sequence_number):
            self.is_joined = False
        if number == 0:
            self._first_sent_at = batch.sent_at
            if not self.is_joined:
                self._index.set_coverage(Coverage.COMPLETE, CoverageReason.REPLAYED, self._wall())
        return Verdict.APPLY

    # ------------------------------------------------------------------ the end of a replay

    def ended(self, end: ReplayEnd, held: HeldBatches) -> None:
        """The replay is over. What it did not bring is lost, or will be asked for later."""
        asked, self._asked = self._asked, None
        assert asked is not None, "somebody asked"
        if end is ReplayEnd.STOPPED:
            return
        if end is ReplayEnd.MARKER and asked.purpose is Purpose.PROVE and asked.ended_below:
            end = ReplayEnd.RESTARTED
        self._note_failure(end)
        if end is ReplayEnd.RESTARTED:
            self._restarted_behind(asked)
            return
        if end is ReplayEnd.FOREIGN and asked.fits is not False:
            self._contradicted(is_disturbed=asked.is_disturbed)
        elif asked.purpose is Purpose.PROVE:
            self._proof_ended(asked, end, held)
        elif asked.purpose is Purpose.FILL:
            self._fill_ended(asked, end, held)
        elif asked.purpose is Purpose.REBUILD:
            if end is not ReplayEnd.REBUILD:
                self._rebuilds = 0
        else:
            assert_never(asked.purpose)
        self._held_of_old_run = 0

    def _restarted_behind(self, asked: _Asked) -> None:
        """The replay shows another run than the one we know. Now for the past of that one."""
        held_before = asked.held_before if asked.purpose is Purpose.PROVE and self._connections > 1 else 0
        self._begin_again()
        self._wanted = Purpose.PROVE
        self._held_of_old_run = held_before

    def _proof_ended(self, asked: _Asked, end: ReplayEnd, held: HeldBatches) -> None:
        if asked.expected is None:
            if end is ReplayEnd.MARKER:
                self._drop_past(held, self._held_of_old_run, is_of_old_run=True)
        elif asked.fits:
            self._has_fitted = True
            if self.is_joined:
                self._settle()
            self._drop_past(held, asked.held_before, is_of_old_run=False)
        elif self.is_joined:
            self._to_prove = None  # an operator asked, and nothing speaks against it
        elif asked.highest is not None:
            self._doubt_for_good()
        else:
            self._doubt(CoverageReason.CONTINUITY_UNPROVEN)
            self._wanted = Purpose.PROVE

    def _drop_past(self, held: HeldBatches, count: int, *, is_of_old_run: bool) -> None:
        """Batches received before a replay was asked for, which has shown what there was by then."""
        for _ in range(count):
            batch = held.first
            if batch is None or not (is_of_old_run or batch.sequence_number < self.sequence.next_number):
                return
            is_known = self.sequence.has_applied(batch.sequence_number, batch.fingerprint)
            self._counters["duplicates" if is_known else "late_batches"] += 1
            held.pop()

    def _fill_ended(self, asked: _Asked, end: ReplayEnd, held: HeldBatches) -> None:
        first, next_number = held.first, self.sequence.next_number
        assert first is not None, "asked for because of it"
        missing = Gap(next_number, first.sequence_number - 1) if first.sequence_number > next_number else None
        is_ours = asked.fits is True and self.is_joined
        if asked.fits is False and end in FAILED:  # it broke off before it came to the held batch: restart or foreign?
            self._to_prove = asked.expected
            self._prove()
        elif asked.fits is False:
            self._distrust(is_disturbed=asked.is_disturbed)
        elif missing is not None and not is_ours and asked.highest is not None and end is ReplayEnd.MARKER:
            # that was all the endpoint has, and the held batch is not among it
            self._contradicted(is_disturbed=asked.is_disturbed)
            return
        if missing is not None:
            failed = end in FAILED
            self._lose(missing, CoverageReason.JOINED_LATE if failed else CoverageReason.REPLAY_STARTS_LATER)
        if end is ReplayEnd.REPAIRED:
            self._counters["gaps_repaired"] += asked.missing is not None and not asked.has_lost
            if asked.expected is not None and not asked.fits:
                self._doubt_for_good()
        elif missing is None or not self.is_joined:  # the answers have not reached the held batch
            self.is_joined = False
            self._to_prove = self._to_prove or asked.expected
            self._doubt(CoverageReason.CONTINUITY_UNPROVEN)
            self._pause(1)  # or the next batch would ask again

    # ------------------------------------------------------------------ what follows

    def _begin_again(self) -> None:
        """The engine restarted: drop what its last run left."""
        self._report("restart_found", last_sequence_number=self.sequence.applied)
        self._counters["restarts"] += 1
        self._index.restart(self._wall())
        self.sequence.begin_again()
        self._forget_run()

    def _rewind(self) -> None:
        """Apply this run of the engine again, from its first number on."""
        self._index.drop_residencies(self._wall())
        self._index.set_coverage(Coverage.COMPLETE, CoverageReason.REPLAYED, self._wall())
        self.sequence.rewind()
        self._forget_run()

    def _forget_run(self) -> None:
        self.is_joined, self._is_first_live = True, True
        self._to_prove, self._has_old_doubt = None, False
        self._warm_until = self._last_live = None
        self._first_sent_at = self._late_number = None

    def _contradicted(self, *, is_disturbed: bool) -> None:
        """Replay and live stream have different batches under one number."""
        self._contradictions += 1
        self._begin_again()
        if self._contradictions >= CONTRADICTIONS_MAX:
            self._distrust(is_disturbed=is_disturbed)

    def _distrust(self, *, is_disturbed: bool) -> None:
        """The replay endpoint, unless the connection has changed meanwhile, which explains it as well."""
        if is_disturbed:
            self._waits_for_connection = True
            return
        self._report("replay_distrusted")
        self._counters["replays_distrusted"] += 1
        self._contradictions = 0
        self.is_distrusted = True
        self._pause(COOL_DOWNS_MAX)

    def _note_failure(self, end: ReplayEnd) -> None:
        if end in FAILED:
            self._failures += 1
            self._pause(min(2 ** (self._failures - 1), COOL_DOWNS_MAX))
            self._report("replay_failed", reason=str(end), pause_s=self.cool_until - self._now())
        else:
            self._failures = 0
            self.is_distrusted = False

    def _pause(self, cool_downs: int) -> None:
        self.cool_until = max(self.cool_until, self._now() + cool_downs * self._limits.replay_cool_down_s)

    def _lose(self, gap: Gap, reason_at_start: CoverageReason) -> None:
        """These numbers cannot be had. Before the first batch known, that is a late start and not a gap."""
        if self.sequence.applied is None:
            self._index.set_coverage(Coverage.SINCE, reason_at_start, self._wall(), since=gap.gap_last + 1)
        else:
            self._counters["gaps"] += 1
            self._counters["missing_batches"] += gap.gap_last - gap.gap_first + 1
            is_news = self._index.checkpoint.reason is not CoverageReason.GAP
            self._report("gap_found" if is_news else "gap_found_again", **gap._asdict())
            self._index.count_gap(gap.gap_first, gap.gap_last, self._wall())
        self.sequence.lose(gap.gap_last)

    def _join(self, *, has_fitted: bool) -> None:
        """A batch has come both ways. `has_fitted`: by a replay that had the batch to be proven, too."""
        self._contradictions = 0
        self.is_joined = True
        if has_fitted or self._to_prove is None:
            self._settle()

    def _note_repeated(self, batch: KnownBatch) -> None:
        """The subscription itself repeats a batch we know: if it is the one to be proven, it is."""
        if batch == self._to_prove and self._connections == 1:
            self._warm_until = None
            self._settle()

    def _doubt(self, reason: CoverageReason) -> None:
        if self._index.checkpoint.reason not in DOUBTS:
            self._has_old_doubt = False
        self._index.doubt(reason, self._wall())

    def _doubt_for_good(self) -> None:
        """Of this run: the batch that would prove it cannot be had."""
        self._doubt(CoverageReason.CONTINUITY_UNPROVEN)
        self._to_prove, self._has_old_doubt = None, True

    def _settle(self) -> None:
        """The stream goes on. If there is no other doubt, coverage may say so."""
        self._to_prove = None
        if not self._has_old_doubt:
            self._index.prove(self._wall())


def _is_earlier(batch: NumberedBatch, than: NumberedBatch | None) -> bool:
    """By the engine's clock."""
    if than is None:
        return False
    before, now = than.sent_at, batch.sent_at
    return before is not None and now is not None and now < before
