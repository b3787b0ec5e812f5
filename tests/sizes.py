"""How much the long tests do.

A third where kernels run as plain Python (NUMBA_DISABLE_JIT=1), several times slower. Property tests repeat the same
examples in every run, so that a change is judged by what it changed; `make soak` looks for new ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

from indexer.compiled import IS_COMPILED

Thing = TypeVar("Thing")
STEP = 1 if IS_COMPILED else 3
SOAK = int(os.environ.get("KV_INDEX_SOAK", "0"))  # so many times as many examples, chosen at random; 0 = the same ones


def fewer(count: int) -> int:
    """So many seeds, or a third of them."""
    return -(-count // STEP)


def examples(count: int) -> settings:
    """Of a property test."""
    return settings(max_examples=fewer(count) * max(SOAK, 1), derandomize=not SOAK, database=None, deadline=None)


def some(things: Sequence[Thing]) -> Sequence[Thing]:
    """All of these, or every third."""
    return things[::STEP]
