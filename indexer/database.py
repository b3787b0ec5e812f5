"""The database of the service: opened, probed, closed; and what the registry and the API ask of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import structlog

from indexer.errors import StoreUnavailable
from indexer.index.publisher import PublisherIndex
from indexer.registration import CommandKind, Registration
from indexer.settings import Settings
from indexer.store.embedded import EmbeddedPostgres
from indexer.store.lease import LeaseKeeper, Look, replica_name
from indexer.store.postgres import Store
from indexer.store.recovery import StoredRows
from indexer.store.writer import Writer

log = structlog.get_logger(__name__)

PROBE_INTERVAL_S = 1.0
LOAD_PORTION_ROWS = 5_000  # some milliseconds on the loop
LOAD_RETRY_S = 1.0
ROWS_WAIT_S = 2.0
ROWS_LOOK_INTERVAL_S = 0.1


class Database:
    """The store, or the lack of one: embedded or given by URL, not there before `open`, gone after `close`.

    For the registry it is where publishers are kept, and what replicas know of each other's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = replica_name()
        self._url = ""
        self._leases: LeaseKeeper | None = None
        self.writer: Writer | None = None
        self.embedded = None if settings.database_url else EmbeddedPostgres(settings.data_dir)
        self._store: Store | None = None

    async def open(self) -> Store:
        """Raises StoreUnavailable."""
        url = self._settings.database_url
        self._url = url.get_secret_value() if url else await self._start_embedded()
        self._store = Store(self._url, retry_max_s=self._settings.database_retry_max_s, name=self._name)
        await self._store.open(wait=self._settings.wait)
        await self._store.keep_past(self._settings.journal_rows_s > 0)
        return self._store

    def lease_keeper(self, on_look: Callable[[Look], None]) -> LeaseKeeper:
        """Made once, after `open`; to be run."""
        self._leases = LeaseKeeper(self._url, self._name, on_look)
        return self._leases

    async def _start_embedded(self) -> str:
        assert self.embedded is not None
        return await self.embedded.start()

    async def probe(self) -> None:
        """Look now and then whether the database is there: with no changes to write, nothing else would tell."""
        while True:
            was_reachable = self.is_reachable
            await asyncio.sleep(PROBE_INTERVAL_S)
            with suppress(StoreUnavailable):
                await self.store.ping()
            if self.is_reachable != was_reachable:
                log.warning("database_returned" if self.is_reachable else "database_lost", reason=self.last_error)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
        if self.embedded is not None:
            await self.embedded.stop()

    @property
    def store(self) -> Store:
        if self._store is None:
            raise StoreUnavailable("the database is not open yet")
        return self._store

    @property
    def leases(self) -> LeaseKeeper:
        if self._leases is None:
            raise StoreUnavailable("the database is not open yet")
        return self._leases

    @property
    def is_reachable(self) -> bool:
        return self._store is not None and self._store.is_reachable

    @property
    def last_error(self) -> str:
        return (self._store and self._store.last_error) or "none"

    async def save(self, registration: Registration) -> Registration:
        saved = await self.store.save(registration)
        await self.leases.look_now()  # so that it is ours from the start, if it is
        return saved

    async def delete(self, publisher_id: int) -> None:
        await self.store.delete(publisher_id)

    async def block_rows(self, content_key: int, tenants: Collection[str] | None) -> list[dict[str, object]]:
        return await self.store.block_rows(content_key, tenants)

    # ------------------------------------------------------------------ what others have registered

    async def registrations(self, publisher_ids: Collection[int]) -> list[Registration]:
        wanted = set(publisher_ids)
        return [r for r in await self.store.registrations() if r.publisher_id in wanted]

    @property
    def looks(self) -> int:
        return 0 if self._leases is None else self._leases.looks

    def is_written_here(self, publisher_id: int) -> bool:
        return self.leases.lease(publisher_id) is not None

    async def tell(self, kind: CommandKind, publisher_ids: Collection[int]) -> None:
        await self.store.tell(kind, list(publisher_ids), self._name)
        if kind is CommandKind.CLEAR and self.writer is not None:
            await self.writer.flush()  # so that nobody loads what is forgotten

    async def load(self, publisher: PublisherIndex, at_least: int | None) -> None:
        publisher_id = publisher.registration.publisher_id
        while True:
            try:
                if at_least is not None:
                    await self._wait_for_rows(publisher_id, at_least)
                rows = await self.store.read(publisher_id, LOAD_PORTION_ROWS)
                break
            except StoreUnavailable as error:
                log.warning("loading_retried", reason=str(error), next_try_s=LOAD_RETRY_S)
                await asyncio.sleep(LOAD_RETRY_S)
        if rows is not None:  # else it is unregistered, which will be told
            await self._load(publisher, rows)

    async def _wait_for_rows(self, publisher_id: int, at_least: int) -> None:
        """For ROWS_WAIT_S at most: then its writer is not well, or it is another run of the engine."""
        deadline = time.monotonic() + ROWS_WAIT_S
        while time.monotonic() < deadline:
            number = await self.store.sequence_number(publisher_id)
            if number is not None and number >= at_least:
                return
            await asyncio.sleep(ROWS_LOOK_INTERVAL_S)

    async def _load(self, publisher: PublisherIndex, rows: StoredRows) -> None:
        """While others are followed and queries answered."""
        stored = rows.publisher
        for _ in publisher.loading(stored.rows(rows.residencies, rows.ghosts)):
            await asyncio.sleep(0)
        publisher.catch_up_with_others()
        if self.writer is not None:
            self.writer.note_loaded(publisher.registration.publisher_id, stored.flushes)
