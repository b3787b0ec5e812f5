"""Makes a publisher's rows, which another replica has written, equal to memory, and its checkpoint with them.

One transaction: the changes that memory has kept are written first, as they alone say where blocks start; then rows and
memory are compared, and what still differs is written. Nobody else writes the rows meanwhile: the publisher is locked.
Cost: 3 s for a million residencies, with copies of them in memory.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection

from indexer.index.columns import PublisherState
from indexer.store.difference import ghost_differences, residency_differences
from indexer.store.engine import driver_connection
from indexer.store.merge import empty_staging, write_changes
from indexer.store.read_columns import read_residencies
from indexer.store.recovery import stream_ghosts


def reconcile_rows(connection: Connection, state: PublisherState, term: int) -> int | None:
    """How many rows differed. None, and nothing is written, if the publisher is gone or its writer is somebody else."""
    driver = driver_connection(connection)
    changes = state.changes
    terms = {changes.publisher_id: term}
    changes.fold()
    if not write_changes(driver, [changes], terms).rows:
        return None
    holders = residency_differences(read_residencies(connection, changes.publisher_id), state.held)
    ghosts = ghost_differences(stream_ghosts(connection, changes.publisher_id), state.ghosts)
    rest = replace(
        changes, holders=holders, ghosts_cleared=False, ghosts=ghosts, groups=None, side_state=None, expired=None
    )
    empty_staging(driver)
    write_changes(driver, [rest], terms)
    return rest.size
