"""What a publisher held before a gap that was not repaired: known, but not credited until it is proven.

A batch that is lost may have removed any block. So a gap makes all that is held unverified: its holders are set aside
as a cohort, and empty ones take their places. From there a block goes back one by one: where it is stored again, or
where a store goes on from it (the engine holds every ancestor of a block that it extends). Or it ends, by a removal or
a clear, or because nothing was heard of it for long.

Invariants: a hash is in at most one holder of a place, verified or not; cohorts are in the order of their numbers, and
a row whose cohort is above that of one cohort is in none of the older ones.

If broken: answers would promise what the engine may have evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from indexer.index.holder import Holder
from indexer.index.state import EngineHash, HolderKey

JOINED_MAX = 10_000  # residencies: where both are more, two cohorts stay two
MERGED_AT_ONCE = 512  # residencies: half a millisecond
APART_MAX = 16  # holders of one place and cohort that wait to be merged; at the bound two are merged in one go
SPANS = 4  # a cohort takes in what becomes unverified within a quarter of the time that it has


@dataclass(slots=True, eq=False)
class Cohort:
    """What became unverified at about the same time.

    `number`: the cohort of its newest rows. `places`: the holders of each, which are merged into one bit by bit.
    `since`: when somebody with a clock first saw it. `is_open`: what becomes unverified next joins it.
    """

    number: int
    places: dict[HolderKey, list[Holder]] = field(default_factory=dict)
    since: float | None = None
    is_open: bool = True

    def __len__(self) -> int:
        return _size(self.holders())

    def holders(self) -> Iterator[Holder]:
        return chain.from_iterable(self.places.values())

    def join(self, lost: dict[HolderKey, Holder]) -> None:
        """Take these in. Cost: nothing, or at APART_MAX that of a merge."""
        for key, holder in lost.items():
            apart = self.places.setdefault(key, [])
            apart.append(holder)
            if len(apart) > APART_MAX:
                _merge(apart, min(map(len, apart)))

    def merge(self) -> bool:
        """Go on with that in one place. False: all is in one holder each."""
        for apart in self.places.values():
            if len(apart) > 1:
                _merge(apart, MERGED_AT_ONCE)
                return True
        return False


class Unverified:
    """Of one publisher. `expired`: the cohort that was dropped last, if the store was not told yet."""

    __slots__ = ("cohorts", "dropped", "entries_max", "expired")

    def __init__(self, entries_max: int) -> None:
        self.cohorts: list[Cohort] = []  # oldest first
        self.entries_max = entries_max
        self.dropped = 0  # residencies that nothing was heard of, ever
        self.expired: int | None = None

    def __bool__(self) -> bool:
        """Whether there is any. Cost: per cohort and place."""
        return bool(self.cohorts) and any(len(holder) for holder in self.holders())

    def __len__(self) -> int:
        return sum(len(cohort) for cohort in self.cohorts)

    def holders(self) -> Iterator[Holder]:
        """The newest first."""
        for cohort in reversed(self.cohorts):
            yield from cohort.holders()

    def of(self, key: HolderKey) -> list[Holder]:
        """Those of one place, the newest first."""
        return [holder for cohort in reversed(self.cohorts) for holder in cohort.places.get(key, ())]

    def find(self, key: HolderKey, engine_hash: EngineHash) -> Holder | None:
        """The holder of this place that has the hash."""
        for cohort in reversed(self.cohorts):
            for holder in cohort.places.get(key, ()):
                if engine_hash in holder:
                    return holder
        return None

    def add(self, number: int, lost: dict[HolderKey, Holder]) -> None:
        """These holders, verified until now, with rows of this cohort. Cost: a slot each."""
        for holder in lost.values():
            holder.lose_trust()
        newest = self.cohorts[-1] if self.cohorts else None
        if newest is not None and newest.is_open and min(len(newest), _size(lost.values())) <= JOINED_MAX:
            newest.number = number
            newest.join(lost)
        elif lost:
            self.cohorts.append(Cohort(number, {key: [holder] for key, holder in lost.items()}))
        while self.cohorts and len(self) > self.entries_max:
            self._drop_oldest()

    def clear(self, keys: set[HolderKey]) -> list[Holder]:
        """The holders of these places are taken out, and returned."""
        cleared = [cohort.places.pop(key) for cohort in self.cohorts for key in keys & cohort.places.keys()]
        self._forget_empty()
        return list(chain.from_iterable(cleared))

    def merge(self) -> bool:
        """Go on with what has been put together. False: there was nothing left. Cost: half a millisecond."""
        return any(cohort.merge() for cohort in self.cohorts)

    def expire(self, now: float, age_max_s: float) -> None:
        """Drop what has been unverified for so long, or up to a quarter longer. Cost: that of `Holder.leave`."""
        self._forget_empty()
        for cohort in self.cohorts:
            cohort.since = now if cohort.since is None else cohort.since
            cohort.is_open &= now - cohort.since < age_max_s / SPANS
        while self.cohorts and now - (self.cohorts[0].since or 0.0) >= age_max_s * (1 + 1 / SPANS):
            self._drop_oldest()

    def take_expired(self) -> int | None:
        """For the store: after all else has been written, rows of this cohort and older ones are to be deleted."""
        expired, self.expired = self.expired, None
        return expired

    def restore_expired(self, expired: int | None) -> None:
        """A flush failed, or nobody knows."""
        if self.expired is None:
            self.expired = expired

    def _drop_oldest(self) -> None:
        oldest = self.cohorts.pop(0)
        self.dropped += len(oldest)
        self.expired = oldest.number
        for holder in oldest.holders():
            holder.pending.note_dropped()
            holder.leave()

    def _forget_empty(self) -> None:
        for cohort in self.cohorts:
            for holder in [holder for holder in cohort.holders() if not len(holder)]:
                cohort.places[holder.key].remove(holder)
                holder.leave()
            cohort.places = {key: apart for key, apart in cohort.places.items() if apart}
        self.cohorts = [cohort for cohort in self.cohorts if cohort.places]


def _size(holders: Iterable[Holder]) -> int:
    return sum(map(len, holders))


def _merge(apart: list[Holder], count: int) -> None:
    """So many residencies go from the smallest of these holders to the next one; it leaves when it is empty."""
    apart.sort(key=len)
    smallest, following = apart[:2]
    smallest.give_some(following, count)
    if not len(smallest):
        smallest.leave()
        del apart[0]
