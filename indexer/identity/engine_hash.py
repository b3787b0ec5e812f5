"""vLLM's own block hashes, computed from tokens: what an engine calls a block if its algorithm and seed are known.

A block's digest is that of (parent digest, tokens, extra keys or None), serialised by pickle or as canonical CBOR; the
first parent is the digest of the seed. Events name a block by its whole digest or by the last 64 bits of it.

Extra keys are tagged since 0.31, `("mm", identifier, offset)`, and bare before, `(identifier, offset)`. The path of an
adapter is part of its tag and never published, so tagged digests of prompts with an adapter cannot be computed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import islice, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from xxhash import xxh3_128_digest

DEFAULT_SEED = "vllm-none-hash"  # of the sha256 algorithms since 0.29; those of xxhash have none
PICKLE_PROTOCOL = 5
Extra: TypeAlias = "tuple[object, ...] | None"
_CBOR_BYTES, _CBOR_TEXT, _CBOR_ARRAY = 0x40, 0x60, 0x80
_CBOR_NULL = b"\xf6"


class Algorithm(NamedTuple):
    digest: Callable[[bytes], bytes]
    is_cbor: bool


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


ALGORITHMS = {
    "sha256": Algorithm(_sha256, is_cbor=False),
    "sha256_cbor": Algorithm(_sha256, is_cbor=True),
    "xxhash": Algorithm(xxh3_128_digest, is_cbor=False),
    "xxhash_cbor": Algorithm(xxh3_128_digest, is_cbor=True),
}


def first_parent(algorithm: Algorithm, seed: str) -> bytes:
    """The digest that the first block has as its parent."""
    return algorithm.digest(_cbor(seed) if algorithm.is_cbor else pickle.dumps(seed, PICKLE_PROTOCOL))


def block_digests(
    algorithm: Algorithm, parent: bytes, tokens: Sequence[int], block_tokens: int, extra: Mapping[int, Extra]
) -> list[bytes]:
    """Digests of the whole blocks of `tokens` that follow `parent`. `extra`: extra keys by block, of those that have
    some. Cost: 1 to 3 us a block of 16 tokens."""
    digest = algorithm.digest
    digests = []
    if algorithm.is_cbor:
        head = b"\x83" + _cbor_head(_CBOR_BYTES, len(parent))
        for i, encoded in enumerate(_cbor_blocks(tokens, block_tokens)):
            parent = digest(head + parent + encoded + (_cbor(extra[i]) if i in extra else _CBOR_NULL))
            digests.append(parent)
        return digests
    for i in range(len(tokens) // block_tokens):
        block = tuple(tokens[i * block_tokens : (i + 1) * block_tokens])
        parent = digest(pickle.dumps((parent, block, extra.get(i)), PICKLE_PROTOCOL))
        digests.append(parent)
    return digests


class BlockItem(NamedTuple):
    """A multimodal item as a block has it: `offset` from the block's start, negative if it began earlier."""

    identifier: str
    offset: int


def items_by_block(
    items: Sequence[tuple[str, int, int]], block_tokens: int, blocks: int, lookahead_tokens: int = 0
) -> dict[int, list[BlockItem]]:
    """The items that lie in each of the first blocks, or in the tokens after it that are hashed with it.

    `items`: (identifier, offset, length) in prompt order. An item that goes on behind a block is its last one, as in
    the engine, so the cost is one step per item and block.
    """
    found: dict[int, list[BlockItem]] = {}
    first = 0
    for block in range(blocks if items else 0):
        start, end = block * block_tokens, (block + 1) * block_tokens + lookahead_tokens
        while first < len(items) and items[first][1] + items[first][2] <= start:
            first += 1
        if first == len(items):
            break
        for identifier, offset, length in islice(items, first, None):
            if offset >= end:
                break
            found.setdefault(block, []).append(BlockItem(identifier, offset - start))
            if offset + length > end:
                break
    return found


def extra_keys(items: Iterable[BlockItem], lora_name: str | None, cache_salt: str | None, *, is_tagged: bool) -> Extra:
    """Of one block as the engine hashes them. `cache_salt`: of the first block only; `lora_name`: in bare form only."""
    keys: list[object] = [lora_name] if lora_name else []
    keys += [("mm", *item) if is_tagged else tuple(item) for item in items]
    if cache_salt:
        keys.append(("cache_salt", cache_salt) if is_tagged else cache_salt)
    return tuple(keys) or None


def _cbor_blocks(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Each block's tokens as an array of canonical CBOR. Token ids below 2^32."""
    count = len(tokens) // block_tokens * block_tokens
    ids = np.array(tokens[:count], np.uint32)
    sizes = 1 + (ids >= 24) + (ids >= 1 << 8) + 2 * (ids >= 1 << 16)
    rows = np.empty((count, 5), np.uint8)  # right-aligned: a head byte and up to four bytes, big-endian
    rows[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(count, 4)
    for size, code in ((2, 0x18), (3, 0x19), (5, 0x1A)):
        rows[sizes == size, 5 - size] = code
    data = rows[np.arange(5) >= 5 - sizes[:, None]].tobytes()
    ends = [0, *np.cumsum(sizes)[block_tokens - 1 :: block_tokens].tolist()]
    head = _cbor_head(_CBOR_ARRAY, block_tokens)
    return [head + data[first:last] for first, last in pairwise(ends)]


def _cbor(value: object) -> bytes:
    """Canonical CBOR of texts, bytes, integers, tuples and None."""
    if value is None:
        return _CBOR_NULL
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(0x20, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(_CBOR_BYTES, len(value)) + value
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return _cbor_head(_CBOR_TEXT, len(data)) + data
    assert isinstance(value, tuple)
    return _cbor_head(_CBOR_ARRAY, len(value)) + b"".join(map(_cbor, value))


def _cbor_head(kind: int, argument: int) -> bytes:
    """The shortest form of a head: its argument in the byte itself, or in 1, 2, 4 or 8 bytes after it."""
    if argument < 24:
        return bytes([kind | argument])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * size:
            return bytes([kind | code]) + argument.to_bytes(size, "big")
    raise ValueError(f"no head holds {argument}")
