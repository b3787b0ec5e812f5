"""Parts of a prompt as intervals of tokens: `(start, end)`, ascending, with room between one and the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

Intervals: TypeAlias = list[tuple[int, int]]


def united(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """What any of these has; they may touch and overlap, in any order."""
    result: Intervals = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        elif start < end:
            result.append((start, end))
    return result


def common(one: Intervals, other: Intervals) -> Intervals:
    """What both have."""
    return list(_common(one, other))


def _common(one: Intervals, other: Intervals) -> Iterator[tuple[int, int]]:
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            yield start, end
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1


def without(one: Intervals, other: Intervals) -> Intervals:
    """What the first has and the other has not."""
    ends = [0, *(edge for interval in other for edge in interval), max((end for _, end in one), default=0)]
    between = [(start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if start < end]
    return common(one, between)


def reach(intervals: Intervals) -> int:
    """How far it goes from the start on."""
    return intervals[0][1] if intervals and intervals[0][0] == 0 else 0


def whole_blocks(intervals: Intervals, block_tokens: int) -> Intervals:
    """The blocks that lie in it with all their tokens."""
    inner = ((-(-start // block_tokens) * block_tokens, end // block_tokens * block_tokens) for start, end in intervals)
    return [(start, end) for start, end in inner if start < end]
