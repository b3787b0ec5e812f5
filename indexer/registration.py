"""A registered publisher: what an operator or a router told us about one engine's event stream.

Shared by `api` (parses it), `store` (keeps it) and `stream` (follows it), which do not know each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

AUTO = "auto"
"""The engine of a publisher whose events are to tell what it is."""


class PublisherKey(NamedTuple):
    """The owner of one numbered event stream: an engine as routers know it, and its data-parallel rank."""

    worker_id: str
    dp_rank: int


@dataclass(frozen=True, slots=True)
class Registration:
    """One publisher as registered. Two registrations are the same if every field but `publisher_id` is equal.

    `publisher_id` is given by the store when the registration is saved; a publisher that is deleted and registered
    again gets a new one, which fences off late writes for the old one. `block_size` in tokens, None = learn it.
    `engine`: what publishes; AUTO = its events will tell.
    """

    worker_id: str
    dp_rank: int
    model: str
    endpoint: str
    replay_endpoint: str | None = None
    tenant: str = "default"
    engine: str = AUTO
    block_size: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    publisher_id: int = 0

    @property
    def key(self) -> PublisherKey:
        return PublisherKey(self.worker_id, self.dp_rank)


class CommandKind(Enum):
    """What an operator may ask for, of a publisher."""

    CLEAR = "clear"
    RESYNC = "resync"
    RESYNC_FULL = "resync_full"


class Command(NamedTuple):
    """What another replica was asked for `age_s` seconds ago, and all are to do."""

    command_id: int
    publisher_id: int
    kind: CommandKind
    age_s: float
