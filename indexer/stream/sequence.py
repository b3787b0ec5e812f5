"""Sequence numbers of one publisher: what is next, what is missing, what came twice, what began again.

Purpose: say what to do with a batch, from its number and fingerprint alone. Knows no sockets and no time.

Inputs: `live` (from the subscription) and `replayed` (from the replay endpoint). Outcomes:

* APPLY: the next one. It counts as applied from here on.
* DUPLICATE: has been applied already, or was given up as lost; leave it out.
* Gap(first, last): these numbers are missing before it. Get them, or say `lose`; then ask again.
* RESTART: the engine began again. Say `begin_again`; then ask again.

A PUB socket never repeats itself and never reorders. So a live number that is not above the last live one is another
run of the engine, unless the very same batch (number and fingerprint) was applied. A live number that replay was
faster with is a duplicate if it is the same batch, and another run if it is not.

Invariants: a number is answered APPLY at most once between two restarts (or rewinds); Gap is answered before any later
number is applied; Gap and RESTART change nothing by themselves; the next number never falls, except by `begin_again`
and `rewind`.

If broken: the index would hold residencies that no publisher has, and routers would trust them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

RECENT_BATCHES: Final = 1_024
"""Fingerprints that are kept of batches the subscription has passed already."""
RECENT_BATCHES_MAX: Final = 65_536
"""And of those that replay was faster with; beyond, the oldest are forgotten, and would be taken for a restart."""


class Step(Enum):
    APPLY = "apply"
    DUPLICATE = "duplicate"
    RESTART = "restart"


class Gap(NamedTuple):
    """Missing numbers, both included."""

    gap_first: int
    gap_last: int


Outcome: TypeAlias = Step | Gap


class KnownBatch(NamedTuple):
    """A batch that was applied."""

    sequence_number: int
    fingerprint: int


class Sequence:
    """The state machine. `applied` and `fingerprint`: those of a checkpoint to continue from, or None."""

    __slots__ = ("_recent", "applied", "last_live", "newest")

    def __init__(self, applied: int | None = None, fingerprint: int | None = None) -> None:
        self.applied = applied  # or given up as lost
        self.newest: KnownBatch | None = None  # the last one that was really applied
        self.last_live: int | None = None
        self._recent = _RecentBatches()
        if applied is not None and fingerprint is not None:
            self.newest = KnownBatch(applied, fingerprint)
            self._recent.add([applied], [fingerprint])

    @property
    def next_number(self) -> int:
        return 0 if self.applied is None else self.applied + 1

    def live(self, number: int, fingerprint: int) -> Outcome:
        """What to do with a batch from the subscription."""
        known = self._recent.fingerprint(number)
        if known == fingerprint:
            self._pass(number)
            return Step.DUPLICATE
        if self.last_live is not None and number <= self.last_live:
            return Step.RESTART
        if self.applied is not None and number <= self.applied:
            return self._live_behind(number, known)
        outcome = self._ahead(number, fingerprint)
        if outcome is Step.APPLY:
            self._pass(number)
        return outcome

    def in_a_row(self, numbers: Iterable[int]) -> int:
        """How many of these numbers from the subscription, from the first on, `live` would answer APPLY."""
        if self.last_live is not None and self.last_live >= self.next_number:
            return 0
        expected = first = self.next_number
        for number in numbers:
            if number != expected:
                break
            expected += 1
        return expected - first

    def take_in_a_row(self, numbers: list[int], fingerprints: list[int]) -> None:
        """As if `live` had been asked for each of these, which `in_a_row` has counted."""
        self.applied = numbers[-1]
        self.newest = KnownBatch(numbers[-1], fingerprints[-1])
        self._recent.add(numbers, fingerprints)
        self._pass(numbers[-1])

    def replayed(self, number: int, fingerprint: int) -> Outcome:
        """What to do with a batch from the replay endpoint. The batch `newest` itself proves or refutes continuity."""
        newest = self.newest
        is_newest = newest is not None and number == newest.sequence_number
        known = newest.fingerprint if newest and is_newest else self._recent.fingerprint(number)
        if known is not None:
            return Step.DUPLICATE if known == fingerprint else Step.RESTART
        if self.applied is not None and number <= self.applied:
            return Step.DUPLICATE
        return self._ahead(number, fingerprint)

    def has_applied(self, number: int, fingerprint: int) -> bool:
        """Whether this very batch is known to have been applied (see the bounds above)."""
        return self._recent.fingerprint(number) == fingerprint

    def lose(self, gap_last: int) -> None:
        """Give up what is missing up to and including `gap_last`."""
        assert gap_last >= self.next_number, "only numbers that were not applied can be lost"
        self.applied = gap_last

    def begin_again(self) -> None:
        """The engine restarted: forget everything, so that the number to come is looked at as the first."""
        self.rewind()
        self.last_live = None

    def rewind(self) -> None:
        """Apply this run of the engine again, from its first number on."""
        self.applied = None
        self.newest = None
        self._recent.clear()

    def reconnected(self) -> None:
        """The connection was lost and made again: a live number that comes again is now from another run of the engine.

        Kept are the fingerprint of the batch `newest`, for replay to prove continuity with, and those of batches that
        replay was faster with, which may still be waiting in the socket.
        """
        if self.last_live is not None:
            self._recent.forget(self.last_live)

    def _ahead(self, number: int, fingerprint: int) -> Outcome:
        expected = self.next_number
        if number > expected:
            return Gap(expected, number - 1)
        self.applied = number
        self.newest = KnownBatch(number, fingerprint)
        self._recent.add([number], [fingerprint])
        return Step.APPLY

    def _live_behind(self, number: int, known: int | None) -> Outcome:
        """Replay (or a checkpoint) has passed this live number, and this very batch is not known to be applied."""
        was_left_out = known is None and self._recent.spans(number)
        return Step.DUPLICATE if was_left_out else Step.RESTART

    def _pass(self, number: int) -> None:
        if self.last_live is None or number > self.last_live:
            self.last_live = number
        self._recent.trim(self.last_live)


class _RecentBatches:
    """Numbers and fingerprints of applied batches, ascending; 16 bytes each."""

    __slots__ = ("_fingerprints", "_numbers")

    def __init__(self) -> None:
        self._numbers = array("Q")
        self._fingerprints = array("Q")

    def fingerprint(self, number: int) -> int | None:
        numbers = self._numbers
        if not numbers or number > numbers[-1]:
            return None
        at = bisect_left(numbers, number)
        return self._fingerprints[at] if numbers[at] == number else None

    def spans(self, number: int) -> bool:
        """Whether batches on both sides of this number are known."""
        return bool(self._numbers) and self._numbers[0] < number < self._numbers[-1]

    def add(self, numbers: list[int], fingerprints: list[int]) -> None:
        """Far fewer than RECENT_BATCHES_MAX at once."""
        assert not self._numbers or numbers[0] > self._numbers[-1], "numbers are applied in order"
        if len(self._numbers) + len(numbers) > RECENT_BATCHES_MAX:
            self._drop(RECENT_BATCHES_MAX // 2)
        self._numbers.extend(numbers)
        self._fingerprints.extend(fingerprints)

    def trim(self, passed: int) -> None:
        """Drop the oldest, but none above `passed`; amortised constant cost."""
        if len(self._numbers) >= 2 * RECENT_BATCHES:
            self._drop(min(len(self._numbers) - RECENT_BATCHES, bisect_right(self._numbers, passed)))

    def forget(self, passed: int) -> None:
        self._drop(bisect_right(self._numbers, passed))

    def clear(self) -> None:
        self._drop(len(self._numbers))

    def _drop(self, count: int) -> None:
        del self._numbers[:count]
        del self._fingerprints[:count]
