"""Many residencies at once, as arrays of equal length: what crosses the border between the index and the store.

Only residencies under 64-bit engine hashes, nearly all there are, travel this way; wider hashes are values of
`state.py`. Arrays own their data, or share that of a portion that was read, and are never written to again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.index.state import (
    Checkpoint,
    EngineHash,
    GhostRow,
    GhostRows,
    GroupState,
    HolderKey,
    PublisherChanges,
    ResidencyRow,
)

U64: TypeAlias = npt.NDArray[np.uint64]
U32: TypeAlias = npt.NDArray[np.uint32]
I32: TypeAlias = npt.NDArray[np.int32]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ResidencyColumns:
    """Rows of the store, see `state.ResidencyRow`. Distinct hashes.

    `parent_keys[i]` means nothing unless `has_parent[i]` (a block at the root has none), nor does `local_hashes[i]`
    unless `has_local[i]`. `positions` and `block_tokens` in tokens.
    """

    engine_hashes: U64
    content_keys: U64
    parent_keys: U64
    has_parent: Flags
    local_hashes: U64
    has_local: Flags
    block_tokens: U32
    positions: U64
    reference_counts: U32
    cohorts: I32

    def __len__(self) -> int:
        return len(self.engine_hashes)

    def rows(self) -> Iterator[tuple[int, ResidencyRow]]:
        """(engine hash, row) of each: for few of them."""
        columns = (getattr(self, name).tolist() for name in self.__slots__)
        for engine_hash, key, parent, has_parent, local, has_local, *others in zip(*columns, strict=True):
            yield engine_hash, ResidencyRow(key, parent if has_parent else None, local if has_local else None, *others)


@dataclass(frozen=True, slots=True)
class ColumnChanges:
    """New states of one holder's residencies, by engine hash; a hash is in at most one of `upserted` and `counted`.

    First the rows of `removed` go, those of `upserted` that the store may have among them, then `upserted` are written,
    then the rows of `counted` get their new reference counts and cohorts.
    """

    removed: U64
    upserted: ResidencyColumns
    counted: U64
    counts: U32
    counted_cohorts: I32

    def __len__(self) -> int:
        return len(self.removed) + len(self.upserted) + len(self.counted)

    @property
    def count_changes(self) -> tuple[U64, U32, I32]:
        return self.counted, self.counts, self.counted_cohorts


class WideResidency(NamedTuple):
    """One residency under a hash of more than 64 bits."""

    engine_hash: bytes
    content_key: int
    end_tokens: int
    reference_count: int
    cohort: int


@dataclass(frozen=True, slots=True)
class StoredResidencies:
    """Residencies of one holder as recovery needs them. `end_tokens`: where the block ends in its prompt."""

    holder: HolderKey
    engine_hashes: U64
    content_keys: U64
    end_tokens: U64
    reference_counts: U32
    cohorts: I32
    wide: Sequence[WideResidency] = field(default=())

    def __len__(self) -> int:
        return len(self.engine_hashes) + len(self.wide)

    def chosen(self, rows: Flags, has: Callable[[int], bool]) -> StoredResidencies:
        """These rows, and the wide ones of certain cohorts."""
        wide = [residency for residency in self.wide if has(residency.cohort)]
        return StoredResidencies(
            self.holder,
            self.engine_hashes[rows],
            self.content_keys[rows],
            self.end_tokens[rows],
            self.reference_counts[rows],
            self.cohorts[rows],
            wide,
        )


class PublisherRows(NamedTuple):
    """All that the store says of a publisher, as recovery needs it. `ghosts` in ascending order of `ordinal`."""

    checkpoint: Checkpoint
    granule: int | None
    groups: Sequence[GroupState] = ()
    residencies: Iterable[StoredResidencies] = ()
    ghosts: Iterable[tuple[EngineHash, GhostRow]] = ()
    side_state: bytes | None = None


class PublisherState(NamedTuple):
    """All that memory says of a publisher. `changes`: what the store does not have of it, as far as memory knows."""

    changes: PublisherChanges
    held: Sequence[StoredResidencies]
    ghosts: GhostRows
