"""What becomes known of waiting blocks: when a hash is explained, everything that waited for it finds its place.

A hash is explained by a store, by another publisher, by its child (the chain before a known block is read from the
ancestry), or by an anchor: kept window blocks form runs that end on the alignment, where the full group announces the
same hash; of the blocks before an anchor fewer than the window needs are kept with it, so those can be placed too.
Where the window group drops blocks for EAGLE, it keeps the block after an anchor, too, of which the event has tokens.

Invariants: settling is a loop, however long the chain; what is explained is resolvable before anything goes on from it.

If broken: window blocks would be missed, or orphans placed under another prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from indexer.identity.chain import block_local_hash, chain_keys
from indexer.index.ancestry import Ancestry
from indexer.index.groups import MAMBA, Groups
from indexer.index.holder import Holder
from indexer.index.offloading import Connector, part_hash
from indexer.index.residents import Point, Residents
from indexer.index.state import EngineHash, ResidencyRow
from indexer.index.waiting import SparseRun, WaitingBlock, WaitingRoom

WIDE_HASH = 1 << 32  # below, an engine hash may be a mere counter: it means nothing to another publisher
DIGEST_BYTES = frozenset({16, 32})

Learned = tuple[EngineHash, Point]


class Neighbours(Protocol):
    """The other publishers of the scope, as far as they know or want the same hashes."""

    @property
    def is_awaited(self) -> bool: ...

    def resolve_elsewhere(self, engine_hash: EngineHash) -> Point | None: ...

    def await_elsewhere(self, engine_hash: EngineHash) -> None: ...

    def explain_elsewhere(self, engine_hash: EngineHash, point: Point) -> None: ...


class Settling:
    """Learns what hashes mean and places what waited for that, of one publisher in one granule."""

    def __init__(
        self,
        neighbours: Neighbours,
        residents: Residents,
        waiting: WaitingRoom,
        ancestry: Ancestry,
        groups: Groups,
        counters: Counter[str],
        connector: Connector,
    ) -> None:
        self.granule = 0
        self._connector = connector
        self._neighbours = neighbours
        self._residents = residents
        self._waiting = waiting
        self._ancestry = ancestry
        self._groups = groups
        self._counters = counters

    def learn(self, engine_hash: EngineHash, point: Point) -> None:
        """A hash turned out to mean this, though no event stored it here."""
        if self._residents.resolve(engine_hash) is None:
            self._residents.remember(engine_hash, point)
        self.settle([(engine_hash, point)])

    def learn_parent_of(self, child: EngineHash, parent: EngineHash, granules: int) -> None:
        """The hash that lies so many granules before the end of a known block, if the chain there is at hand."""
        point = self._residents.resolve(child)
        before = None if point is None else self._before(point, granules)
        if before is not None:
            self.learn(parent, before)

    def learn_concatenated(self, engine_hash: EngineHash, keys: list[int], start: int) -> None:
        """vLLM 0.21 to 0.23: the hash of a block of k hash units is the k digests one after the other (bytes form).

        `keys`: at the end of each granule of the block, which starts `start` granules into the prompt.
        """
        if not isinstance(engine_hash, bytes):
            return
        count = len(keys)
        for k in range(count, 1, -1):
            size, rest = divmod(len(engine_hash), k)
            if not rest and size in DIGEST_BYTES and count % k == 0 and self._has_size(count // k * self.granule):
                per = count // k
                for i in range(k):
                    digest = engine_hash[i * size : (i + 1) * size]
                    self.learn(digest, Point(keys[(i + 1) * per - 1], start + (i + 1) * per))
                return

    def link(self, parent_key: int | None, keys: Sequence[int], local_hashes: Sequence[int]) -> None:
        """Remember the chain through these granules, if blocks may be announced without it.

        Anchors may be old; otherwise a block that is named by its hash follows the event that explains it at once.
        """
        has_chunks = self._connector.blocks_per_chunk > 1
        if len(self._groups.by_index) > 1 or len(self._residents.holders) > 1 or has_chunks:
            self._ancestry.need_old = self._groups.need_anchors or has_chunks
            self._ancestry.add(parent_key, keys, local_hashes)

    def hold_at(
        self, holder: Holder, engine_hash: EngineHash, point: Point, block_tokens: int, references: int
    ) -> None:
        """A residency of a block that ends at `point`; where it starts is read from the ancestry, if that reaches.

        `block_tokens` 0: the size is unknown. No block is longer than the prefix that it ends.
        """
        assert point.key is not None
        coarse = self._groups.coarse_tokens(holder.key.group, block_tokens)
        if coarse and point.granules * self.granule % coarse:
            self._residents.remember(engine_hash, point)
            return
        if block_tokens > point.granules * self.granule:
            block_tokens = 0
        granules, rest = divmod(block_tokens, self.granule)
        before = self._ancestry.back(point.key, granules) if granules and not rest else None
        parent_key, locals_ = before if before else (None, [])
        row = ResidencyRow(
            point.key,
            parent_key,
            block_local_hash(locals_) if locals_ else None,
            block_tokens,
            point.granules * self.granule - block_tokens,
            references,
        )
        self._residents.hold(holder, engine_hash, row, point.granules)
        if not block_tokens and self._connector.blocks_per_chunk > 1:
            self._hold_parts(holder, engine_hash, point)

    def _hold_parts(self, holder: Holder, last_hash: EngineHash, end: Point) -> None:
        """A connector named a chunk by its last block alone: the blocks before that are there, too, under hashes that
        we make up. As far back as the ancestry reaches."""
        group = self._groups.by_index.get(holder.key.group)
        step = 0 if group is None or group.kind == MAMBA else group.block_tokens // self.granule
        blocks = self._connector.blocks_per_chunk
        if not step or end.granules % (step * blocks):
            return
        point: Point | None = end
        for before in range(1, blocks):
            point = None if point is None else self._before(point, step)
            if point is None:
                return
            self.hold_at(holder, part_hash(last_hash, before), point, step * self.granule, 1)

    def settle(self, learned: list[Learned], new_run: SparseRun | None = None) -> None:
        """Place everything that waited for these hashes, and for what becomes known thereby."""
        if not (self._waiting or self._neighbours.is_awaited):
            return
        runs: dict[SparseRun, None] = {} if new_run is None else {new_run: None}
        anchored: set[EngineHash] = set()
        while learned or runs:
            if not learned:
                learned = self._settle_run(runs.popitem()[0], anchored)
                continue
            engine_hash, point = learned.pop()
            if self._neighbours.is_awaited:
                self._neighbours.explain_elsewhere(engine_hash, point)
            learned.extend(self._settle_hash(engine_hash, point))
            runs.update(dict.fromkeys(self._waiting.runs.get(engine_hash, ())))

    def _settle_hash(self, engine_hash: EngineHash, point: Point) -> list[Learned]:
        """Place the block that waits under this hash; what that tells of its parent and of its children."""
        learned: list[Learned] = []
        block = self._waiting.take(engine_hash)
        if block is not None:
            self._settle_block(engine_hash, point, block)
            learned.extend(self._parent_of(block, point))
        for child in self._waiting.children.get(engine_hash, ()):
            locals_ = self._waiting.blocks[child].local_hashes
            keys = chain_keys(point.key, locals_)
            self.link(point.key, keys, locals_)
            learned.append((child, Point(keys[-1], point.granules + len(keys))))
        return learned

    def _settle_block(self, engine_hash: EngineHash, point: Point, block: WaitingBlock) -> None:
        self._counters["settled_blocks"] += 1
        for key, references in block.counts.items():
            self.hold_at(self._residents.holder(key), engine_hash, point, block.block_tokens, references)
        if self._residents.resolve(engine_hash) is None:
            self._residents.remember(engine_hash, point)

    def _parent_of(self, block: WaitingBlock, point: Point) -> list[Learned]:
        """What a placed block tells of its parent, unless skipped context lies between them."""
        if block.parent is None or block.granules != len(block.local_hashes):
            return []
        before = self._before(point, block.granules)
        if before is None or self._residents.resolve(block.parent) is not None:
            return []
        self._residents.remember(block.parent, before)
        return [(block.parent, before)]

    def _settle_run(self, run: SparseRun, anchored: set[EngineHash]) -> list[Learned]:
        """What is newly known of a sparse run; `anchored`: what was before, so that each is told once."""
        if run not in self._waiting.run_order:
            return []
        learned = [(h, point) for h, point in self._around_anchors(run) if h not in anchored]
        anchored.update(h for h, _ in learned)
        if not learned and not any(h in self._waiting.blocks for h in run.hashes):
            self._waiting.end_run(run)
        return learned

    def _around_anchors(self, run: SparseRun) -> list[Learned]:
        """Where the blocks are that lie around each anchor: a hash of the run that is known at an aligned position."""
        alignment = self._groups.alignment // self.granule
        learned: list[Learned] = []
        for i, engine_hash in enumerate(run.hashes):
            anchor = self._residents.resolve(engine_hash)
            if anchor is not None and not anchor.granules % alignment:
                learned.extend(self._before_anchor(run, i, anchor))
                learned.extend(self._after_anchor(run, i, anchor))
        return learned

    def _before_anchor(self, run: SparseRun, i: int, anchor: Point) -> list[Learned]:
        step = run.block_tokens // self.granule
        needed = self._groups.by_index[run.group].window_blocks
        learned: list[Learned] = []
        point = anchor
        for other in reversed(run.hashes[max(0, i - needed + 1) : i]):
            before = self._before(point, step)
            if before is None or self._residents.resolve(other) is not None:
                break
            point = before
            learned.append((other, point))
        return learned

    def _after_anchor(self, run: SparseRun, i: int, anchor: Point) -> list[Learned]:
        """The block after an anchor, where it was kept for EAGLE; its tokens are in the span if we know where that
        starts, which is believed if the tokens before the anchor are the anchor's own."""
        if not run.local_hashes or i + 1 >= len(run.hashes) or i + 1 in run.unclear:
            return []
        following = run.hashes[i + 1]
        start = Point(None, 0) if run.parent is None else self._residents.resolve(run.parent)
        if start is None or self._residents.resolve(following) is not None:
            return []
        step = run.block_tokens // self.granule
        first = anchor.granules - start.granules
        before = self._ancestry.back(anchor.key, step) if anchor.key is not None else None
        locals_ = run.local_hashes[first : first + step] if first >= step else []
        if before is None or len(locals_) < step or before[1] != run.local_hashes[first - step : first]:
            return []
        keys = chain_keys(anchor.key, locals_)
        self.link(anchor.key, keys, locals_)
        return [(following, Point(keys[-1], anchor.granules + step))]

    def _before(self, point: Point, granules: int) -> Point | None:
        """The point so many granules before this one, unless that is the root or unknown."""
        before = None if point.key is None else self._ancestry.back(point.key, granules)
        return None if before is None or before[0] is None else Point(before[0], point.granules - granules)

    def _has_size(self, tokens: int) -> bool:
        return any(tokens in group.sizes for group in self._groups.by_index.values())


def is_wide(engine_hash: EngineHash) -> bool:
    """Whether a hash is a digest of content for sure, so that it means the same to another publisher."""
    return len(engine_hash) > 8 if isinstance(engine_hash, bytes) else engine_hash >= WIDE_HASH
