"""What a publisher holds without our knowing its content yet: orphans, unplaced residencies, sparse window runs.

An orphan has a parent hash that nobody can resolve; an unplaced residency is a hash without a position; a sparse run
is a window group's list of hashes whose positions an anchor will tell. All wait under engine hashes until one of those
becomes known. They never answer a query, are removed by their own removals and clears, and are bounded: the oldest go.

Local hashes are kept, never token ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from indexer.index.state import EngineHash, HolderKey

LOCAL_HASHES_MAX = 1 << 21  # of all orphans together: one may span a whole prompt
RUN_HASHES_MAX = 1 << 18  # of all sparse runs together: an engine may put any number into one event


class WaitingBlock(msgspec.Struct, gc=False):
    """One block. `local_hashes`: of every granule after `parent` up to the block's end; empty if there is no parent.

    `granules`, `block_tokens`: the block's own size (0 if unknown). `counts`: references per holder.
    """

    parent: int | bytes | None
    local_hashes: list[int]
    granules: int
    block_tokens: int
    counts: dict[HolderKey, int] = {}


@dataclass(slots=True, eq=False)
class SparseRun:
    """A window group's event: these hashes in this order, somewhere in a longer span, in runs that end on anchors.

    Where runs end one block past an anchor (EAGLE): `local_hashes` of the whole span, which starts after `parent`, and
    the `unclear` hashes, by index: those whose extra keys begin in their block. Elsewhere these are empty.
    """

    hashes: list[EngineHash]
    group: int
    block_tokens: int
    parent: EngineHash | None = None
    local_hashes: list[int] = field(default_factory=list)
    unclear: frozenset[int] = frozenset()


@dataclass(slots=True)
class WaitingRoom:
    """Everything that waits, of one publisher. `is_changed`: the store does not have it yet."""

    orphans_max: int
    unplaced_max: int
    runs_max: int
    blocks: dict[EngineHash, WaitingBlock] = field(default_factory=dict)
    children: dict[EngineHash, dict[EngineHash, None]] = field(default_factory=dict)
    runs: dict[EngineHash, list[SparseRun]] = field(default_factory=dict)
    # oldest first; OrderedDict, because the first entry of a dict is slow to find once many before it are gone
    run_order: OrderedDict[SparseRun, None] = field(default_factory=OrderedDict)
    orphan_order: OrderedDict[EngineHash, None] = field(default_factory=OrderedDict)
    unplaced_order: OrderedDict[EngineHash, None] = field(default_factory=OrderedDict)
    dropped_orphans: int = 0
    dropped_unplaced: int = 0
    dropped_sparse_runs: int = 0
    local_hashes: int = 0
    run_hashes: int = 0
    is_changed: bool = False

    @property
    def orphans(self) -> int:
        return len(self.orphan_order)

    @property
    def unplaced(self) -> int:
        return len(self.unplaced_order)

    def __bool__(self) -> bool:
        return bool(self.blocks or self.runs)

    def park(self, engine_hash: EngineHash, block: WaitingBlock, *, counts: bool = True) -> None:
        """Wait; a hash that waits already only gains references (unless not `counts`), or its parent. At the bound the
        oldest goes."""
        self.is_changed = True
        before = self.blocks.get(engine_hash)
        if before is not None:
            for holder, count in block.counts.items():
                if counts or holder not in before.counts:
                    before.counts[holder] = before.counts.get(holder, 0) + count
            if before.parent is not None or block.parent is None:
                return
            block.counts = before.counts
            self._pop(engine_hash)
        self.blocks[engine_hash] = block
        if block.parent is None:
            block.local_hashes = []  # of no use: nobody can tell where they begin
            self.unplaced_order[engine_hash] = None
            if self.unplaced > self.unplaced_max:
                self._pop(next(iter(self.unplaced_order)))
                self.dropped_unplaced += 1
            return
        self.orphan_order[engine_hash] = None
        self.children.setdefault(block.parent, {})[engine_hash] = None
        self.local_hashes += len(block.local_hashes)
        while self.orphans > self.orphans_max or self.local_hashes > LOCAL_HASHES_MAX:
            self._pop(next(iter(self.orphan_order)))
            self.dropped_orphans += 1

    def take(self, engine_hash: EngineHash) -> WaitingBlock | None:
        """The block that waits under this hash, which waits no more."""
        if engine_hash not in self.blocks:
            return None
        self.is_changed = True
        return self._pop(engine_hash)

    def has(self, engine_hash: EngineHash, holder: HolderKey) -> bool:
        """Whether a block with this hash waits for this holder."""
        block = self.blocks.get(engine_hash)
        return block is not None and holder in block.counts

    def release(self, engine_hash: EngineHash, holder: HolderKey) -> bool:
        """One reference of a waiting block ends. False if this holder has none."""
        block = self.blocks.get(engine_hash)
        if block is None or holder not in block.counts:
            return False
        self.is_changed = True
        block.counts[holder] -= 1
        if not block.counts[holder]:
            del block.counts[holder]
        self._forget_if_useless(engine_hash)
        return True

    def clear(self, holders: set[HolderKey]) -> None:
        """These holders lost everything; orphans that others wait under stay as links."""
        for block in self.blocks.values():
            for holder in holders & block.counts.keys():
                del block.counts[holder]
                self.is_changed = True
        for engine_hash in reversed(list(self.blocks)):
            self._forget_if_useless(engine_hash)
        for run in list(self.run_order):
            if not any(engine_hash in self.blocks for engine_hash in run.hashes):
                self.end_run(run)

    def forget_all(self) -> None:
        if self:
            self.is_changed = True
        self.blocks.clear()
        self.children.clear()
        self.runs.clear()
        self.run_order.clear()
        self.orphan_order.clear()
        self.unplaced_order.clear()
        self.local_hashes = self.run_hashes = 0

    def wait_for_anchor(self, run: SparseRun) -> None:
        """At the bound the oldest run goes; its hashes stay unplaced."""
        self.is_changed = True
        self.run_order[run] = None
        for engine_hash in run.hashes:
            self.runs.setdefault(engine_hash, []).append(run)
        self.run_hashes += len(run.hashes) + len(run.local_hashes)
        while len(self.run_order) > self.runs_max or self.run_hashes > RUN_HASHES_MAX:
            self.end_run(next(iter(self.run_order)))
            self.dropped_sparse_runs += 1

    def end_run(self, run: SparseRun) -> None:
        self.is_changed = True
        del self.run_order[run]
        self.run_hashes -= len(run.hashes) + len(run.local_hashes)
        for engine_hash in run.hashes:
            runs = self.runs[engine_hash]
            runs.remove(run)
            if not runs:
                del self.runs[engine_hash]

    def _pop(self, engine_hash: EngineHash) -> WaitingBlock:
        block = self.blocks.pop(engine_hash)
        if block.parent is None:
            del self.unplaced_order[engine_hash]
        else:
            del self.orphan_order[engine_hash]
            self.local_hashes -= len(block.local_hashes)
            siblings = self.children[block.parent]
            del siblings[engine_hash]
            if not siblings:
                del self.children[block.parent]
        return block

    def _forget_if_useless(self, engine_hash: EngineHash | None) -> None:
        """Without references a waiting block is only worth its place if others wait under it; so is its parent."""
        while engine_hash is not None and engine_hash in self.blocks and engine_hash not in self.children:
            if self.blocks[engine_hash].counts:
                return
            engine_hash = self._pop(engine_hash).parent

    def residencies(self) -> Iterator[tuple[HolderKey, EngineHash, int]]:
        for engine_hash, block in self.blocks.items():
            for holder, count in block.counts.items():
                yield holder, engine_hash, count
