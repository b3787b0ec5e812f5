"""How much the long tests do: a third where kernels run as plain Python (NUMBA_DISABLE_JIT=1), several times slower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

from indexer.compiled import IS_COMPILED

Thing = TypeVar("Thing")
STEP = 1 if IS_COMPILED else 3


def fewer(count: int) -> int:
    """So many seeds, or a third of them."""
    return -(-count // STEP)


def examples(count: int) -> settings:
    """Of a property test."""
    return settings(max_examples=fewer(count), deadline=None)


def some(things: Sequence[Thing]) -> Sequence[Thing]:
    """All of these, or every third."""
    return things[::STEP]
