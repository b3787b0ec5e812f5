"""The way to the database: its URL, its engine, its version, its schema. Synchronous; `Store` calls it in threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

import indexer
from indexer.errors import IndexerError, StoreUnavailable

DRIVER = "postgresql+psycopg"
URL_SCHEMES = ("postgres", "postgresql", DRIVER)
SERVER_VERSION_MIN = 140_000
CONNECTIONS_MAX = 4
APPLICATION_NAME = "kv-indexer"

# A server that vanished without a word is noticed after about this long (TCP only).
_CONNECT_ARGUMENTS = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}

# What is raised for a value that does not fit its column.
_REFUSALS = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)

# Alembic keeps its context in module globals: one migration at a time in this process.
_alembic_context = threading.Lock()


class StoreUnusable(StoreUnavailable):
    """The database answers, but cannot be used as it is; trying again does not help."""


class ValueRefused(IndexerError):
    """The database is well, but will never take one of the values it was given; trying again does not help."""


def parse_database_url(database_url: str) -> URL:
    """`postgres://`, `postgresql://` and `postgresql+psycopg://` mean the same. Raises StoreUnusable."""
    try:
        url = make_url(database_url)
    except (ArgumentError, ValueError):
        raise StoreUnusable(
            "the database URL cannot be read: it must be like postgresql://user@host:5432/name"
        ) from None
    if url.drivername not in URL_SCHEMES:
        raise StoreUnusable(f"the database URL must start with postgresql://, not {url.drivername}://")
    return url.set(drivername=DRIVER)


def create_database_engine(database_url: str, name: str = APPLICATION_NAME) -> Engine:
    """An engine that has not connected yet; the server shows its connections under `name`. They are tested before each
    use: a server may have restarted."""
    url = parse_database_url(database_url)
    arguments: dict[str, Any] = {key: value for key, value in _CONNECT_ARGUMENTS.items() if key not in url.query}
    arguments["application_name"] = name
    return create_engine(
        url, pool_pre_ping=True, pool_size=CONNECTIONS_MAX, max_overflow=0, pool_timeout=30, connect_args=arguments
    )


def describe(url: URL) -> str:
    """Where the database is, in words that may be logged: no user, no password."""
    host = url.host or url.query.get("host") or "the local socket"
    where = ", ".join(host) if isinstance(host, tuple) else str(host)
    port = url.port or url.query.get("port") or 5432
    return f"database {url.database!r} on {where} port {port}"


def reason_of(error: Exception, url: URL) -> str:
    """What the database or the driver said, on one line and without the password."""
    origin = error.orig if isinstance(error, DBAPIError) and error.orig else error
    said = " ".join(str(origin).split()) or type(origin).__name__
    return said.replace(url.password, "***") if url.password else said


def refuses_a_value(error: Exception) -> bool:
    """The database is well and reached, but will never take one of the values: trying again does not help."""
    origin = error.orig if isinstance(error, DBAPIError) and error.orig else error
    return isinstance(origin, _REFUSALS)


def unavailable(error: Exception, url: URL) -> StoreUnavailable:
    """One sentence for the operator about an error of the driver."""
    if isinstance(error, PoolTimeout):
        return StoreUnavailable(f"{describe(url)} does not answer: all {CONNECTIONS_MAX} connections are waiting")
    return StoreUnavailable(f"{describe(url)} cannot be used: {reason_of(error, url)}")


def prepare(connection: Connection) -> None:
    """Check the server's version and bring the schema up to date, in the caller's transaction."""
    check_server_version(driver_connection(connection).info.server_version, connection.engine.url)
    migrate(connection)


def check_server_version(version: int, url: URL) -> None:
    """`version` as libpq counts: 140005 is 14.5. Raises StoreUnusable below 14."""
    if version < SERVER_VERSION_MIN:
        raise StoreUnusable(f"{describe(url)} is PostgreSQL {version // 10_000}; 14 or newer is needed")


def migrate(connection: Connection, revision: str = "head") -> None:
    """Upgrade the schema, to the newest revision if no other is named.

    Several processes may do so at once: the others wait for the first.
    """
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _alembic_context:
        try:
            command.upgrade(config, revision)
        except CommandError as error:
            raise StoreUnusable(
                f"{describe(connection.engine.url)} has a schema that this version does not know ({error}): "
                "was it used by a newer version?"
            ) from error


def driver_connection(connection: Connection) -> psycopg.Connection:
    """The psycopg connection below an SQLAlchemy one, within the same transaction."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


def migrations_directory() -> Path:
    """Beside the package in a checkout, inside it when it is installed from a wheel."""
    package = Path(indexer.__file__).parent
    installed = package / "_migrations"
    return installed if installed.is_dir() else package.parent / "migrations"
