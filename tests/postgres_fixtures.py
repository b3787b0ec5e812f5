"""A real Postgres for tests: `postgres_server` per run, `database_url` per test (an empty, migrated database).

The server is the embedded one, without fsync, or the one INDEXER_TEST_DATABASE_URL names (an account that may create
databases). If neither can be had, tests fail: they are never skipped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from indexer.store.embedded import EmbeddedPostgres
from indexer.store.postgres import Store

FAST_AND_FORGETFUL = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "60"}


@dataclass(frozen=True)
class PostgresServer:
    """A server on which tests may create databases; `url` is that of one they leave alone."""

    url: str

    def create_database(self, template: str | None = None) -> str:
        """A new database, a copy of the one at the URL `template` if given; returns its URL."""
        name = f"test_{uuid.uuid4().hex}"
        self.execute("CREATE DATABASE {} TEMPLATE {}", name, _name_of(template) if template else "template0")
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def drop_database(self, url: str) -> None:
        self.execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", _name_of(url))

    def execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    given = os.environ.get("INDEXER_TEST_DATABASE_URL")
    if given:
        yield PostgresServer(given)
        return
    directory = Path(tempfile.mkdtemp(prefix="kv-index-test-"))
    embedded = EmbeddedPostgres(directory, FAST_AND_FORGETFUL)
    embedded.start_now()
    try:
        yield PostgresServer(embedded.database_url)
    finally:
        embedded.stop_now()
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def migrated_template(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a database that is migrated and empty, for copying only."""
    url = postgres_server.create_database()
    asyncio.run(_migrate(url))
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def empty_database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A database without any table."""
    url = postgres_server.create_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def database_url(postgres_server: PostgresServer, migrated_template: str) -> Iterator[str]:
    """A database with the newest schema and no rows."""
    url = postgres_server.create_database(migrated_template)
    yield url
    postgres_server.drop_database(url)


async def _migrate(url: str) -> None:
    store = Store(url)
    try:
        await store.open(wait=False)
    finally:
        await store.close()


def _name_of(url: str) -> str:
    name = make_url(url).database
    assert name
    return name
