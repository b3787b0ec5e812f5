"""What `wire` raises, and nothing else: bytes that cannot be read."""

from __future__ import annotations


class WireError(Exception):
    """A message, batch or event that cannot be read. `reason` is a short stable word, used as a counter's label."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason
