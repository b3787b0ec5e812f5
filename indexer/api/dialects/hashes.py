"""Hashes of blocks as other services spell them: integers of either sign, or 16 hexadecimal digits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from indexer.api.errors import ApiError
from indexer.api.formats import read_bin_keys

U64_MAX = 2**64 - 1

# msgspec takes no bounds beyond 63 bits: the upper one is checked when they are read
BlockHash: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=-(2**63))] | Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{16}$(?!\n)")]
)


def read_hashes(field: str, hashes: Sequence[BlockHash] | bytes) -> array[int]:
    """The same 64 bits of every spelling; bytes are u64 little-endian. Raises ApiError 422."""
    if isinstance(hashes, bytes):
        return read_bin_keys(field, hashes)
    values = [int(value, 16) if isinstance(value, str) else value for value in hashes]
    for place, value in enumerate(values):
        if value > U64_MAX:
            raise out_of_range(f"{field}[{place}]")
    return array("Q", [value & U64_MAX for value in values])


def out_of_range(field: str) -> ApiError:
    return ApiError(422, "invalid_value", f"{field}: must fit into 64 bits", field)
