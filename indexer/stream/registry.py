"""Which publishers are followed: registering, unregistering, one supervised task each.

Purpose: the one place where publishers come and go. A follower that dies is started again after a pause that doubles,
and its failure is shown; a batch that kills it twice is skipped and counted.

Invariants: for every followed publisher there is one entry in the index and one task; changes to one
`(worker_id, dp_rank)` are made one after the other; once `unregister` has returned, no batch of that publisher is
applied any more.

Unregistering does not need the store: the publisher is gone from the index and from answers at once. If its rows cannot
be deleted, that is tried again until it succeeds, and before the same publisher is registered anew. Should the service
die before, the publisher is there again after the next start.

Replicas: with `stored`, other processes follow the same publishers. `reconcile` is told who is registered in the store:
who is new is followed (adopted), who has gone is dropped. An adopted publisher's rows are loaded before it is followed;
without a replay endpoint, the subscription is opened before they are read, see early.py.

If broken: routers would be sent to engines that are gone, and be told of blocks that a removed engine once had.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

import structlog

from indexer.errors import NoReplayEndpoint, PublisherConflict, PublisherLimit
from indexer.index.state import Coverage, CoverageReason, ProvenBatch, Trust
from indexer.registration import AUTO, Command, CommandKind, PublisherKey, Registration
from indexer.stream.early import EarlySubscription, OpenedEarly
from indexer.stream.endpoints import normalise_endpoint
from indexer.stream.followed import FollowedPublisher
from indexer.stream.follower import Clock, Fenced, Follower
from indexer.stream.limits import StreamLimits
from indexer.stream.pace import Pace
from indexer.stream.ports import FollowedIndex, PublisherIndexes, RegistrationStore, StoredPublishers, Transport
from indexer.stream.repair import ReplayTurns
from indexer.stream.zmq_source import ZmqTransport
from indexer.wire.columns import PayloadReader

log = structlog.get_logger(__name__)

HEALTHY_AFTER_S = 60.0
"""A follower that ran for this long before it died is started again after the shortest pause."""
DELETE_RETRY_S = 1.0
SETTLED_S = 5.0
"""So long after a command, its effect is in the rows, if their writer is well."""
EXPIRY_LOOK_S = 1.0
CANCEL_TIMEOUT_S = 5.0

Sees: TypeAlias = Callable[[str], bool]

COMPARED_FIELDS = ("model", "endpoint", "replay_endpoint", "tenant", "engine", "block_size", "options")

PublisherT = TypeVar("PublisherT", bound=FollowedIndex)


def _everyone(_: str) -> bool:
    return True


class Registry(Generic[PublisherT]):
    """See the module. Make it inside a running event loop; `run` and `close` it once."""

    def __init__(
        self,
        index: PublisherIndexes[PublisherT],
        registrations: RegistrationStore,
        limits: StreamLimits | None = None,
        *,
        stored: StoredPublishers[PublisherT] | None = None,
        transport: Transport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._index = index
        self._registrations = registrations
        self._stored = stored
        self._limits = limits or StreamLimits()
        self._transport = transport or ZmqTransport(self._limits)
        self._clock = clock or Clock()
        self._entries: dict[PublisherKey, _Entry[PublisherT]] = {}
        self._locks: dict[PublisherKey, _KeyLock] = {}
        self._replay_turns = ReplayTurns(self._limits.replays_max)
        self._reader = PayloadReader()
        self._pace = Pace(self._limits.slice_s, self._clock.elapsed)
        self._undeleted: dict[PublisherKey, list[int]] = {}
        self._left: dict[int, int] = {}  # unregistered here, and maybe still in the store -> the last look before
        self._news = asyncio.Event()
        self._is_closing = False
        self.registrations_expired = 0
        self._defect: BaseException | None = None

    # ------------------------------------------------------------------ who is followed

    def normalise_endpoint(self, endpoint: str) -> str:
        """The endpoint as it will be kept and connected to. Raises EndpointError."""
        return normalise_endpoint(endpoint)

    def followed(self) -> list[FollowedPublisher[PublisherT]]:
        return [entry.followed for entry in self._entries.values()]

    def find(self, worker_id: str, dp_rank: int) -> FollowedPublisher[PublisherT] | None:
        entry = self._entries.get(PublisherKey(worker_id, dp_rank))
        return entry.followed if entry else None

    @property
    def first_replays_pending(self) -> int:
        """Publishers whose past has not been asked for to its end yet, be it that they do not answer at all."""
        return sum(followed.is_in_first_replay for followed in self.followed())

    @property
    def deletions_pending(self) -> int:
        """Unregistered publishers whose rows are still in the store."""
        return sum(map(len, self._undeleted.values()))

    # ------------------------------------------------------------------ changes

    async def register(self, registration: Registration) -> tuple[FollowedPublisher[PublisherT], bool]:
        """Follow a publisher. True = created, False = it was there with the same values.

        Raises EndpointError, PublisherConflict, PublisherLimit, and what the store raises; then nothing has changed.
        """
        registration = self._normalised(registration)
        async with self._locked(registration.key):
            entry = self._entries.get(registration.key)
            if entry:
                _check_same(entry.followed.registration, registration)
                return entry.followed, False
            if len(self._entries) >= self._limits.publishers_max:
                raise PublisherLimit(self._limits.publishers_max)
            await self._delete_rows(registration.key)
            saved = await self._registrations.save(registration)
            publisher = self._index.add_publisher(saved)
            self._note_begun(publisher)
            return self._follow(saved, publisher, is_loaded=self._stored is None), True

    def resume(self, registration: Registration, publisher: PublisherT) -> FollowedPublisher[PublisherT]:
        """Follow a publisher that the index and the store have already."""
        return self._follow(registration, publisher, is_loaded=True)

    def adopt(self, registration: Registration) -> None:
        """Follow a publisher that only the store has."""
        self._follow(registration, self._index.add_publisher(registration), is_loaded=False)

    def _note_begun(self, publisher: PublisherT) -> None:
        publisher.set_coverage(Coverage.COMPLETE, CoverageReason.FROM_START, round(self._clock.wall(), 3))

    def _follow(
        self, registration: Registration, publisher: PublisherT, *, is_loaded: bool
    ) -> FollowedPublisher[PublisherT]:
        assert registration.key not in self._entries, "a publisher is followed once"
        followed = FollowedPublisher(registration, publisher)
        followed.is_in_first_replay = registration.replay_endpoint is not None or not is_loaded
        followed.disconnected_since = asyncio.get_running_loop().time()
        publisher.show(Trust(Coverage.DISCONNECTED, CoverageReason.NEVER_CONNECTED, self._clock.wall()))
        self._entries[registration.key] = _Entry(followed, self._supervise, is_loaded=is_loaded, look=self._look)
        self._entries[registration.key].task.add_done_callback(self._note_end)
        return followed

    async def unregister(self, worker_id: str, dp_rank: int | None = None, sees: Sees = _everyone) -> int:
        """Stop following and drop everything known; rank None = all ranks of the worker. Returns how many.

        `sees`, here and below: whether the caller sees a tenant; publishers of others do not exist for it."""
        known = {*self._entries, *self._locks}
        keys = sorted(k for k in known if k.worker_id == worker_id and dp_rank in (None, k.dp_rank))
        return sum([await self._unregister_one(key, sees) for key in keys])

    async def reconcile(self, registered: Collection[int], look: int) -> None:
        """Follow whom others have registered, and drop whom they have unregistered. `registered`: by publisher_id, all
        that this look into the store has found; what happened here after it had begun, it may not know yet. Raises
        what the store raises."""
        assert self._stored is not None
        for entry in list(self._entries.values()):
            if entry.publisher_id not in registered and entry.look < look:
                await self._drop(entry)
        self._left = {i: before for i, before in self._left.items() if i in registered or before >= look}
        known = {entry.publisher_id for entry in self._entries.values()} | self._left.keys()
        unknown = [publisher_id for publisher_id in registered if publisher_id not in known]
        for registration in await self._stored.registrations(unknown) if unknown else ():
            await self._adopt(registration)

    def others_are_at(self, batches: Mapping[int, ProvenBatch]) -> None:
        """How far the replicas that write the rows have followed, by publisher_id."""
        for entry in self._entries.values():
            batch = batches.get(entry.publisher_id)
            if batch is not None and entry.follower is not None:
                entry.follower.others_are_at(batch)

    async def _adopt(self, registration: Registration) -> None:
        async with self._locked(registration.key):
            if registration.key in self._entries or registration.publisher_id in self._left or self._is_closing:
                return  # the next time, if it is still there
            if len(self._entries) >= self._limits.publishers_max:
                log.error("adoption_refused", reason="publishers_max is reached", **registration.key._asdict())
                return
            log.info("publisher_adopted", **registration.key._asdict())
            self.adopt(registration)

    async def _drop(self, entry: _Entry[PublisherT]) -> None:
        """Another replica has unregistered it."""
        key = entry.followed.registration.key
        async with self._locked(key):
            if self._entries.get(key) is entry:
                log.info("publisher_dropped", **key._asdict())
                await self._end(key, entry)

    async def _end(self, key: PublisherKey, entry: _Entry[PublisherT]) -> None:
        try:
            await entry.cancel()
        finally:
            del self._entries[key]
            self._index.remove_publisher(key)

    async def clear(self, worker_id: str, dp_rank: int | None = None, sees: Sees = _everyone) -> int:
        """Forget what they hold, at once and without the store; rank None = all ranks. Returns how many.

        Other replicas are told, if the store is there.
        """
        entries = self._entries_of(worker_id, dp_rank, sees)
        await self._command(CommandKind.CLEAR, entries)
        return len(entries)

    async def resync(
        self, worker_id: str, dp_rank: int | None = None, sees: Sees = _everyone, *, is_full: bool = False
    ) -> int:
        """Ask their replay endpoints again, for all they have if `is_full`; rank None = all ranks. Returns how many.

        Other replicas are told, too. Raises NoReplayEndpoint if one of them has none; then none is asked.
        """
        entries = self._entries_of(worker_id, dp_rank, sees)
        for entry in entries:
            if entry.followed.registration.replay_endpoint is None:
                raise NoReplayEndpoint(*entry.followed.registration.key)
        await self._command(CommandKind.RESYNC_FULL if is_full else CommandKind.RESYNC, entries)
        return len(entries)

    async def _command(self, kind: CommandKind, entries: Sequence[_Entry[PublisherT]]) -> None:
        for entry in entries:
            self._obey(entry, kind)
        if self._stored is not None and entries:
            try:
                await self._stored.tell(kind, [entry.publisher_id for entry in entries])
            except Exception as error:  # it is done here, whatever becomes of the others
                log.warning("replicas_not_told", command=kind.value, error=str(error))

    def obey(self, commands: Sequence[Command]) -> None:
        """Do what other replicas were asked for, each once; `commands`: all of the last minute. Rows that were loaded
        SETTLED_S after a command have its effect."""
        ids = {command.command_id for command in commands}
        now = asyncio.get_running_loop().time()
        for entry in self._entries.values() if commands else ():
            entry.obeyed &= ids
            for command in commands:
                is_news = entry.publisher_id == command.publisher_id and command.command_id not in entry.obeyed
                if is_news and entry.loaded_at is not None:
                    entry.obeyed.add(command.command_id)
                    if now - command.age_s > entry.loaded_at - SETTLED_S:
                        self._obey(entry, command.kind)

    def _obey(self, entry: _Entry[PublisherT], kind: CommandKind) -> None:
        if kind is CommandKind.CLEAR:
            entry.is_to_be_cleared = entry.loaded_at is None  # what is being loaded, too
            entry.followed.index.clear(round(self._clock.wall(), 3))
            log.warning("publisher_cleared", **entry.followed.registration.key._asdict())
        else:
            entry.resync(is_full=kind is CommandKind.RESYNC_FULL)

    def _entries_of(self, worker_id: str, dp_rank: int | None, sees: Sees) -> list[_Entry[PublisherT]]:
        keys = sorted(k for k in self._entries if k.worker_id == worker_id and dp_rank in (None, k.dp_rank))
        return [entry for key in keys if sees((entry := self._entries[key]).tenant)]

    async def expire(self) -> None:
        """Unregister who has been disconnected for too long, if there is a limit."""
        limit_s, now = self._limits.registration_expiry_s, asyncio.get_running_loop().time()
        for followed in self.followed() if limit_s else ():
            since = followed.disconnected_since
            is_ours = self._stored is None or self._stored.is_written_here(followed.registration.publisher_id)
            if is_ours and since is not None and now - since >= limit_s:
                names = followed.registration.key._asdict()
                log.warning("registration_expired", disconnected_s=round(now - since, 1), **names)
                self.registrations_expired += await self.unregister(*followed.registration.key)

    async def _unregister_one(self, key: PublisherKey, sees: Sees) -> bool:
        async with self._locked(key):
            entry = self._entries.get(key)
            if not entry or not sees(entry.tenant):
                return False
            try:
                await self._end(key, entry)
            finally:
                self._left[entry.publisher_id] = self._look
                self._undeleted.setdefault(key, []).append(entry.publisher_id)
            try:
                await self._delete_rows(key)
            except Exception as error:  # whatever it is: tried again by `run`, which is woken
                log.warning("deletion_postponed", worker_id=key.worker_id, dp_rank=key.dp_rank, error=str(error))
                self._news.set()
            return True

    async def _delete_rows(self, key: PublisherKey) -> None:
        """Of former registrations of this publisher. The caller holds its lock."""
        while waiting := self._undeleted.get(key):
            await self._registrations.delete(waiting[0])
            waiting.pop(0)
        self._undeleted.pop(key, None)

    def _normalised(self, registration: Registration) -> Registration:
        replay_endpoint = registration.replay_endpoint
        return replace(
            registration,
            endpoint=self.normalise_endpoint(registration.endpoint),
            replay_endpoint=None if replay_endpoint is None else self.normalise_endpoint(replay_endpoint),
        )

    @property
    def _look(self) -> int:
        return self._stored.looks if self._stored is not None else 0

    @asynccontextmanager
    async def _locked(self, key: PublisherKey) -> AsyncIterator[None]:
        lock = self._locks.setdefault(key, _KeyLock())
        lock.users += 1
        try:
            async with lock.lock:
                yield
        finally:
            lock.users -= 1
            if not lock.users:
                del self._locks[key]

    # ------------------------------------------------------------------ tasks

    async def run(self) -> None:
        """Delete what could not be deleted, unregister who expired, until `close`.

        Raises if a supervising task died, which is a defect.
        """
        look_s = EXPIRY_LOOK_S if self._limits.registration_expiry_s else None
        while not self._is_closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self._news.wait()
            self._news.clear()
            if self._defect:
                raise self._defect
            await self.expire()
            await self._delete_rows_of_all()
            if self._undeleted and not self._is_closing:
                await asyncio.sleep(DELETE_RETRY_S)
                self._news.set()

    async def close(self, timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        """Apply what has been received, for at most `timeout_s`; then stop all followers and close all sockets."""
        self._is_closing = True
        self._news.set()
        entries = list(self._entries.values())
        for entry in entries:
            entry.finish()
        if entries:
            await asyncio.wait([entry.task for entry in entries], timeout=timeout_s)
        await asyncio.gather(*(entry.cancel() for entry in entries))
        self._transport.close()

    async def _supervise(self, entry: _Entry[PublisherT]) -> None:
        followed, delay_s = entry.followed, self._limits.restart_delay_min_s
        loop = asyncio.get_running_loop()
        transport = self._transport
        while not self._is_closing:
            started = loop.time()
            try:
                if entry.loaded_at is None:
                    transport = await self._warm_up(entry)
                    entry.loaded_at = loop.time()
                    if entry.is_to_be_cleared:
                        self._obey(entry, CommandKind.CLEAR)
                entry.follower = Follower(
                    followed,
                    transport,
                    self._limits,
                    replay_turns=self._replay_turns,
                    clock=self._clock,
                    reader=self._reader,
                    pace=self._pace,
                )
                await entry.follower.run()
            except Fenced:
                return
            except Exception as error:
                entry.follower = None
                entry.note_failure(error, self._clock.wall())
            else:
                return
            if loop.time() - started > HEALTHY_AFTER_S:
                delay_s = self._limits.restart_delay_min_s
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._limits.restart_delay_max_s)

    async def _warm_up(self, entry: _Entry[PublisherT]) -> Transport:
        """Load what is stored; returns what to follow it with from there."""
        assert self._stored is not None
        publisher, registration = entry.followed.index, entry.followed.registration
        if registration.replay_endpoint is not None or self._stored.is_written_here(registration.publisher_id):
            await self._load(publisher, None)
            return self._transport
        early = EarlySubscription(self._transport, registration.endpoint)
        try:
            first = await early.first_number()
            await self._load(publisher, first)
        except BaseException:
            early.close()
            raise
        return OpenedEarly(self._transport, early)

    async def _load(self, publisher: PublisherT, at_least: int | None) -> None:
        assert self._stored is not None
        await self._stored.load(publisher, at_least)
        if publisher.checkpoint.coverage_at is None:  # nothing was stored
            self._note_begun(publisher)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception():
            self._defect = task.exception()
            self._news.set()

    async def _delete_rows_of_all(self) -> None:
        for key in list(self._undeleted):
            try:
                async with self._locked(key):
                    await self._delete_rows(key)
            except Exception as error:  # the store reports itself; here it only means: later
                log.debug("deletion_postponed", worker_id=key.worker_id, dp_rank=key.dp_rank, error=str(error))


class _Entry(Generic[PublisherT]):
    """A followed publisher, its task, and the follower that runs in it at the moment."""

    def __init__(
        self,
        followed: FollowedPublisher[PublisherT],
        supervise: Callable[[_Entry[PublisherT]], Coroutine[None, None, None]],
        *,
        is_loaded: bool,
        look: int,
    ) -> None:
        self.followed = followed
        self.follower: Follower | None = None
        self.loaded_at = asyncio.get_running_loop().time() if is_loaded else None
        self.is_to_be_cleared = False  # as soon as it is loaded
        self.obeyed: set[int] = set()  # commands of the last minute
        self.look = look  # the last one begun before it was followed
        self._failed_on: tuple[int, int] | None = None
        worker_id, dp_rank = followed.registration.key
        self.task = asyncio.create_task(supervise(self), name=f"follow {worker_id} rank {dp_rank}")

    @property
    def publisher_id(self) -> int:
        return self.followed.registration.publisher_id

    @property
    def tenant(self) -> str:
        return self.followed.registration.tenant

    def finish(self) -> None:
        """Let the follower apply what it has; without one (not started, or pausing after a failure) just end."""
        if self.follower:
            self.follower.finish()
        else:
            self.task.cancel()

    def resync(self, *, is_full: bool) -> None:
        """A follower that is pausing after a failure asks anyway when it starts."""
        if self.follower:
            self.follower.resync(is_full=is_full)

    async def cancel(self) -> None:
        """Fence the publisher and end its task. Bounded: the fence holds even if the task should not end in time."""
        self.followed.is_fenced = True
        self.task.cancel()
        await asyncio.wait([self.task], timeout=CANCEL_TIMEOUT_S)

    def note_failure(self, error: Exception, at: float) -> None:
        """Show it. The batch that was being applied is skipped if it did this before."""
        followed = self.followed
        followed.note_failure(error, at)
        log.error("follower_failed", exc_info=error, **followed.registration.key._asdict())
        if followed.applying and followed.applying == self._failed_on:
            number, fingerprint = followed.applying
            followed.counters["poisonous_batches"] += 1
            followed.index.skip(number, fingerprint, CoverageReason.POISONOUS_BATCH, at)
        self._failed_on, followed.applying = followed.applying, None


class _KeyLock:
    """`users` hold it or wait for it; without any it is forgotten."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


def _check_same(known: Registration, given: Registration) -> None:
    """Whoever leaves the engine open agrees with what is registered. Raises PublisherConflict."""
    if given.engine == AUTO:
        given = replace(given, engine=known.engine)
    for name in COMPARED_FIELDS:
        if getattr(known, name) != getattr(given, name):
            raise PublisherConflict(known.worker_id, known.dp_rank, name)
