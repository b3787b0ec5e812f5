"""What only one worker holds: what a fleet would have to compute again if that worker went.

Keys are compared within one key space: workers of another granule never hold the same key. The sets of holders are
few and know how many keys have them, so that nothing is done per residency.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from indexer.index.columns import U64
from indexer.index.heat import F64, WeighedKeys
from indexer.index.holder import Holder
from indexer.index.key_space import KeySpace
from indexer.index.scope import Scope

if TYPE_CHECKING:
    from indexer.index.publisher import PublisherIndex

SLOTS_AT_ONCE = 1_000  # each of these is a millisecond or two
SETS_AT_ONCE = 2_000
KEYS_AT_ONCE = 8_192


class DrainImpact:
    """Of one worker in one scope. Numbers of blocks and tokens; those of queries are estimates (heat.py)."""

    def __init__(self, scope: Scope, worker_id: str) -> None:
        self._scope = scope
        self._worker_id = worker_id
        self.held_blocks = self.held_tokens = 0
        self.only_here_blocks = self.only_here_tokens = 0
        self.queried_tokens = self.queried_only_here_tokens = 0.0

    def steps(self, heat: dict[int, WeighedKeys]) -> Generator[None, None, None]:
        """Work it out; between two steps the index may be used, and what changes meanwhile may count or not. `heat`: by
        granule."""
        for space in list(self._scope.spaces.values()):
            sides = _Sides(space)
            yield from sides.steps(self._worker_id)
            yield from self._count(space, sides)
            if space.granule in heat:
                yield from self._count_queried(space, sides, heat[space.granule])

    def _count(self, space: KeySpace, sides: _Sides) -> Iterator[None]:
        masks = space.masks  # as they are now: sets are only added, or numbered in a new list
        uses = space.uses.tolist()
        for first in range(0, min(len(masks), len(uses)), SETS_AT_ONCE):
            part = slice(first, first + SETS_AT_ONCE)
            for mask, count in zip(masks[part], uses[part], strict=False):
                block = sides.block_tokens(mask) if count else 0
                if block:
                    self.held_blocks += count
                    self.held_tokens += count * block
                    if sides.is_only_here(mask):
                        self.only_here_blocks += count
                        self.only_here_tokens += count * block
            yield

    def _count_queried(self, space: KeySpace, sides: _Sides, heat: WeighedKeys) -> Iterator[None]:
        for first in range(0, len(heat.keys), KEYS_AT_ONCE):
            part = slice(first, first + KEYS_AT_ONCE)
            self._count_queried_part(space, sides, heat.keys[part], heat.queries[part])
            yield

    def _count_queried_part(self, space: KeySpace, sides: _Sides, keys: U64, queries: F64) -> None:
        ids, inverse = np.unique(space.look_up(keys), return_inverse=True)
        by_set = np.bincount(inverse, queries, len(ids)).tolist()
        for set_id, count in zip(ids.tolist(), by_set, strict=True):
            mask = space.masks[set_id]
            here, anywhere = sides.block_tokens(mask), sides.any_block_tokens(mask)
            self.queried_tokens += count * anywhere
            if here and sides.is_only_here(mask):
                self.queried_only_here_tokens += count * here


class _Sides:
    """The slots of a key space that count: the worker's, and those of whoever else could load or be sent a prompt."""

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._own = self._others = 0
        self._own_by_size: dict[int, int] = {}  # block tokens -> slots
        self._all_by_size: dict[int, int] = {}

    def steps(self, worker_id: str) -> Iterator[None]:
        for slot, holder in enumerate(list(self._space.slots), 1):
            if isinstance(holder, Holder) and holder.is_verified and holder.is_credited:
                self._add(holder, worker_id)
            if slot % SLOTS_AT_ONCE == 0:
                yield

    def _add(self, holder: Holder, worker_id: str) -> None:
        publisher = cast("PublisherIndex", holder.owner)
        bit, size = 1 << holder.slot, _block_tokens(publisher, holder, self._space.granule)
        if not publisher.is_credited:
            return
        if publisher.registration.worker_id == worker_id:
            self._own |= bit
            self._own_by_size[size] = self._own_by_size.get(size, 0) | bit
        elif not publisher.is_pool or publisher.registration.serves != frozenset({worker_id}):
            self._others |= bit
        self._all_by_size[size] = self._all_by_size.get(size, 0) | bit

    def block_tokens(self, mask: int) -> int:
        """Of the worker's blocks under keys with this set; 0 = it has none."""
        return max((size for size, slots in self._own_by_size.items() if mask & slots), default=0)

    def any_block_tokens(self, mask: int) -> int:
        """Of anybody's."""
        return max((size for size, slots in self._all_by_size.items() if mask & slots), default=0)

    def is_only_here(self, mask: int) -> bool:
        return not mask & self._others


def _block_tokens(publisher: PublisherIndex, holder: Holder, granule: int) -> int:
    group = publisher.groups.by_index.get(holder.key.group)
    return max(granule, 0 if group is None else group.block_tokens)
