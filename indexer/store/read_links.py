"""Reads which block follows which in one place of a publisher, for proofs (see indexer/index/parent_links.py).

A row names the content key of its parent, not its engine hash. The parent is the one block of the place that has this
key; if there are several, or none, there is no link, and a proof ends there.

Synchronous. Runs in the caller's transaction, which must be repeatable read.
"""

from __future__ import annotations

import numpy as np
from sqlalchemy import Connection

from indexer.index.columns import U64
from indexer.index.state import HolderKey
from indexer.store.engine import driver_connection
from indexer.store.read_columns import IN_THE_ORDER_ON_DISK, QUERY_ROWS, HashRange, read_holders

# No engine has a block whose parent has the key 0, short of one in 2^64: it stands for the root.
GLUED = """
    SELECT count(*), COALESCE(string_agg(engine_hash || int8send(content_key) || int8send(COALESCE(parent_key, 0)), '')
        FILTER (WHERE length(engine_hash) = 8), '')
    FROM (SELECT engine_hash, content_key, parent_key FROM residencies WHERE {} LIMIT %(query_rows)s + 1) AS held
"""
_GLUED_ROW = np.dtype([("engine_hash", ">u8"), ("content_key", ">u8"), ("parent_key", ">u8")])


def read_links(
    connection: Connection, publisher_id: int, holder: HolderKey, *, query_rows: int = QUERY_ROWS
) -> tuple[U64, U64]:
    """Engine hashes of blocks, and of their parents. Hashes of other than 64 bits have no links here."""
    driver = driver_connection(connection)
    none: U64 = np.empty(0, np.uint64)
    columns: list[tuple[U64, ...]] = [(none, none, none)]
    ranges = [HashRange.whole(*place) for place in read_holders(driver, publisher_id).items() if place[1] == holder]
    driver.execute(IN_THE_ORDER_ON_DISK)
    while ranges:
        held = ranges.pop()
        with driver.cursor(binary=True) as cursor:
            cursor.execute(held.asks(GLUED), {**held.values(), "query_rows": query_rows}, prepare=False)
            found = cursor.fetchone()
        assert found is not None
        count, glued = found
        if count > query_rows:
            ranges += held.parts()
        else:
            rows = np.frombuffer(glued, _GLUED_ROW)
            columns.append(tuple(rows[name].astype(np.uint64) for name in _GLUED_ROW.names or ()))
    hashes, keys, parent_keys = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return links_of(hashes, keys, parent_keys)


def links_of(hashes: U64, keys: U64, parent_keys: U64) -> tuple[U64, U64]:
    """The blocks whose parent is sure, and their parents. Cost: 1 us a block, mostly without the interpreter lock."""
    order = np.argsort(keys)
    sorted_keys = keys[order]
    first = np.searchsorted(sorted_keys, parent_keys)
    is_sure = np.searchsorted(sorted_keys, parent_keys, side="right") - first == 1
    is_sure &= parent_keys != 0
    return hashes[is_sure], hashes[order][first[is_sure]]
