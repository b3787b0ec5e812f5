"""What to write so that rows become what memory says. Pure.

Purpose: a replica that takes over a publisher finds rows that another one has written. Both have followed the same
stream, so nearly all is equal: only what differs is written. Memory does not keep where a block starts and its local
hash, so a row that only memory has is written without them, as if its engine hash alone had been announced; that is
why the others are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.index.columns import I32, U32, U64, ColumnChanges, ResidencyColumns, StoredResidencies, WideResidency
from indexer.index.state import CountChange, EngineHash, GhostRow, GhostRows, HolderChanges, HolderKey, ResidencyRow


class _Flat(NamedTuple):
    """Residencies under 64-bit hashes, ascending by hash."""

    hashes: U64
    keys: U64
    ends: U64
    counts: U32
    cohorts: I32


def residency_differences(
    stored: Iterable[StoredResidencies], held: Iterable[StoredResidencies]
) -> list[HolderChanges]:
    """Per holder that differs. Cost: 0.3 us a residency."""
    rows, memory = _by_holder(stored), _by_holder(held)
    differences = (_of_holder(holder, rows.get(holder, ()), memory.get(holder, ())) for holder in {**rows, **memory})
    return [changes for changes in differences if changes.size]


def ghost_differences(
    stored: Iterable[tuple[EngineHash, GhostRow]], held: GhostRows
) -> dict[EngineHash, GhostRow | None]:
    """New states of ghosts; None = forget."""
    rows = dict(stored)
    changes: dict[EngineHash, GhostRow | None] = {h: row for h, row in held.items() if rows.pop(h, None) != row}
    changes.update(dict.fromkeys(rows))
    return changes


def _by_holder(portions: Iterable[StoredResidencies]) -> dict[HolderKey, list[StoredResidencies]]:
    holders: dict[HolderKey, list[StoredResidencies]] = {}
    for portion in portions:
        holders.setdefault(portion.holder, []).append(portion)
    return holders


def _of_holder(
    holder: HolderKey, stored: Sequence[StoredResidencies], held: Sequence[StoredResidencies]
) -> HolderChanges:
    wide_rows, wide_held = _wide(stored), _wide(held)
    columns = _flat_differences(_flat(stored), _flat(held))
    return HolderChanges(holder, rows=_wide_differences(wide_rows, wide_held), columns=columns)


def _flat(portions: Sequence[StoredResidencies]) -> _Flat:
    none: U64 = np.empty(0, np.uint64)
    hashes = np.concatenate([none, *(portion.engine_hashes for portion in portions)])
    order = np.argsort(hashes)
    return _Flat(
        hashes[order],
        np.concatenate([none, *(portion.content_keys for portion in portions)])[order],
        np.concatenate([none, *(portion.end_tokens for portion in portions)])[order],
        np.concatenate([none.astype(np.uint32), *(portion.reference_counts for portion in portions)])[order],
        np.concatenate([none.astype(np.int32), *(portion.cohorts for portion in portions)])[order],
    )


def _flat_differences(stored: _Flat, held: _Flat) -> ColumnChanges:
    place, is_stored = _look_up(held.hashes, stored.hashes)
    has_key, has_count = is_stored.copy(), is_stored.copy()
    has_key[is_stored] = stored.keys[place[is_stored]] == held.keys[is_stored]
    at = place[is_stored]
    has_count[is_stored] = stored.counts[at] == held.counts[is_stored]
    has_count[is_stored] &= stored.cohorts[at] == held.cohorts[is_stored]
    _, is_held = _look_up(stored.hashes, held.hashes)
    is_counted = has_key & ~has_count
    return ColumnChanges(
        stored.hashes[~is_held],
        _rows(held, ~has_key),
        held.hashes[is_counted],
        held.counts[is_counted],
        held.cohorts[is_counted],
    )


def _look_up(wanted: U64, known: U64) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Where each wanted hash is among the known ones (ascending), and whether it is there."""
    place = np.searchsorted(known, wanted)
    is_known = np.zeros(len(wanted), np.bool_)
    inside = place < len(known)
    is_known[inside] = known[place[inside]] == wanted[inside]
    return place, is_known


def _rows(held: _Flat, chosen: npt.NDArray[np.bool_]) -> ResidencyColumns:
    """Blocks of unknown size, at the end of their prefix."""
    hashes = held.hashes[chosen]
    zeros, no = np.zeros(len(hashes), np.uint64), np.zeros(len(hashes), np.bool_)
    return ResidencyColumns(
        hashes,
        held.keys[chosen],
        zeros,
        no,
        zeros,
        no,
        np.zeros(len(hashes), np.uint32),
        held.ends[chosen],
        held.counts[chosen],
        held.cohorts[chosen],
    )


def _wide(portions: Sequence[StoredResidencies]) -> dict[EngineHash, WideResidency]:
    return {residency.engine_hash: residency for portion in portions for residency in portion.wide}


def _wide_differences(
    stored: Mapping[EngineHash, WideResidency], held: Mapping[EngineHash, WideResidency]
) -> dict[EngineHash, ResidencyRow | CountChange | None]:
    changes: dict[EngineHash, Any] = dict.fromkeys(stored.keys() - held.keys())
    for engine_hash, residency in held.items():
        row = stored.get(engine_hash)
        if row is None or row.content_key != residency.content_key:
            _, key, end_tokens, count, cohort = residency
            changes[engine_hash] = ResidencyRow(key, None, None, 0, end_tokens, count, cohort)
        elif row != residency:
            changes[engine_hash] = CountChange(residency.reference_count, residency.cohort)
    return changes
