"""The life of one publisher: receive, decode, ask the sequence, replay, apply.

Purpose: apply every batch of one engine to its index, in order and once, and say how far that succeeded. Live batches
wait in one bounded queue (`HeldBatches`); one loop receives into it, repairs what is missing, and applies from it. Live
and replayed batches are applied by the same function; only what has piled up, follows each other and is simple is
applied several batches at a time, with the same result.

When a connection was made and there is a replay endpoint, the publisher is *synchronised*: its past is asked for, from
the batch of the checkpoint on (from 0 without one). That batch, with the same fingerprint, proves that this is still
the run of the engine we know; another one, or a newest number below it, proves a restart. A gap is asked for from its
first number. What cannot be had lowers coverage and is never waited for twice in a row: an endpoint that did not answer
is left alone for `replay_cool_down_s`.

Invariants: effects reach the index only through `_apply`, in one task; a batch leaves the queue only when it was
applied or found to be a duplicate; nothing is applied once the publisher is fenced; every wait has a deadline, but for
the one for news.

If broken: an index with batches missing, doubled or of two runs mixed, whose coverage says it is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import xxhash

from indexer.index.publisher import ApplyOutcome
from indexer.index.state import Coverage
from indexer.stream.followed import BadMessage, FollowedPublisher, FollowState
from indexer.stream.held import HeldBatches, LiveBatch
from indexer.stream.limits import StreamLimits
from indexer.stream.pace import Pace
from indexer.stream.ports import FollowedIndex, LiveSource, Transport
from indexer.stream.replay import Replay, ReplayEnd
from indexer.stream.sequence import Gap, Sequence, Step
from indexer.wire.columns import TOGETHER_MAX, PayloadReader, rank_of, read_batch
from indexer.wire.errors import WireError
from indexer.wire.frames import split_message

log = structlog.get_logger(__name__)

BURST_MESSAGES = 256
REPLAY_BURST = 64
TOGETHER_BYTES = 32 * 1024  # of payload: no longer at a time, and no more growth, than one large message is
RESUMED_AFTER = (ReplayEnd.DEADLINE, ReplayEnd.GARBAGE, ReplayEnd.UNORDERED, ReplayEnd.HOLE)
COOLED_DOWN_AFTER = (ReplayEnd.SILENT, ReplayEnd.IDLE, ReplayEnd.GARBAGE, ReplayEnd.UNORDERED)

fingerprint_of = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class Clock:
    """`wall`: seconds since the epoch, to show. `elapsed`: any fine counter of seconds, to slice work by."""

    wall: Callable[[], float] = time.time
    elapsed: Callable[[], float] = time.perf_counter


class Fenced(Exception):
    """The publisher was unregistered while its batches were being applied."""


class Follower:
    """Follows one publisher until it is cancelled or told to finish."""

    def __init__(
        self,
        followed: FollowedPublisher[Any],
        transport: Transport,
        limits: StreamLimits,
        *,
        replay_turns: asyncio.Semaphore,
        clock: Clock | None = None,
        reader: PayloadReader | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._followed = followed
        self._publisher: FollowedIndex = followed.index
        self._registration = followed.registration
        self._counters = followed.counters
        self._transport = transport
        self._limits = limits
        self._replay_turns = replay_turns
        self._clock = clock or Clock()
        self._reader = reader or PayloadReader()
        self._pace = pace or Pace(limits.slice_s)
        checkpoint = self._publisher.checkpoint
        self._sequence = Sequence(checkpoint.sequence_number, checkpoint.fingerprint)
        self._held = HeldBatches(limits.held_batches_max, limits.held_bytes_max)
        self._wake = asyncio.Event()
        self._connections = 0
        self._is_connected = False
        self._is_replaying = False
        self._is_finishing = False
        self._wants_synchronising = False
        self._wants_rebuild = False
        self._wants_rewind = False
        self._cool_until = 0.0
        self._slice_end = 0.0
        self._together_max = 1  # batches: doubles while that works
        self._together_limit = 1 if followed.counters["failures"] else TOGETHER_MAX  # a poisonous batch must be told
        self._live: LiveSource
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Ends by itself only after `finish`. Raises what the transport or the index raise."""
        self._show()
        self._followed.is_in_first_replay = self._can_replay
        self._live = self._transport.open_live(self._registration.endpoint, self._wake.set)
        try:
            while not self._is_finishing:
                await self._turn()
            await self._apply_rest()
        finally:
            self._live.close()

    def finish(self) -> None:
        """Apply what has been received, as far as nothing is missing, and end."""
        self._is_finishing = True
        self._wake.set()

    # ------------------------------------------------------------------ receive

    async def _turn(self) -> None:
        is_all = self._receive()
        if self._synchronising_is_due:
            await self._synchronise()
        await self._apply_held()
        if is_all and not self._held:
            await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        timeout_s = max(0.0, self._cool_until - self._now()) if self._wants_synchronising else None
        await self._wait(timeout_s)

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # the caller looks at its deadlines

    def _receive(self) -> bool:
        """One burst into the queue. True = nothing is left in the socket."""
        self._wake.clear()
        wanted = min(self._held.room, BURST_MESSAGES)
        messages = self._live.drain(wanted) if wanted > 0 else []
        for connected in self._live.connection_changes():
            self._note_connection(connected)
        for frames in messages:
            self._hold(frames)
        if messages:
            self._followed.last_batch_at = self._clock.wall()
        return 0 < wanted != len(messages)

    def _hold(self, frames: list[bytes]) -> None:
        try:
            message = split_message(frames)
        except WireError as error:
            self._counters["bad_messages"] += 1
            self._counters[f"bad_messages_{error.reason}"] += 1
            self._followed.last_bad_message = BadMessage(error.reason, tuple(map(len, frames[:8])))
            return
        self._counters["batches_received"] += 1
        self._held.append(LiveBatch(message.sequence_number, fingerprint_of(message.payload), message.payload))

    def _note_connection(self, connected: bool) -> None:
        self._is_connected = connected
        if connected:
            self._counters["connections"] += 1
            if self._connections:
                self._sequence.reconnected()
            self._connections += 1
            self._wants_synchronising = self._can_replay
        else:
            self._counters["connections_lost"] += 1
        log.info("publisher_connected" if connected else "publisher_disconnected", **self._names)
        self._show()

    # ------------------------------------------------------------------ apply

    async def _apply_held(self) -> None:
        """Everything that is held, until synchronising is due. Each turn makes the queue or a gap shorter."""
        with self._pace.working():
            while (batch := self._held.first) and not self._synchronising_is_due and not self._is_finishing:
                await self._take_live(batch)

    async def _take_live(self, batch: LiveBatch) -> None:
        if not (self._publisher.takes_columns and self._apply_together()):
            await self._take_one(batch)
        if self._wants_rebuild:
            await self._rebuild()
        if self._clock.elapsed() >= self._slice_end:
            await self._breathe()

    async def _take_one(self, batch: LiveBatch) -> None:
        outcome = self._sequence.live(batch.sequence_number, batch.fingerprint)
        if outcome is Step.APPLY:
            self._held.pop()
            self._apply(*batch)
        elif outcome is Step.DUPLICATE:
            self._held.pop()
            self._counters["duplicates"] += 1
        elif outcome is Step.RESTART:
            self._begin_again()
        elif isinstance(outcome, Gap):
            await self._repair(outcome)

    def _apply_together(self) -> int:
        """Apply the first held batches, as far as each is the next and simple; how many.

        0: nothing happened, the first is to be looked at by itself.
        """
        batches = self._held.first_few(self._together_max, TOGETHER_BYTES)
        del batches[self._sequence.in_a_row(batch.sequence_number for batch in batches) :]
        columns = self._reader.read(*(batch.payload for batch in batches)) if batches else None
        if columns is None:
            self._together_max = 1
            return 0
        if self._followed.is_fenced:
            raise Fenced
        first = batches[0]
        self._followed.applying = (first.sequence_number, first.fingerprint)
        applied = self._publisher.apply_columns(columns, batches)
        self._followed.applying = None
        for batch in batches[:applied]:
            self._held.pop()
            outcome = self._sequence.live(batch.sequence_number, batch.fingerprint)
            assert outcome is Step.APPLY, "as `in_a_row` has said"
            self._check_rank(rank_of(batch.payload))
        self._counters["batches_applied"] += applied
        self._together_max = min(2 * applied, self._together_limit) or 1
        return applied

    def _apply(self, number: int, fingerprint: int, payload: bytes) -> None:
        if self._followed.is_fenced:
            raise Fenced
        try:
            batch = read_batch(payload, self._reader)
        except WireError as error:
            self._counters["unreadable_batches"] += 1
            self._publisher.skip(number, fingerprint, error.reason)
            return
        self._check_rank(batch.data_parallel_rank)
        self._followed.applying = (number, fingerprint)
        outcome = self._publisher.apply(batch, number, fingerprint)
        self._followed.applying = None
        self._counters["batches_applied"] += 1
        if outcome is ApplyOutcome.NEEDS_REPLAY:
            self._publisher.set_coverage(Coverage.DEGRADED)
            self._wants_rebuild = True

    def _check_rank(self, rank: int | None) -> None:
        if rank not in (None, self._registration.dp_rank):
            self._counters["rank_mismatches"] += 1

    async def _breathe(self) -> None:
        """Let other tasks run, if this one has been applying for a while."""
        if self._clock.elapsed() >= self._slice_end:
            await asyncio.sleep(0)
            self._slice_end = self._clock.elapsed() + self._pace.share_s

    async def _apply_rest(self) -> None:
        """The last act: what is in the socket and the queue, up to the first thing that would need a replay."""
        is_all = False
        while not self._wants_synchronising and not (is_all and not self._held):
            is_all = self._receive()
            while batch := self._held.first:
                outcome = self._sequence.live(batch.sequence_number, batch.fingerprint)
                if outcome is Step.APPLY:
                    self._apply(*batch)
                elif outcome is not Step.DUPLICATE:
                    return
                self._held.pop()
                await self._breathe()

    # ------------------------------------------------------------------ what is missing

    def _begin_again(self) -> None:
        """The engine restarted: drop what its last run left, then look at the batch again."""
        log.info("restart_found", last_sequence_number=self._sequence.applied, **self._names)
        self._counters["restarts"] += 1
        self._publisher.restart()
        self._sequence.begin_again()

    def _lose(self, gap: Gap) -> None:
        """These numbers cannot be had. Before the first batch known, that is a late start and not a gap."""
        if self._sequence.applied is None:
            self._publisher.set_coverage(Coverage.SINCE, since=gap.gap_last + 1)
        else:
            self._counters["gaps"] += 1
            self._counters["missing_batches"] += gap.gap_last - gap.gap_first + 1
            was_degraded = self._publisher.checkpoint.coverage is Coverage.DEGRADED
            report = log.debug if was_degraded else log.warning
            report("gap_found", gap_first=gap.gap_first, gap_last=gap.gap_last, **self._names)
            self._publisher.count_gap(gap.gap_first, gap.gap_last)
        self._sequence.lose(gap.gap_last)

    async def _repair(self, gap: Gap) -> None:
        """Ask for a gap before the first held batch; what brings no progress is lost."""
        if not self._can_replay or self._is_cooling:
            self._lose(gap)
            return
        before = self._sequence.applied
        end = await self._replay(gap.gap_first, until_held=True)
        if end is ReplayEnd.REPAIRED:
            self._counters["gaps_repaired"] += 1
        elif end is ReplayEnd.RESTARTED:
            self._begin_again()
        elif self._is_finishing or self._synchronising_is_due:
            pass  # the gap is found again afterwards
        elif self._sequence.applied == before:
            self._lose(gap)

    async def _rebuild(self) -> None:
        """The index had to drop what it knew: apply this run of the engine again, from its first number.

        Without a replay it goes on from here, with coverage degraded.
        """
        for _ in range(self._limits.replay_tries_max):
            if not self._can_replay or self._is_cooling:
                break
            self._counters["rebuilds"] += 1
            self._wants_rebuild, self._wants_rewind = False, True
            await self._replay(0, until_held=True)
            self._wants_rewind = False
            if not self._wants_rebuild:
                break
        self._wants_rebuild = False

    # ------------------------------------------------------------------ synchronise

    @property
    def _synchronising_is_due(self) -> bool:
        return self._wants_synchronising and not self._is_finishing and not self._is_cooling

    async def _synchronise(self) -> None:
        """Ask for everything since the checkpoint, that batch included; find out whether the engine restarted."""
        self._wants_synchronising = False
        while not self._receive() and self._held.room > 0:
            await self._breathe()
        held_before = len(self._held) if self._connections > 1 else 0
        number = self._sequence.applied
        end = await self._replay(0 if number is None else number, is_checking=number is not None)
        if end is ReplayEnd.RESTARTED:
            self._begin_again()
            end = await self._replay(0)
            if end is ReplayEnd.MARKER:
                self._drop_late(held_before)
        if self._wants_rebuild:
            await self._rebuild()
        self._followed.is_in_first_replay = False

    def _drop_late(self, held_before: int) -> None:
        """Batches received before a replay that showed another run, and not among its answers, are of the old run."""
        for _ in range(held_before):
            batch = self._held.pop()
            is_known = self._sequence.has_applied(batch.sequence_number, batch.fingerprint)
            self._counters["duplicates" if is_known else "late_batches"] += 1

    # ------------------------------------------------------------------ replay

    async def _replay(self, start: int, *, is_checking: bool = False, until_held: bool = False) -> ReplayEnd:
        """Ask from `start` on and apply the answers; ask again from where they stopped while that brings progress.

        `is_checking`: `start` is the batch of the checkpoint; without it among the answers, continuity is not proven.
        `until_held`: only what is missing before the first held batch is wanted.
        """
        self._is_replaying = True
        self._show()
        tries_left = self._limits.replay_tries_max
        try:
            while True:
                before = self._sequence.applied
                end = await self._replay_once(start, is_checking, until_held)
                self._counters["replays"] += 1
                self._counters[f"replays_{end}"] += 1
                if end not in RESUMED_AFTER:
                    break
                has_progress = self._sequence.applied != before
                tries_left = self._limits.replay_tries_max if has_progress else tries_left - 1
                if not tries_left:
                    break
                if has_progress or end is ReplayEnd.HOLE:
                    start, is_checking = self._sequence.next_number, False
        finally:
            self._is_replaying = False
            self._show()
        if end in COOLED_DOWN_AFTER:
            self._cool_until = self._now() + self._limits.replay_cool_down_s
            log.warning("replay_failed", reason=str(end), pause_s=self._limits.replay_cool_down_s, **self._names)
        return end

    async def _replay_once(self, start: int, is_checking: bool, until_held: bool) -> ReplayEnd:
        endpoint = self._registration.replay_endpoint
        assert endpoint is not None, "asked for only if there is one"
        async with self._replay_turns:
            source = self._transport.open_replay(endpoint, self._wake.set)
            try:
                replay = Replay(
                    source,
                    start,
                    now=self._now(),
                    idle_timeout_s=self._limits.replay_idle_timeout_s,
                    timeout_s=self._limits.replay_timeout_s,
                )
                end = await self._take_answers(replay, start, is_checking, until_held)
            finally:
                source.close()
        has_start = replay.last_number is not None and replay.last_number >= start
        return ReplayEnd.RESTARTED if end is ReplayEnd.MARKER and is_checking and not has_start else end

    async def _take_answers(self, replay: Replay, start: int, is_checking: bool, until_held: bool) -> ReplayEnd:
        """Apply answers until there are no more or no more are wanted; live batches are received meanwhile."""
        is_first = True
        while replay.end is None:
            is_all = self._receive()
            if self._is_finishing:
                return ReplayEnd.STOPPED
            if self._held.room <= 0:
                return ReplayEnd.HELD_FULL
            answers = replay.take(self._now(), REPLAY_BURST)
            for number, payload in answers:
                if is_first and is_checking and number > start:
                    self._publisher.set_coverage(Coverage.DEGRADED)  # the past that would prove continuity is gone
                end = self._take_answer(number, payload, None if is_first else start, until_held)
                if end is not None:
                    return end
                is_first = False
                await self._breathe()
            if is_all and not answers and replay.end is None:
                await self._wait(replay.wait_s(self._now()))
            else:
                await self._breathe()
        return replay.end

    def _take_answer(self, number: int, payload: bytes, start: int | None, until_held: bool) -> ReplayEnd | None:
        """Apply one answer, or say why the replay is over.

        A hole is asked for again, if its first number was not the `start` of this request; None = this is the first
        answer, so nothing before it can be had.
        """
        if self._wants_rewind:
            self._wants_rewind = False
            self._publisher.drop_residencies()
            self._publisher.set_coverage(Coverage.COMPLETE)  # as for a first batch: `_lose` says if it is not 0
            self._sequence.rewind()
        fingerprint = fingerprint_of(payload)
        outcome = self._sequence.replayed(number, fingerprint)
        if isinstance(outcome, Gap):
            if self._held.first and outcome.gap_first <= self._held.first.sequence_number <= outcome.gap_last:
                return ReplayEnd.PASSED
            if start not in (None, outcome.gap_first):
                return ReplayEnd.HOLE
            self._lose(outcome)
            outcome = self._sequence.replayed(number, fingerprint)
        if outcome is Step.RESTART:
            return ReplayEnd.RESTARTED
        if outcome is Step.APPLY:
            self._apply(number, fingerprint, payload)
            self._counters["batches_replayed"] += 1
            if self._wants_rebuild:
                return ReplayEnd.REBUILD
            if until_held and self._held.first and self._held.first.sequence_number == number + 1:
                return ReplayEnd.REPAIRED
        return None

    # ------------------------------------------------------------------ what is shown

    def _show(self) -> None:
        self._publisher.is_connected = self._is_connected
        self._publisher.is_recovering = self._is_replaying
        if self._is_replaying:
            self._followed.state = FollowState.REPLAYING
        elif self._is_connected:
            self._followed.state = FollowState.CONNECTED
        else:
            self._followed.state = FollowState.DISCONNECTED if self._connections else FollowState.CONNECTING

    @property
    def _names(self) -> dict[str, object]:
        return {"worker_id": self._registration.worker_id, "dp_rank": self._registration.dp_rank}

    @property
    def _can_replay(self) -> bool:
        return self._registration.replay_endpoint is not None

    @property
    def _is_cooling(self) -> bool:
        return self._now() < self._cool_until

    def _now(self) -> float:
        return self._loop.time()
