"""Reads the residencies of many publishers in one pass over their table.

Rows of a publisher lie all over the table, between those of all others: to fetch them publisher by publisher visits
every page as often as there are publishers in it. So pages are read in their order, some thousand at a time, glued as
in `read_columns`, and sorted by holder here. While one portion is worked on, the next one is being read.

Synchronous. Runs in the caller's transaction, which must be repeatable read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import psycopg
from sqlalchemy import Connection

from indexer.index.columns import I32, StoredResidencies
from indexer.index.state import HolderKey
from indexer.store.engine import driver_connection
from indexer.store.read_columns import (
    GLUE,
    GLUED_ROW,
    IDENTITY_GLUE,
    IDENTITY_ROW,
    IS_NARROW,
    ROW,
    Columns,
    Row,
    identity_columns,
    sorted_by_width,
    to_columns,
)

PORTION_PAGES = 8_192  # of 8 KB: some 500,000 rows, 20 MB

HOLDERS = "SELECT holder_id, publisher_id, medium, group_idx, owner FROM holders WHERE publisher_id = ANY(%s::bigint[])"
PAGES = "SELECT pg_relation_size('residencies') / current_setting('block_size')::int"
_IN_PAGES = "FROM residencies WHERE ctid >= %(first)s::tid AND ctid < %(end)s::tid"
GLUED = (
    f"SELECT count(*), COALESCE(string_agg({GLUE} || int4send(holder_id), '') FILTER (WHERE {IS_NARROW}), '')"
    f" {_IN_PAGES}"
).encode()
# Nearly all rows have the same count and cohort. Where all have, a quarter of Postgres' time is saved.
UNIFORM_GLUED = (
    f"SELECT count(*), COALESCE(string_agg({IDENTITY_GLUE} || int4send(holder_id), '') FILTER (WHERE {IS_NARROW}), ''),"
    f" min(reference_count), max(reference_count), min(cohort), max(cohort) {_IN_PAGES}"
).encode()
ONE_BY_ONE = f"SELECT holder_id, {ROW} {_IN_PAGES} AND NOT {IS_NARROW}".encode()
_HOLDER_FIELD = ("holder_id", ">i4")
_GLUED_ROW = np.dtype([*GLUED_ROW.descr, _HOLDER_FIELD])
_UNIFORM_ROW = np.dtype([*IDENTITY_ROW.descr, _HOLDER_FIELD])


class Place(NamedTuple):
    """A holder, and whose it is."""

    publisher_id: int
    holder: HolderKey


class _Portion(NamedTuple):
    """Rows of some pages: the columns of those with hashes of 64 bits, and whose each is; the others by holder_id."""

    holder_ids: I32
    columns: Columns
    wide: Sequence[tuple[int, Row]] = ()


def read_all_residencies(
    connection: Connection, publisher_ids: Sequence[int], *, portion_pages: int = PORTION_PAGES
) -> Iterator[tuple[int, StoredResidencies]]:
    """Every residency of these publishers, by publisher_id, in no order. Cost: that of all rows there are."""
    driver = driver_connection(connection)
    places = _read_places(driver, publisher_ids)
    pages = _read_pages(driver)
    read = _PageReader(driver, portion_pages).read
    with ThreadPoolExecutor(1, thread_name_prefix="pages") as thread:
        following = thread.submit(read, 0)
        for first in range(portion_pages, pages, portion_pages):
            portion, following = following.result(), thread.submit(read, first)
            yield from _by_place(places, portion)
        yield from _by_place(places, following.result())


def _read_places(driver: psycopg.Connection, publisher_ids: Sequence[int]) -> Mapping[int, Place]:
    rows = driver.execute(HOLDERS, (list(publisher_ids),))
    return {holder_id: Place(publisher_id, HolderKey(*key)) for holder_id, publisher_id, *key in rows}


def _read_pages(driver: psycopg.Connection) -> int:
    found = driver.execute(PAGES).fetchone()
    assert found is not None
    return int(found[0])


class _PageReader:
    """Reads `portion_pages` at a time, as if all rows had one count and cohort until it meets some that have not."""

    def __init__(self, driver: psycopg.Connection, portion_pages: int) -> None:
        self._driver = driver
        self._portion_pages = portion_pages
        self._is_uniform = True

    def read(self, first: int) -> _Portion:
        values = {"first": f"({first},0)", "end": f"({first + self._portion_pages},0)"}
        with self._driver.cursor(binary=True) as cursor:
            if self._is_uniform:
                portion = self._read_uniform(cursor, values)
                if portion is not None:
                    return portion
                self._is_uniform = False
            count, glued = self._fetch(cursor, GLUED, values)
            rows = np.frombuffer(glued, _GLUED_ROW)
            portion = _Portion(rows["holder_id"].astype(np.int32), to_columns(rows))
            if len(rows) == count:
                return portion
            cursor.execute(ONE_BY_ONE, values)
            return portion._replace(wide=[(holder_id, tuple(row)) for holder_id, *row in cursor])

    def _read_uniform(self, cursor: psycopg.Cursor, values: Mapping[str, str]) -> _Portion | None:
        """None if they are not."""
        count, glued, *bounds = self._fetch(cursor, UNIFORM_GLUED, values)
        rows = np.frombuffer(glued, _UNIFORM_ROW)
        if len(rows) < count or bounds[0] != bounds[1] or bounds[2] != bounds[3]:
            return None
        same = (np.full(count, bounds[0] or 0, np.uint32), np.full(count, bounds[2] or 0, np.int32))
        return _Portion(rows["holder_id"].astype(np.int32), (*identity_columns(rows), *same))

    def _fetch(self, cursor: psycopg.Cursor, query: bytes, values: Mapping[str, str]) -> Sequence[Any]:
        found: Sequence[Any] | None = cursor.execute(query, values).fetchone()
        assert found is not None
        return found


def _by_place(places: Mapping[int, Place], portion: _Portion) -> Iterator[tuple[int, StoredResidencies]]:
    order = np.argsort(portion.holder_ids, kind="stable")
    holder_ids = portion.holder_ids[order]
    hashes, keys, ends, counts, cohorts = portion.columns
    hashes, keys, ends, counts, cohorts = hashes[order], keys[order], ends[order], counts[order], cohorts[order]
    starts = np.flatnonzero(np.diff(holder_ids, prepend=holder_ids[:1] - 1)).tolist()
    for first, end in pairwise([*starts, len(holder_ids)]):
        place, its = places.get(int(holder_ids[first])), slice(first, end)
        if place is not None:
            columns = hashes[its], keys[its], ends[its], counts[its], cohorts[its]
            yield place.publisher_id, StoredResidencies(place.holder, *columns)
    for holder_id, row in portion.wide:
        place = places.get(holder_id)
        if place is not None:
            yield place.publisher_id, sorted_by_width(place.holder, [row])
