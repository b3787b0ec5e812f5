"""Engine hash -> engine hash of its parent, of the blocks of one place: what a proof walks along.

Purpose: a store that goes on from a block proves that block and all its ancestors. Which those are is a fact of content
that never changes, so links may come late, and stay when their block is gone. They are kept only while there is
something to prove: of blocks stored meanwhile as they come, of those from before as the store has them (`learn`).

Invariants: a link is right or missing; a missing one ends a proof early, so that less is credited.

If broken: blocks would be proven that the engine may have evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from indexer.index.columns import U64
from indexer.index.kernels import links_learn
from indexer.index.state import EngineHash
from indexer.index.table import Table, Walk, fits

if TYPE_CHECKING:
    from indexer.index.holder import Holder

SPARE = 16_384
LOOKED_AT_ONCE = 8_192  # places of a table: a millisecond


class ParentLinks:
    """`ends`: blocks that are proven by those that follow them, and still to be moved with their ancestors.
    `to_look_at`: verified blocks, some of which may have such parents. Both are right until the next gap.
    Cost: 23 to 34 bytes a link."""

    __slots__ = ("_to_sweep", "ends", "is_complete", "table", "to_look_at", "wide")

    def __init__(self) -> None:
        self.table = Table()
        self.wide: dict[EngineHash, EngineHash] = {}  # where one of the two fits no table
        self.is_complete = False  # what the store has was learned
        self.ends: list[EngineHash] = []
        self.to_look_at: Walk | None = None
        self._to_sweep: Walk | None = None

    def __len__(self) -> int:
        return len(self.table) + len(self.wide)

    def get(self, engine_hash: EngineHash) -> EngineHash | None:
        if self.wide and engine_hash in self.wide:
            return self.wide[engine_hash]
        return None if isinstance(engine_hash, bytes) else self.table.get(engine_hash) or None

    def add_run(self, hashes: Sequence[EngineHash], parent: EngineHash | None) -> None:
        """These blocks follow each other, the first one follows `parent` (None: the root)."""
        for engine_hash in hashes:
            if parent is not None and parent != engine_hash:
                self._add(engine_hash, parent)
            parent = engine_hash

    def learn(self, hashes: U64, parents: U64) -> None:
        """Links of blocks from before. Cost: 0.4 us each."""
        self.table.make_room(len(hashes))
        links_learn(*self.table.arrays, hashes, parents)
        self.table.let_go()

    def complete(self, verified: Holder) -> None:
        """What the store has was learned; proofs of these blocks may have ended early for want of it."""
        self.is_complete = True
        self.to_look_at = verified.walk()

    def find_ends(self, lost: Sequence[Holder]) -> None:
        """Of some more verified blocks the parents that are not. Cost: a millisecond."""
        assert self.to_look_at
        hashes, _ = self.to_look_at.entries(LOOKED_AT_ONCE)
        parents = np.unique(self.table.values(hashes))
        is_lost = np.zeros(len(parents), np.bool_)
        for holder in lost:
            is_lost |= holder.has_each(parents)
        self.ends = parents[is_lost].tolist()

    def forget_ends(self) -> None:
        """A gap: what was verified no longer is."""
        self.ends, self.to_look_at = [], None

    def keep(self, holders: Sequence[Holder]) -> None:
        """Begin to forget the links of blocks that are gone, if those are more than the others: see `sweep`. Cost:
        nothing, or 0.3 us a link that fits no table."""
        if self._to_sweep or len(self) <= 2 * sum(map(len, holders)) + SPARE:
            return
        self._to_sweep = self.table.walk()
        self.wide = {h: p for h, p in self.wide.items() if any(h in holder for holder in holders)}

    def sweep(self, holders: Sequence[Holder]) -> bool:
        """Forget some more of them. False: there was nothing left. Cost: a millisecond, and more with many holders."""
        if not self._to_sweep:
            return False
        hashes, _ = self._to_sweep.entries(LOOKED_AT_ONCE)
        stays = np.zeros(len(hashes), np.bool_)
        for holder in holders:
            stays |= holder.has_each(hashes)
        self.table.remove_all(hashes[~stays])
        return True

    def _add(self, engine_hash: EngineHash, parent: EngineHash) -> None:
        if isinstance(engine_hash, bytes) or isinstance(parent, bytes) or not fits(parent):
            self.wide[engine_hash] = parent
        else:
            self.table.put(engine_hash, parent)
