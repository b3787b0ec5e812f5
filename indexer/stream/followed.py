"""A registered publisher and how following its stream goes: what the API shows of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from indexer.index.state import Coverage, CoverageReason, Trust
from indexer.registration import Registration
from indexer.stream.ports import FollowedIndex

ERROR_CHARACTERS_MAX = 300

PublisherT = TypeVar("PublisherT", bound=FollowedIndex)


class FollowState(StrEnum):
    CONNECTING = "connecting"  # never connected since the follower started
    CONNECTED = "connected"
    REPLAYING = "replaying"
    DISCONNECTED = "disconnected"  # was connected; reconnects by itself
    FAILED = "failed"  # the follower died; it is started again after a pause


class ReplayState(StrEnum):
    IDLE = "idle"
    WAITING_FOR_TURN = "waiting_for_turn"
    RUNNING = "running"
    COOLING_DOWN = "cooling_down"  # it failed, and is left alone for a while
    DISTRUSTED = "distrusted"  # it answered with batches of another engine, and is left alone for longer


@dataclass(frozen=True, slots=True)
class ReplayStatus:
    """What is known of a publisher's replay endpoint. Times in seconds since 1970."""

    state: ReplayState = ReplayState.IDLE
    asked_from: int | None = None
    brought: int = 0
    last_end: str | None = None
    last_end_at: float | None = None
    next_try_at: float | None = None

    def now(self, now: float) -> ReplayStatus:
        """A pause ends by itself."""
        is_over = self.next_try_at is not None and now >= self.next_try_at
        return replace(self, state=ReplayState.IDLE, next_try_at=None) if is_over else self


class BadMessage(NamedTuple):
    """The last message that was not three proper frames. Sizes only: its content may be somebody's prompt."""

    reason: str
    frame_bytes: tuple[int, ...]


@dataclass(slots=True, eq=False)
class FollowedPublisher(Generic[PublisherT]):
    """Written by its follower and the registry, read by everyone.

    `last_batch_at`: wall clock in seconds. `counters`: names from a small closed set, see `docs/operations.md`.
    `is_in_first_replay`: its past is still to be asked for, or being asked for.
    `is_fenced`: unregistered; nothing of its stream is applied any more. `replay`: how its replay endpoint does.
    """

    registration: Registration
    index: PublisherT
    state: FollowState = FollowState.CONNECTING
    last_error: str | None = None
    last_batch_at: float | None = None
    counters: Counter[str] = field(default_factory=Counter)
    last_bad_message: BadMessage | None = None
    replay: ReplayStatus = ReplayStatus()
    disconnected_since: float | None = None  # by the event loop's clock; None = connected
    is_in_first_replay: bool = False
    is_fenced: bool = False
    applying: tuple[int, int] | None = None  # number and fingerprint of the batch that is being applied

    def describe_replay(self, now: float) -> dict[str, object] | None:
        """How its replay endpoint does; None without one."""
        return None if self.registration.replay_endpoint is None else asdict(self.replay.now(now))

    def note_failure(self, error: Exception, at: float) -> None:
        self.state = FollowState.FAILED
        self.index.show(Trust(Coverage.DISCONNECTED, CoverageReason.FOLLOWER_FAILED, at))
        self.is_in_first_replay = False
        self.counters["failures"] += 1
        self.last_error = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
