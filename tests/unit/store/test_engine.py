"""Database URLs, versions, and the sentences an operator gets."""

from __future__ import annotations

import pytest
from sqlalchemy import make_url

from indexer.store.engine import (
    StoreUnusable,
    check_server_version,
    describe,
    migrations_directory,
    parse_database_url,
    unavailable,
)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_all_usual_schemes_mean_the_same(scheme: str) -> None:
    url = parse_database_url(f"{scheme}://user:secret@db.example:5433/name?sslmode=require")
    assert url.drivername == "postgresql+psycopg"
    assert (url.host, url.port, url.database, url.password) == ("db.example", 5433, "name", "secret")
    assert describe(url) == "database 'name' on db.example port 5433"


@pytest.mark.parametrize(
    "text", ["", "nonsense", "sqlite:///file", "mysql://u:hunter2@h/db", "postgres://u:hunter2@h:port/db"]
)
def test_other_urls_are_refused_without_their_password(text: str) -> None:
    with pytest.raises(StoreUnusable) as caught:
        parse_database_url(text)
    assert "database URL" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_socket_directory_is_named_as_the_place() -> None:
    url = parse_database_url("postgresql://postgres@/kv_index?host=/var/run/postgres")
    assert describe(url) == "database 'kv_index' on /var/run/postgres port 5432"


def test_an_error_is_one_line_without_the_password() -> None:
    url = make_url("postgresql://u:hunter2@h/db")
    said = str(unavailable(Exception("cannot connect\n\twith hunter2"), url))
    assert said == "database 'db' on h port 5432 cannot be used: cannot connect with ***"


def test_servers_before_14_are_refused() -> None:
    url = make_url("postgresql://h/db")
    check_server_version(140_000, url)
    check_server_version(180_004, url)
    with pytest.raises(StoreUnusable, match="PostgreSQL 13; 14 or newer is needed"):
        check_server_version(130_014, url)


def test_the_migrations_are_found() -> None:
    assert (migrations_directory() / "env.py").is_file()
