"""Content key at the end of a granule -> the key where that granule starts, and its local hash.

Needed where an engine announces a hash without saying what lies before it: window blocks before an anchor, and rows of
blocks that were placed by their hash alone. Only publishers with several groups or media keep it. Bounded: the oldest
links go; what they would have placed stays unplaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from struct import Struct

RECENT_MAX = 4_096  # links, where only the newest are of use
FORGOTTEN_AT_ONCE = 64  # one in so many
_LINK = Struct("<QQQB")


class Ancestry:
    __slots__ = ("_links", "forgotten", "is_changed", "links_max", "need_old")

    def __init__(self, links_max: int) -> None:
        self.links_max = links_max
        self.need_old = True  # False: only the newest are of use, so RECENT_MAX are enough
        self.forgotten = 0
        self.is_changed = False  # the store does not have the newest links yet
        self._links: dict[int, tuple[int | None, int]] = {}

    def __len__(self) -> int:
        return len(self._links)

    def add(self, parent_key: int | None, keys: Sequence[int], local_hashes: Sequence[int]) -> None:
        """Link a run of granules: `keys[i]` ends the one with `local_hashes[i]`; the first starts at `parent_key`."""
        links = self._links
        self.is_changed = True
        for key, local in zip(keys, local_hashes, strict=True):
            if key not in links:
                links[key] = (parent_key, local)
            parent_key = key
        bound = self.links_max if self.need_old else min(self.links_max, RECENT_MAX)
        excess = len(links) - bound
        if excess > 0:
            self._forget_oldest(excess + bound // FORGOTTEN_AT_ONCE)

    def _forget_oldest(self, count: int) -> None:
        """Many at once: to find the oldest, a dict walks over all the places from which older ones were taken."""
        for key in list(islice(self._links, count)):
            del self._links[key]
            self.forgotten += 1

    def back(self, key: int, granules: int) -> tuple[int | None, list[int]] | None:
        """The key `granules` before `key` (None: the root) and the local hashes between; None if a link is missing."""
        local_hashes: list[int] = []
        current: int | None = key
        for _ in range(granules):
            link = None if current is None else self._links.get(current)
            if link is None:
                return None
            current, local = link
            local_hashes.append(local)
        local_hashes.reverse()
        return current, local_hashes

    def clear(self) -> None:
        self._links.clear()

    def newest(self, count: int) -> bytes:
        """The newest links as bytes, for `restore`."""
        links = list(self._links.items())[-count:]
        return b"".join(_LINK.pack(key, parent or 0, local, parent is None) for key, (parent, local) in links)

    def restore(self, data: bytes) -> None:
        for key, parent, local, is_root in _LINK.iter_unpack(data):
            self._links[key] = (None if is_root else parent, local)
