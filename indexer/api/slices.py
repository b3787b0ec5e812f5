"""Work of the index that would hold the loop for too long, in slices."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def in_slices(work: Generator[None, None, ResultT]) -> ResultT:
    """What the generator returns; after each of its steps others have a turn."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result
        await asyncio.sleep(0)
