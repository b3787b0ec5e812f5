"""How loops over arrays are compiled: one decorator for all kernels.

Compiled code is kept on disk, beside its module or in the user's cache folder, so that only the first start after an
install compiles. With NUMBA_DISABLE_JIT=1 the same functions run as plain Python: slowly, with the same results.

A kernel is kept under its own module's time of change, so a kernel calls only kernels of its own module, and of
`identity.chain_kernels`, which never changes within an identity scheme. One that calls others says so: `kernel_over`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"nogil": True, "forceinline": True, "_nrt": False}
"""The last two are most of the speed. What a kernel calls becomes part of it, and none counts references to its
arguments at each call of another: the caller holds them, and no kernel makes an array. (`_nrt` is Numba's own,
undocumented name.)"""

OVERFLOW_WARNING = "overflow encountered in scalar"
IS_COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]

if not IS_COMPILED:
    # arithmetic modulo 2^64 is meant, and compiled code does not warn either: in this thread, and in all others
    np.seterr(over="ignore")
    warnings.filterwarnings("ignore", OVERFLOW_WARNING, RuntimeWarning)


def kernel(function: Function) -> Function:
    """Compiled when first called, or then read from the cache; runs without the interpreter's lock."""
    try:
        compiled: Function = numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no folder can be written to: compiled at every start
        compiled = numba.njit(**OPTIONS)(function)
    return compiled


def kernel_over(*modules: ModuleType) -> Callable[[Function], Function]:
    """The decorator for kernels that call kernels of these modules: compiled anew when one of them changes.

    They keep the interpreter's lock, and some need no more of this decorator: to wait for the lock afterwards, while
    another thread has it, may take far longer.
    """

    def compile_over(function: Function) -> Function:
        options = OPTIONS | {"nogil": False}
        compiled: Any = function
        try:
            compiled = numba.njit(cache=True, **options)(function)
            if IS_COMPILED:
                index = compiled._cache._cache_file  # whose stamp is that of the function's own module
                index._source_stamp = (index._source_stamp, *map(_time_of_change, modules))
        except RuntimeError:
            compiled = numba.njit(**options)(function)
        return compiled  # type: ignore[no-any-return]

    return compile_over


def _time_of_change(module: ModuleType) -> tuple[int, int]:
    assert module.__file__ is not None
    status = os.stat(module.__file__)
    return status.st_mtime_ns, status.st_size


def _trailing_zeros(number: np.uint64) -> np.uint64:
    """Zero bits below the lowest one; 64 if there is none. One instruction when compiled."""
    bits = int(number)
    return np.uint64((bits & -bits).bit_length() - 1 if bits else 64)


def _typed_trailing_zeros(_: Any, number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return numba.types.uint64(numba.types.uint64), generate


trailing_zeros: Callable[[np.uint64], np.uint64] = _trailing_zeros
if IS_COMPILED:
    trailing_zeros = intrinsic(_typed_trailing_zeros)  # type: ignore[assignment]
