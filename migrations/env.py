"""Runs the migrations, in one transaction, one process at a time.

The caller (`indexer.store.engine.migrate`) hands in its connection. When Alembic's own command line runs this (to write
a new revision, say), the database is that of INDEXER_DATABASE_URL.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection, text

from indexer.store.engine import create_database_engine
from indexer.store.tables import metadata

# Any number, as long as every version of this service uses the same one.
MIGRATION_LOCK = 0x6B76_696E_6465_78


def run_migrations(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        connection.execute(text("SET LOCAL lock_timeout = '60s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        connection.execute(text("SET LOCAL lock_timeout = '10s'"))
        connection.execute(text("SET LOCAL statement_timeout = '10min'"))
        context.run_migrations()


def run_from_command_line() -> None:
    engine = create_database_engine(os.environ["INDEXER_DATABASE_URL"])
    with engine.connect() as connection:
        run_migrations(connection)
    engine.dispose()


if (given := context.config.attributes.get("connection")) is not None:
    run_migrations(given)
else:
    run_from_command_line()
