"""What the store keeps of a publisher beside its rows, as one blob: waiting blocks, sparse runs, links, variants,
and what is known of a connector.

Local hashes, engine hashes and namespaces only, never token ids.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from indexer.index.ancestry import Ancestry
from indexer.index.groups import Groups
from indexer.index.offloading import Connector, Place
from indexer.index.residents import Namespace, Residents
from indexer.index.state import HolderKey
from indexer.index.waiting import SparseRun, WaitingBlock, WaitingRoom


class _SideState(msgspec.Struct, array_like=True):
    # engine hash, parent, local hashes, granules, block tokens, references per holder
    blocks: list[tuple[int | bytes, int | bytes | None, list[int], int, int, list[tuple[str, int, str, int]]]]
    runs: list[tuple[list[int | bytes], int, int]]  # hashes, group, block tokens
    links: bytes
    lookahead_tokens: int
    variants: list[tuple[int | bytes, bytes, str | None, str | None]]  # hash, variant, LoRA name, salt
    spans: list[tuple[int | bytes | None, list[int], list[int]]] = []  # of each run: parent, local hashes, unclear
    blocks_per_chunk: int | None = None  # of a connector, 0 = not said; None = no connector has shown
    # medium, owner, and (group, hash, references) of what was stored there since the last clear
    since_clear: list[tuple[str, str, list[tuple[int, int | bytes, int]]]] = []


class SideState:
    """Reads and writes the blob of one publisher. `links_max`: the newest links that go into it."""

    def __init__(
        self,
        residents: Residents,
        waiting: WaitingRoom,
        ancestry: Ancestry,
        groups: Groups,
        connector: Connector,
        links_max: int,
    ) -> None:
        self._residents = residents
        self._waiting = waiting
        self._ancestry = ancestry
        self._groups = groups
        self._connector = connector
        self._links_max = links_max

    @property
    def is_changed(self) -> bool:
        """Whether the store does not have it yet. Links count only where anchors need them."""
        links = self._ancestry.is_changed and self._groups.need_anchors
        others = self._residents.variants_are_changed or self._connector.is_changed
        return self._waiting.is_changed or links or others

    def set_changed(self, is_changed: bool) -> None:
        self._waiting.is_changed = is_changed
        self._ancestry.is_changed = self._residents.variants_are_changed = self._connector.is_changed = False

    def encode(self) -> bytes:
        blocks = [
            (h, b.parent, b.local_hashes, b.granules, b.block_tokens, [(*k, n) for k, n in b.counts.items()])
            for h, b in self._waiting.blocks.items()
        ]
        runs = [(run.hashes, run.group, run.block_tokens) for run in self._waiting.run_order]
        links = self._ancestry.newest(self._links_max) if self._groups.need_anchors else b""
        variants = [(h, v, *space) for h, by_hash in self._residents.variants.items() for v, space in by_hash.items()]
        spans = [(run.parent, run.local_hashes, list(run.unclear)) for run in self._waiting.run_order]
        connector = self._connector
        since_clear = [
            (*place, [(group, engine_hash, n) for (group, engine_hash), n in watched.items()])
            for place, watched in connector.since_clear.places.items()
        ]
        state = _SideState(
            blocks,
            runs,
            links,
            self._residents.lookahead_tokens,
            variants,  # type: ignore[arg-type]
            spans,
            connector.learned if connector.is_shown else None,
            since_clear,
        )
        return msgspec.msgpack.encode(state)

    def load(self, blob: bytes) -> None:
        """Into a fresh publisher, after its residencies."""
        state = msgspec.msgpack.decode(blob, type=_SideState)
        for engine_hash, parent, local_hashes, granules, block_tokens, counts in state.blocks:
            references = {HolderKey(medium, group, owner): n for medium, group, owner, n in counts}
            for key in references:
                self._residents.holder(key)  # its place is taken: what waits may settle at any time
            self._waiting.park(engine_hash, WaitingBlock(parent, local_hashes, granules, block_tokens, references))
        spans = state.spans or [(None, [], [])] * len(state.runs)  # an older version has saved none
        for run, span in zip(state.runs, spans, strict=True):
            hashes, group, block_tokens = run
            parent, local_hashes, unclear = span
            sparse_run = SparseRun(hashes, group, block_tokens, parent, local_hashes, frozenset(unclear))
            self._waiting.wait_for_anchor(sparse_run)
        self._ancestry.restore(state.links)
        self._residents.lookahead_tokens = state.lookahead_tokens
        for engine_hash, variant, lora_name, cache_salt in state.variants:
            self._residents.variants.setdefault(engine_hash, {})[variant] = Namespace(lora_name, cache_salt)
        if state.blocks_per_chunk is not None:
            self._connector.show(state.blocks_per_chunk)
        for medium, owner, stored in state.since_clear:
            watched = Counter({(group, engine_hash): count for group, engine_hash, count in stored})
            self._connector.since_clear.places[Place(medium, owner)] = watched
        self.set_changed(False)
