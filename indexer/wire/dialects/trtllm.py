"""TensorRT-LLM's dictionaries, as its event API hands them out: `event_id`, `data`, `window_size`, `attention_dp_rank`.

`data` is one of `created`, `stored` (a parent hash and a run of blocks with tokens and cache levels), `removed` (hashes
without a level) and `updated` (a block moved between levels, or has another priority). Its newer push path sends
vLLM's form instead, which `wire.decode` reads. What is read here is the documented layout; no engine was at hand.

One tree holds each content once per window size, so a store that is repeated counts once, and a removal ends it on
every level. A window size is a group. A block is only taken for plain content if it is: with an extra id beside a
token, an adapter's number, a salt or multimodal keys, or partly filled, it is taken by its hash alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import msgspec

from indexer.wire.errors import ForOthers, WireError
from indexer.wire.events import (
    REPEATED,
    Addressee,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    RemovedEverywhere,
)

LEVELS = ("GPU", "CPU")
LEVELS_MAX = 256
WINDOW_MAX = 1 << 31


class _Token(msgspec.Struct, gc=False):
    token_id: int
    token_extra_id: int | None = None


class _Block(msgspec.Struct, gc=False):
    block_hash: int | bytes
    tokens: list[_Token]
    cache_level: int = 0
    lora_id: Any = None
    mm_keys: Any = None
    cache_salt: Any = None
    cache_salt_id: Any = None

    def is_plain(self, tokens: int) -> bool:
        """Whether these tokens are all there is to its content, and fill it."""
        has_more = self.lora_id or self.mm_keys or self.cache_salt or self.cache_salt_id
        return not has_more and len(self.tokens) == tokens and not any(t.token_extra_id for t in self.tokens)


class _Created(msgspec.Struct, tag_field="type", tag="created", gc=False):
    pass


class _Stored(msgspec.Struct, tag_field="type", tag="stored", gc=False):
    parent_hash: int | bytes | None
    blocks: list[_Block]


class _Removed(msgspec.Struct, tag_field="type", tag="removed", gc=False):
    block_hashes: list[int | bytes]


class _Difference(msgspec.Struct, gc=False):
    old_value: int
    new_value: int


class _Updated(msgspec.Struct, tag_field="type", tag="updated", gc=False):
    block_hash: int | bytes
    cache_level: _Difference | None = None


class _Fields(msgspec.Struct, gc=False):
    data: _Created | _Stored | _Removed | _Updated
    window_size: int | None = None
    attention_dp_rank: int | None = None


_decode = msgspec.msgpack.Decoder(_Fields).decode


def read(raw: bytes | msgspec.Raw, addressee: Addressee | None) -> list[Event]:
    """See `Reader`. Reasons: `bad_window`, `bad_cache_level`."""
    fields = _decode(raw)
    if addressee is not None and not addressee.is_meant(None, None, fields.attention_dp_rank):
        raise ForOthers
    group = 0 if fields.window_size is None else fields.window_size
    if not 0 <= group < WINDOW_MAX:
        raise WireError("bad_window", f"window_size is {group}")
    data = fields.data
    if isinstance(data, _Stored):
        block_tokens = None if addressee is None else addressee.block_tokens
        return list(_stored(data, group, block_tokens))
    if isinstance(data, _Removed):
        return [RemovedEverywhere(block_hashes=data.block_hashes, group_idx=group)]
    if isinstance(data, _Updated):
        return [] if data.cache_level is None else _moved(data.block_hash, data.cache_level, group)
    return [AllBlocksCleared()]


def _stored(data: _Stored, group: int, block_tokens: int | None) -> Iterator[BlockStored]:
    """One event for each part of the run that lies on one level and is plain, or is not."""
    if not data.blocks:
        return
    size = block_tokens or len(data.blocks[0].tokens)
    if size & (size - 1):
        size = 0  # blocks hold a power of two tokens, so this one is partly filled
    parent = data.parent_hash
    for (level, is_plain), part in groupby(data.blocks, lambda block: (block.cache_level, block.is_plain(size))):
        blocks = list(part)
        stored = _by_hash([block.block_hash for block in blocks], level, group)
        if is_plain:
            stored.parent_block_hash, stored.block_size = parent, size
            stored.token_ids = [token.token_id for block in blocks for token in block.tokens]
        yield stored
        parent = blocks[-1].block_hash


def _moved(block_hash: int | bytes, level: _Difference, group: int) -> list[Event]:
    return [
        _by_hash([block_hash], level.new_value, group),
        BlockRemoved(block_hashes=[block_hash], medium=_medium(level.old_value), group_idx=group),
    ]


def _by_hash(hashes: list[int | bytes], level: int, group: int) -> BlockStored:
    medium = _medium(level)
    return BlockStored(block_hashes=hashes, token_ids=[], block_size=0, medium=medium, group_idx=group, origin=REPEATED)


def _medium(level: int) -> str:
    """Levels beyond the host's memory are tiers of their own."""
    if not 0 <= level < LEVELS_MAX:
        raise WireError("bad_cache_level", f"cache_level is {level}")
    return LEVELS[level] if level < len(LEVELS) else f"LEVEL_{level}"
