"""What is known of an engine's KV-cache groups, learned from its events alone.

A group has a kind (full attention, sliding window, Mamba ...), a block size, and for windows their length. Engines
with one group say nothing about it; a kind never named is taken for full attention, which promises the least.
Partial entries (vLLM >= 0.24) of a full or Mamba group are announced with the finer hash size as block size, so a
group's block size is the largest that it has shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import gcd, lcm

from indexer.index.state import GroupState

WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
UNKNOWN = "unknown"
MAMBA = "mamba"
GROUPS_MAX = 1_024  # further groups are left out, and further sizes of one; both counted in `ignored_sizes`
SIZES_MAX = 64  # per group
CHUNKED_LOCAL = "chunked_local_attention"


@dataclass(slots=True)
class Group:
    """One KV-cache group. Sizes in tokens."""

    kind: str = UNKNOWN
    window: int | None = None
    sizes: set[int] = field(default_factory=set)

    @property
    def block_tokens(self) -> int:
        return max(self.sizes, default=0)

    @property
    def is_window(self) -> bool:
        return self.kind in WINDOW_KINDS

    @property
    def window_blocks(self) -> int:
        """Blocks before a position that a window needs there: ceil((W - 1) / block)."""
        return -(-((self.window or 1) - 1) // self.block_tokens)


class Groups:
    """All groups of one publisher. `version` changes whenever something was learned."""

    __slots__ = ("_has_engine", "block_tokens_min", "by_index", "ignored_sizes", "need_anchors", "version")

    def __init__(self, block_tokens_min: int = 1) -> None:
        self.block_tokens_min = block_tokens_min
        self.by_index: dict[int, Group] = {}
        self.ignored_sizes = 0
        self.version = 0
        # whether a window group has smaller blocks than another group: only anchors place its sparse events then
        self.need_anchors = False
        self._has_engine = False

    @property
    def are_of_a_store(self) -> bool:
        """Whether no engine's blocks have shown any, so that those of a store behind it may."""
        return not self._has_engine

    def learn(
        self, index: int, kind: str | None, window: int | None, block_tokens: int, *, is_engine: bool = True
    ) -> None:
        """`is_engine`: the block is on the engine's own GPU. What a store has shown is forgotten then."""
        before = self.version
        if is_engine and not self._has_engine:
            self.by_index.clear()
            self._has_engine = True
        self._learn(index, kind, window, block_tokens)
        if self.version != before:
            self.need_anchors = self._find_need_of_anchors()

    def _learn(self, index: int, kind: str | None, window: int | None, block_tokens: int) -> None:
        group = self.by_index.get(index)
        if group is None:
            if len(self.by_index) >= GROUPS_MAX:
                self.ignored_sizes += 1
                return
            group = self.by_index[index] = Group()
            self.version += 1
        if kind is not None and kind != group.kind:
            group.kind = kind
            self.version += 1
        if window is not None and window != group.window:
            group.window = window
            self.version += 1
        if block_tokens in group.sizes:
            return
        if len(group.sizes) >= SIZES_MAX:
            self.ignored_sizes += 1
            return
        group.sizes.add(block_tokens)
        self.version += 1

    def is_full(self, index: int) -> bool:
        """Whether a group is one of full attention for sure: one of several may have another kind, as long as nobody
        has named it."""
        group = self.by_index.get(index)
        if group is None or group.kind in FULL_KINDS:
            return group is not None
        return group.kind == UNKNOWN and len(self.by_index) == 1

    def coarse_tokens(self, index: int, block_tokens: int) -> int:
        """If blocks of this size are too small to be kept each: the step in tokens at which they are; else 0.

        Only of full attention alone: of a window every block counts.
        """
        least = self.block_tokens_min
        if not 0 < block_tokens < least or least % block_tokens:
            return 0
        return least if len(self.by_index) == 1 and self.is_full(index) else 0

    @property
    def is_coarse(self) -> bool:
        """Whether not every block is kept."""
        return self.block_tokens_min > 1 and any(
            self.coarse_tokens(index, group.block_tokens) for index, group in self.by_index.items()
        )

    def restore(self, states: Iterable[GroupState]) -> None:
        """From rows; whose they are is not told, so they stay."""
        for state in states:
            self.by_index[state.group] = Group(state.kind, state.window, set(state.sizes))
            self._has_engine = True
        self.version += 1
        self.need_anchors = self._find_need_of_anchors()

    def states(self) -> tuple[GroupState, ...]:
        return tuple(
            GroupState(index, group.kind, group.block_tokens, group.window, tuple(sorted(group.sizes)))
            for index, group in sorted(self.by_index.items())
        )

    def _find_need_of_anchors(self) -> bool:
        largest = max((group.block_tokens for group in self.by_index.values()), default=0)
        return any(group.is_window and group.block_tokens < largest for group in self.by_index.values())

    @property
    def hash_tokens(self) -> int:
        """The engine's hash_block_size: the gcd of every block size it has shown."""
        return gcd(*(size for group in self.by_index.values() for size in group.sizes))

    @property
    def hash_units(self) -> frozenset[int]:
        """How many hash units a block has, for the groups where that is more than one."""
        unit = self.hash_tokens
        return frozenset(g.block_tokens // unit for g in self.by_index.values() if g.block_tokens > unit)

    @property
    def alignment(self) -> int:
        """Hit lengths are multiples of this (engine-events section 7): one group: its block; several: their lcm, or
        the hash size when fine-grained hits are on: a Mamba group has larger blocks than that, and every window or
        chunked group has blocks of just that size."""
        groups = list(self.by_index.values())
        fine = self.hash_tokens
        if len(groups) > 1 and any(g.kind == MAMBA and g.block_tokens > fine for g in groups):
            others = [g for g in groups if g.is_window or g.kind == CHUNKED_LOCAL]
            if all(g.block_tokens == fine for g in others):
                return fine
        return lcm(*(g.block_tokens for g in groups))
