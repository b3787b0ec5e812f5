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

from collections.abc import Iterator
from dataclasses import dataclass

from indexer.index.holder import Holder
from indexer.index.state import EngineHash, HolderKey

MERGED_AT_ONCE = 10_000  # residencies: some 2 ms
SPANS = 4  # a cohort takes in what becomes unverified within a quarter of the time that it has


@dataclass(slots=True, eq=False)
class Cohort:
    """What became unverified at about the same time.

    `number`: the cohort of its newest rows. `since`: when somebody with a clock first saw it. `is_open`: what becomes
    unverified next may still join it.
    """

    number: int
    holders: dict[HolderKey, Holder]
    since: float | None = None
    is_open: bool = True

    def __len__(self) -> int:
        return sum(len(holder) for holder in self.holders.values())


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
            yield from cohort.holders.values()

    def of(self, key: HolderKey) -> list[Holder]:
        """Those of one place, the newest first."""
        return [cohort.holders[key] for cohort in reversed(self.cohorts) if key in cohort.holders]

    def find(self, key: HolderKey, engine_hash: EngineHash) -> Holder | None:
        """The holder of this place that has the hash."""
        for cohort in reversed(self.cohorts):
            holder = cohort.holders.get(key)
            if holder is not None and engine_hash in holder:
                return holder
        return None

    def add(self, number: int, lost: dict[HolderKey, Holder]) -> None:
        """These holders, verified until now, with rows of this cohort. Cost: a slot each, or up to 2 ms."""
        for holder in lost.values():
            holder.lose_trust()
        newest = self.cohorts[-1] if self.cohorts else None
        if newest is not None and newest.is_open and min(len(newest), _size(lost)) <= MERGED_AT_ONCE:
            _join(newest, lost)
            newest.number = number
        elif lost:
            self.cohorts.append(Cohort(number, lost))
        while self.cohorts and len(self) > self.entries_max:
            self._drop_oldest()

    def clear(self, keys: set[HolderKey]) -> list[Holder]:
        """The holders of these places are taken out, and returned."""
        cleared = [cohort.holders.pop(key) for cohort in self.cohorts for key in keys & cohort.holders.keys()]
        self._forget_empty()
        return cleared

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
        for holder in oldest.holders.values():
            holder.pending.note_dropped()
            holder.leave()

    def _forget_empty(self) -> None:
        for cohort in self.cohorts:
            for key in [key for key, holder in cohort.holders.items() if not len(holder)]:
                cohort.holders.pop(key).leave()
        self.cohorts = [cohort for cohort in self.cohorts if cohort.holders]


def _size(holders: dict[HolderKey, Holder]) -> int:
    return sum(len(holder) for holder in holders.values())


def _join(cohort: Cohort, lost: dict[HolderKey, Holder]) -> None:
    """Of each place, the smaller holder goes into the larger one."""
    for key, holder in lost.items():
        before = cohort.holders.get(key)
        if before is None:
            cohort.holders[key] = holder
        elif len(before) < len(holder):
            before.give_all(holder)
            cohort.holders[key] = holder
        else:
            holder.give_all(before)
