"""Events -> runs of blocks with their local hashes: the border between an engine's words and content.

A run is what a dense event is about: consecutive blocks, their hashes, and the local hashes of every granule that they
span. Where the run starts is not known here, only whether that is the root (salts belong to granule 0).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from indexer.identity.chain import chain_seed, local_hashes, salted_seed
from indexer.identity.extra_keys import NO_EXTRA_KEYS, ExtraKeys, from_event
from indexer.index.names_seen import NamesSeen
from indexer.index.options import EngineOptions
from indexer.index.residents import Namespace
from indexer.index.state import EngineHash
from indexer.wire.errors import WireError
from indexer.wire.events import BlockStored, TokenIds

U32_BYTES = 4
CARRIED_MAX = 4_096  # at the bound the oldest goes: an identifier carried on from there is taken for a new item
CARRIED_LENGTH_MAX = 4_096  # of a block's together; longer ones are not kept


class Run(NamedTuple):
    """Consecutive blocks of one event: their hashes, and the local hashes of every granule that they span."""

    hashes: Sequence[EngineHash]
    local_hashes: list[int]
    granules: int  # per block
    block_tokens: int
    namespace: Namespace
    lookaheads: list[tuple[list[int], bytes]] | None = None  # per block: tokens after it, bytes of items in them
    counts: bool = True  # False: where it is resident already, this adds no reference

    def after(self, blocks: int) -> Run:
        """The run without its first blocks."""
        lookaheads = None if self.lookaheads is None else self.lookaheads[blocks:]
        hashes, locals_ = self.hashes[blocks:], self.local_hashes[blocks * self.granules :]
        return self._replace(hashes=hashes, local_hashes=locals_, lookaheads=lookaheads)


class RunReader:
    """Reads runs in one granule. Remembers old versions' bare identifiers: they say what is new in the next block."""

    def __init__(self, counters: Counter[str], options: EngineOptions, names: NamesSeen) -> None:
        self.granule = 0
        self._options = options
        self._names = names
        self._carried: dict[EngineHash, frozenset[str]] = {}
        self._counters = counters

    def change_granule(self, granule: int) -> None:
        self.granule = granule
        self._carried.clear()

    def read(self, event: BlockStored, *, at_root: bool, counts: bool) -> Run:
        """The blocks of a dense event. Raises WireError."""
        step, rest = divmod(event.block_size, self.granule)
        if rest:
            raise WireError("bad_block_size", "block_size is no multiple of the granule")
        extra = self._extra_keys(event, at_root=at_root)
        locals_ = self._local_hashes(event, event.tokens, extra, at_root=at_root)
        lookaheads = _lookaheads(event, extra)
        return Run(event.block_hashes, locals_, step, event.block_size, namespace_of(event), lookaheads, counts)

    def read_context(self, event: BlockStored, *, at_root: bool) -> list[int]:
        """Local hashes of the skipped context; its extra keys come one list per skipped block. Raises WireError."""
        tokens = _count(event.skipped_tokens)
        blocks = len(event.skipped_extra_keys or ())
        block_tokens = tokens // blocks if blocks else tokens
        if tokens % self.granule or (blocks and tokens % blocks):
            raise WireError("bad_skipped_context", "skipped_token_ids are not whole blocks, one per skipped_extra_keys")
        extra = from_event(
            event.skipped_extra_keys,
            lora_name=_lora(event),
            block_tokens=block_tokens,
            granule=self.granule,
            at_root=at_root,
        )
        return self._local_hashes(event, event.skipped_tokens, extra, at_root=at_root)

    def seed_of(self, event: BlockStored) -> int:
        """The seed of every granule, by the adapter's name in prompts."""
        lora_name = self._options.content_adapter(_lora(event))
        if lora_name:
            self._names.note_adapter(lora_name)
        return chain_seed(lora_name)

    def read_span(self, event: BlockStored) -> tuple[list[int], frozenset[int]]:
        """Of a sparse event: local hashes of its whole span as if it had no extra keys, and the indexes of the hashes
        in whose block some begin. Raises WireError."""
        locals_ = self._local_hashes(event, event.tokens, NO_EXTRA_KEYS, at_root=False)
        if not event.extra_keys or not any(event.extra_keys):
            return locals_, frozenset()
        extra = from_event(
            event.extra_keys, lora_name=_lora(event), block_tokens=event.block_size, granule=self.granule, at_root=False
        )
        step = event.block_size // self.granule
        return locals_, frozenset(granule // step for granule in extra.items)

    def _extra_keys(self, event: BlockStored, *, at_root: bool) -> ExtraKeys:
        if not event.extra_keys:
            return NO_EXTRA_KEYS
        parent = event.parent_block_hash
        extra = from_event(
            event.extra_keys,
            lora_name=_lora(event),
            block_tokens=event.block_size,
            granule=self.granule,
            at_root=at_root,
            carried=self._carried.get(parent, frozenset()) if parent is not None else frozenset(),
        )
        if sum(map(len, extra.carried)) > CARRIED_LENGTH_MAX:
            self._counters["forgotten_carried_identifiers"] += 1
        elif extra.carried and event.block_hashes:
            self._carried[event.block_hashes[-1]] = extra.carried
            if len(self._carried) > CARRIED_MAX:
                del self._carried[next(iter(self._carried))]
                self._counters["forgotten_carried_identifiers"] += 1
        return extra

    def _local_hashes(self, event: BlockStored, tokens: TokenIds, extra: ExtraKeys, *, at_root: bool) -> list[int]:
        seed = self.seed_of(event)
        cache_salt = extra.cache_salt or event.cache_salt
        if cache_salt:
            self._names.note_salt(cache_salt)
        first_seed = salted_seed(seed, cache_salt) if at_root else None
        return local_hashes(tokens, self.granule, seed, first_seed=first_seed, items=extra.items)


def namespace_of(event: BlockStored) -> Namespace:
    return Namespace(_lora(event), event.cache_salt)


def refuse_cycles(event: BlockStored) -> None:
    """Raises WireError if a hash occurs twice in the event's chain."""
    hashes = event.block_hashes
    if len(hashes) == 1:
        if hashes[0] == event.parent_block_hash:
            raise WireError("self_reference", "a block is its own parent")
        return
    distinct = set(hashes)
    if len(distinct) < len(hashes) or event.parent_block_hash in distinct:
        raise WireError("self_reference", "a block hash occurs twice in one chain")


def first_blocks(event: BlockStored, blocks: int) -> BlockStored:
    """A dense event of the first blocks alone."""
    part = _part(event, 0, blocks, 0, event.parent_block_hash)
    part.skipped_parent_block_hash, part.skipped_tokens = event.skipped_parent_block_hash, event.skipped_tokens
    part.skipped_extra_keys = event.skipped_extra_keys
    return part


def located_blocks(event: BlockStored) -> Iterator[BlockStored | EngineHash]:
    """An event that says where its blocks lie, as dense events of one block; a bare hash where the parent is unknown.

    `block_offsets` say which block of the span each hash is; the skipped blocks' extra keys are unknown. So a block
    follows `block_parent_hashes`, or without them the hash before it if no block lies between, or the event's parent if
    it is the first of the span. No root is in the midst of a span. Raises WireError if the event contradicts itself.
    """
    offsets, parents = _located(event)
    for i, engine_hash in enumerate(event.block_hashes):
        parent = parents[i] if parents is not None else None
        if offsets[i] == 0:
            parent = event.parent_block_hash if parent is None else parent
        elif parents is None and i > 0 and offsets[i - 1] == offsets[i] - 1:
            parent = event.block_hashes[i - 1]
        if parent is None and offsets[i]:
            yield engine_hash
        else:
            yield _part(event, i, i + 1, offsets[i], parent)


def _part(event: BlockStored, first: int, end: int, offset: int, parent: EngineHash | None) -> BlockStored:
    """The blocks `first` to `end` as an event of their own; their tokens begin `offset` blocks into the span."""
    width = event.block_size * (1 if isinstance(event.tokens, array) else U32_BYTES)
    lookahead = event.lookahead_token_ids
    part = BlockStored(
        block_hashes=event.block_hashes[first:end],
        parent_block_hash=parent,
        token_ids=[],
        block_size=event.block_size,
        lora_name=event.lora_name,
        cache_salt=event.cache_salt,
        extra_keys=None if event.extra_keys is None else event.extra_keys[first:end],
        lookahead_token_ids=None if lookahead is None else lookahead[first:end],
        origin=event.origin,
    )
    part.tokens = event.tokens[offset * width : (offset + end - first) * width]
    part.token_count = (end - first) * event.block_size
    return part


def _located(event: BlockStored) -> tuple[list[int], list[EngineHash | None] | None]:
    """Offsets and parents. Raises WireError if they contradict the event."""
    count = len(event.block_hashes)
    blocks = event.token_count // event.block_size
    offsets, parents = event.block_offsets, event.block_parent_hashes
    if offsets is None:
        if count != blocks:
            raise WireError("bad_block_offsets", "block_parent_hashes without block_offsets need one hash per block")
        offsets = list(range(count))
    ascending = all(a < b for a, b in pairwise(offsets))
    if len(offsets) != count or not ascending or not all(0 <= o < blocks for o in offsets):
        raise WireError("bad_block_offsets", "block_offsets do not fit block_hashes and token_ids")
    if parents is not None and len(parents) != count:
        raise WireError("bad_block_offsets", "block_parent_hashes and block_hashes differ in length")
    if parents is not None and any(h == p for h, p in zip(event.block_hashes, parents, strict=True)):
        raise WireError("self_reference", "a block is its own parent")
    return offsets, parents


def _lookaheads(event: BlockStored, extra: ExtraKeys) -> list[tuple[list[int], bytes]] | None:
    tokens = event.lookahead_token_ids
    if not tokens:
        return None
    if len(tokens) != len(event.block_hashes):
        raise WireError("bad_lookahead", "lookahead_token_ids and block_hashes differ in length")
    return [(ids, extra.lookahead.get(i, b"")) for i, ids in enumerate(tokens)]


def _count(tokens: TokenIds) -> int:
    return len(tokens) // (1 if isinstance(tokens, array) else U32_BYTES)


def _lora(event: BlockStored) -> str | None:
    return event.lora_name if isinstance(event.lora_name, str) else None
