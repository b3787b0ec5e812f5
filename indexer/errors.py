"""Errors that cross the border between parts, split by whose fault they are. Each carries its facts as attributes.

What only one part raises and handles (a payload that cannot be decoded, say) is defined beside its code.
"""

from __future__ import annotations


class IndexerError(Exception):
    """The root of all errors this project raises on purpose; its text is one sentence fit for an operator."""


class SettingsError(IndexerError):
    """A setting is unknown or out of bounds: the operator's fault. `setting` is its name in the config file."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


class StoreUnavailable(IndexerError):
    """The database cannot be reached or used right now. Never contains a password."""


class ListenError(IndexerError):
    """The HTTP address cannot be bound: in use, not ours, or not allowed."""


class PublisherConflict(IndexerError):
    """A publisher is registered already, with other values: the caller's fault. `field` is the first that differs."""

    def __init__(self, worker_id: str, dp_rank: int, field: str) -> None:
        super().__init__(f"publisher {worker_id!r} rank {dp_rank} is already registered with another {field}")
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.field = field


class PublisherLimit(IndexerError):
    """As many publishers are registered as the settings allow."""

    def __init__(self, publishers_max: int) -> None:
        super().__init__(f"{publishers_max} publishers are registered, the most that publishers_max allows")
        self.publishers_max = publishers_max


class NoReplayEndpoint(IndexerError):
    """A publisher that is to be asked for its past was registered without a replay endpoint: the caller's fault."""

    def __init__(self, worker_id: str, dp_rank: int) -> None:
        super().__init__(f"publisher {worker_id!r} rank {dp_rank} is registered without a replay_endpoint")
        self.worker_id = worker_id
        self.dp_rank = dp_rank


class EndpointError(IndexerError):
    """A ZMQ endpoint that cannot be connected to: the caller's fault. The text says what is wrong with it."""


class ServiceError(IndexerError):
    """A service that a command asked answered with an error, or could not be reached."""


class PastOutOfReach(IndexerError):
    """What was at that time is not known: the caller's fault. `begins_at`: from when on it is, in seconds since 1970;
    None = it is not kept at all."""

    def __init__(self, begins_at: float | None) -> None:
        since = "journal_rows_s is 0" if begins_at is None else f"it is since {begins_at:.3f}"
        super().__init__(f"what was held then is not known: {since}")
        self.begins_at = begins_at
