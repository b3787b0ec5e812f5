"""The values that cross the border of the index: checkpoints going in, changes going out to the store.

Everything is a plain value; nothing here reads or changes the index. Positions and sizes are in tokens. Hashes are
unsigned 64-bit integers, but for engine hashes, which may also be bytes of any length (never of length 8: those are
turned into integers when they are decoded).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from indexer.registration import PublisherKey, Registration

if TYPE_CHECKING:
    from indexer.index.change_log import ChangeLog
    from indexer.index.columns import ColumnChanges

EngineHash: TypeAlias = int | bytes


class HolderKey(NamedTuple):
    """One place of a publisher that can hold blocks. `owner` is the event's `ownership`, "" for the engine itself."""

    medium: str
    group: int
    owner: str


class Coverage(StrEnum):
    """How far a publisher's answers can be trusted."""

    COMPLETE = "complete"  # every batch since the engine's start, or proven continuous since
    SINCE = "since"  # joined late: what was stored before batch `since` is unknown
    DEGRADED = "degraded"  # a gap that was not repaired
    RECOVERING = "recovering"  # asking a publisher for past batches
    DISCONNECTED = "disconnected"


class CoverageReason(StrEnum):
    """Why coverage is what it is. A closed set; docs/operations.md says what to do about each."""

    # complete
    FROM_START = "from_start"  # followed since batch 0 of this run of the engine
    REPLAYED = "replayed"  # a replay brought everything; no live batch has shown yet that it is of the same run
    PROVEN = "proven"  # and one has; or a doubt was settled by a replay
    # since
    JOINED_LATE = "joined_late"  # and there was nobody to ask for what was before
    REPLAY_STARTS_LATER = "replay_starts_later"  # the engine no longer has what was before
    REPLAY_IS_FOREIGN = "replay_is_foreign"  # the replay endpoint answers with batches of another engine
    HEALED = "healed"  # batches were lost; what they may have removed was proven, or dropped
    CLEARED = "cleared"  # an operator let everything before be forgotten
    # degraded
    GAP = "gap"  # batches are lost
    UNREADABLE_BATCH = "unreadable_batch"  # so is what this one said
    POISONOUS_BATCH = "poisonous_batch"  # so is what this one said: it killed its follower
    CONTINUITY_UNPROVEN = "continuity_unproven"  # no number is missing, but it may be another run of the engine
    CLOCK_WENT_BACK = "clock_went_back"  # the same, and the engine's timestamps say that it is
    GRANULE_REFINED = "granule_refined"  # the past would have to be read again, and cannot be had
    # recovering
    WAITING_FOR_TURN = "waiting_for_turn"  # too many replays of others are running
    REPLAYING = "replaying"
    # disconnected
    NEVER_CONNECTED = "never_connected"
    CONNECTION_LOST = "connection_lost"
    NOT_CREDITED = "not_credited"  # for so long that it no longer counts in answers
    FOLLOWER_FAILED = "follower_failed"  # it is started again after a pause


LOSSES = frozenset({CoverageReason.GAP, CoverageReason.UNREADABLE_BATCH, CoverageReason.POISONOUS_BATCH})
DOUBTS = frozenset({CoverageReason.CONTINUITY_UNPROVEN, CoverageReason.CLOCK_WENT_BACK})


class Trust(NamedTuple):
    """What answers say of a publisher. `at`: when it became so, in seconds since 1970; None = not known."""

    coverage: Coverage
    reason: CoverageReason
    at: float | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far a publisher's stream has been applied.

    `sequence_number` is the last batch applied, None before the first; `fingerprint` is xxh3_64 of that batch's
    payload; `since` is the first number known, None = all from 0 on; `generation` counts the engine's restarts.

    `cohort` counts the gaps that were not repaired: rows of residencies that are verified have it, too.
    `verified_since`: the first number after the newest of them, as long as something is unverified.
    """

    generation: int = 1
    sequence_number: int | None = None
    fingerprint: int | None = None
    coverage: Coverage = Coverage.COMPLETE
    since: int | None = None
    reason: CoverageReason = CoverageReason.FROM_START
    coverage_at: float | None = None
    cohort: int = 0
    verified_since: int | None = None

    @property
    def trust(self) -> Trust:
        return Trust(self.coverage, self.reason, self.coverage_at)


class ProvenBatch(NamedTuple):
    """A batch up to which somebody has followed a publisher without a doubt."""

    generation: int
    sequence_number: int
    fingerprint: int


class ResidencyRow(NamedTuple):
    """This publisher holds this block on this medium in this group, as the store keeps it.

    `parent_key` is the content key where the block starts (None at the root), `local_hash` that of the block (of
    several granules: xxh3_64 of their local hashes as u64le, seed 1337), None if only the engine hash was announced and
    the block's content is no longer at hand; `position` the index of its first token; `cohort` that of the publisher
    when it was verified last (see `Checkpoint`).
    """

    content_key: int
    parent_key: int | None
    local_hash: int | None
    block_tokens: int
    position: int
    reference_count: int
    cohort: int = 0


class StoredCut(NamedTuple):
    """A publisher as its rows have it: they are of batch `sequence_number` (None: before the first)."""

    registration: Registration
    granule: int | None
    coverage: str
    sequence_number: int | None


class StoredBlock(NamedTuple):
    """A row that is verified; see `ResidencyRow`."""

    medium: str
    group: int
    content_key: int
    parent_key: int | None
    local_hash: int | None
    block_tokens: int
    position: int


class CountChange(NamedTuple):
    """Only the reference count of a residency that the store already has changed, or that it is verified now."""

    reference_count: int
    cohort: int = 0


class GhostRow(NamedTuple):
    """An engine hash that is resolvable as a parent: where the chain stands after its block."""

    content_key: int
    end_granules: int
    ordinal: int  # ghosts are forgotten in this order


class GhostRows(Protocol):
    """New states of ghosts, None = forget. Where a hash comes twice, the row is newer."""

    def __len__(self) -> int: ...

    def items(self) -> Iterable[tuple[EngineHash, GhostRow | None]]: ...


@dataclass(frozen=True, slots=True)
class GroupState:
    """What has been learned of one KV-cache group."""

    group: int
    kind: str
    block_tokens: int
    window: int | None
    sizes: tuple[int, ...]  # every block size seen in this group, ascending


@dataclass(slots=True)
class HolderChanges:
    """Changes of one holder since the last flush.

    `cleared`: first delete every row of this holder, then apply the others. `log`: of 64-bit hashes; `columns` is what
    it comes to, there in its place once `fold` was called (away from the event loop: it takes 0.2 us a change), unless
    it has only stores. `rows`: of all other
    hashes, so they have none in common; a row is the new state, or None = delete.
    """

    holder: HolderKey
    cleared: bool = False
    rows: dict[EngineHash, ResidencyRow | CountChange | None] = field(default_factory=dict)
    columns: ColumnChanges | None = None
    log: ChangeLog | None = None

    @property
    def size(self) -> int:
        """Rows to write, once folded; until then, changes. A clear counts as one."""
        changes = self.columns if self.columns is not None else self.log
        return self.cleared + len(self.rows) + (0 if changes is None else len(changes))

    def fold(self) -> None:
        if self.log is not None and not self.log.has_only_stores:
            self.columns, self.log = self.log.folded(), None

    def portions(self) -> Iterable[ColumnChanges]:
        """What `log` comes to, after `fold`: all at once, or, if it has only stores, bit by bit."""
        if self.columns is not None:
            return (self.columns,)
        return () if self.log is None else self.log.portions()


@dataclass(slots=True)
class PublisherChanges:
    """Everything of one publisher that a flush writes, in one transaction, with the checkpoint it belongs to.

    `expired`: after all else, delete the rows of this cohort and of older ones; None = none. `groups` and `side_state`
    are None when unchanged. `side_state` is an
    opaque blob (orphans, unplaced residencies): local hashes only, never token ids.
    """

    publisher: PublisherKey
    publisher_id: int
    checkpoint: Checkpoint
    granule: int | None
    holders: list[HolderChanges]
    ghosts_cleared: bool
    ghosts: GhostRows
    expired: int | None
    groups: tuple[GroupState, ...] | None
    side_state: bytes | None

    @property
    def may_hide_rows(self) -> bool:
        """Whether the store may have rows of what memory holds anew: of blocks that are or just were unverified."""
        return self.checkpoint.verified_since is not None or self.expired is not None

    @property
    def size(self) -> int:
        """Rows to write."""
        return sum(h.size for h in self.holders) + len(self.ghosts)

    def fold(self) -> None:
        """Bring what changed into the form that is written. Cost: see `HolderChanges`."""
        for holder in self.holders:
            holder.fold()
