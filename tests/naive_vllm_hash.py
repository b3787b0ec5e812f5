"""vLLM's block hashes as a few plain lines: pickle and SHA-256, extra keys tagged."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from hashlib import sha256


def digests(
    tokens: Sequence[int], block: int = 16, *, salt: str | None = None, seed: str = "vllm-none-hash"
) -> list[bytes]:
    """Of every whole block."""
    parent = sha256(pickle.dumps(seed, 5)).digest()
    result = []
    for start in range(0, len(tokens) - block + 1, block):
        extra = (("cache_salt", salt),) if salt and not start else None
        parent = sha256(pickle.dumps((parent, tuple(tokens[start : start + block]), extra), 5)).digest()
        result.append(parent)
    return result


def number(digest: bytes) -> int:
    """As engines publish it by default."""
    return int.from_bytes(digest[-8:], "big")


def numbers_of(tokens: Sequence[int], block: int = 16, **other: str) -> list[int]:
    return [number(digest) for digest in digests(tokens, block, **other)]
