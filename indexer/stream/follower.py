"""The life of one publisher: receive, apply, show.

Purpose: apply every batch of one engine to its index, in order and once, and say how far that succeeded. Live batches
wait in one bounded queue (`HeldBatches`); one loop receives into it and, in turns, either applies from it or takes the
answers of a replay. What to do with each batch, and when to ask for past ones, is decided by `Continuity`; how long
that may take, by `Repair`. Live and replayed batches are applied by the same function; only what has piled up, follows
each other and is simple is applied several batches at a time, with the same result.

Invariants: effects reach the index only through `_apply`, in one task; a batch leaves the queue only when it was
applied or found not to be wanted; nothing is applied once the publisher is fenced; the loop goes on receiving whatever
it waits for; every wait has a deadline, but for the one for news.

If broken: an index with batches missing, doubled or of two runs mixed, whose coverage says it is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog
import xxhash

from indexer.index.publisher import ApplyOutcome, addressee_of
from indexer.index.state import Coverage, CoverageReason, ProvenBatch, Trust
from indexer.stream.continuity import Continuity, Purpose, Verdict
from indexer.stream.followed import BadMessage, FollowedPublisher, FollowState, ReplayState, ReplayStatus
from indexer.stream.held import HeldBatches, NumberedBatch
from indexer.stream.limits import StreamLimits
from indexer.stream.pace import Pace
from indexer.stream.ports import FollowedIndex, LiveSource, ReplaySource, Transport
from indexer.stream.repair import Repair, ReplayTurns
from indexer.stream.replay import ReplayEnd
from indexer.wire.columns import TOGETHER_MAX, PayloadReader, rank_of, read_batch
from indexer.wire.errors import WireError
from indexer.wire.frames import split_message

log = structlog.get_logger(__name__)

BURST_MESSAGES = 256
REPLAY_BURST = 64
BURST_BYTES = 128 * 1024  # some 1,500 blocks of 16 tokens: less than a millisecond; also what is applied by one pass
QUIET_REPORTS = frozenset({"gap_found_again"})

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
        replay_turns: ReplayTurns,
        clock: Clock | None = None,
        reader: PayloadReader | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._followed = followed
        self._publisher: FollowedIndex = followed.index
        self._registration = followed.registration
        self._addressee = addressee_of(followed.registration)
        self._counters = followed.counters
        self._transport = transport
        self._limits = limits
        self._replay_turns = replay_turns
        self._clock = clock or Clock()
        self._reader = reader or PayloadReader()
        self._pace = pace or Pace(limits.slice_s, self._clock.elapsed)
        self._held = HeldBatches(limits.held_batches_max, limits.held_bytes_max)
        self._wake = asyncio.Event()
        self._now = asyncio.get_running_loop().time
        self._continuity = Continuity(
            self._publisher,
            self._counters,
            limits,
            has_replay=self._registration.replay_endpoint is not None,
            now=self._now,
            wall=self._wall,
            report=self._report,
        )
        self._repair: Repair | None = None
        self._is_connected = False
        self._has_connected = False
        self._is_finishing = False
        self._shown: tuple[Coverage, CoverageReason] | None = None
        self._burst_messages = 1  # to receive at once: more the smaller they are
        self._together_max = 1  # batches: doubles while that works
        self._together_limit = 1 if followed.counters["failures"] else TOGETHER_MAX  # a poisonous batch must be told
        self._live: LiveSource

    async def run(self) -> None:
        """Ends by itself only after `finish`. Raises what the transport or the index raise."""
        self._followed.is_in_first_replay = self._registration.replay_endpoint is not None
        self._followed.replay = replace(self._followed.replay, state=ReplayState.IDLE, next_try_at=None)
        self._note_disconnected()
        self._show()
        self._live = self._transport.open_live(self._registration.endpoint, self._wake.set)
        try:
            while not self._is_finishing:
                await self._turn()
            if self._repair is None:
                await self._apply_rest()
        finally:
            if self._repair is not None:
                self._repair.close()
            self._live.close()

    def finish(self) -> None:
        """Apply what has been received, as far as nothing is missing, and end."""
        self._is_finishing = True
        self._wake.set()

    def resync(self, *, is_full: bool) -> None:
        """Ask the replay endpoint again, as soon as a replay that runs is over."""
        self._continuity.resync(is_full=is_full)
        self._wake.set()

    def others_are_at(self, batch: ProvenBatch) -> None:
        """Another replica has followed this publisher so far, and has no doubt."""
        self._continuity.others_are_at(batch)

    # ------------------------------------------------------------------ receive

    async def _turn(self) -> None:
        await self._pace.turn()
        is_all = self._receive()
        self._look_at_credit()
        has_received = is_all or self._held.room <= 0
        if self._repair is None and has_received and self._continuity.wants_to_ask(self._held):
            self._begin_repair()
        if self._repair is not None:
            await self._advance_repair(self._repair, is_all)
        elif not await self._apply_held():
            await (self._wait(self._idle_s()) if is_all else asyncio.sleep(0))

    def _idle_s(self) -> float | None:
        """How long there is nothing to do without news; None = for ever."""
        times = [at for at in (self._continuity.wakes_at, self._credit_ends_at) if at is not None]
        return max(0.0, min(times) - self._now()) if times else None

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # the caller looks at its deadlines

    def _receive(self) -> bool:
        """One burst into the queue. True = nothing is left in the socket."""
        self._wake.clear()
        wanted = min(self._held.room, self._burst_messages)
        messages = self._live.drain(wanted) if wanted > 0 else []
        for connected in self._live.connection_changes():
            self._note_connection(connected)
        if messages:
            self._hold(messages)
            self._followed.last_batch_at = self._clock.wall()
            mean_bytes = 1 + sum(len(frames[-1]) for frames in messages) // len(messages)
            self._burst_messages = min(BURST_MESSAGES, max(1, BURST_BYTES // mean_bytes))
        return 0 < wanted != len(messages)

    def _hold(self, messages: list[list[bytes]]) -> None:
        batches = []
        for frames in messages:
            try:
                _, number, payload = split_message(frames)
            except WireError as error:
                self._counters["bad_messages"] += 1
                self._counters[f"bad_messages_{error.reason}"] += 1
                self._followed.last_bad_message = BadMessage(error.reason, tuple(map(len, frames[:8])))
            else:
                batches.append(NumberedBatch(number, fingerprint_of(payload), payload))
        self._counters["batches_received"] += len(batches)
        self._held.extend(batches)

    def _note_connection(self, connected: bool) -> None:
        self._is_connected = connected
        self._continuity.connection_changed(self._held, is_connected=connected)
        if connected:
            self._has_connected = True
            self._followed.disconnected_since = None
            self._counters["connections"] += 1
        else:
            self._counters["connections_lost"] += 1
            self._note_disconnected()
        log.info("publisher_connected" if connected else "publisher_disconnected", **self._names)
        self._show()

    def _note_disconnected(self) -> None:
        if self._followed.disconnected_since is None:
            self._followed.disconnected_since = self._now()

    # ------------------------------------------------------------------ apply

    async def _apply_held(self) -> bool:
        """What is held, until something has to be asked for first. True = there is more to do at once."""
        while (batch := self._held.first) and not self._is_finishing:
            if self._continuity.wants_to_ask(self._held):
                return True
            with self._pace:
                if self._publisher.takes_columns and self._apply_together():
                    pass
                elif self._take_live(batch) is Verdict.WAIT:
                    return False
            await self._pace.turn()
        return self._continuity.wants_to_ask(self._held)

    def _take_live(self, batch: NumberedBatch) -> Verdict:
        verdict = self._continuity.live(batch, self._held)
        if verdict is Verdict.APPLY:
            self._held.pop()
            self._apply(*batch)
        elif verdict is Verdict.DROP:
            self._held.pop()
        return verdict

    def _apply_together(self) -> int:
        """Apply the first held batches, as far as each is the next and simple; how many.

        0: nothing happened, the first is to be looked at by itself.
        """
        batches = self._held.first_few(self._together_max, BURST_BYTES)
        del batches[self._continuity.in_a_row(batches, self._held) :]
        columns = self._reader.read(*(batch.payload for batch in batches)) if batches else None
        if columns is None:
            self._together_max = 1
            return 0
        if self._followed.is_fenced:
            raise Fenced
        first = batches[0]
        self._followed.applying = (first.sequence_number, first.fingerprint)
        applied = self._publisher.apply_columns(columns, batches, self._wall())
        self._followed.applying = None
        if applied:
            self._note_applied(batches[:applied])
        self._together_max = min(2 * applied, self._together_limit) or 1
        return applied

    def _note_applied(self, batches: list[NumberedBatch]) -> None:
        self._held.pop_few(batches)
        self._continuity.take_in_a_row(batches)
        for batch in batches:
            self._check_rank(rank_of(batch.payload))
        self._counters["batches_applied"] += len(batches)

    def _apply(self, number: int, fingerprint: int, payload: bytes) -> bool:
        """False: the index needs the whole run again, and will get it."""
        if self._followed.is_fenced:
            raise Fenced
        try:
            batch = read_batch(payload, self._reader, self._addressee)
        except WireError as error:
            self._counters["unreadable_batches"] += 1
            self._publisher.skip(number, fingerprint, error.reason, self._wall())
            return True
        self._check_rank(batch.data_parallel_rank)
        self._followed.applying = (number, fingerprint)
        outcome = self._publisher.apply(batch, number, fingerprint, self._wall())
        self._followed.applying = None
        self._counters["batches_applied"] += 1
        return outcome is ApplyOutcome.APPLIED or not self._continuity.needs_replay()

    def _check_rank(self, rank: int | None) -> None:
        if rank not in (None, self._registration.dp_rank):
            self._counters["rank_mismatches"] += 1

    async def _apply_rest(self) -> None:
        """The last act: what is in the socket and the queue, up to the first thing that would need a replay."""
        is_all = False
        while not (is_all and not self._held):
            is_all = self._receive()
            while batch := self._held.first:
                if self._continuity.wants_to_ask(self._held):
                    return
                with self._pace:
                    if self._take_live(batch) not in (Verdict.APPLY, Verdict.DROP):
                        return
                await self._pace.turn()

    # ------------------------------------------------------------------ what is missing

    def _begin_repair(self) -> None:
        ask = self._continuity.ask(self._held)
        self._repair = Repair(
            ask.start,
            self._replay_turns.ask(self._wake.set),
            self._connect_replay,
            self._limits,
            self._counters,
            self._now(),
            next_number=0 if ask.purpose is Purpose.REBUILD else self._continuity.sequence.next_number,
        )
        self._show_repair(self._repair)

    def _connect_replay(self) -> ReplaySource:
        endpoint = self._registration.replay_endpoint
        assert endpoint is not None, "asked for only if there is one"
        return self._transport.open_replay(endpoint, self._wake.set)

    async def _advance_repair(self, repair: Repair, is_all: bool) -> None:
        """Take the answers that have come, and end it if it is over."""
        was_waiting = repair.is_waiting_for_turn
        answers = repair.take(self._now(), REPLAY_BURST)
        for number, payload in answers:
            with self._pace:
                end = self._take_answer(repair, NumberedBatch(number, fingerprint_of(payload), payload))
            if end is not None:
                repair.stop(end)
                break
            await self._pace.turn()
        if not answers and self._held.room <= 0:
            repair.stop(ReplayEnd.HELD_FULL)
        if not repair.goes_on(self._now(), self._continuity.sequence.next_number):
            self._end_repair(repair)
            return
        if was_waiting != repair.is_waiting_for_turn:
            self._show_repair(repair)
        if not answers:
            await (self._wait(repair.wait_s(self._now())) if is_all else asyncio.sleep(0))

    def _take_answer(self, repair: Repair, batch: NumberedBatch) -> ReplayEnd | None:
        """Why the replay is over; None = it is not."""
        is_first = batch.sequence_number == repair.first_number
        verdict = self._continuity.answered(batch, self._held, start=repair.start, is_first=is_first)
        if isinstance(verdict, ReplayEnd):
            return verdict
        if verdict is Verdict.APPLY:
            self._counters["batches_replayed"] += 1
            if not self._apply(*batch):
                return ReplayEnd.REBUILD
        return None

    def _end_repair(self, repair: Repair) -> None:
        assert repair.end is not None
        self._repair = None
        self._continuity.ended(repair.end, self._held)
        if not self._continuity.wants_to_ask(self._held):
            self._followed.is_in_first_replay = False
        self._show_repair(repair)

    # ------------------------------------------------------------------ what is shown

    def _show(self) -> None:
        state, trust = self._state()
        self._followed.state = state
        if trust != self._shown:
            self._shown = trust
            self._publisher.show(None if trust is None else Trust(*trust, self._wall()))

    def _state(self) -> tuple[FollowState, tuple[Coverage, CoverageReason] | None]:
        """And what answers say in place of the checkpoint's coverage."""
        if not self._is_connected:
            state = FollowState.DISCONNECTED if self._has_connected else FollowState.CONNECTING
            reason = CoverageReason.CONNECTION_LOST if self._has_connected else CoverageReason.NEVER_CONNECTED
            if not self._publisher.is_credited:
                reason = CoverageReason.NOT_CREDITED
            return FollowState.REPLAYING if self._repair else state, (Coverage.DISCONNECTED, reason)
        if self._repair is None:
            return FollowState.CONNECTED, None
        is_waiting = self._repair.is_waiting_for_turn
        reason = CoverageReason.WAITING_FOR_TURN if is_waiting else CoverageReason.REPLAYING
        return FollowState.REPLAYING, (Coverage.RECOVERING, reason)

    def _show_repair(self, repair: Repair) -> None:
        """How a repair goes, or how it went."""
        before = self._followed.replay
        state = ReplayState.WAITING_FOR_TURN if repair.is_waiting_for_turn else ReplayState.RUNNING
        last_end, last_end_at, next_try_at = before.last_end, before.last_end_at, None
        if repair.end is not None:
            state, last_end, last_end_at = ReplayState.IDLE, str(repair.end), self._wall()
            pause_s = self._continuity.cool_until - self._now()
            if pause_s > 0:
                state = ReplayState.DISTRUSTED if self._continuity.is_distrusted else ReplayState.COOLING_DOWN
                next_try_at = round(self._wall() + pause_s, 3)
        self._followed.replay = ReplayStatus(state, repair.start, repair.brought, last_end, last_end_at, next_try_at)
        self._show()

    @property
    def _credit_ends_at(self) -> float | None:
        """When it will not count in answers any more, if it stays disconnected."""
        since, limit_s = self._followed.disconnected_since, self._limits.disconnected_credit_s
        return since + limit_s if since is not None and limit_s and self._publisher.is_credited else None

    def _look_at_credit(self) -> None:
        """After a long time without a connection it counts again only when the replay that follows is over."""
        if self._is_connected and self._repair is None and not self._continuity.wants_to_ask(self._held):
            self._publisher.set_credited(True)
        elif (ends_at := self._credit_ends_at) is not None and self._now() >= ends_at:
            self._counters["credits_lost"] += 1
            self._publisher.set_credited(False)
            self._report("credit_lost", disconnected_s=self._limits.disconnected_credit_s)
            self._show()

    def _report(self, event: str, **facts: object) -> None:
        write = log.debug if event in QUIET_REPORTS else log.info if event == "restart_found" else log.warning
        write(event, **facts, **self._names)

    @property
    def _names(self) -> dict[str, object]:
        return {"worker_id": self._registration.worker_id, "dp_rank": self._registration.dp_rank}

    def _wall(self) -> float:
        return round(self._clock.wall(), 3)
