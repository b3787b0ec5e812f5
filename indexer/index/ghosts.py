"""Engine hashes that are not resident, or not only resident, but resolvable as parents.

What a hash means does not change when its block goes, so ghosts outlive removals, clears and restarts. They are
bounded: at `ghosts_max` those that became ghosts first are forgotten; their later children become orphans.

Purpose: every eviction makes a ghost, so they lie in flat arrays, one after the other in the order in which they became
that; what became one again is appended anew, and its old place is free. Wide hashes have their places, too, and dicts
beside for what cannot lie in an array.

Invariants: `ordinal` ascends with the place; what is newer than `state[TAKEN]` is pending, all else is in the store. A
ghost with the flag STORED, or that is not pending, may have a row; if it is forgotten, the store has to be told.

If broken: rows would stay of what is forgotten, or chains go on from what another hash meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from indexer.index.columns import U64
from indexer.index.kernels import (
    DONE,
    END_MASK,
    FREE,
    GHOST_FIELDS,
    HOLDER_FULL,
    LIVE,
    OLDEST,
    ORDINAL,
    PENDING,
    STORED,
    TAKEN,
    WIDE,
    ghosts_forget,
    ghosts_move,
    ghosts_remember,
)
from indexer.index.state import EngineHash, GhostRow
from indexer.index.table import I64, Table

FORGOTTEN_AT_ONCE = 64  # one in so many
SMALLEST = 64
SPARE, SPARE_MIN = 4, 8  # of so many ghosts' places one is free in new arrays, and at least after a move
ROWS_AT_ONCE = 1_024
_NO_HASHES: U64 = np.empty(0, np.uint64)


class Gone:
    """Hashes that are forgotten, of which the store may have rows."""

    __slots__ = ("count", "parts", "wide")

    def __init__(self) -> None:
        self.parts: list[U64] = []
        self.wide: list[bytes] = []
        self.count = 0

    def add(self, hashes: U64, wide: Sequence[bytes] = ()) -> None:
        self.parts.append(hashes)
        self.wide += wide
        self.count += len(hashes) + len(wide)

    def put_before(self, older: Gone) -> None:
        self.parts, self.wide = older.parts + self.parts, older.wide + self.wide
        self.count += older.count

    def __iter__(self) -> Iterator[EngineHash]:
        for part in self.parts:
            yield from part.tolist()
        yield from self.wide


class GhostChanges:
    """What the store does not have yet: hashes that are forgotten, and then rows. `since`: `TAKEN` of before.

    Python objects of it exist only while it is gone through: made of all at once, they leave holes where they were.
    """

    __slots__ = ("_columns", "_wide", "gone", "since")

    def __init__(self, gone: Gone, columns: tuple[Any, ...], wide: Mapping[int, bytes], since: int) -> None:
        """`columns`: hash, key, end, ordinal of each row; `wide`: the hashes of some, by the number of the row."""
        self.gone = gone
        self.since = since
        self._columns = columns
        self._wide = wide

    def __len__(self) -> int:
        return self.gone.count + len(self._columns[0])

    def items(self) -> Iterator[tuple[EngineHash, GhostRow | None]]:
        """The new state of each hash, None = forget. A hash that was forgotten and remembered again comes twice."""
        for engine_hash in self.gone:
            yield engine_hash, None
        for first in range(0, len(self._columns[0]), ROWS_AT_ONCE):
            rows = zip(*(column[first : first + ROWS_AT_ONCE].tolist() for column in self._columns), strict=True)
            for i, (engine_hash, key, end, ordinal) in enumerate(rows, first):
                yield self._wide.get(i, engine_hash), GhostRow(key, end, ordinal)


class Ghosts:
    """Engine hash -> where the chain stands after its block. Cost: 60 to 80 bytes and 0.1 us each."""

    __slots__ = (
        "_cleared",
        "_columns",
        "_gone",
        "_places",
        "_state",
        "_wide",
        "_wide_at",
        "allowance",
        "forgotten",
        "ghosts_max",
    )

    def __init__(self, ghosts_max: int) -> None:
        self.ghosts_max = ghosts_max
        self.allowance = 0  # so many more may be kept: residencies that chains go on from as ghosts (lookahead)
        self.forgotten = 0
        self._state = np.zeros(GHOST_FIELDS, np.int64)
        self._gone = Gone()
        self._cleared = False
        self._empty()

    def __len__(self) -> int:
        return int(self._state[LIVE])

    def get(self, engine_hash: EngineHash) -> tuple[int, int] | None:
        """(content key, end in granules), or None."""
        place = self._place(engine_hash)
        return None if place is None else (int(self._columns[1][place]), int(self._columns[2][place] & END_MASK))

    def keys_of(self, hashes: U64) -> U64:
        """The content key of each, 0 = unknown. Cost: 20 ns each."""
        places = self._places.values(hashes)
        keys: U64 = np.where(places, self._columns[1][places.astype(np.int64) - 1], np.uint64(0))
        return keys

    def remember(self, engine_hash: EngineHash, key: int, end_granules: int) -> None:
        """The newest ghost from now on."""
        if isinstance(engine_hash, bytes):
            self._remember_wide(engine_hash, key, end_granules)
            self.keep_bound()
        else:
            self.remember_all(*np.array([[engine_hash], [key], [end_granules]], np.uint64))

    def remember_each(self, ghosts: Sequence[tuple[EngineHash, int, int]]) -> None:
        """The same for many of any kind."""
        if ghosts and not any(isinstance(engine_hash, bytes) for engine_hash, _, _ in ghosts):
            self.remember_all(*np.array(list(zip(*ghosts, strict=True)), np.uint64))
            return
        for engine_hash, key, end in ghosts:
            self.remember(engine_hash, key, end)

    def remember_all(self, hashes: U64, keys: U64, ends: U64) -> None:
        """`remember`, for many, in this order. The arrays are contiguous."""
        progress = np.zeros(1, np.int64)
        while (status := ghosts_remember(*self._arrays, hashes, keys, ends, progress)) != DONE:
            left = len(hashes) - int(progress[0])
            if status == HOLDER_FULL:
                self._places.make_room(left)
            else:
                self._make_room(left)
        self._places.let_go()
        self.keep_bound()

    def keep_bound(self) -> None:
        """Forget the oldest beyond the bound, which settings may have lowered since they were stored."""
        excess = len(self) - self.ghosts_max - self.allowance
        if excess > 0:
            self._forget_oldest(excess + self.ghosts_max // FORGOTTEN_AT_ONCE)

    def clear(self) -> None:
        """Forget all: their keys mean nothing any more."""
        self._state[[OLDEST, FREE, LIVE, PENDING]] = 0
        self._empty()
        self._gone, self._cleared = Gone(), True

    def load(self, ghosts: Iterable[tuple[EngineHash, GhostRow]]) -> None:
        """From the store, in ascending order of `ordinal`."""
        ghosts = list(ghosts)
        self._state[TAKEN] = np.iinfo(np.int64).max  # so that those that are forgotten at once are told to the store
        self.remember_each([(engine_hash, row.content_key, row.end_granules) for engine_hash, row in ghosts])
        newest = ghosts[-1][1].ordinal if ghosts else 0
        self._state[ORDINAL] = self._state[TAKEN] = max(newest, self._state[ORDINAL])
        self._state[PENDING] = 0

    @property
    def changes_pending(self) -> int:
        return int(self._state[PENDING]) + self._gone.count + self._cleared

    def take_changes(self) -> tuple[bool, GhostChanges]:
        """(forget every row first, then these)."""
        taken = self._cleared, self._rows_since(int(self._state[TAKEN]), self._gone)
        self._gone, self._cleared = Gone(), False
        self._state[TAKEN], self._state[PENDING] = self._state[ORDINAL], 0
        return taken

    def copy(self) -> GhostChanges:
        """All of them, as rows; nothing is taken. Cost: 50 ns each."""
        return self._rows_since(0, Gone())

    def _rows_since(self, ordinal: int, gone: Gone) -> GhostChanges:
        places = self._places_since(ordinal)
        hashes, keys, ends, ordinals = (column[places] for column in self._columns)
        wide = {i: self._wide_at[place] for i, place in enumerate(places.tolist()) if place in self._wide_at}
        return GhostChanges(gone, (hashes, keys, ends & END_MASK, ordinals), wide, ordinal)

    def restore_changes(self, cleared: bool, changes: GhostChanges) -> None:
        """A flush failed, or nobody knows; newer changes win. What it carried may be stored."""
        if self._cleared:
            return
        self._cleared = cleared
        self._gone.put_before(changes.gone)
        places = self._places_since(changes.since)
        was_taken = self._columns[3][places] <= self._state[TAKEN]
        self._columns[2][places[was_taken]] |= STORED
        self._state[TAKEN], self._state[PENDING] = changes.since, len(places)

    def rows(self) -> Iterable[tuple[EngineHash, int, int]]:
        """(engine hash, content key, end in granules) of each, oldest first."""
        places = self._places_since(0)
        hashes, keys, ends, _ = (column[places] for column in self._columns)
        found = zip(places.tolist(), hashes.tolist(), keys.tolist(), (ends & END_MASK).tolist(), strict=True)
        for place, engine_hash, key, end in found:
            yield self._wide_at.get(place, engine_hash), key, end

    # ------------------------------------------------------------------ places

    @property
    def _arrays(self) -> tuple[U64, I64, U64, U64, U64, I64, I64]:
        """What kernels take."""
        return *self._places.arrays, *self._columns, self._state

    def _empty(self) -> None:
        self._places = Table()
        self._columns = _make_columns(SMALLEST)
        self._wide: dict[bytes, int] = {}  # -> place
        self._wide_at: dict[int, bytes] = {}  # in the order of places

    def _place(self, engine_hash: EngineHash) -> int | None:
        if isinstance(engine_hash, bytes):
            return self._wide.get(engine_hash)
        place = self._places.get(engine_hash)
        return place - 1 if place else None

    def _places_since(self, ordinal: int) -> I64:
        """Of all ghosts that are newer than this one."""
        start, end = self._state[OLDEST], self._state[FREE]
        first = start + np.searchsorted(self._columns[3][start:end], ordinal, side="right")
        places: I64 = first + np.flatnonzero(self._columns[2][first:end])
        return places

    def _make_room(self, count: int) -> None:
        """So many more places behind the last one: in the same arrays as long as they are of the right size, as new
        ones every time would leave holes in memory. Cost: 30 ns a ghost."""
        needed = len(self) + max(len(self) // SPARE_MIN, count)
        columns = self._columns
        if not needed <= len(columns[0]) <= 2 * needed:
            columns = _make_columns(max(SMALLEST, len(self) + max(len(self) // SPARE, count)))
        ghosts_move(*self._arrays, *columns)
        self._columns = columns
        wide_places = np.flatnonzero(columns[2][: self._state[FREE]] & WIDE).tolist() if self._wide else []
        self._wide_at = dict(zip(wide_places, self._wide_at.values(), strict=True))
        self._wide = {engine_hash: place for place, engine_hash in self._wide_at.items()}

    def _forget_oldest(self, count: int) -> None:
        """Many at once: a call costs more than a ghost."""
        gone, progress = np.empty(count, np.uint64), np.zeros(2, np.int64)
        while ghosts_forget(*self._arrays, count, gone, progress) != DONE:
            self._forget_wide(int(self._state[OLDEST]))
            progress[0] += 1
        if progress[1]:
            self._gone.add(gone[: progress[1]].copy())
        self._places.tidy()
        self.forgotten += count

    def _forget_wide(self, place: int) -> None:
        engine_hash = self._wide_at[place]
        del self._wide[engine_hash]
        if self._end_wide(place):
            self._gone.add(_NO_HASHES, [engine_hash])

    def _remember_wide(self, engine_hash: bytes, key: int, end_granules: int) -> None:
        """As `ghosts_remember`."""
        if self._state[FREE] == len(self._columns[0]):
            self._make_room(1)
        known = self._wide.pop(engine_hash, None)
        flags = int(WIDE) if known is None else int(WIDE) | self._end_wide(known)
        place = int(self._state[FREE])
        self._state[[FREE, LIVE, PENDING, ORDINAL]] += 1
        for column, value in zip(self._columns, (0, key, end_granules | flags, self._state[ORDINAL]), strict=True):
            column[place] = value
        self._wide[engine_hash], self._wide_at[place] = place, engine_hash

    def _end_wide(self, place: int) -> int:
        """As `_end_ghost`."""
        is_pending = bool(self._columns[3][place] > self._state[TAKEN])
        flags = int(self._columns[2][place] & STORED) if is_pending else int(STORED)
        self._columns[2][place] = 0
        self._state[LIVE] -= 1
        self._state[PENDING] -= is_pending
        del self._wide_at[place]
        return flags


def _make_columns(places: int) -> tuple[U64, U64, U64, I64]:
    """hashes, keys, ends with flags, ordinals: one piece of memory."""
    hashes, keys, ends, ordinals = np.zeros((4, places), np.uint64)
    return hashes, keys, ends, ordinals.view(np.int64)
