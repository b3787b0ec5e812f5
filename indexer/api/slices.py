"""Work that would hold the loop for too long, in slices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable
from typing import TypeVar

PER_SLICE = 100  # descriptions of publishers, and what takes as long

ItemT = TypeVar("ItemT")
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


async def giving_way(items: Iterable[ItemT], per_slice: int = PER_SLICE) -> AsyncIterator[ItemT]:
    """The same items; after every `per_slice` of them others have a turn."""
    for number, item in enumerate(items, 1):
        yield item
        if number % per_slice == 0:
            await asyncio.sleep(0)
