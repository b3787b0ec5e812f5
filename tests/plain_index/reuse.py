"""The engine's look-up as the engine does it: lists of cached blocks from which blocks are popped, group by group."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm


@dataclass(frozen=True)
class PlainGroup:
    """`cached`: numbers of the cached blocks, the first of the prompt is 1. `fine`: ends of partial entries, in tokens.

    `chunk`: of chunked local attention; `drops`: for EAGLE.
    """

    kind: str
    block: int
    cached: frozenset[int]
    fine: frozenset[int] = frozenset()
    window: int = 0
    chunk: int = 0
    drops: bool = False


class PlainLookUp:
    """One prompt of so many tokens. `unit`: of hashes, if blocks may have partial entries that are not cached now."""

    def __init__(self, groups: list[PlainGroup], tokens: int, unit: int = 0) -> None:
        self.groups = sorted(groups, key=lambda group: group.kind != "full")  # full attention first
        self.max_hit = tokens - 1
        sizes = [group.block for group in groups]
        has_partial = any(group.fine for group in groups)
        self.unit = gcd(*sizes, 16 if has_partial else unit)
        self.hashed = tokens // self.unit * self.unit
        others = [group for group in groups if group.kind in ("window", "chunked")]
        is_fine = any(group.kind == "mamba" and group.block > self.unit for group in groups)
        self.is_fine = len(groups) > 1 and is_fine and all(group.block == self.unit for group in others)
        self.alignment = self.unit if self.is_fine else lcm(*sizes)

    def hit(self) -> int:
        if len(self.groups) == 1:
            return self.find(self.groups[0], self.max_hit, self.groups[0].drops)
        length = self.max_hit
        is_found: set[int] = set()
        has_dropped: set[int] = set()
        while True:
            before = length
            for i, group in enumerate(self.groups):
                if group.kind == "full" and i in is_found:
                    continue  # trimmed: every shorter length on the alignment is cached, too
                drops = group.drops and i not in has_dropped
                furthest = length
                if drops:
                    beyond = self.unit if self.is_fine and group.kind == "full" else group.block
                    furthest = min(length + beyond, self.hashed)
                found = self.find(group, furthest, drops)
                is_found.add(i)
                if drops and group.kind != "full":
                    has_dropped.add(i)
                elif found < length and not drops:
                    has_dropped.clear()
                length = min(length, found)
            is_simple = len(self.groups) == 2 and self.groups[0].kind == "full" != self.groups[1].kind
            if length >= before or is_simple:
                return length

    def find(self, group: PlainGroup, furthest: int, drops: bool) -> int:
        if group.kind == "mamba":
            ends = {number * group.block for number in group.cached} | group.fine
            return max((end for end in ends if end <= furthest and end % self.alignment == 0), default=0)
        if group.kind == "full":
            return self.find_full(group, furthest, drops)
        blocks = [number in group.cached for number in range(1, furthest // group.block + 1)]
        if group.kind == "chunked":
            granted = furthest // group.chunk * group.chunk // group.block if group.chunk else 0
            while granted < len(blocks) and blocks[granted]:
                granted += 1
            return granted * group.block
        return self.find_window(group, blocks, drops)

    def find_full(self, group: PlainGroup, furthest: int, drops: bool) -> int:
        length = 0
        while length + group.block <= furthest and length // group.block + 1 in group.cached:
            length += group.block
        if self.is_fine:
            ends = group.fine | {number * group.block for number in group.cached}
            inside = [end for end in ends if length < end <= min(furthest, length + group.block)]
            length = max(inside, default=length)
        if drops and length:
            length -= min(self.alignment, group.block)
        return length // self.alignment * self.alignment

    def find_window(self, group: PlainGroup, blocks: list[bool], drops: bool) -> int:
        needed = -(-(group.window - 1) // group.block) + (1 if drops else 0)
        per_alignment = self.alignment // group.block
        popped = 1 if drops else 0
        for last in range(len(blocks), 0, -1):
            run = blocks[max(0, last - max(1, needed)) : last]
            if all(run) and len(run) == max(1, needed) and (last - popped) % per_alignment == 0:
                return (last - popped) * group.block
        cached_at_start = blocks.index(False) if False in blocks else len(blocks)
        may_end = [last for last in range(1, cached_at_start + 1) if (last - popped) % per_alignment == 0]
        length = max(may_end, default=0) // per_alignment * per_alignment
        if drops and length:
            length = (length - 1) // per_alignment * per_alignment
        return length * group.block
