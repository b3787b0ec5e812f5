"""Residencies as columns, made from plain rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from indexer.index.columns import U64, ColumnChanges, ResidencyColumns
from indexer.index.state import ResidencyRow

MEANINGLESS = 0xDEAD  # what a column holds where its flag says that there is no value


def u64(values: Iterable[int]) -> U64:
    return np.array(list(values), np.uint64)


def columns_of(rows: Mapping[int, ResidencyRow]) -> ResidencyColumns:
    """Rows by engine hash."""
    held = rows.values()
    return ResidencyColumns(
        engine_hashes=u64(rows),
        content_keys=u64(row.content_key for row in held),
        parent_keys=u64(MEANINGLESS if row.parent_key is None else row.parent_key for row in held),
        has_parent=np.array([row.parent_key is not None for row in held], np.bool_),
        local_hashes=u64(MEANINGLESS if row.local_hash is None else row.local_hash for row in held),
        has_local=np.array([row.local_hash is not None for row in held], np.bool_),
        block_tokens=np.array([row.block_tokens for row in held], np.uint32),
        positions=u64(row.position for row in held),
        reference_counts=np.array([row.reference_count for row in held], np.uint32),
        cohorts=np.array([row.cohort for row in held], np.int32),
    )


def changes_of(
    removed: Iterable[int] = (),
    upserted: Mapping[int, ResidencyRow] | None = None,
    counted: Mapping[int, int] | None = None,
) -> ColumnChanges:
    """Rows and reference counts by engine hash."""
    counts = counted or {}
    return ColumnChanges(
        removed=u64(removed),
        upserted=columns_of(upserted or {}),
        counted=u64(counts),
        counts=np.array(list(counts.values()), np.uint32),
        counted_cohorts=np.zeros(len(counts), np.int32),
    )
