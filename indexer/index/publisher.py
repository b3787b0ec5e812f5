"""One publisher: what its events say it holds, block by block.

Purpose: turn event batches into residencies of content keys. An event is applied whole and in order; nothing that a
publisher sends raises, it is counted instead. Effects and checkpoint move together (`apply`), and so do they when the
store takes them (`take_changes`). Around that it keeps how far all this can be trusted. What the store lacks is kept by
unstored.py, what queries follow by publisher_reuse.py.

What an engine hash means never changes while it is remembered: it is resident in some holder, or a ghost, or it waits
(see waiting.py) until a hash that explains it is announced. Ghosts outlive removals, clears and restarts, because
engines announce children of blocks that are gone.

If broken: hits would be promised that the engine does not have, or prefixes lost for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from math import gcd
from typing import TYPE_CHECKING, TypeAlias

from indexer.index.ancestry import Ancestry
from indexer.index.columns import PublisherRows, PublisherState
from indexer.index.ghosts import Ghosts
from indexer.index.groups import Groups
from indexer.index.holder import Holder
from indexer.index.journal import Journal, Kind, Note
from indexer.index.key_space import KeySpace
from indexer.index.limits import IndexLimits
from indexer.index.offloading import Connector
from indexer.index.options import read_options
from indexer.index.parent_links import ParentLinks
from indexer.index.placing import Placing, tells_block_size
from indexer.index.predictions import Predictions
from indexer.index.publisher_reuse import PublisherReuse
from indexer.index.publisher_status import PublisherStatus, status_of
from indexer.index.residents import Point, Residents
from indexer.index.sequence_numbers import NOBODYS
from indexer.index.settling import is_wide
from indexer.index.side_state import SideState
from indexer.index.state import (
    DOUBTS,
    LOSSES,
    Checkpoint,
    Coverage,
    CoverageReason,
    EngineHash,
    HolderKey,
    PublisherChanges,
    Trust,
)
from indexer.index.tail import Tail
from indexer.index.tiers import GPU, Media, canonical_medium
from indexer.index.unstored import Unstored
from indexer.index.waiting import WaitingRoom
from indexer.index.whole_batches import WholeBatches
from indexer.registration import AUTO, Registration
from indexer.wire.columns import BatchColumns
from indexer.wire.decode import EventBatch, decode_batch, raw_events
from indexer.wire.dialects.recognition import SGLANG, VLLM, Recogniser
from indexer.wire.errors import WireError
from indexer.wire.events import Addressee, AllBlocksCleared, BlockRemoved, BlockStored, Event

if TYPE_CHECKING:
    from indexer.index.scope import Scope

DEFAULT_GRANULE = 16
REFUSED_BATCHES_MIN = 3  # so many in a row, and all that it publishes is taken for refused
SWEEP_WORK_PER_BATCH = 256  # some 50 us: what was cleared is gone before as much is stored again in usual batches

NumberedPayload: TypeAlias = tuple[int, int, bytes]  # sequence number, fingerprint, what was sent


class ApplyOutcome(Enum):
    APPLIED = auto()
    NEEDS_REPLAY = auto()  # the granule had to be refined; the batches before this one are needed to rebuild


def addressee_of(registration: Registration) -> Addressee:
    """Whom events that name a model, tenant or rank must mean."""
    worker_id, dp_rank = registration.key
    return Addressee(worker_id, registration.model, registration.tenant, dp_rank, registration.block_size)


class PublisherIndex:
    """See the module. Cost of `apply`: about 3 us a block of 16 tokens."""

    def __init__(self, registration: Registration, scope: Scope, limits: IndexLimits) -> None:
        self.registration = registration
        self.options = read_options(registration.options)
        self.is_pool = registration.is_pool
        self._addressee = addressee_of(registration)
        self._recogniser = Recogniser(None if registration.engine == AUTO else registration.engine)
        self.checkpoint = Checkpoint()
        self.trust = self.checkpoint.trust  # what answers say; made anew when it changes
        self.is_credited = True
        self.predictions: Predictions | None = None  # as routers have told; never stored
        self._shown: Trust | None = None
        self.granule: int | None = None
        self.groups = Groups(limits.block_tokens_min)
        self.waiting = WaitingRoom(limits.orphans_max, limits.unplaced_max, limits.sparse_runs_max)
        self.ancestry = Ancestry(limits.links_max)
        self.counters: Counter[str] = Counter()
        self.media = Media(limits.media)
        self.connector = Connector.from_options(registration.options)
        self.journal = Journal(limits.journal_bytes_max)
        self.residents = Residents(
            self,
            Ghosts(limits.ghosts_max),
            self.waiting,
            self.counters,
            self.media,
            limits.holders_max,
            limits.unverified_max,
        )
        self.reuse = PublisherReuse(self.options, self.groups, self.residents)
        self.placing = Placing(
            self,
            self.residents,
            self.groups,
            self.waiting,
            self.ancestry,
            self.counters,
            self.connector,
            self.media,
            options=self.options,
            content_from_any_medium=self._tells_content_everywhere,
            drops=self.reuse.drops,
            is_vllm=self.dialect == VLLM,
            is_pool=registration.is_pool,
            names=scope.names,
            note_ended=self._note_ended,
        )
        self.gaps = 0
        self.missing_batches = 0
        self.batches_applied = 0
        self.bad_events: Counter[str] = Counter()
        self._scope = scope
        self.number_row = scope.numbers.take()
        self._side_state = SideState(
            self.residents, self.waiting, self.ancestry, self.groups, self.connector, limits.links_stored_max
        )
        self._tail = Tail(limits.tail_bytes_max)
        self._whole_batches = WholeBatches(self, self.placing, self.groups, scope.scratch, self._apply_event)
        self._unstored = Unstored(registration, self.residents, self.groups, self._side_state)
        self.has_spoken = False  # whether any batch of it has come, ever
        self._refused_batches = 0  # in a row, of which nothing was applied
        self._trouble_at = 0.0
        self._suspicions = 0
        self._checkpoint_is_changed = False
        self._kind = (-1, -1, False)

    # ------------------------------------------------------------------ the stream

    @property
    def generation(self) -> int:
        return self.checkpoint.generation

    @property
    def coverage(self) -> Coverage:
        """How far answers can be trusted right now."""
        return self.trust.coverage

    def show(self, trust: Trust | None) -> None:
        """What answers say instead of the checkpoint's coverage: `recovering` or `disconnected`. Never stored."""
        self._shown = trust
        self._renew_trust()

    def set_credited(self, is_credited: bool) -> None:
        """Whether what it holds counts in answers. Cost: nothing if it stays as it is."""
        if is_credited != self.is_credited:
            self.is_credited = is_credited
            if self.space is not None:
                self.space.known.clear()

    # ------------------------------------------------------------------ the dialect

    @property
    def dialect(self) -> str | None:
        """What publishes: as registered, or what its events have told; None as long as they have not."""
        return self._recogniser.dialect

    @property
    def leaves_one_token_more(self) -> bool:
        """SGLang's pairs, which are its lookahead, need the token after them; not if it is another engine for sure."""
        return bool(self.residents.lookahead_tokens) and self.dialect in (SGLANG, None)

    @property
    def _tells_content_everywhere(self) -> bool:
        """vLLM's connectors leave out what sets a prompt apart beside its tokens."""
        return self.dialect not in (VLLM, None)

    def _recognise(self, payload: bytes) -> None:
        self._recogniser.look(raw_events(payload))
        self.placing.content_from_any_medium = self._tells_content_everywhere
        self.placing.is_vllm = self.dialect == VLLM

    # ------------------------------------------------------------------ batches

    def apply(self, batch: EventBatch, sequence_number: int, fingerprint: int, at: float | None = None) -> ApplyOutcome:
        """Apply one batch and move the checkpoint to it. Never raises for what a publisher sent. `at`: when, in seconds
        since 1970."""
        if self.dialect is None:
            self._recognise(batch.payload)
        numbered = [(sequence_number, fingerprint, batch.payload)]
        if batch.columns is not None and self.apply_columns(batch.columns, numbered, at):
            return ApplyOutcome.APPLIED
        self.journal.add(numbered, at)
        outcome = self._apply_each(batch if batch.columns is None else decode_batch(batch.payload))
        if self.is_pool and self.waiting.unplaced:
            self.placing.adopt_waiting()
        self._note_kind()
        self._note_applied(1, sequence_number, fingerprint)
        return outcome

    @property
    def takes_columns(self) -> bool:
        """Whether `apply_columns` is worth trying."""
        return self._whole_batches.is_simple and self.dialect is not None

    def apply_columns(self, columns: BatchColumns, batches: Sequence[NumberedPayload], at: float | None = None) -> int:
        """Apply the first of these batches, read as columns, and move the checkpoint to the last that was; how many.

        The same as one after the other. 0: nothing happened, `apply` takes the first.
        """
        applied = self._whole_batches.apply(columns)
        if applied:
            done = batches[:applied]
            self._note_refusal(is_refused=False)
            for _, _, payload in done:
                self._tail.append(payload)
            self.journal.add(done, at)
            sequence_number, fingerprint, _ = batches[applied - 1]
            self._note_applied(applied, sequence_number, fingerprint)
        return applied

    def _note_applied(self, batches: int, sequence_number: int, fingerprint: int) -> None:
        self._scope.tell()
        self._scope.sweep(SWEEP_WORK_PER_BATCH * batches)
        if self._scope.expected is not None:
            self._scope.expected.settle(self)
        self.tidy_trust()
        self.batches_applied += batches
        if self._suspicions != self.counters["stores_from_last_hit"]:
            self._suspicions = self.counters["stores_from_last_hit"]
            self._scope.note_assumptions(self)
        point = self.checkpoint
        self.checkpoint = Checkpoint(
            point.generation,
            sequence_number,
            fingerprint,
            point.coverage,
            point.since,
            point.reason,
            point.coverage_at,
            point.cohort,
            point.verified_since,
        )
        self._scope.numbers.note(self.number_row, sequence_number)
        self._note_voice()
        self._checkpoint_is_changed = True

    def _apply_each(self, batch: EventBatch) -> ApplyOutcome:
        outcome = ApplyOutcome.APPLIED
        if self._learn(batch.events):
            outcome = self._rebuild()
        self._tail.append(batch.payload)
        refused = self.bad_events.total()
        for event in batch.events:
            self._apply_event(event)
        refused = self.bad_events.total() - refused
        self.bad_events.update(batch.bad_events)
        if batch.for_others:
            self.counters["events_for_others"] += batch.for_others
        # whoever speaks for others as well is only taken for refused if nothing ever was for this publisher
        ignored = batch.for_others if self.granule is None else 0
        if len(batch.events) > refused or refused or batch.bad_events or ignored:
            self._note_refusal(is_refused=len(batch.events) == refused)
        return outcome

    def _note_refusal(self, *, is_refused: bool) -> None:
        """Of one more batch. Cost: nothing, as long as none is."""
        if is_refused or self._refused_batches:
            self._refused_batches = self._refused_batches + 1 if is_refused else 0
            self._scope.note_refusal(self)

    @property
    def is_refused(self) -> bool:
        """Whether nothing of its last batches could be read, or was for it."""
        return self._refused_batches >= REFUSED_BATCHES_MIN

    def _note_voice(self) -> None:
        if not self.has_spoken and self.checkpoint.sequence_number is not None:
            self.has_spoken = True
            self._scope.note_voice(self)

    def skip(self, sequence_number: int, fingerprint: int, reason: str, at: float | None = None) -> None:
        """A batch that cannot be read as a whole: counted; what it said is lost."""
        self.bad_events[reason] += 1
        self._note_refusal(is_refused=True)
        self.journal.note(Note(Kind.UNREADABLE, sequence_number, at))
        self._lose_trust(sequence_number + 1, at)
        self._move_checkpoint(sequence_number=sequence_number, fingerprint=fingerprint)
        is_poison = reason == CoverageReason.POISONOUS_BATCH
        why = CoverageReason.POISONOUS_BATCH if is_poison else CoverageReason.UNREADABLE_BATCH
        self.set_coverage(Coverage.DEGRADED, why, at)

    def restart(self, at: float | None = None) -> None:
        """The engine began again with an empty cache. Ghosts stay: hashes mean what they did."""
        self._drop_residencies(Kind.RESTART, at)
        self._scope.forget_expected(self)
        self.counters["restarts"] += 1
        self.checkpoint = Checkpoint(generation=self.generation + 1, coverage_at=at, cohort=self.checkpoint.cohort)
        self._renew_trust()

    def drop_residencies(self, at: float | None = None) -> None:
        """Forget what it holds, not what its hashes mean: before its stream is applied again from the start."""
        self._drop_residencies(Kind.APPLIED_AGAIN, at)

    def _drop_residencies(self, why: Kind, at: float | None) -> None:
        self.journal.note(Note(why, self.checkpoint.sequence_number, at))
        self.placing.clear()
        self._tail.start_again()
        self._checkpoint_is_changed = True

    def clear(self, at: float | None = None) -> None:
        """An operator's word: what it holds is not to be believed. What it stores from now on is."""
        self._drop_residencies(Kind.CLEARED_BY_OPERATOR, at)
        self._scope.forget_expected(self)
        self.counters["clears"] += 1
        number = self.checkpoint.sequence_number
        if number is not None:
            self.set_coverage(Coverage.SINCE, CoverageReason.CLEARED, at, since=number + 1)

    def set_coverage(
        self, coverage: Coverage, reason: CoverageReason, at: float | None = None, since: int | None = None
    ) -> None:
        """`since`: the first number known. A degraded one keeps what it was known since."""
        if coverage is Coverage.DEGRADED:
            since = self.checkpoint.since
        self._move_checkpoint(coverage=coverage, reason=reason, coverage_at=at, since=since)

    def doubt(self, reason: CoverageReason, at: float | None = None) -> None:
        """Nothing is missing, but whether this is still the same run is not proven. Something worse stays as it is."""
        point = self.checkpoint
        if point.coverage is not Coverage.DEGRADED or (point.reason in DOUBTS and reason != point.reason):
            self.set_coverage(Coverage.DEGRADED, reason, at)

    def prove(self, at: float | None = None) -> None:
        """A doubt is settled, or live batches have shown to be of the run that was replayed."""
        point = self.checkpoint
        if point.reason in DOUBTS or point.reason is CoverageReason.REPLAYED:
            coverage = Coverage.COMPLETE if point.since is None else Coverage.SINCE
            self.set_coverage(coverage, CoverageReason.PROVEN, at, since=point.since)

    def count_gap(self, gap_first: int, gap_last: int, at: float | None = None) -> None:
        """These numbers are lost, and with them removals of nobody knows what: nothing that is held is verified."""
        self.gaps += 1
        self.missing_batches += gap_last - gap_first + 1
        self.journal.note(Note(Kind.GAP, self.checkpoint.sequence_number, at, (gap_first, gap_last)))
        self._lose_trust(gap_last + 1, at)
        self.set_coverage(Coverage.DEGRADED, CoverageReason.GAP, at)

    def _lose_trust(self, verified_since: int, at: float | None) -> None:
        dropped = self.residents.unverified.dropped
        self.residents.lose_trust()
        self._note_dropped(dropped, at)
        self.connector.forget_clear()
        self._tail.give_up()
        self._move_checkpoint(cohort=self.residents.cohort, verified_since=verified_since)

    def expire_unverified(self, now: float, age_max_s: float, at: float | None = None) -> None:
        """Now and then: drop what has been unverified for longer than that, and links that nobody needs any more.

        `now`: of any clock that only goes on; `at`: what coverage says. Cost: `Holder.leave`, `ParentLinks.keep`.
        """
        residents = self.residents
        if residents.unverified.cohorts:
            dropped = residents.unverified.dropped
            residents.unverified.expire(now, age_max_s)
            self._note_dropped(dropped, at)
            self._trouble_at = now
        if self.checkpoint.verified_since is not None and not residents.unverified:
            self._heal(self.checkpoint.verified_since, at)
        if residents.links:
            residents.keep_links()
            if now - self._trouble_at >= age_max_s:
                residents.links = {}

    def _note_dropped(self, before: int, at: float | None) -> None:
        if self.residents.unverified.dropped > before:
            self.journal.note(Note(Kind.UNVERIFIED_DROPPED, self.checkpoint.sequence_number, at))

    def expire_blocks(self, now: float, at: float | None = None) -> None:
        """Now and then: drop what counts no more, though nobody said that it was removed. `now`: see `Lifetimes`."""
        if self.placing.lifetimes is not None:
            self.placing.end(self.placing.lifetimes.expired(now), Kind.EXPIRED, at)

    def _note_ended(self, why: Kind, blocks: Sequence[tuple[HolderKey, EngineHash]], at: float | None) -> None:
        self.journal.note(Note(why, self.checkpoint.sequence_number, at, blocks=tuple(blocks)))

    def _heal(self, verified_since: int, at: float | None) -> None:
        """Nothing is unverified any more, so what is held is right: only what was before is not known."""
        if self.checkpoint.reason in LOSSES:
            self.set_coverage(Coverage.SINCE, CoverageReason.HEALED, at, since=verified_since)
        self._move_checkpoint(verified_since=None)

    def wanted_links(self) -> list[tuple[HolderKey, ParentLinks]]:
        """The places of which the store has links that are needed: to `learn` and `Residents.use_links`."""
        if not self.residents.unverified:
            return []
        places = [(key, self.placing.links_of(key)) for key in self.residents.links]
        return [(key, links) for key, links in places if links is not None and not links.is_complete]

    def tidy_trust(self) -> bool:
        """Go on with what a gap has left to be done. False: there was nothing left. Cost: a millisecond."""
        return bool(self.residents.links or self.residents.unverified.cohorts) and self.residents.tidy_trust()

    def _move_checkpoint(self, **fields: object) -> None:
        self.checkpoint = replace(self.checkpoint, **fields)  # type: ignore[arg-type]
        self._renew_trust()
        self._checkpoint_is_changed = True

    def _renew_trust(self) -> None:
        """After every change of the checkpoint but `_note_applied`, and of what is shown."""
        before, self.trust = self.trust, self._shown or self.checkpoint.trust
        if self.trust != before and self.space is not None:
            self.space.known.clear()
        self._scope.numbers.note(self.number_row, self.checkpoint.sequence_number)
        self._scope.note_coverage(self, is_complete=self.trust.coverage is Coverage.COMPLETE)
        self._note_voice()

    def _apply_event(self, event: Event) -> None:
        try:
            if isinstance(event, BlockStored):
                self.placing.store(event)
            elif isinstance(event, BlockRemoved):
                self.placing.remove(event)
            else:
                self._clear(event)
        except WireError as error:
            self.bad_events[error.reason] += 1

    def _clear(self, event: AllBlocksCleared) -> None:
        """SGLang's reset empties every tier, vLLM's only its own blocks: what connectors hold survives it."""
        medium = None if event.medium is None else canonical_medium(event.medium, None)
        if medium in (None, GPU):
            self._scope.forget_expected(self)
        if medium is not None:
            self.placing.clear_medium(medium)
        elif self.connector.survives_clears:
            self.placing.clear_device()
        else:
            self.placing.clear()

    # ------------------------------------------------------------------ granule

    def _learn(self, events: Iterable[Event]) -> bool:
        """Groups and granule from a whole batch, before it is applied. True if a granule in use became finer."""
        granule = self.granule
        for event in events:
            if not isinstance(event, BlockStored):
                continue
            granule = granule or self.registration.block_size or DEFAULT_GRANULE
            if self.placing.is_from_connector(event):
                self.connector.show(len(event.block_hashes) if self._is_whole_chunk(event) else 0)
            if not tells_block_size(event):
                continue
            if self.placing.teaches_group(event):
                kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
                is_engine = self.placing.is_on_device(event)
                self.groups.learn(event.group_idx or 0, kind, window, event.block_size, is_engine=is_engine)
            if self.placing.defines_content(event):
                granule = gcd(granule, event.block_size)
        if granule is None or granule == self.granule:
            return False
        is_refined = self.granule is not None
        self._use_granule(granule)
        return is_refined

    def _is_whole_chunk(self, event: BlockStored) -> bool:
        """Of a connector's events, one that describes its chunk; of Mamba states there may be parts of blocks."""
        group = event.group_idx or 0
        return (
            bool(event.token_count)
            and self.groups.is_full(group)
            and self.groups.by_index[group].block_tokens == event.block_size
        )

    def _use_granule(self, granule: int) -> None:
        self.granule = granule
        self._kind = (-1, -1, False)
        self.placing.change_granule(granule, self._scope.key_space(granule))

    def _rebuild(self) -> ApplyOutcome:
        """The granule became finer: everything is placed anew from the tail, if that reaches back to the start."""
        self.counters["granule_refinements"] += 1
        if not self._tail.is_complete:
            self.journal.note(Note(Kind.APPLIED_AGAIN, self.checkpoint.sequence_number, None))
            self.set_coverage(Coverage.DEGRADED, CoverageReason.GRANULE_REFINED)
            return ApplyOutcome.NEEDS_REPLAY
        counters, bad_events = self.counters.copy(), self.bad_events.copy()
        for payload in self._tail.payloads:
            for event in decode_batch(payload, self._addressee).events:
                self._apply_event(event)
        self.counters.clear()
        self.counters.update(counters)
        self.bad_events = bad_events
        return ApplyOutcome.APPLIED

    # ------------------------------------------------------------------ other publishers of the scope

    def resolve_elsewhere(self, engine_hash: EngineHash) -> Point | None:
        """What another publisher with the same granule knows of a wide hash: wide hashes are digests of content."""
        for other in self._scope.publishers:
            if other is not self and other.granule == self.granule:
                point = other.residents.resolve(engine_hash)
                if point is not None:
                    return point
        return None

    @property
    def is_awaited(self) -> bool:
        """Whether orphans of any publisher of the scope wait for a hash that another may know."""
        return bool(self._scope.awaited)

    def await_elsewhere(self, engine_hash: EngineHash) -> None:
        """Orphans wait under this hash: let other publishers tell when they learn it."""
        self._scope.wait(self, engine_hash)

    def explain_elsewhere(self, engine_hash: EngineHash, point: Point) -> None:
        """This publisher knows a hash that others wait for."""
        self._scope.explain(self, engine_hash, point)

    # ------------------------------------------------------------------ queries

    @property
    def space(self) -> KeySpace | None:
        """Where its keys are; None as long as its granule is not known."""
        return None if self.granule is None else self._scope.spaces.get(self.granule)

    @property
    def plain_holder(self) -> Holder | None:
        """Its one holder, on the GPU, if its hits are simply how far the prefix reaches there (but for the last block
        if it drops blocks)."""
        holders = self.residents.holders
        if len(holders) != 1 or not self.is_credited or self._is_in_a_pool:
            return None
        (holder,) = holders.values()
        is_only_group = self.reuse.plain_groups == (holder.key.group,)
        return holder if is_only_group and holder.tier == GPU and holder.is_credited else None

    @property
    def _is_in_a_pool(self) -> bool:
        """Whether what it holds is of a pool, or not all that it can load."""
        scope = self._scope
        return bool(scope.pools) and (self.is_pool or scope.is_served(self.registration.worker_id))

    def _note_kind(self) -> None:
        """Let queries in its scope know what this publisher takes."""
        loads_chunks = self.connector.blocks_per_chunk > 1  # of which only the last block may be known
        kind = (self.groups.version, self.residents.lookahead_tokens, loads_chunks)
        if self.space is None or self._kind == kind:
            return
        self._kind = kind
        self.space.known.clear()
        self._scope.note_kind(self)
        self._scope.note_assumptions(self)
        if self.reuse.is_asked_always or loads_chunks or not self.reuse.is_full_alone:
            self.space.needs_whole_walk = True

    # ------------------------------------------------------------------ the store

    @property
    def changes_pending(self) -> int:
        """Rows that the next flush would write, the checkpoint included."""
        return self._unstored.pending + self._checkpoint_is_changed

    def take_changes(self) -> PublisherChanges | None:
        """What changed since the last time, with the checkpoint it belongs to; None = nothing. Cost: per change."""
        if not self.changes_pending:
            return None
        self._checkpoint_is_changed = False
        return self._unstored.take(self.checkpoint, self.granule)

    def take_everything(self) -> PublisherState:
        """All there is, in one moment, for rows that somebody else has written."""
        self._checkpoint_is_changed = False
        return self._unstored.take_everything(self.checkpoint, self.granule)

    def restore_changes(self, changes: PublisherChanges) -> None:
        """A flush failed, or nobody knows: merge its changes back under newer ones."""
        self._checkpoint_is_changed = True
        self._unstored.restore(changes)

    def load(self, rows: PublisherRows) -> None:
        """Recovery, on a fresh publisher."""
        for _ in self.loading(rows):
            pass

    def loading(self, rows: PublisherRows) -> Iterator[None]:
        """The same bit by bit, so that others may have a turn after each portion of residencies."""
        checkpoint, granule, groups, residencies, ghosts, side_state = rows
        self.checkpoint = checkpoint
        if checkpoint.sequence_number is not None:
            self.journal.note(Note(Kind.RECOVERED, checkpoint.sequence_number, None))
        self._renew_trust()
        self.residents.cohort = checkpoint.cohort
        self.groups.restore(groups)
        self._unstored.note_groups_stored()
        self._tail.give_up()
        if granule is None:
            return
        self._use_granule(granule)
        for stored in residencies:
            self.residents.load(stored)
            yield
        if side_state is not None:
            self._side_state.load(side_state)
        self.residents.load_ghosts(ghosts)
        self.placing.begin_lifetimes()
        self._note_kind()
        for parent in self.waiting.children:
            waiting = self.waiting.blocks.get(parent)
            if is_wide(parent) and (waiting is None or waiting.parent is None):
                self.await_elsewhere(parent)

    def resemble(self, other: PublisherIndex) -> None:
        """Before `load`: take what is known of the other one beside its rows, as far as answers depend on it."""
        self._recogniser = other._recogniser
        self.residents.lookahead_tokens = other.residents.lookahead_tokens
        self.connector.is_shown, self.connector.learned = other.connector.is_shown, other.connector.learned

    def catch_up_with_others(self) -> None:
        """After `load`: see `Scope.tell_again`."""
        self._scope.tell_again(self)

    # ------------------------------------------------------------------ inspection

    def residencies(self) -> Iterator[tuple[HolderKey, EngineHash, int, int]]:
        """(holder, engine hash, content key, reference count) of each, for the audit. Count 0: it is unverified."""
        for holder in self.residents.all_holders():
            for engine_hash, content_key in holder.items():
                count = holder.reference_count(engine_hash) if holder.is_verified else 0
                yield holder.key, engine_hash, content_key, count

    def ghosts(self) -> Iterable[tuple[EngineHash, int, int]]:
        """(engine hash, content key, end in granules) of every ghost, oldest first."""
        return self.residents.ghosts.rows()

    def status(self) -> PublisherStatus:
        return status_of(self)

    def leave(self) -> None:
        """The publisher is removed: its keys, slots and row become free. Whatever it is told from now on is nothing."""
        self.residents.leave()
        self._scope.numbers.give_back(self.number_row)
        self.number_row = NOBODYS
