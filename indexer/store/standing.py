"""How this replica stands to one publisher's rows: may it write them, and does it know what is in them? Pure.

Purpose: every replica follows every publisher, so each has the changes that its writer stores. One that is not the
writer *keeps* them until the rows show that they are stored; when it becomes the writer, it writes what it has kept.
It knows what the rows are if nobody else has written since it loaded them (they say how many flushes have), or if the
lease follows its own. If not, rows and memory are compared.

| lease | rows | next |
| --- | --- | --- |
| none | | KEEP |
| the one that it writes with, or the next one | own | WRITE |
| another one | of as many flushes as when they were loaded | WRITE, what was kept first |
| another one | of more | COMPARE |

If broken: rows would miss what was kept, or stay of what is gone.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from indexer.index.state import PublisherChanges
from indexer.store.lease import Lease, StoredState

KEPT_FLUSHES_MAX = 256
KEPT_CHANGES_MAX = 1_000_000
"""Of one publisher. Beyond, what was kept is dropped, and rows and memory are compared at a take-over."""


class Step(Enum):
    KEEP = auto()
    WRITE = auto()
    COMPARE = auto()


class Standing:
    """`flushes`: of the rows that memory was loaded from. `term`: what it writes with; None = it is not the writer."""

    __slots__ = ("_flushes", "_kept_size", "kept", "term")

    def __init__(self, flushes: int) -> None:
        self.term: int | None = None
        self.kept: deque[PublisherChanges] = deque()
        self._kept_size = 0
        self._flushes: int | None = flushes  # None: what the rows are is not known from them any more

    def look(self, lease: Lease | None) -> Step:
        """What to do with changes. WRITE and COMPARE: write with the lease's term."""
        if lease is None:
            return Step.KEEP
        is_own = self.term is not None and lease.term <= self.term + 1  # nobody came between
        return Step.WRITE if is_own or lease.flushes == self._flushes else Step.COMPARE

    def began(self, lease: Lease) -> None:
        """It writes with this lease from now on, and knows what the rows are."""
        self.term, self._flushes = lease.term, None

    def refused(self) -> None:
        """Somebody else has claimed the publisher."""
        self.term = None

    def take_kept(self) -> list[PublisherChanges]:
        """The newest first. They are to be given back to the publisher."""
        kept = list(reversed(self.kept))
        self._drop_kept()
        return kept

    def keep(self, changes: PublisherChanges) -> bool:
        """False: too much is kept, and was dropped."""
        self.kept.append(changes)
        self._kept_size += changes.size
        if len(self.kept) <= KEPT_FLUSHES_MAX and self._kept_size <= KEPT_CHANGES_MAX:
            return True
        self._drop_kept()
        self._flushes = None
        return False

    def confirm(self, stored: StoredState) -> None:
        """The rows are this far. If others have written since, what was kept up to there is no longer needed."""
        if stored.flushes == self._flushes or stored.sequence_number is None:
            return
        until = (stored.generation, stored.sequence_number)
        while self.kept and _place(self.kept[0]) <= until:
            self._kept_size -= self.kept.popleft().size

    def _drop_kept(self) -> None:
        self.kept.clear()
        self._kept_size = 0


def _place(changes: PublisherChanges) -> tuple[int, int]:
    point = changes.checkpoint
    return point.generation, -1 if point.sequence_number is None else point.sequence_number
