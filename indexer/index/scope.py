"""One (tenant, model): its publishers, and a key space per granule. Nothing matches across scopes."""

from __future__ import annotations

from indexer.index.key_space import KeySpace
from indexer.index.publisher import PublisherIndex
from indexer.index.state import EngineHash


class Scope:
    def __init__(self) -> None:
        self.publishers: dict[PublisherIndex, None] = {}
        self.spaces: dict[int, KeySpace] = {}
        # (granule, engine hash) -> publishers with orphans under that hash, which another publisher may explain
        self.awaited: dict[tuple[int | None, EngineHash], dict[PublisherIndex, None]] = {}

    def key_space(self, granule: int) -> KeySpace:
        space = self.spaces.get(granule)
        if space is None:
            space = self.spaces[granule] = KeySpace(granule)
        return space

    def leave(self, publisher: PublisherIndex) -> None:
        """The publisher is removed: its keys, slots and places in line become free."""
        publisher.leave()
        del self.publishers[publisher]
        for awaited, waiting in list(self.awaited.items()):
            waiting.pop(publisher, None)
            if not waiting:
                del self.awaited[awaited]
        used = {p.granule for p in self.publishers}
        for granule in [g for g in self.spaces if g not in used]:
            del self.spaces[granule]
