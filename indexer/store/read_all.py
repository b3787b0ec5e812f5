"""Reads the residencies of many publishers in one pass over their table.

Rows of a publisher lie all over the table, between those of all others: to fetch them publisher by publisher visits
every page as often as there are publishers in it. So pages are read in their order, some thousand at a time, glued as
in `read_columns`, and sorted by holder here. While one portion is worked on, the next one is being read.

Synchronous. Runs in the caller's transaction, which must be repeatable read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import psycopg
from sqlalchemy import Connection

from indexer.index.columns import StoredResidencies
from indexer.index.state import HolderKey
from indexer.store.engine import driver_connection
from indexer.store.read_columns import GLUE, GLUED_ROW, IS_NARROW, ROW, Row, Rows, sorted_by_width, to_columns

PORTION_PAGES = 8_192  # of 8 KB: some 500,000 rows, 20 MB

HOLDERS = "SELECT holder_id, publisher_id, medium, group_idx, owner FROM holders WHERE publisher_id = ANY(%s::bigint[])"
PAGES = "SELECT pg_relation_size('residencies') / current_setting('block_size')::int"
_IN_PAGES = "FROM residencies WHERE ctid >= %(first)s::tid AND ctid < %(end)s::tid"
GLUED = (
    f"SELECT count(*), COALESCE(string_agg({GLUE} || int4send(holder_id), '') FILTER (WHERE {IS_NARROW}), '')"
    f" {_IN_PAGES}"
).encode()
ONE_BY_ONE = f"SELECT holder_id, {ROW} {_IN_PAGES} AND NOT {IS_NARROW}".encode()
_GLUED_ROW = np.dtype([*GLUED_ROW.descr, ("holder_id", ">i4")])


class Place(NamedTuple):
    """A holder, and whose it is."""

    publisher_id: int
    holder: HolderKey


class _Portion(NamedTuple):
    """Rows of some pages: those with hashes of 64 bits, and the others, by holder_id."""

    glued: Rows
    wide: Sequence[tuple[int, Row]]


def read_all_residencies(
    connection: Connection, publisher_ids: Sequence[int], *, portion_pages: int = PORTION_PAGES
) -> Iterator[tuple[int, StoredResidencies]]:
    """Every residency of these publishers, by publisher_id, in no order. Cost: that of all rows there are."""
    driver = driver_connection(connection)
    places = _read_places(driver, publisher_ids)
    pages = _read_pages(driver)
    with ThreadPoolExecutor(1, thread_name_prefix="pages") as thread:
        read = partial(_read_portion, driver, portion_pages)
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


def _read_portion(driver: psycopg.Connection, pages: int, first: int) -> _Portion:
    values = {"first": f"({first},0)", "end": f"({first + pages},0)"}
    with driver.cursor(binary=True) as cursor:
        cursor.execute(GLUED, values)
        found = cursor.fetchone()
        assert found is not None
        count, glued = found
        rows = np.frombuffer(glued, _GLUED_ROW)
        if len(rows) == count:
            return _Portion(rows, ())
        cursor.execute(ONE_BY_ONE, values)
        return _Portion(rows, [(holder_id, tuple(row)) for holder_id, *row in cursor])


def _by_place(places: Mapping[int, Place], portion: _Portion) -> Iterator[tuple[int, StoredResidencies]]:
    holder_ids = portion.glued["holder_id"].astype(np.int32)
    order = np.argsort(holder_ids, kind="stable")
    rows, holder_ids = portion.glued[order], holder_ids[order]
    starts = np.flatnonzero(np.diff(holder_ids, prepend=holder_ids[:1] - 1)).tolist()
    for first, end in pairwise([*starts, len(rows)]):
        place = places.get(int(holder_ids[first]))
        if place is not None:
            yield place.publisher_id, to_columns(place.holder, rows[first:end])
    for holder_id, row in portion.wide:
        place = places.get(holder_id)
        if place is not None:
            yield place.publisher_id, sorted_by_width(place.holder, [row])
