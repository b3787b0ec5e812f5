"""The derivation of `chain.py` over whole arrays: the same keys, without an object per granule.

XXH3 is called in the `xxhash` package's own library, as an external symbol, so that compiled code can be kept on disk.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import xxhash
import xxhash._xxhash
from llvmlite import binding

from indexer.compiled import IS_COMPILED, kernel
from indexer.identity.chain import SEED

_LIBRARY = xxhash._xxhash.__file__
_FUNCTION = "XXH3_64bits_withSeed"
_SEED = np.uint64(SEED)
_PAIR_BYTES = np.uintp(16)

if not hasattr(ctypes.CDLL(_LIBRARY), _FUNCTION):
    raise ImportError(f"the xxhash package at {_LIBRARY} does not export {_FUNCTION}; install its wheel from PyPI")
binding.load_library_permanently(_LIBRARY)


def _plain_xxh3(address: Any, size: Any, seed: Any) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(ctypes.string_at(int(address), int(size)), int(seed)))


xxh3: Any = (
    numba.types.ExternalFunction(_FUNCTION, numba.uint64(numba.uintp, numba.uintp, numba.uint64))
    if IS_COMPILED
    else _plain_xxh3
)


@kernel
def hash_granules(
    tokens: npt.NDArray[np.uint32],
    first: int,
    count: int,
    granule: int,
    seed: int,
    locals_: npt.NDArray[np.uint64],
    at: int,
) -> None:
    """Local hashes of `count` granules, the first of which starts at token `first`, into `locals_` from `at` on."""
    size = granule * 4
    address = tokens.ctypes.data + first * 4
    for j in range(count):
        locals_[at + j] = xxh3(np.uintp(address + j * size), np.uintp(size), np.uint64(seed))


@kernel
def chain(
    key: int,
    has_parent: bool,
    locals_: npt.NDArray[np.uint64],
    first: int,
    count: int,
    keys: npt.NDArray[np.uint64],
    at: int,
    pair: npt.NDArray[np.uint64],
) -> None:
    """Content keys at the ends of `count` granules from `locals_[first]` on, after `key` or from the root, into `keys`
    from `at` on. `pair`: two words to work in.
    """
    address = pair.ctypes.data
    current = np.uint64(key)
    for j in range(count):
        local = locals_[first + j]
        if has_parent or j > 0:
            pair[0] = current
            pair[1] = local
            current = xxh3(np.uintp(address), _PAIR_BYTES, _SEED)
        else:
            current = local
        keys[at + j] = current


@kernel
def hash_block(locals_: npt.NDArray[np.uint64], first: int, count: int) -> Any:
    """The local hash of a block of `count` granules: see `chain.block_local_hash`."""
    if count == 1:
        return locals_[first]
    return xxh3(np.uintp(locals_.ctypes.data + first * 8), np.uintp(count * 8), _SEED)
