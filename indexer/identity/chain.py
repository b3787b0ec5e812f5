"""Tokens -> content keys: identity scheme 1 (docs/identity.md has it byte by byte).

A prompt is cut into granules of `g` tokens. Each granule has a local hash of its tokens and of the multimodal items
that start in it; a prefix has a content key that chains the local hashes. Ingest and query use these same functions,
so they cannot disagree.

If broken: two engines with equal content would not match, or, worse, unequal content would.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct

from xxhash import xxh3_64_intdigest

SCHEME = 1
SEED = 1337
SALT_SEED = 1
IDENTIFIER_SEED = 0
U32_LIMIT = 1 << 32
_MASK_64 = (1 << 64) - 1

_pack_two = Struct("<QQ").pack
_pack_one = Struct("<Q").pack
assert sys.byteorder == "little", "token buffers are handed to XXH3 as they lie in memory"


def identifier_bytes(identifier: str | bytes) -> bytes:
    """What a multimodal identifier (or a prompt-embeds digest) adds to its granule's hash input: 8 bytes."""
    data = identifier.encode("utf-8", "surrogatepass") if isinstance(identifier, str) else identifier
    return _pack_one(xxh3_64_intdigest(data, IDENTIFIER_SEED))


def chain_seed(lora_name: str | None) -> int:
    """The seed of every granule of a prompt with this adapter (None or "": the base model)."""
    if not lora_name:
        return SEED
    return (SEED + xxh3_64_intdigest(lora_name.encode("utf-8", "surrogatepass"), IDENTIFIER_SEED)) & _MASK_64


def salted_seed(seed: int, cache_salt: str | None) -> int:
    """The seed of granule 0 of a salted prompt; later granules keep `seed`."""
    if not cache_salt:
        return seed
    return (seed + xxh3_64_intdigest(cache_salt.encode("utf-8", "surrogatepass"), SALT_SEED)) & _MASK_64


def local_hashes(
    tokens: bytes | array[int],
    granule: int,
    seed: int,
    *,
    first_seed: int | None = None,
    items: Mapping[int, bytes] | None = None,
) -> list[int]:
    """Local hashes of the whole granules of `tokens`; an unfinished granule at the end is left out.

    `tokens`: u32 little-endian bytes, or an array of u64 if one id is 2^32 or more: granules that hold such an id are
    hashed with all their tokens as u64, the others as u32. `first_seed`: the seed of granule 0 if it differs (salt).
    `items`: granule -> bytes of the items that start there. Cost: 0.2 us a granule.
    """
    if isinstance(tokens, array):
        return _wide_local_hashes(tokens, granule, seed, first_seed, items)
    step = granule * 4
    ends = len(tokens) - step + 1
    hashes = [xxh3_64_intdigest(tokens[i : i + step], seed) for i in range(0, ends, step)]
    if hashes and first_seed is not None and first_seed != seed:
        hashes[0] = xxh3_64_intdigest(tokens[:step], first_seed)
    for j, suffix in (items or {}).items():
        if j < len(hashes):
            granule_seed = first_seed if j == 0 and first_seed is not None else seed
            hashes[j] = xxh3_64_intdigest(tokens[j * step : (j + 1) * step] + suffix, granule_seed)
    return hashes


def _wide_local_hashes(
    tokens: array[int], granule: int, seed: int, first_seed: int | None, items: Mapping[int, bytes] | None
) -> list[int]:
    hashes = []
    for j in range(len(tokens) // granule):
        ids = tokens[j * granule : (j + 1) * granule]
        data = ids.tobytes() if max(ids) >= U32_LIMIT else array("I", ids).tobytes()
        granule_seed = first_seed if j == 0 and first_seed is not None else seed
        hashes.append(xxh3_64_intdigest(data + (items or {}).get(j, b""), granule_seed))
    return hashes


def chain_keys(parent_key: int | None, locals_: Iterable[int]) -> list[int]:
    """Content keys at the end of each granule, from `parent_key` (None: from the root). Cost: 0.3 us a granule."""
    keys = []
    key = parent_key
    for local in locals_:
        key = local if key is None else xxh3_64_intdigest(_pack_two(key, local), SEED)
        keys.append(key)
    return keys


def block_local_hash(locals_: Sequence[int]) -> int:
    """The local hash of a block: that of its granule, or of several granules the hash of their local hashes."""
    if len(locals_) == 1:
        return locals_[0]
    return xxh3_64_intdigest(array("Q", locals_).tobytes(), SEED)


def lookahead_key(key: int, lookahead_tokens: Sequence[int], items: bytes = b"") -> int:
    """What is resident when an engine's hash also covers the tokens after its block (EAGLE; vLLM >= 0.33, SGLang).

    `key`: content key at the block's end; `items`: bytes of the items that start in the lookahead tokens.
    """
    wide = any(token >= U32_LIMIT for token in lookahead_tokens)
    tokens = array("Q" if wide else "I", lookahead_tokens).tobytes()
    return xxh3_64_intdigest(_pack_one(key) + tokens + items, SEED)
