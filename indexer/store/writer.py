"""Write-behind: brings what changed in memory to Postgres, every few hundred milliseconds or N changes.

Purpose: the index never waits for the database. Changes are coalesced in the index until a flush takes them; a block
stored and evicted between two flushes costs no row.

Of several replicas, each flushes in the same rhythm. What it has a lease of is written; changes of all others are kept
until their rows have them, see standing.py, and publishers whose rows it has not loaded yet are left alone.

Invariants: one flush at a time; changes that were taken are either written, or given back to their publisher with
everything newer on top; when a flush ends, however it ends, none of its writes is still under way.

At the bounds: more than `flush_changes_max` pending changes start a flush early, and a flush writes about as many per
transaction (a publisher is never split). A publisher with a value that Postgres refuses is tried again every
`HOLD_BACK_S`, and its changes stay pending; the others are written. While the database is away, tries are spaced with
growing pauses of at most `retry_max_s`; pending changes then grow to no more than one per residency and ghost that
memory or the store has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import structlog

from indexer.errors import StoreUnavailable
from indexer.index.content_index import ContentIndex
from indexer.index.publisher import PublisherIndex
from indexer.index.state import PublisherChanges
from indexer.store.engine import ValueRefused
from indexer.store.lease import Lease, Leases, StoredStates
from indexer.store.postgres import NO_TERMS, RETRY_FIRST_S, Store
from indexer.store.standing import Standing, Step

log = structlog.get_logger()

PENDING_CHECK_S = 0.05
REST_MIN_S = 0.05
HOLD_BACK_S = 60.0

_Taken: TypeAlias = Sequence[tuple[PublisherIndex, PublisherChanges]]


class Writer:
    """The write-behind task. The plain attributes are for metrics; all but `pending` only grow or are replaced."""

    def __init__(
        self,
        store: Store,
        index: ContentIndex,
        flush_interval_s: float = 0.25,
        flush_changes_max: int = 50_000,
        *,
        retry_max_s: float = 10.0,
        leases: Leases | None = None,
    ) -> None:
        """`leases` None: nobody has claimed any publisher, and all are written."""
        self._store = store
        self._index = index
        self._leases = leases
        self._standings: dict[int, Standing] = {}
        self._flush_interval_s = flush_interval_s
        self._flush_changes_max = flush_changes_max
        self._retry_max_s = retry_max_s
        self._one_flush = asyncio.Lock()
        self._held_back: dict[int, float] = {}  # publisher_id -> when to try again (monotonic)
        self._under_way = 0  # changes that a flush has taken
        self._stored_until = time.monotonic()  # the database has every change from before
        self.rows_written = 0
        self.flushes = 0
        self.flush_failures = 0
        self.values_refused = 0
        self.fenced_flushes = 0
        self.takeovers = 0
        self.rows_reconciled = 0
        self.kept_dropped = 0
        self.last_flush_s: float | None = None
        self.last_flush_at: float | None = None  # seconds since 1970

    @property
    def pending(self) -> int:
        """Changes in memory that the database does not have yet."""
        return self._under_way + sum(publisher.changes_pending for publisher in self._index.publishers())

    @property
    def lag_s(self) -> float:
        """Age of the oldest change that the database does not have yet, 0 if it has all.

        The index has no clock, so this is the time since the last flush that left nothing behind began: too long by no
        more than the pause between two flushes.
        """
        return time.monotonic() - self._stored_until if self.pending else 0.0

    async def run(self) -> None:
        """Flush until cancelled. Never raises because of the database."""
        pause_s = self._flush_interval_s
        while True:
            await self._wait(pause_s)
            try:
                pause_s = rest_after(await self._timed_flush(), self._flush_interval_s)
            except StoreUnavailable as error:
                pause_s = min(max(2 * pause_s, RETRY_FIRST_S), max(self._retry_max_s, self._flush_interval_s))
                log.warning("flush_failed", reason=str(error), pending=self.pending, next_try_s=round(pause_s, 3))

    def note_loaded(self, publisher_id: int, flushes: int) -> None:
        """Memory has the rows as so many flushes have written them: from now on its changes are kept or written."""
        self._standings[publisher_id] = Standing(flushes)

    def confirm(self, states: StoredStates) -> None:
        """The rows are this far by now."""
        for publisher_id, standing in self._standings.items():
            if standing.kept and publisher_id in states:
                standing.confirm(states[publisher_id])

    def writes(self, publisher_id: int) -> bool:
        """Whether the rows of this publisher are what memory was when it was flushed last."""
        standing = self._standings.get(publisher_id)
        return self._leases is None or (standing is not None and standing.term is not None)

    @property
    def kept(self) -> int:
        """Changes kept of publishers that others write."""
        return sum(changes.size for standing in self._standings.values() for changes in standing.kept)

    async def flush(self) -> None:
        """Write everything that has changed until now. Raises StoreUnavailable; then nothing is lost."""
        await self._timed_flush()

    async def _timed_flush(self) -> float:
        """Seconds that it took."""
        async with self._one_flush:
            started = time.monotonic()
            ours, others, unsure = self._sorted()
            await self._keep(others)
            for publishers in self._portions(ours):
                await self._write(publishers)
            for publisher, lease in unsure:
                if not self._is_held_back(publisher, time.monotonic()):
                    await self._take_over(publisher, lease)
            if not self._left_changes_behind(started):
                self._stored_until = started
            seconds = self.last_flush_s = time.monotonic() - started
            self.last_flush_at = time.time()
            return seconds

    def _sorted(self) -> tuple[list[PublisherIndex], list[PublisherIndex], list[tuple[PublisherIndex, Lease]]]:
        """Publishers to write, to keep changes of, and to compare with their rows."""
        publishers = self._index.publishers()
        if self._leases is None:
            return publishers, [], []
        ours, others, unsure = [], [], []
        for publisher in publishers:
            publisher_id = publisher.registration.publisher_id
            standing = self._standings.get(publisher_id)
            if standing is None:
                continue
            lease = self._leases.lease(publisher_id)
            step = standing.look(lease)
            if lease is None:
                others.append(publisher)
            elif step is Step.COMPARE:
                unsure.append((publisher, lease))
            else:
                if lease.term != standing.term:
                    self._go_on(publisher, standing, lease)
                ours.append(publisher)
        present = {publisher.registration.publisher_id for publisher in publishers}
        self._standings = {i: standing for i, standing in self._standings.items() if i in present}
        return ours, others, unsure

    def _go_on(self, publisher: PublisherIndex, standing: Standing, lease: Lease) -> None:
        """Nobody else has written: what was kept is written by the next flush."""
        standing.began(lease)
        for changes in standing.take_kept():
            publisher.restore_changes(changes)

    async def _keep(self, publishers: Sequence[PublisherIndex]) -> None:
        taken = [(publisher, changes) for publisher in publishers if (changes := publisher.take_changes())]
        if not taken:
            return
        try:
            await _fold([changes for _, changes in taken])
        except BaseException:
            _give_back(taken)
            raise
        for publisher, changes in taken:
            standing = self._standings.get(publisher.registration.publisher_id)
            if standing is not None and not standing.keep(changes):
                self.kept_dropped += 1

    async def _take_over(self, publisher: PublisherIndex, lease: Lease) -> None:
        """Others have written its rows since we knew them: make rows and memory equal."""
        standing = self._standings[publisher.registration.publisher_id]
        for changes in standing.take_kept():
            publisher.restore_changes(changes)
        state = publisher.take_everything()
        try:
            rows = await self._store.reconcile(state, lease.term)
        except BaseException as error:
            publisher.restore_changes(state.changes)
            self.flush_failures += 1
            if not isinstance(error, ValueRefused):
                raise
            self._hold_back(publisher, error)
            return
        if rows is None:
            self._note_refused(publisher, state.changes, lease.term)
            return
        standing.began(lease)
        self.takeovers += 1
        self.rows_reconciled += rows
        names = publisher.registration.key._asdict()
        log.info("publisher_taken_over", term=lease.term, rows_reconciled=rows, **names)

    def _note_refused(self, publisher: PublisherIndex, changes: PublisherChanges, term: int) -> None:
        """Somebody else has claimed it since, or it is gone: what was to be written is kept, as from now on."""
        if self._index.publisher(publisher.registration.key) is not publisher:
            return
        publisher.restore_changes(changes)
        publisher_id = publisher.registration.publisher_id
        self.fenced_flushes += 1
        if self._leases is not None:
            self._leases.refused(publisher_id, term)
        if standing := self._standings.get(publisher_id):
            standing.refused()
        log.warning("flush_fenced", term=term, **publisher.registration.key._asdict())

    def _portions(self, publishers: Iterable[PublisherIndex]) -> Iterator[list[PublisherIndex]]:
        """Those that are not held back, in lists of about `flush_changes_max` changes."""
        portion: list[PublisherIndex] = []
        size = 0
        for publisher in publishers:
            if self._is_held_back(publisher, time.monotonic()):
                continue
            portion.append(publisher)
            size += publisher.changes_pending
            if size >= self._flush_changes_max:
                yield portion
                portion, size = [], 0
        yield portion

    def _is_held_back(self, publisher: PublisherIndex, moment: float) -> bool:
        return self._held_back.get(publisher.registration.publisher_id, 0.0) > moment

    def _left_changes_behind(self, started: float) -> bool:
        """Whether the flush that began then passed over a publisher that has changes."""
        return any(p.changes_pending for p in self._index.publishers() if self._is_held_back(p, started))

    async def _write(self, publishers: Sequence[PublisherIndex]) -> None:
        """Take the changes of these publishers and write them in one transaction, or give them back."""
        pending = sum(publisher.changes_pending for publisher in publishers)
        taken = [(publisher, changes) for publisher in publishers if (changes := publisher.take_changes())]
        if not taken:
            return
        self._under_way = pending
        try:
            await _fold([changes for _, changes in taken])
            outcome = await self._store.write([changes for _, changes in taken], self._terms(taken))
        except ValueRefused as error:
            _give_back(taken)
            self._under_way = 0
            await self._isolate([publisher for publisher, _ in taken], error)
        except BaseException:
            _give_back(taken)
            self.flush_failures += 1
            raise
        else:
            self.flushes += 1
            self.rows_written += outcome.rows
            self._note_written(taken, outcome.fenced)
        finally:
            self._under_way = 0

    def _terms(self, taken: _Taken) -> Mapping[int, int]:
        if self._leases is None:
            return NO_TERMS
        standings = ((changes.publisher_id, self._standings[changes.publisher_id]) for _, changes in taken)
        return {publisher_id: standing.term or 0 for publisher_id, standing in standings}

    def _note_written(self, taken: _Taken, fenced: frozenset[int]) -> None:
        for publisher, changes in taken:
            standing = self._standings.get(changes.publisher_id)
            if changes.publisher_id in fenced:
                self._note_refused(publisher, changes, (standing and standing.term) or 0)

    async def _isolate(self, publishers: Sequence[PublisherIndex], error: ValueRefused) -> None:
        """Write each publisher by itself, so that one with an impossible value does not stop the others."""
        if len(publishers) > 1:
            for publisher in publishers:
                await self._write([publisher])
            return
        self.flush_failures += 1
        self._hold_back(publishers[0], error)

    def _hold_back(self, publisher: PublisherIndex, error: ValueRefused) -> None:
        registration = publisher.registration
        self._held_back[registration.publisher_id] = time.monotonic() + HOLD_BACK_S
        self.values_refused += 1
        log.error("changes_refused", worker_id=registration.worker_id, dp_rank=registration.dp_rank, reason=str(error))

    async def _wait(self, pause_s: float) -> None:
        """Until the pause is over, or more is pending than may be; after a failure, always the whole pause."""
        ends = time.monotonic() + pause_s
        may_be_early = pause_s <= self._flush_interval_s
        while (left := ends - time.monotonic()) > 0:
            await asyncio.sleep(min(left, PENDING_CHECK_S))
            if may_be_early and self.pending > self._flush_changes_max:
                return


def rest_after(flush_s: float, interval_s: float) -> float:
    """How long to wait after a flush, so that flushes begin an interval apart.

    If they take longer, what came meanwhile has waited for long enough. A whole interval of rest would then make the
    next flush longer still: where flushes are busy for 0.9 of the time, ten times the rest is between two of them.
    """
    return max(interval_s - flush_s, min(interval_s, REST_MIN_S))


async def _fold(taken: Sequence[PublisherChanges]) -> None:
    """Bring changes into the form that is written, in a thread. In this form they are also given back, so that tries
    that fail do not pile up. Whoever is cancelled meanwhile waits for the end: the thread works on what he gives back.
    """

    def fold_all() -> None:
        for changes in taken:
            changes.fold()

    folding = asyncio.ensure_future(asyncio.to_thread(fold_all))
    try:
        await asyncio.shield(folding)
    finally:
        await asyncio.wait({folding})


def _give_back(taken: Iterable[tuple[PublisherIndex, PublisherChanges]]) -> None:
    for publisher, changes in taken:
        publisher.restore_changes(changes)
