"""How long residencies count whose end nobody announces.

A source with `no_removals` (a storage tier, a shared store) only says what it stored. Its blocks count for so long
after their last store, or until so many newer ones came. There is no clock here: a block's time begins at the first
call of `expired` after its store, so it counts up to one call longer. After a recovery all that is held begins anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from indexer.index.options import NoRemovals
from indexer.index.state import EngineHash, HolderKey

BLOCKS_MAX = 1_000_000  # if only an age is given

Block = tuple[HolderKey, EngineHash]


class Lifetimes:
    """Of one publisher. Cost: 200 bytes and some 5 us a block."""

    def __init__(self, rule: NoRemovals) -> None:
        self._blocks_max = BLOCKS_MAX if rule.blocks_max is None else rule.blocks_max
        self._expire_after_s = rule.expire_after_s
        self._stored: OrderedDict[Block, float | None] = OrderedDict()  # oldest first; the newest have no time yet

    def __len__(self) -> int:
        return len(self._stored)

    def note(self, key: HolderKey, hashes: Iterable[EngineHash]) -> None:
        """These were stored."""
        for engine_hash in hashes:
            self._stored[key, engine_hash] = None
            self._stored.move_to_end((key, engine_hash))

    def forget(self, keys: set[HolderKey]) -> None:
        """These holders lost everything."""
        for block in [block for block in self._stored if block[0] in keys]:
            del self._stored[block]

    def excess(self) -> Iterator[Block]:
        """The oldest blocks beyond the bound, which count no more."""
        while len(self._stored) > self._blocks_max:
            yield self._stored.popitem(last=False)[0]

    def expired(self, now: float) -> Iterator[Block]:
        """Those whose time is over, which count no more. `now`: of any clock that only goes on, in seconds."""
        if self._expire_after_s is None:
            return
        for block in reversed(self._stored):
            if self._stored[block] is not None:
                break
            self._stored[block] = now
        while self._stored:
            block, since = next(iter(self._stored.items()))
            if since is None or now - since < self._expire_after_s:
                return
            del self._stored[block]
            yield block
