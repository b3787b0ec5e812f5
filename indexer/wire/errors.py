"""What `wire` raises, and nothing else: bytes that cannot be read; inside it, that an event is not ours."""

from __future__ import annotations


class WireError(Exception):
    """A message, batch or event that cannot be read. `reason` is a short stable word, used as a counter's label."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class ForOthers(Exception):
    """An event of another model, tenant or rank than the publisher's. Never leaves `wire`."""
