"""How long a follower may apply batches before everybody else gets a turn.

All followers that have something to apply share one slice: with a slice each, a hundred busy publishers would keep a
query waiting for a hundred slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SHARE_BYTES_MIN = 32 * 1024


class Pace:
    """Shared by all followers of a registry."""

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._working = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a follower has something to apply."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    @property
    def share_s(self) -> float:
        return self._slice_s / max(1, self._working)

    def share_of(self, bytes_max: int) -> int:
        """Of as many bytes as all followers may take in one slice; a small message is always one's share."""
        return max(SHARE_BYTES_MIN, bytes_max // max(1, self._working))
