"""The payloads since an engine's start, while they fit a bound: what a refined granule is rebuilt from.

Block sizes show up in the first batches, so a tail that outgrew its bound is given up for good.
"""

from __future__ import annotations


class Tail:
    __slots__ = ("bytes_max", "is_complete", "payloads", "size_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.payloads: list[bytes] = []
        self.size_bytes = 0
        self.is_complete = True

    def append(self, payload: bytes) -> None:
        if not self.is_complete:
            return
        self.payloads.append(payload)
        self.size_bytes += len(payload)
        if self.size_bytes > self.bytes_max:
            self.give_up()

    def give_up(self) -> None:
        self.payloads, self.size_bytes, self.is_complete = [], 0, False

    def start_again(self) -> None:
        """The engine began again: what it holds from now on is in the payloads from now on."""
        self.payloads, self.size_bytes, self.is_complete = [], 0, True
