"""What an operator wants to know of one publisher's index, read off its parts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from indexer.index.assumptions import Assumption, assumptions_of
from indexer.index.state import GroupState

if TYPE_CHECKING:
    from indexer.index.publisher import PublisherIndex


@dataclass(slots=True)
class PublisherStatus:
    """Counts are of now, `counters` of ever."""

    granule: int | None
    groups: tuple[GroupState, ...]
    residencies: int
    residencies_by_medium: dict[str, int]
    unverified: int
    orphans: int
    ghosts: int
    unplaced: int
    gaps: int
    missing_batches: int
    batches_applied: int
    bad_events: dict[str, int]
    counters: dict[str, int]
    assumptions: list[Assumption]


def status_of(publisher: PublisherIndex) -> PublisherStatus:
    waiting, residents = publisher.waiting, publisher.residents
    by_medium: Counter[str] = Counter()
    for key, holder in residents.holders.items():
        if len(holder):  # a holder that lost everything is not recovered either
            by_medium[key.medium] += len(holder)
    counters = {
        **publisher.counters,
        "dropped_orphans": waiting.dropped_orphans,
        "dropped_unplaced": waiting.dropped_unplaced,
        "dropped_sparse_runs": waiting.dropped_sparse_runs,
        "dropped_unverified": residents.unverified.dropped,
        "forgotten_ghosts": residents.ghosts.forgotten,
        "forgotten_links": publisher.ancestry.forgotten,
        "ignored_sizes": publisher.groups.ignored_sizes,
    }
    return PublisherStatus(
        granule=publisher.granule,
        groups=publisher.groups.states(),
        residencies=sum(by_medium.values()),
        residencies_by_medium=dict(sorted(by_medium.items())),
        unverified=len(residents.unverified),
        orphans=waiting.orphans,
        ghosts=len(residents.ghosts),
        unplaced=waiting.unplaced,
        gaps=publisher.gaps,
        missing_batches=publisher.missing_batches,
        batches_applied=publisher.batches_applied,
        bad_events=dict(sorted(publisher.bad_events.items())),
        counters=dict(sorted(counters.items())),
        assumptions=list(assumptions_of(publisher)),
    )
