"""Which blocks of a prompt an engine published under hashes that no event explains.

Some blocks are announced without all of their tokens: partial entries, blocks whose parent nobody announced, sparse
events. They wait under their hash (waiting.py). If the engine's algorithm and seed are known, the prompt itself
explains them: its blocks are hashed as the engine does, and what waits under one of these hashes is where that block
ends.

Digests of a prompt's first blocks are remembered by content key, segment by segment, as prompts share their start.
Bounded: so many segments, and so many blocks hashed for one query; what lies behind is not matched (answers may be too
low), until it was asked for often enough.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from indexer.identity.engine_hash import (
    ALGORITHMS,
    DEFAULT_SEED,
    BlockItem,
    Extra,
    block_digests,
    extra_keys,
    first_parent,
    items_by_block,
)
from indexer.index.columns import U64
from indexer.index.options import EngineHash as Option
from indexer.index.state import EngineHash

if TYPE_CHECKING:
    from indexer.index.publisher import PublisherIndex

SEGMENT_BLOCKS = 32
SEGMENTS_MAX = 4_096  # 15 MB
HASHED_BLOCKS_MAX = 1_024  # in one query: 2 to 4 ms


class Prompt(NamedTuple):
    """`items`: (identifier, offset, length), by offset. `keys`: content keys at the end of each granule."""

    tokens: array[int]
    items: Sequence[tuple[str, int, int]]
    lora_name: str | None
    cache_salt: str | None
    granule: int
    keys: Sequence[int] | U64

    @property
    def has_extra_keys(self) -> bool:
        return bool(self.items or self.lora_name or self.cache_salt)


class Hashing(NamedTuple):
    """How an engine hashes: its option, the tokens of its hash unit, and those after a block that are hashed, too."""

    option: Option
    block_tokens: int
    lookahead_tokens: int = 0


def hashing_of(publisher: PublisherIndex) -> Hashing | None:
    """If that is told and of use: some of its blocks wait for what their hashes mean."""
    option, block_tokens = publisher.options.engine_hash, publisher.groups.hash_tokens
    if option is None or not block_tokens or not publisher.waiting.blocks:
        return None
    return Hashing(option, block_tokens, publisher.residents.lookahead_tokens)


def waiting_blocks(publisher: PublisherIndex, ends: Mapping[EngineHash, int]) -> dict[int, set[tuple[int, str]]]:
    """End -> group and tier of the blocks that wait under these hashes, and that the engine can load."""
    found: dict[int, set[tuple[int, str]]] = {}
    blocks, holders = publisher.waiting.blocks, publisher.residents.holders
    for engine_hash in ends.keys() & blocks.keys():
        for key in blocks[engine_hash].counts:
            if key in holders and holders[key].is_credited:
                found.setdefault(ends[engine_hash], set()).add((key.group, holders[key].tier))
    return found


class _Chain(NamedTuple):
    hashing: Hashing
    is_tagged: bool


_Segment: TypeAlias = tuple[_Chain, str | None, int, int]
"""Blocks in a row, by adapter, granule and the content key at their end."""


class _Hashes(NamedTuple):
    """Of a segment's blocks: as whole digests, and as numbers."""

    digests: list[bytes]
    numbers: list[int]


class EngineHashes:
    """Of one scope. Cost: 0.1 us a block that is remembered, for others see `block_digests`."""

    def __init__(self) -> None:
        self._segments: OrderedDict[_Segment, _Hashes] = OrderedDict()  # the one used last is the last

    def __len__(self) -> int:
        return len(self._segments)

    def ends(self, prompt: Prompt, hashing: Hashing, units: frozenset[int]) -> dict[EngineHash, int]:
        """Every hash under which the engine may publish a block of this prompt, and the token where that block ends.

        `units`: blocks of so many hash units are named by all their digests one after the other (vLLM 0.21 to 0.23).
        """
        ends: dict[EngineHash, int] = {}
        budget = HASHED_BLOCKS_MAX
        step = hashing.block_tokens
        for is_tagged in (True, False) if prompt.has_extra_keys else (False,):
            if is_tagged and prompt.lora_name:
                continue  # the adapter's path is not known
            segments, budget = self._segments_of(prompt, _Chain(hashing, is_tagged), budget)
            end = step
            for hashes in segments:
                after = end + step * len(hashes.digests)
                ends.update(zip(hashes.digests, range(end, after, step), strict=True))
                ends.update(zip(hashes.numbers, range(end, after, step), strict=True))
                end = after
            digests = [digest for hashes in segments for digest in hashes.digests] if units else []
            for unit in units:
                for first in range(0, len(digests) - unit + 1, unit):
                    ends[b"".join(digests[first : first + unit])] = (first + unit) * step
        return ends

    def _segments_of(self, prompt: Prompt, chain: _Chain, budget: int) -> tuple[list[_Hashes], int]:
        """Of the prompt's blocks in their order, as far as the budget of blocks reaches; and what is left of it."""
        hashing = chain.hashing
        block_tokens = hashing.block_tokens
        algorithm = ALGORITHMS[hashing.option.algorithm]
        parent = first_parent(algorithm, DEFAULT_SEED if hashing.option.seed is None else hashing.option.seed)
        blocks = max(0, (len(prompt.tokens) - hashing.lookahead_tokens) // block_tokens)
        # content keys say neither where in its granule an item starts, nor what comes after a block
        is_kept = not (prompt.items or hashing.lookahead_tokens or block_tokens % prompt.granule)
        items = items_by_block(prompt.items, block_tokens, min(blocks, budget), hashing.lookahead_tokens)
        segments: list[_Hashes] = []
        for first in range(0, blocks, SEGMENT_BLOCKS):
            last = min(first + SEGMENT_BLOCKS, blocks)
            is_whole = is_kept and last - first == SEGMENT_BLOCKS
            content_key = int(prompt.keys[last * block_tokens // prompt.granule - 1]) if is_whole else 0
            key = chain, prompt.lora_name, prompt.granule, content_key
            hashes = self._segments.get(key) if is_whole else None
            if hashes is None:
                budget -= last - first
                if budget < 0:
                    break
                tokens = prompt.tokens[first * block_tokens : last * block_tokens].tolist()
                extra = dict(_extra_keys(prompt, chain, items, range(first, last)))
                digests = block_digests(algorithm, parent, tokens, block_tokens, extra)
                hashes = _Hashes(digests, [int.from_bytes(digest[-8:], "big") for digest in digests])
            if is_whole:
                self._keep(key, hashes)
            segments.append(hashes)
            parent = hashes.digests[-1]
        return segments, budget

    def _keep(self, key: _Segment, hashes: _Hashes) -> None:
        self._segments[key] = hashes
        self._segments.move_to_end(key)
        if len(self._segments) > SEGMENTS_MAX:
            self._segments.popitem(last=False)


def _extra_keys(
    prompt: Prompt, chain: _Chain, items: Mapping[int, list[BlockItem]], blocks: range
) -> Iterator[tuple[int, Extra]]:
    """Of the blocks that have some, each numbered from the first of these."""
    lookahead = chain.hashing.lookahead_tokens
    for i, block in enumerate(blocks if lookahead or prompt.has_extra_keys else ()):
        salt = None if block else prompt.cache_salt
        keys = extra_keys(items.get(block, ()), prompt.lora_name, salt, is_tagged=chain.is_tagged)
        if lookahead:
            end = (block + 1) * chain.hashing.block_tokens
            keys = (keys, *prompt.tokens[end : end + lookahead])
        if keys is not None:
            yield i, keys
