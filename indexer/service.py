"""The composition root: builds every part, starts them in order, watches them, stops them in order.

Start: HTTP (alive, not ready), database, schema, recovery of every known publisher, writer and followers, ready.
Stop (SIGTERM, SIGINT or a task that died): not ready, fleet and followers stop after applying what they have, last
flush with checkpoints, HTTP, database. One deadline holds for all of it; a second signal cuts it short.

Invariants: nothing answers from the index before it is recovered; nothing is applied after the last flush; when `run`
returns, no process that it started is left.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import fields
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from indexer.allocator import give_memory_back, tune_allocator
from indexer.api.access import Keyring
from indexer.api.app import create_app
from indexer.api.ports import ApiLimits, Services
from indexer.collector import IndexCollector
from indexer.database import Database
from indexer.errors import IndexerError, StoreUnavailable
from indexer.fleet_process import FleetProcess
from indexer.guard import Guard
from indexer.http_server import HttpServer
from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.index.state import StoredBlock, StoredCut
from indexer.keys import with_fleet_key
from indexer.metrics import Metrics
from indexer.registration import PublisherKey, Registration
from indexer.rehearsal import compile_kernels
from indexer.settings import Settings
from indexer.store.lease import LeaseKeeper, Look, StoredStates
from indexer.store.link_giver import LinkGiver
from indexer.store.past import Past, past_index
from indexer.store.postgres import Store
from indexer.store.writer import Writer
from indexer.stream.endpoints import normalise_endpoint
from indexer.stream.followed import FollowState
from indexer.stream.limits import StreamLimits
from indexer.stream.registry import Registry
from indexer.stream.zmq_source import raise_open_files_limit

if TYPE_CHECKING:
    from indexer.grpc_server import GrpcServer

log = structlog.get_logger(__name__)

RECOVERY_RETRY_S = 1.0
READY_LOOK_INTERVAL_S = 0.05
CONNECT_GRACE_S = 2.0
AUDIT_TRIES_MAX = 10
HOUSEKEEPING_INTERVAL_S = 0.25
TICKS_PER_TRIM = 4
SWEEP_PAUSE_S = 0.001  # others have the loop at least half of the time
REMOVED_ROWS_INTERVAL_S = 1.0
SWITCH_INTERVAL_S = 0.0003
COMPILING = "the kernels are being compiled, which takes half a minute or more at the first start"
RECOVERING = "the index is being recovered from the database"
DATABASE_STOP_S = 30.0

LimitsT = TypeVar("LimitsT", IndexLimits, StreamLimits, ApiLimits)


def limits_from(kind: type[LimitsT], settings: Settings) -> LimitsT:
    """Every bound of a part is a setting of the same name."""
    return kind(**{field.name: getattr(settings, field.name) for field in fields(kind)})


def _calm_garbage_collector() -> None:
    """The index is millions of integers and no cycles: looking for some among them would only stall the loop.

    What exists now is never looked at again, and new objects less often than by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)


def _favour_the_loop() -> None:
    """The flush's thread gives the interpreter up after this long at the latest; by default, much later."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _grpc_server(settings: Settings, services: Services, keyring: Keyring | None) -> GrpcServer:
    from indexer.grpc_server import GrpcServer  # 15 MB that few need

    return GrpcServer(settings, services, keyring)


class TaskDied(IndexerError):
    """A task that must live as long as the service ended: a defect."""


class ServiceLife:
    """How far the service has come, for the API: recovered, ready, stopping."""

    def __init__(self, database: Database, registry: Registry[PublisherIndex], ready_wait_s: float) -> None:
        self._database = database
        self._registry = registry
        self._ready_wait_s = ready_wait_s
        self._recovered_at: float | None = None
        self.is_compiled = False
        self._first_replays_over = False
        self.is_stopping = False

    @property
    def is_recovered(self) -> bool:
        return self._recovered_at is not None

    def note_recovered(self) -> None:
        self._recovered_at = time.monotonic()

    def missing(self) -> list[str]:
        if self.is_stopping:
            return ["the service is stopping"]
        if not self.is_recovered:
            return [RECOVERING if self.is_compiled else COMPILING]
        missing = []
        if not self._database.is_reachable:
            missing.append(f"the database is not reachable: {self._database.last_error}")
        if waiting := self._first_replays():
            missing.append(f"publishers in their first replay: {waiting}")
        return missing

    def _first_replays(self) -> int:
        """Of publishers known at the start. Once they are over, new publishers do not make the service unready."""
        assert self._recovered_at is not None
        if self._first_replays_over:
            return 0
        age_s = time.monotonic() - self._recovered_at
        followed = self._registry.followed()
        waiting = sum(f.is_in_first_replay for f in followed)
        if age_s < CONNECT_GRACE_S:
            waiting += sum(f.state == FollowState.CONNECTING for f in followed)
        self._first_replays_over = waiting == 0 or age_s > self._ready_wait_s
        return 0 if self._first_replays_over else waiting


class Service:
    """One running service. Make it inside the event loop that runs it; `run` it once.

    Raises ListenError if the address of gRPC is taken, SettingsError if gRPC is not installed, or keys or certificates
    are not right.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._fleet_token = with_fleet_key(settings)
        self._stop_asked = asyncio.Event()
        self._stop_forced = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: Writer | None = None
        self._writer_task: asyncio.Task[None] | None = None
        self._lease_task: asyncio.Task[None] | None = None
        self._registered: asyncio.Queue[tuple[int, StoredStates]] = asyncio.Queue(maxsize=1)
        self._shared_http: HttpServer | None = None
        self._one_audit = asyncio.Lock()
        self._is_dumping = False
        self._fleet: FleetProcess | None = None
        raise_open_files_limit()
        tune_allocator()
        _favour_the_loop()
        self.metrics = Metrics()
        self._guard = Guard(self._settings, self.metrics)
        self.index = ContentIndex(limits_from(IndexLimits, settings))
        self.database = Database(settings)
        self.registry: Registry[PublisherIndex] = Registry(
            self.index, self.database, limits_from(StreamLimits, settings), stored=self.database
        )
        self.life = ServiceLife(self.database, self.registry, settings.ready_wait_s)
        self.collector = IndexCollector(self.registry, settings.metrics_publishers_max)
        self.metrics.registry.register(self.collector)
        services = self._services()
        self.app = create_app(services, self._guard.keyring)
        self._grpc = _grpc_server(settings, services, self._guard.keyring) if settings.grpc_port is not None else None

    def _services(self) -> Services:
        return Services(
            index=self.index,
            registry=self.registry,
            normalise_endpoint=normalise_endpoint,
            blocks=self.database.block_rows,
            audit=self.audit,
            dump=self.dump,
            life=self.life,
            limits=limits_from(ApiLimits, self._settings),
            metrics=self.metrics,
            refresh_metrics=self._refresh_metrics,
            past=self.past,
        )

    async def run(self) -> int:
        """Serve until a signal or a fault; returns the exit status.

        Raises ListenError if the address is taken, StoreUnavailable if there is no database to start with.
        """
        http = self._http_server(self._settings.port)
        with http, self._signals():
            self._spawn("http", http.serve())
            if self._grpc is not None:
                self._spawn("grpc", self._grpc.serve())
            start = self._spawn("start", self._start(http.url))
            try:
                await self._supervise(start)
            finally:
                status = await self._stop(start, http)
            return status

    def _http_server(self, port: int, *, is_shared: bool = False) -> HttpServer:
        host, tls = self._settings.host, self._guard.tls
        return HttpServer(self.app, host, port, self.app.direct, is_shared=is_shared, tls=tls)

    # ------------------------------------------------------------------ start

    async def _start(self, url: str) -> None:
        log.info("http_opened", url=url)
        self._guard.warn(url)
        self._spawn("access files", self._guard.watch())
        _, _, store = await asyncio.gather(self._compile(), self._describe(), self.database.open())
        if self.database.embedded is not None:
            self._spawn("database", self.database.embedded.watch())
        leases = await self._take_leases()
        settings = self._settings
        self._writer = self.collector.writer = self.database.writer = Writer(
            store,
            self.index,
            settings.flush_interval_s,
            settings.flush_changes_max,
            retry_max_s=settings.database_retry_max_s,
            leases=leases,
        )
        await self._recover(store, self._writer, leases)
        self._writer_task = self._spawn("writer", self._writer.run())
        self._spawn("replicas", self._reconcile())
        self._spawn("probe", self.database.probe())
        self._spawn("registry", self.registry.run())
        self._spawn("housekeeping", self._keep_house())
        self._spawn("removed rows", self._sweep_removed(store))
        self._spawn("links", LinkGiver(store, self.index, self._writer).run())
        _calm_garbage_collector()
        self.life.note_recovered()
        log.info("service_started", url=url, publishers=len(self.registry.followed()))
        sys.stdout.write(f"kv-indexer answers at {url} (Ctrl-C stops it)\n")
        sys.stdout.flush()
        if settings.shared_port is not None:
            self._spawn("shared port", self._answer_together(settings.shared_port))
        if settings.simulate:
            self._fleet = FleetProcess(url, self._fleet_token, settings.tls_cert_file)
            self._spawn("fleet", self._fleet.run())

    async def _answer_together(self, port: int) -> None:
        """At the shared port, too, once ready: who compiles or recovers gets no queries there."""
        while True:
            if not self.life.missing():
                break
            await asyncio.sleep(READY_LOOK_INTERVAL_S)
        http = self._http_server(port, is_shared=True)
        with http:
            self._shared_http = http
            log.info("shared_port_joined", port=port)
            await http.serve()

    async def _compile(self) -> None:
        started = time.monotonic()
        await asyncio.to_thread(compile_kernels)
        self.life.is_compiled = True
        log.info("kernels_compiled", seconds=round(time.monotonic() - started, 3))

    async def _describe(self) -> None:
        """The OpenAPI document, which would hold the loop for a fifth of a second; a wrong path needs it, too."""
        await asyncio.to_thread(self.app.openapi)

    async def _keep_house(self) -> None:
        """What cleared holders left is swept up; tables go on growing at rest; memory that a burst took goes back, now
        and then and when it is over."""
        assert self._writer is not None
        before = given = (0, 0, 0)
        steps = 0
        for tick in count():
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
            for _ in chain(iter(self.index.sweep, False), self.index.rest()):
                steps += 1
                await asyncio.sleep(SWEEP_PAUSE_S)
            for _ in self.index.expire_expected(time.monotonic()):
                await asyncio.sleep(0)
            self.index.expire_blocks(time.monotonic(), time.time())
            self.index.share_journals()
            self.index.expire_unverified(time.monotonic(), self._settings.unverified_max_s, time.time())
            received = sum(followed.counters["batches_received"] for followed in self.registry.followed())
            now = (received, self._writer.rows_written, steps)
            if now != given and (now == before or not tick % TICKS_PER_TRIM):
                await asyncio.to_thread(give_memory_back)
                given = now
            before = now

    async def _sweep_removed(self, store: Store) -> None:
        """Rows of unregistered publishers go, also of those that a process left behind."""
        while True:
            with suppress(StoreUnavailable):
                while await store.sweep():
                    pass
                while self._settings.journal_rows_s and await store.sweep_past(self._settings.journal_rows_s):
                    pass
            await asyncio.sleep(REMOVED_ROWS_INTERVAL_S)

    async def _take_leases(self) -> LeaseKeeper:
        """Of all publishers that no other replica writes. Without one, that is all of them."""
        leases = self.collector.leases = self.database.lease_keeper(self._note_look)
        self._lease_task = self._spawn("leases", leases.run())
        while not await leases.look_now():
            log.warning("leases_awaited", reason="the database does not answer")
        return leases

    def _note_look(self, look: Look) -> None:
        """Of who is registered, only the newest look counts."""
        self.registry.obey(look.commands)
        while not self._registered.empty():
            self._registered.get_nowait()
        self._registered.put_nowait((self.database.looks, look.states))

    async def _reconcile(self) -> None:
        """Do as other replicas have done: who is registered, and how far the rows are."""
        assert self._writer is not None
        while True:
            look, states = await self._registered.get()
            self._writer.confirm(states)
            self.registry.others_are_at({i: batch for i, state in states.items() if (batch := state.proven_batch)})
            with suppress(StoreUnavailable):  # the next look says the same
                await self.registry.reconcile(states.keys(), look)

    async def _recover(self, store: Store, writer: Writer, leases: LeaseKeeper) -> None:
        """Load every known publisher, then follow them all. Nothing else uses the index meanwhile.

        Those that another replica writes are loaded while they are followed.
        """
        started = time.monotonic()
        registrations = await store.registrations()
        ours = {r.publisher_id: r for r in registrations if leases.lease(r.publisher_id) is not None}
        recovered = await self._recover_all(store, writer, list(ours.values()))
        seconds = time.monotonic() - started
        for publisher in recovered:
            self.registry.resume(publisher.registration, publisher)
        for registration in registrations:
            if registration.publisher_id not in ours:
                self.registry.adopt(registration)
        self.metrics.recovery_seconds.set(seconds)
        log.info(
            "index_recovered",
            publishers=len(recovered),
            of_others=len(registrations) - len(recovered),
            seconds=round(seconds, 3),
        )

    async def _recover_all(
        self, store: Store, writer: Writer, registrations: Sequence[Registration]
    ) -> list[PublisherIndex]:
        while True:
            publishers = [self.index.add_publisher(registration) for registration in registrations]
            try:
                flushes = await store.recover_all(publishers)
            except StoreUnavailable as error:
                for registration in registrations:
                    self.index.remove_publisher(registration.key)
                if not self._settings.wait:
                    raise
                log.warning("recovery_retried", reason=str(error), next_try_s=RECOVERY_RETRY_S)
                await asyncio.sleep(RECOVERY_RETRY_S)
            else:
                for publisher_id, number in flushes.items():
                    writer.note_loaded(publisher_id, number)
                return publishers

    # ------------------------------------------------------------------ run

    async def _supervise(self, start: asyncio.Task[None]) -> None:
        """Until a stop is asked for. Raises what a task died of that must not: StoreUnavailable, TaskDied."""
        stop = asyncio.create_task(self._stop_asked.wait(), name="stop")
        try:
            while not stop.done():
                done, _ = await asyncio.wait({stop, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= done
                for task in done - {stop}:
                    if task is not start or task.exception():
                        raise _cause_of_death(task)
        finally:
            stop.cancel()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        return task

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT asks for a stop, the second forces it."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            (self._stop_forced if self._stop_asked.is_set() else self._stop_asked).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    # ------------------------------------------------------------------ stop

    async def _stop(self, start: asyncio.Task[None], http: HttpServer) -> int:
        """0, or 1 if something had to be cut off. The database is stopped in any case."""
        log.info("stop_began")
        self.life.is_stopping = True
        try:
            orderly = asyncio.create_task(self._stop_in_order(start, http), name="orderly stop")
            forced = asyncio.create_task(self._stop_forced.wait(), name="forced stop")
            await asyncio.wait(
                {orderly, forced}, timeout=self._settings.stop_deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            status = await self._outcome_of(orderly)
        finally:
            forced.cancel()
            await self._cut_off()
        log.info("service_stopped", status=status)
        return status

    async def _outcome_of(self, orderly: asyncio.Task[None]) -> int:
        if not orderly.done():
            log.error("stop_cut_short", forced=self._stop_forced.is_set(), deadline_s=self._settings.stop_deadline_s)
            orderly.cancel()
            await asyncio.wait({orderly}, timeout=1.0)
            return 1
        if error := orderly.exception():
            log.error("stop_failed", exc_info=error)
            return 1
        return 0

    async def _stop_in_order(self, start: asyncio.Task[None], http: HttpServer) -> None:
        await _end(start)
        self.app.watch_feed.close()
        if self._shared_http is not None:
            await self._shared_http.close()
        if self._grpc is not None:
            await self._grpc.close()
        if self._fleet is not None:
            await self._fleet.stop()
        await self.registry.close()
        await _end(self._writer_task)
        try:
            if self._writer is not None:
                await self._writer.flush()
            await _end(self._lease_task)  # another replica may write at once
        finally:
            await http.close()

    async def _cut_off(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fleet is not None:
            await self._fleet.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(DATABASE_STOP_S):
                await self.database.close()

    # ------------------------------------------------------------------ for the API

    async def audit(self) -> dict[str, object]:
        """Flush, then compare rows and memory. One at a time. Raises StoreUnavailable.

        What was applied between flush and comparison shows as a checkpoint that differs, and who came or went as a
        publisher: then once more.
        """
        async with self._one_audit:
            if self._writer is None:
                raise StoreUnavailable("the database is not open yet")
            for _ in range(AUDIT_TRIES_MAX):
                await self.database.leases.look_now()
                await self._writer.flush()
                report = await self.database.store.audit(self.index, self._writer.writes)
                if not any(difference.kind in ("checkpoint", "publisher") for difference in report.differences):
                    break
            return report.to_dict()

    async def past(self, at: float, query: PrefixQuery, wanted: Sequence[PublisherKey]) -> Past:
        """Raises StoreUnavailable, PastOutOfReach."""
        return await past_index(self.database.store, self.index, at, query, wanted)

    async def dump(self, tenants: Collection[str] | None) -> AsyncGenerator[StoredCut | list[StoredBlock], None]:
        """What memory holds now or a moment later, as it is stored. One at a time. Raises StoreUnavailable."""
        if self._writer is None or self._is_dumping:
            raise StoreUnavailable("another dump is under way" if self._is_dumping else "the database is not open yet")
        self._is_dumping = True
        try:
            await self._writer.flush()
            async with aclosing(self.database.store.dump(tenants)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._is_dumping = False

    async def _refresh_metrics(self) -> None:
        self.metrics.store_reachable.set(self.database.is_reachable)
        if self.life.is_recovered:
            await self.collector.refresh()


def _cause_of_death(task: asyncio.Task[Any]) -> IndexerError:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, IndexerError):
        return error
    log.critical("task_died", task=task.get_name(), exc_info=error)
    return TaskDied(f"its task {task.get_name()!r} died, so the service stops: {error!r}")


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
