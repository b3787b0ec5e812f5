"""What the followers need from the outside, as small protocols: sockets, a publisher's index, saved registrations.

`zmq_source.py` is the real transport; simulations have their own, with lost, repeated and reordered messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from indexer.index.publisher import ApplyOutcome, NumberedPayload
from indexer.index.state import Checkpoint, Coverage, CoverageReason, Trust
from indexer.registration import CommandKind, PublisherKey, Registration
from indexer.wire.columns import BatchColumns
from indexer.wire.decode import EventBatch


class LiveSource(Protocol):
    """One subscription. Nothing here waits; the source calls `wake` (see `Transport`) when there may be news."""

    def drain(self, messages_max: int) -> list[list[bytes]]:
        """Messages received, as frames, in order. Fewer than `messages_max` = that was all: `wake` follows the next.

        Of a message with more frames than any form has, the last may be left out.
        """

    def connection_changes(self) -> list[bool]:
        """Connections made (True) and lost (False) since the last call, in order.

        Taken right after `drain`, it tells of every connection that a drained message came through.
        """

    def close(self) -> None: ...


class ReplaySource(Protocol):
    """One connection to a replay endpoint, for one request."""

    def request(self, start: int) -> None: ...

    def drain(self, messages_max: int) -> list[list[bytes]]:
        """As `LiveSource.drain`."""

    def close(self) -> None: ...


class Transport(Protocol):
    """Opens sources. `wake` is called on the event loop, and may be called for nothing."""

    def open_live(self, endpoint: str, wake: Callable[[], None]) -> LiveSource: ...

    def open_replay(self, endpoint: str, wake: Callable[[], None]) -> ReplaySource: ...

    def close(self) -> None: ...


class FollowedIndex(Protocol):
    """The part of `index.publisher.PublisherIndex` that a follower drives.

    What it is told to `show` stands in answers in place of the checkpoint's coverage, which stays as it is. `at`: wall
    clock, in seconds.
    """

    is_credited: bool  # whether it counts in answers, see `set_credited`

    @property
    def registration(self) -> Registration: ...
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def takes_columns(self) -> bool: ...

    def apply(
        self, batch: EventBatch, sequence_number: int, fingerprint: int, at: float | None = None
    ) -> ApplyOutcome: ...
    def apply_columns(
        self, columns: BatchColumns, batches: Sequence[NumberedPayload], at: float | None = None
    ) -> int: ...
    def skip(self, sequence_number: int, fingerprint: int, reason: str, at: float | None = None) -> None: ...
    def restart(self, at: float | None = None) -> None: ...
    def drop_residencies(self, at: float | None = None) -> None: ...
    def clear(self, at: float | None = None) -> None: ...
    def count_gap(self, gap_first: int, gap_last: int, at: float | None = None) -> None: ...
    def doubt(self, reason: CoverageReason, at: float | None = None) -> None: ...
    def prove(self, at: float | None = None) -> None: ...
    def set_coverage(
        self, coverage: Coverage, reason: CoverageReason, at: float | None = None, since: int | None = None
    ) -> None: ...
    def show(self, trust: Trust | None) -> None: ...
    def set_credited(self, is_credited: bool) -> None: ...


FollowedIndexT = TypeVar("FollowedIndexT", bound=FollowedIndex, covariant=True)
LoadedIndexT = TypeVar("LoadedIndexT", bound=FollowedIndex, contravariant=True)


class PublisherIndexes(Protocol[FollowedIndexT]):
    """The part of `index.content_index.ContentIndex` that the registry drives."""

    def add_publisher(self, registration: Registration) -> FollowedIndexT: ...
    def remove_publisher(self, key: PublisherKey) -> None: ...


class RegistrationStore(Protocol):
    """Where registrations survive a restart of the service."""

    async def save(self, registration: Registration) -> Registration:
        """The same with its `publisher_id`. Raises StoreUnavailable."""

    async def delete(self, publisher_id: int) -> None:
        """The registration and everything stored of it. Raises StoreUnavailable."""


class StoredPublishers(Protocol[LoadedIndexT]):
    """What replicas that share a store know of each other's publishers."""

    @property
    def looks(self) -> int:
        """How many looks at who is registered have begun until now."""

    def is_written_here(self, publisher_id: int) -> bool:
        """Whether this process writes its rows, so that nobody changes them while they are read."""

    async def load(self, publisher: LoadedIndexT, at_least: int | None) -> None:
        """Load its rows into a fresh publisher, as soon as there are any that have the batch `at_least`; for a bounded
        time that is waited for. Tries again while the store is away."""

    async def tell(self, kind: CommandKind, publisher_ids: Collection[int]) -> None:
        """Let all other replicas do this too, and store what it has changed here. Raises StoreUnavailable."""

    async def registrations(self, publisher_ids: Collection[int]) -> list[Registration]:
        """Of those that are registered. Raises StoreUnavailable."""
