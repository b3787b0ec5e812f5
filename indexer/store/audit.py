"""Compares memory and rows: holder by holder, hash by hash, count by count.

Purpose: show that the index and Postgres say the same. Two things are compared per publisher: a copy of its state in
memory, taken in one synchronous step, and its rows, read in one transaction. If batches were applied in between, the
checkpoints differ, and the report says so first: then flush and audit again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from sqlalchemy import Connection

from indexer.index.content_index import ContentIndex
from indexer.index.publisher import PublisherIndex
from indexer.index.state import Checkpoint, EngineHash, HolderKey
from indexer.registration import PublisherKey
from indexer.store.recovery import read_publisher, stream_ghosts, stream_residencies

DIFFERENCES_SHOWN_MAX = 20

Residency = tuple[int, int]  # content key, reference count, 0 = unverified
Ghost = tuple[int, int]  # content key, end in granules


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that memory and store do not agree on; None = one of them does not have it. `where` names it."""

    worker_id: str
    dp_rank: int
    kind: str  # "publisher", "checkpoint", "residency" or "ghost"
    where: str
    in_memory: str | None
    in_store: str | None


@dataclass(slots=True)
class AuditReport:
    """What was compared, and the first differences of all that were found."""

    publishers: int = 0
    publishers_of_others: int = 0  # not compared: another replica writes them
    residencies_in_memory: int = 0
    residencies_in_store: int = 0
    ghosts_in_memory: int = 0
    ghosts_in_store: int = 0
    differences_total: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return self.differences_total == 0

    def add(self, difference: Difference) -> None:
        self.differences_total += 1
        if len(self.differences) < DIFFERENCES_SHOWN_MAX:
            self.differences.append(difference)

    def to_dict(self) -> dict[str, object]:
        """The report as JSON takes it."""
        return {"is_equal": self.is_equal, **asdict(self)}


@dataclass(frozen=True, slots=True)
class PublisherSnapshot:
    """A copy of what memory says of one publisher."""

    key: PublisherKey
    publisher_id: int
    checkpoint: Checkpoint
    residencies: dict[tuple[HolderKey, EngineHash], Residency]
    ghosts: dict[EngineHash, Ghost]


def take_snapshots(publishers: Iterable[PublisherIndex]) -> Iterator[PublisherSnapshot]:
    """One publisher at a time, each in one synchronous step."""
    for publisher in publishers:
        yield _snapshot(publisher)


def _snapshot(publisher: PublisherIndex) -> PublisherSnapshot:
    return PublisherSnapshot(
        key=publisher.registration.key,
        publisher_id=publisher.registration.publisher_id,
        checkpoint=publisher.checkpoint,
        residencies={(holder, h): (key, count) for holder, h, key, count in publisher.residencies()},
        ghosts={h: (key, end_granules) for h, key, end_granules in publisher.ghosts()},
    )


def audit_publisher(snapshot: PublisherSnapshot, report: AuditReport, connection: Connection) -> None:
    """Compare one publisher and add to the report. Memory: one copy of what the index holds of this publisher."""
    report.publishers += 1
    stored = read_publisher(connection, snapshot.publisher_id)
    if stored is None:
        report.add(Difference(*snapshot.key, "publisher", f"publisher_id {snapshot.publisher_id}", "registered", None))
        return
    if stored.checkpoint != snapshot.checkpoint:
        sides = str(snapshot.checkpoint), str(stored.checkpoint)
        report.add(Difference(*snapshot.key, "checkpoint", "checkpoint", *sides))
    _audit_residencies(connection, snapshot, report, stored.checkpoint.cohort)
    _audit_ghosts(connection, snapshot, report)


def _audit_residencies(connection: Connection, snapshot: PublisherSnapshot, report: AuditReport, cohort: int) -> None:
    """Of what is unverified nobody knows the count: it is enough that both have it."""
    missing = snapshot.residencies
    report.residencies_in_memory += len(missing)
    for holder, engine_hash, row in stream_residencies(connection, snapshot.publisher_id):
        report.residencies_in_store += 1
        in_memory = missing.pop((holder, engine_hash), None)
        in_store = (row.content_key, row.reference_count if row.cohort == cohort else 0)
        if in_memory != in_store:
            report.add(_residency_difference(snapshot.key, holder, engine_hash, in_memory, in_store))
    for (holder, engine_hash), in_memory in missing.items():
        report.add(_residency_difference(snapshot.key, holder, engine_hash, in_memory, None))


def _audit_ghosts(connection: Connection, snapshot: PublisherSnapshot, report: AuditReport) -> None:
    missing = snapshot.ghosts
    report.ghosts_in_memory += len(missing)
    for engine_hash, row in stream_ghosts(connection, snapshot.publisher_id):
        report.ghosts_in_store += 1
        in_memory = missing.pop(engine_hash, None)
        in_store = (row.content_key, row.end_granules)
        if in_memory != in_store:
            report.add(_ghost_difference(snapshot.key, engine_hash, in_memory, in_store))
    for engine_hash, in_memory in missing.items():
        report.add(_ghost_difference(snapshot.key, engine_hash, in_memory, None))


def _residency_difference(
    key: PublisherKey,
    holder: HolderKey,
    engine_hash: EngineHash,
    in_memory: Residency | None,
    in_store: Residency | None,
) -> Difference:
    where = f"medium={holder.medium} group={holder.group} owner={holder.owner!r} engine_hash={_show(engine_hash)}"
    return Difference(*key, "residency", where, *map(_show_residency, (in_memory, in_store)))


def _ghost_difference(
    key: PublisherKey, engine_hash: EngineHash, in_memory: Ghost | None, in_store: Ghost | None
) -> Difference:
    return Difference(*key, "ghost", f"engine_hash={_show(engine_hash)}", *map(_show_ghost, (in_memory, in_store)))


def _show(engine_hash: EngineHash) -> str:
    return str(engine_hash) if isinstance(engine_hash, int) else f"0x{engine_hash.hex()}"


def _show_residency(residency: Residency | None) -> str | None:
    return None if residency is None else f"content_key={residency[0]} reference_count={residency[1]}"


def _show_ghost(ghost: Ghost | None) -> str | None:
    return None if ghost is None else f"content_key={ghost[0]} end_granules={ghost[1]}"


def unknown_publishers(stored: Iterable[PublisherKey], index: ContentIndex) -> Iterator[Difference]:
    """Publishers that the store has and memory does not."""
    for key in stored:
        if index.publisher(key) is None:
            yield Difference(*key, "publisher", "registration", None, "registered")
