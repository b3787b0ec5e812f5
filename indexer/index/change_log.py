"""What the store does not have yet of one holder's residencies: operations in the order in which they happened.

Purpose: noting a change costs a few words in an array and no look at earlier changes. They are folded per engine hash
only when a flush writes them, away from the event loop: a block stored and evicted meanwhile comes to nothing.

Invariants: folding names the new state of each hash, so that writing it twice is the same as once. A hash whose first
operation is a store has no row in the store, unless the log is uncertain (a flush failed and may have been written).

If broken: rows would stay of what is gone, or be missing of what is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.index.columns import U64, ColumnChanges, ResidencyColumns
from indexer.index.kernels import (
    BORN,
    COUNT,
    COUNTED,
    GONE,
    KEYED,
    LOCATED,
    REMOVED,
    ROOTED,
    RUN,
    RUN_HEAD,
    UPSERTED,
    coalesce,
)
from indexer.index.state import ResidencyRow
from indexer.index.table import Table

CHUNK_WORDS_MIN = 512
CHUNK_WORDS_MAX = 1 << 17
_pack_row = Struct("<7Q").pack_into
_pack_two = Struct("<2Q").pack_into
_ROW_WORDS = 7
_WORD_BYTES = 8
Chunk: TypeAlias = tuple[int, U64]  # the cohort of all rows in it, and operations


class ChangeLog:
    """Cost: 16 bytes a block stored in a run, of one granule; 56 bytes a row by itself; 16 bytes a removal."""

    __slots__ = ("_chunks", "_memory", "chunk", "cohort", "entries", "fill", "has_only_stores", "is_uncertain", "words")

    def __init__(self, cohort: int = 0) -> None:
        self.cohort = cohort  # of what is written now
        self._chunks: list[Chunk] = []  # full ones, cut to what they hold
        self.chunk: U64 = np.empty(0, np.uint64)
        self._memory = memoryview(b"")
        self.fill = 0
        self.words = 0  # of the full chunks
        self.entries = 0
        self.is_uncertain = False
        self.has_only_stores = True  # then no hash occurs twice

    @classmethod
    def of(cls, changes: ColumnChanges) -> ChangeLog:
        """A log that comes to these changes."""
        log = cls()
        log._chunks, log.entries = _to_words(changes), len(changes)
        log.has_only_stores = len(changes) == len(changes.upserted)
        log.words = sum(len(words) for _, words in log._chunks)
        return log

    def __len__(self) -> int:
        return self.entries

    def begin_cohort(self, cohort: int) -> None:
        """Rows from now on are of this cohort."""
        self._close_chunk()
        self.cohort = cohort

    def provide(self, words: int) -> None:
        """So many words fit into `chunk` after `fill`."""
        if self.fill + words <= len(self.chunk):
            return
        self._close_chunk()
        size = min(max(CHUNK_WORDS_MIN, 2 * self.words), CHUNK_WORDS_MAX)
        self.chunk = np.empty(max(size, words), np.uint64)
        self._memory = self.chunk.data.cast("B")

    def add_row(self, engine_hash: int, row: ResidencyRow) -> None:
        """A residency begins, or is written anew."""
        self.provide(_ROW_WORDS)
        flags = KEYED | (ROOTED if row.parent_key is None else 0) | (0 if row.local_hash is None else LOCATED)
        words = [row.parent_key or 0, row.position, engine_hash, row.content_key, 0]
        if row.local_hash is not None:
            words[3:] = [row.local_hash, row.content_key]
        sizes = row.block_tokens | row.reference_count << 32
        _pack_row(self._memory, self.fill * _WORD_BYTES, RUN | flags << 8 | 1 << 32, sizes, *words)
        self.fill += _ROW_WORDS - (row.local_hash is None)
        self.entries += 1

    def add_run(
        self, hashes: U64, keys: U64, parent_key: int | None, local_hashes: U64, block_tokens: int, position: int
    ) -> None:
        """Residencies of consecutive blocks begin."""
        count = len(hashes)
        self.provide(RUN_HEAD + 3 * count)
        fill, chunk = self.fill, self.chunk
        chunk[fill] = RUN | (LOCATED | KEYED | (ROOTED if parent_key is None else 0)) << 8 | count << 32
        chunk[fill + 1], chunk[fill + 2], chunk[fill + 3] = block_tokens | 1 << 32, parent_key or 0, position
        fill += RUN_HEAD
        for column in (hashes, local_hashes, keys):
            chunk[fill : fill + count] = column
            fill += count
        self.fill = fill
        self.entries += count

    def add_gone(self, engine_hash: int) -> None:
        """A residency ended."""
        self.provide(2)
        _pack_two(self._memory, self.fill * _WORD_BYTES, GONE | 1 << 32, engine_hash)
        self.has_only_stores = False
        self.fill += 2
        self.entries += 1

    def add_count(self, engine_hash: int, references: int) -> None:
        """The reference count of a residency changed."""
        self.provide(2)
        _pack_two(self._memory, self.fill * _WORD_BYTES, COUNT | references << 32, engine_hash)
        self.has_only_stores = False
        self.fill += 2
        self.entries += 1

    def add_counts(self, hashes: U64) -> None:
        """All of these have one reference from now on."""
        count = len(hashes)
        self.provide(2 * count)
        words = self.chunk[self.fill : self.fill + 2 * count]
        words[::2], words[1::2] = COUNT | 1 << 32, hashes
        self.has_only_stores = False
        self.fill += 2 * count
        self.entries += count

    def put_before(self, older: ChangeLog) -> None:
        """A flush failed, or nobody knows: what it was to write happened before all of this."""
        older._close_chunk()
        self._chunks = older._chunks + self._chunks
        self.words += older.words
        self.entries += older.entries
        self.has_only_stores = False  # what the older one stored may have become unverified, and been stored again
        self.is_uncertain = True

    def folded(self) -> ColumnChanges:
        """The new state of every hash. The log stays as it is.

        Cost: 0.1 us and 80 bytes an entry while it lasts, then 50; without the interpreter lock.
        """
        return _fold(self._all_chunks(), self.entries, self.is_uncertain)

    def portions(self) -> Iterator[ColumnChanges]:
        """The same bit by bit, of a log that has only stores."""
        assert self.has_only_stores
        for cohort, words in self._all_chunks():
            portion = _fold([(cohort, words)], len(words) // 2, self.is_uncertain)
            assert len(portion) == len(portion.upserted), "a log of stores alone removes and counts nothing"
            yield portion

    def _all_chunks(self) -> list[Chunk]:
        return [*self._chunks, (self.cohort, self.chunk[: self.fill])]

    def _close_chunk(self) -> None:
        if self.fill:
            self._chunks.append((self.cohort, self.chunk[: self.fill]))
            self.words += self.fill
        self.chunk, self.fill, self._memory = np.empty(0, np.uint64), 0, memoryview(b"")


def _fold(chunks: Sequence[Chunk], entries_max: int, is_uncertain: bool) -> ColumnChanges:
    index, rows = Table(), _make_rows(entries_max)
    index.make_room(entries_max)
    scratch, pair = np.empty(entries_max, np.uint64), np.empty(2, np.uint64)  # touched as far as runs are long
    for cohort, words in chunks:
        coalesce(words, len(words), cohort, index.slots, index.meta, scratch, pair, *rows)
    return _to_changes(tuple(column[: len(index)] for column in rows), is_uncertain)


def _make_rows(count: int) -> tuple[npt.NDArray[Any], ...]:
    """hashes, keys, parents, local hashes, flags, block tokens, positions, references, cohorts, states."""
    kinds = (np.uint64, np.uint64, np.uint64, np.uint64, np.uint8, np.uint32, np.uint64, np.uint32, np.int32, np.uint8)
    return tuple(np.empty(count, kind) for kind in kinds)


def _to_changes(rows: tuple[npt.NDArray[Any], ...], is_uncertain: bool) -> ColumnChanges:
    hashes, keys, parents, local_hashes, flags, block_tokens, positions, references, cohorts, states = rows
    upserted, counted = (states & UPSERTED) != 0, (states & COUNTED) != 0
    removed = (states & (REMOVED | UPSERTED)) != 0  # what was held before, too: as a row of its own, it is new
    if not is_uncertain:
        removed &= (states & BORN) == 0
    has_parent, has_local = (flags & ROOTED) == 0, (flags & LOCATED) != 0
    columns: tuple[npt.NDArray[Any], ...]
    columns = (hashes, keys, parents, has_parent, local_hashes, has_local, block_tokens, positions, references, cohorts)
    if not upserted.all():
        columns = tuple(column[upserted] for column in columns)
    return ColumnChanges(
        hashes[removed], ResidencyColumns(*columns), hashes[counted], references[counted], cohorts[counted]
    )


def _to_words(changes: ColumnChanges) -> list[Chunk]:
    """Changes as operations again."""
    rows, gone = changes.upserted, changes.removed
    cohorts = np.union1d(rows.cohorts, changes.counted_cohorts).tolist()
    chunks = [(0, np.column_stack((np.full(len(gone), GONE | 1 << 32, np.uint64), gone)))]
    for cohort in cohorts:
        chunks += ((cohort, _rows_to_words(rows, cohort, is_located)) for is_located in (True, False))
        chosen = changes.counted_cohorts == cohort
        references = changes.counts[chosen].astype(np.uint64) << np.uint64(32)
        chunks.append((cohort, np.column_stack((references | np.uint64(COUNT), changes.counted[chosen]))))
    return [(cohort, words.ravel()) for cohort, words in chunks if words.size]


def _rows_to_words(rows: ResidencyColumns, cohort: int, is_located: bool) -> npt.NDArray[np.uint64]:
    """Runs of one block, of the rows of this cohort that have a local hash, or of those that have none."""
    chosen = (rows.has_local == is_located) & (rows.cohorts == cohort)
    flags = np.where(rows.has_parent[chosen], KEYED, KEYED | ROOTED).astype(np.uint64)
    if is_located:
        flags |= np.uint64(LOCATED)
    first = flags << np.uint64(8) | np.uint64(RUN | 1 << 32)
    sizes = rows.block_tokens[chosen] | rows.reference_counts[chosen].astype(np.uint64) << np.uint64(32)
    columns = [first, sizes, rows.parent_keys[chosen], rows.positions[chosen], rows.engine_hashes[chosen]]
    if is_located:
        columns.append(rows.local_hashes[chosen])
    return np.column_stack((*columns, rows.content_keys[chosen]))
