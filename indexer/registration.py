"""A registered publisher: what an operator or a router told us about one engine's event stream.

Shared by `api` (parses it), `store` (keeps it) and `stream` (follows it), which do not know each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

POOL_OPTION = "pool"
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

    A pool is stored as the option `pool`, with the workers that it serves as its value (null: all of the model).
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

    @property
    def is_pool(self) -> bool:
        """Whether it owns blocks for others, and is no routing target."""
        return POOL_OPTION in self.options

    @property
    def serves(self) -> frozenset[str] | None:
        """The workers whose reach a pool extends; None = every one of its model."""
        workers = self.options.get(POOL_OPTION)
        return frozenset(map(str, workers)) if isinstance(workers, list) else None


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
