"""Blocks that routers expect: of prompts that were sent to a worker, whose events have not come yet.

Purpose: prompts with one new prefix that come in a burst shall go to the worker that the first was sent to, though its
engine stores the blocks only while it computes them. What is expected never counts as held; answers say it apart.

A content key stands for its whole prefix, so the deepest key that is expected of a worker says how far it will get.

Invariants: only what the publisher did not hold is expected of it, and once a batch has left it there, it no longer is,
also if it goes again; nothing is expected after its time; there are never more keys than `Room` and `blocks_max` allow.

If broken: routers would be sent to workers that have nothing, for some seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from indexer.index.columns import U64
from indexer.index.key_space import WORD_BITS, KeySpace

if TYPE_CHECKING:
    from indexer.index.publisher import PublisherIndex

EXPIRY_WORK = 4_096  # of a step; counts blocks
PUBLISHER_WORK = 64  # takes as long as so many


class Room:
    """How many blocks may be expected in all scopes together, and how many are."""

    __slots__ = ("blocks_max", "taken")

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.taken = 0

    @property
    def left(self) -> int:
        return self.blocks_max - self.taken


class ExpectedBlocks:
    """Of one scope. `blocks_max`: of one publisher. Times are of any clock that only goes on, the same in all calls.

    Cost: some 300 bytes a block.
    """

    def __init__(self, room: Room, blocks_max: int) -> None:
        self._room = room
        self._blocks_max = blocks_max
        self._until: dict[int, dict[PublisherIndex, float]] = {}
        self._keys: dict[PublisherIndex, U64] = {}
        self._granules: dict[PublisherIndex, int] = {}  # of the chains that their keys are of

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    @property
    def granules(self) -> set[int]:
        """Of the chains that anything is expected of."""
        return set(self._granules.values())

    def note(self, publisher: PublisherIndex, granule: int, keys: U64, until: float) -> int:
        """These blocks of a prompt, first to last, are expected, but for those that the publisher holds. Where there
        is no room, the first ones are. Returns how many are expected now. Cost: 1 us a block."""
        if self._granules.get(publisher, granule) != granule:
            self.forget(publisher)
        missing = keys[~_are_held(publisher, keys)].tolist()
        before = self._keys.get(publisher)
        room = min(self._room.left, self._blocks_max - (0 if before is None else len(before)))
        new: list[int] = []
        known = 0
        for key in missing:
            by_publisher = self._until.setdefault(key, {})
            if publisher in by_publisher:
                by_publisher[publisher] = max(until, by_publisher[publisher])
                known += 1
            elif len(new) < room:
                by_publisher[publisher] = until
                new.append(key)
            else:
                self._drop_if_empty(key)
                break
        if new:
            column = np.array(new, np.uint64)
            self._keys[publisher] = column if before is None else np.concatenate((before, column))
            self._granules[publisher] = granule
            self._room.taken += len(new)
        return known + len(new)

    def deepest(self, granule: int, keys: U64, now: float) -> dict[PublisherIndex, int]:
        """How many granules of this prompt each publisher is expected to have. `keys`: of all its granules.

        Cost: 0.1 us a granule, and 0.2 us for each that is expected.
        """
        found: dict[PublisherIndex, int] = {}
        wanted = sum(of == granule for of in self._granules.values())
        places = dict(zip(keys.tolist(), range(1, len(keys) + 1), strict=True))
        for key in sorted(places.keys() & self._until.keys(), key=places.__getitem__, reverse=True):
            for publisher, until in self._until[key].items():
                if until > now:
                    found.setdefault(publisher, places[key])
            if len(found) == wanted:
                break
        return found

    def settle(self, publisher: PublisherIndex) -> None:
        """A batch was applied: what it stored is no longer expected. Cost: 0.1 us if nothing is expected of this
        publisher, else 10 us, and 10 ns a block."""
        keys = self._keys.get(publisher)
        if keys is not None:
            self._keep(publisher, keys, ~_are_held(publisher, keys))

    def forget(self, publisher: PublisherIndex) -> None:
        """Its engine began again, or was cleared, or it is gone."""
        keys = self._keys.get(publisher)
        if keys is not None:
            self._keep(publisher, keys, np.zeros(len(keys), np.bool_))

    def expire(self, now: float) -> Iterator[None]:
        """Drop what is over; between two steps anything may happen. Cost: 0.15 us a block, 10 us a publisher, and a
        millisecond or two a step."""
        work = 0
        for publisher in list(self._keys):
            keys = self._keys.get(publisher)
            if keys is not None:
                until = np.array([self._until[key][publisher] for key in keys.tolist()])
                self._keep(publisher, keys, until > now)
                work += PUBLISHER_WORK + len(keys)
            if work >= EXPIRY_WORK:
                work = 0
                yield

    def _keep(self, publisher: PublisherIndex, keys: U64, is_kept: npt.NDArray[np.bool_]) -> None:
        if is_kept.all():
            return
        for key in keys[~is_kept].tolist():
            del self._until[key][publisher]
            self._drop_if_empty(key)
        kept = keys[is_kept]
        self._room.taken -= len(keys) - len(kept)
        if len(kept):
            self._keys[publisher] = kept
        else:
            del self._keys[publisher], self._granules[publisher]

    def _drop_if_empty(self, key: int) -> None:
        if not self._until[key]:
            del self._until[key]


def _are_held(publisher: PublisherIndex, keys: U64) -> npt.NDArray[np.bool_]:
    """Which of these blocks the publisher has, anywhere."""
    space: KeySpace | None = publisher.space
    held = np.zeros(len(keys), np.bool_)
    if space is None:
        return held
    words = space.look_up(keys).astype(np.int64) * space.words
    for holder in publisher.residents.holders.values():
        word, bit = divmod(holder.slot, WORD_BITS)
        held |= (space.mask_words[words + word] >> np.uint64(bit) & np.uint64(1)).astype(np.bool_)
    return held
