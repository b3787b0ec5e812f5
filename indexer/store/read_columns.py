"""Reads residencies back as columns, without an object per row.

Postgres glues the rows of one holder together, 32 bytes each, and hands them over as one value: a row of its own would
cost more to receive than to read. They are read in the order they lie on disk, as an index scan would fetch every page
many times. A query that finds more than `query_rows` is thrown away, and its range of hashes is read in parts.

Holders with hashes of other than 64 bits are rare; their rows are read one by one.

Synchronous. Runs in the caller's transaction, which must be repeatable read: queries follow each other, and what they
read must belong to one checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import psycopg
from sqlalchemy import Connection

from indexer.index.columns import I32, U32, U64, StoredResidencies, WideResidency
from indexer.index.state import HolderKey
from indexer.store.engine import driver_connection
from indexer.store.tables import to_unsigned

PORTION_ROWS = 100_000
QUERY_ROWS = 1_000_000  # 32 MB, which exist about three times: in the server, in the driver, as one value
PARTS = 8
HASHES_END = 1 << 64

HOLDERS = "SELECT holder_id, medium, group_idx, owner FROM holders WHERE publisher_id = %s"
IN_THE_ORDER_ON_DISK = "SET LOCAL enable_indexscan = off"
ROW = "engine_hash, content_key, position, block_tokens, reference_count, cohort"
# The end of a block may be more than a BIGINT holds: it is sent less END_OFFSET.
IDENTITY_GLUE = "engine_hash || int8send(content_key) || int8send(position - 9223372036854775807 + block_tokens)"
GLUE = f"{IDENTITY_GLUE} || int4send(reference_count) || int4send(cohort)"
IS_NARROW = "length(engine_hash) = 8"
GLUED = (
    f"SELECT count(*), COALESCE(string_agg({GLUE}, '') FILTER (WHERE {IS_NARROW}), '')"
    f" FROM (SELECT {ROW} FROM residencies WHERE {{}} LIMIT %(query_rows)s + 1) AS held"
)
ONE_BY_ONE = f"SELECT {ROW} FROM residencies WHERE {{}}"

_FROM_FIRST = "holder_id = %(holder_id)s AND engine_hash >= %(first)s"
_BEFORE_END = " AND engine_hash < %(end)s"

END_OFFSET = np.uint64(9223372036854775807)
IDENTITY_ROW = np.dtype([("engine_hash", ">u8"), ("content_key", ">u8"), ("end", ">u8")])
GLUED_ROW = np.dtype([*IDENTITY_ROW.descr, ("reference_count", ">u4"), ("cohort", ">i4")])

Rows: TypeAlias = npt.NDArray[np.void]  # of GLUED_ROW, and more
Columns: TypeAlias = tuple[U64, U64, U64, U32, I32]  # as `StoredResidencies` has them
Row: TypeAlias = tuple[bytes, int, int, int, int, int]  # of ONE_BY_ONE


class HashRange(NamedTuple):
    """Engine hashes of one holder, from `first` to before `end`; wider hashes lie between them as bytes compare."""

    holder_id: int
    holder: HolderKey
    first: int
    end: int

    @classmethod
    def whole(cls, holder_id: int, holder: HolderKey) -> HashRange:
        return cls(holder_id, holder, 0, HASHES_END)

    def asks(self, query: str) -> bytes:
        """`query` with the condition of this range."""
        return query.format(_FROM_FIRST if self.end == HASHES_END else _FROM_FIRST + _BEFORE_END).encode()

    def values(self) -> dict[str, object]:
        """Of the condition."""
        return {
            "holder_id": self.holder_id,
            "first": self.first.to_bytes(8, "big") if self.first else b"",
            "end": None if self.end == HASHES_END else self.end.to_bytes(8, "big"),
        }

    def parts(self) -> list[HashRange]:
        size = self.end - self.first
        assert size > 1
        bounds = sorted({self.first + size * number // PARTS for number in range(PARTS + 1)})
        return [self._replace(first=first, end=end) for first, end in pairwise(bounds)]


def read_residencies(
    connection: Connection, publisher_id: int, *, portion_rows: int = PORTION_ROWS, query_rows: int = QUERY_ROWS
) -> Iterator[StoredResidencies]:
    """Every residency of a publisher, in no order, in portions of at most `portion_rows`."""
    driver = driver_connection(connection)
    holders = read_holders(driver, publisher_id)
    driver.execute(IN_THE_ORDER_ON_DISK)
    ranges = [HashRange.whole(*holder) for holder in holders.items()]
    while ranges:
        held = ranges.pop()
        count, rows = _read_glued(driver, held, query_rows)
        if len(rows) < count:
            yield from _read_one_by_one(driver, held, portion_rows)
        elif count > query_rows:
            ranges += held.parts()
        else:
            yield from _in_portions(held.holder, rows, portion_rows)


def read_holders(driver: psycopg.Connection, publisher_id: int) -> dict[int, HolderKey]:
    """The places of a publisher by their numbers; some may hold nothing."""
    return {holder_id: HolderKey(*place) for holder_id, *place in driver.execute(HOLDERS, (publisher_id,))}


def _read_glued(driver: psycopg.Connection, held: HashRange, query_rows: int) -> tuple[int, Rows]:
    """How many rows there are (at most `query_rows` + 1 are looked at), and those of them with hashes of 64 bits."""
    with driver.cursor(binary=True) as cursor:
        # Never prepared: the plan depends on how much of the table the holder is.
        cursor.execute(held.asks(GLUED), {**held.values(), "query_rows": query_rows}, prepare=False)
        found = cursor.fetchone()
    assert found is not None
    count, glued = found
    return count, np.frombuffer(glued, GLUED_ROW)


def _in_portions(holder: HolderKey, rows: Rows, portion_rows: int) -> Iterator[StoredResidencies]:
    for first in range(0, len(rows), portion_rows):
        yield StoredResidencies(holder, *to_columns(rows[first : first + portion_rows]))


def to_columns(rows: Rows) -> Columns:
    """Of rows with hashes of 64 bits."""
    return *identity_columns(rows), rows["reference_count"].astype(np.uint32), rows["cohort"].astype(np.int32)


def identity_columns(rows: Rows) -> tuple[U64, U64, U64]:
    """Hash, key, end."""
    hashes, keys, ends = (rows[name].astype(np.uint64) for name in IDENTITY_ROW.names or ())
    return hashes, keys, ends + END_OFFSET


def _read_one_by_one(driver: psycopg.Connection, held: HashRange, portion_rows: int) -> Iterator[StoredResidencies]:
    with driver.cursor("residencies_one_by_one", binary=True) as cursor:
        cursor.execute(held.asks(ONE_BY_ONE), held.values())
        while rows := cursor.fetchmany(portion_rows):
            yield sorted_by_width(held.holder, rows)


def sorted_by_width(holder: HolderKey, rows: Sequence[Row]) -> StoredResidencies:
    """Rows with hashes of any width."""
    narrow = [row for row in rows if len(row[0]) == 8]
    wide = [row for row in rows if len(row[0]) != 8]
    return StoredResidencies(
        holder,
        _u64(int.from_bytes(engine_hash, "big") for engine_hash, *_ in narrow),
        _u64(to_unsigned(key) for _, key, *_ in narrow),
        _u64(position + tokens for _, _, position, tokens, *_ in narrow),
        np.array([count for *_, count, _ in narrow], np.uint32),
        np.array([cohort for *_, cohort in narrow], np.int32),
        [WideResidency(h, to_unsigned(key), position + tokens, *others) for h, key, position, tokens, *others in wide],
    )


def _u64(values: Iterable[int]) -> npt.NDArray[np.uint64]:
    return np.array(list(values), np.uint64)
