"""Offloading connectors: what an engine loads from slower tiers on top of its own hit, and what resets of them leave.

A connector (vLLM's) copies chunks of several blocks to slower tiers and announces them beside the engine's own blocks.
It looks a prompt up after the engine did, and loads whole chunks only, each known by the hash of its last block.

The rules are those of vLLM's offloading scheduler (0.33; "engine events", section 6). All lengths are in tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from indexer.index.groups import CHUNKED_LOCAL, MAMBA
from indexer.index.reuse import ReuseRules, Spec
from indexer.index.state import EngineHash, HolderKey

CHUNK_BLOCKS_MAX = 1_024  # an event with more of them is taken for something else
WATCHED_MAX = 8_192  # blocks of one tier stored since a clear; with more of them a reset is not looked for


class ChunkedGroup(NamedTuple):
    """How a connector looks up one KV-cache group. `window`: the chunks it needs, None = every one from the start.

    `pops`: the layers are those of a draft model, so that the last chunk found is not taken.
    """

    group: int
    chunk_tokens: int
    window: int | None
    pops: bool


class Place(NamedTuple):
    """A tier that a connector fills; its groups come and go together."""

    medium: str
    owner: str


HoldsChunk = Callable[[ChunkedGroup, int], bool]


def chunked_groups(rules: ReuseRules, blocks_per_chunk: int, draft_groups: frozenset[int]) -> list[ChunkedGroup] | None:
    """How a connector of an engine with these rules looks up: full attention first. None: it cannot serve such one."""
    if any(spec.kind == CHUNKED_LOCAL for spec in rules.specs):
        return None
    return [
        ChunkedGroup(group, size := spec.block_tokens * blocks_per_chunk, _window(spec, size), group in draft_groups)
        for spec in rules.specs
        for group in spec.groups
    ]


def _window(spec: Spec, chunk_tokens: int) -> int | None:
    if spec.is_full:
        return None
    return 1 if spec.kind == MAMBA else -(-(spec.window or 1) // chunk_tokens)


def length_with_loads(
    groups: Sequence[ChunkedGroup], local: int, prompt_tokens: int, align: int, holds: HoldsChunk, *, unsure: int = 0
) -> int:
    """What the engine skips if it has `local` tokens itself; `holds`: whether the chunk that ends there can be loaded.

    Every group may shorten what those before it found, so windows are looked up again until all agree. Less than a
    chunk is never loaded, and the last token of a prompt always computed. `align`: of Mamba states, 1 without them.
    `unsure`: how much more the engine may have itself than is known, within its last chunk: then it loads nothing.
    """
    windows = [group for group in groups if group.window is not None]
    length = (prompt_tokens - 1) // align * align if windows else prompt_tokens
    gained = 0
    popped: set[int] = set()
    following = groups
    while following:
        current, following = following, ()
        has_window = False
        for group in current:
            size = group.chunk_tokens
            length = min(length, prompt_tokens // size * size)
            if length - local < size:
                return local
            pops = group.pops and group.group not in popped
            found = _find_chunks(group, local // size, length, prompt_tokens, pops, holds)
            if not found:
                return local
            if pops:
                found -= 1
                popped.add(group.group)
            length = min(length, size * (local // size + found))
            if length - local < size:
                return local
            if length - local < gained:
                if not group.pops:
                    popped.clear()
                if has_window and not following:
                    following = windows
            has_window |= group.window is not None
            gained = length - local
    return max(local, min(local + gained - unsure, prompt_tokens - 1))


def _find_chunks(
    group: ChunkedGroup, first: int, length: int, prompt_tokens: int, pops: bool, holds: HoldsChunk
) -> int:
    """How many chunks from number `first` on the group agrees to: all up to a hole, or up to its right-most window."""
    size, window = group.chunk_tokens, group.window
    all_chunks = prompt_tokens // size
    if window is None:
        last = min(-(-length // size), all_chunks)
        return next((i - first for i in range(first, last) if not holds(group, (i + 1) * size)), last - first)
    last = min(-(-(length + size if pops else length) // size), all_chunks)
    run = 0
    for i in range(last - 1, first - 1, -1):
        run = run + 1 if holds(group, (i + 1) * size) else 0
        if run == window + pops:
            return i - first + run
    return run


@dataclass(slots=True)
class Connector:
    """What is known of one publisher's connector. `is_changed`: the store does not have it yet.

    `told`: blocks per chunk as registered. Chunks that describe themselves say it, too (`learned`); 0 = unknown.
    """

    told: int = 0
    draft_groups: frozenset[int] = frozenset()
    clear_scope: str | None = None
    is_shown: bool = False
    learned: int = 0
    since_clear: SinceClear = field(default_factory=lambda: SinceClear({}))
    is_changed: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Connector:
        """Of a registration, which has been validated; what is of another type is passed over."""
        told, drafts, scope = (options.get(name) for name in ("blocks_per_chunk", "eagle_groups", "clear_scope"))
        return cls(
            told=told if isinstance(told, int) else 0,
            draft_groups=frozenset(g for g in drafts if isinstance(g, int))
            if isinstance(drafts, list)
            else frozenset(),
            clear_scope=scope if isinstance(scope, str) else None,
        )

    @property
    def blocks_per_chunk(self) -> int:
        return self.learned or self.told or 1

    @property
    def survives_clears(self) -> bool:
        """Whether a clear that names no medium is one of the engine's own blocks alone."""
        return self.is_shown if self.clear_scope is None else self.clear_scope == "device"

    def show(self, blocks_per_chunk: int) -> None:
        """An event of a connector came, with a chunk of so many blocks if it says so (else 0)."""
        if blocks_per_chunk > CHUNK_BLOCKS_MAX:
            blocks_per_chunk = 0
        if not self.is_shown or blocks_per_chunk > self.learned:
            self.is_shown = self.is_changed = True
            self.learned = max(self.learned, blocks_per_chunk)

    def note_clear(self, holders: Iterable[HolderKey]) -> None:
        """The engine cleared its own blocks; perhaps, and silently, these places as well."""
        places = {Place(key.medium, key.owner) for key in holders}
        self.since_clear = SinceClear({place: Counter() for place in places})
        self.is_changed = True

    def note_stored(self, key: HolderKey, hashes: Sequence[EngineHash]) -> None:
        watched = self.since_clear.of(key)
        if watched is None:
            return
        self.is_changed = True
        watched.update((key.group, engine_hash) for engine_hash in hashes)
        if len(watched) > WATCHED_MAX:
            self.since_clear.end(key)

    def note_removed(self, key: HolderKey, engine_hash: EngineHash) -> None:
        """A block that was held. If it was not stored since the clear, then the clear did not reach this place."""
        watched = self.since_clear.of(key)
        if watched is None:
            return
        self.is_changed = True
        block = key.group, engine_hash
        if block not in watched:
            self.since_clear.end(key)
        elif watched[block] == 1:
            del watched[block]
        else:
            watched[block] -= 1

    def was_reset(self, key: HolderKey, last_hash: EngineHash) -> bool:
        """Whether the place was emptied with the last clear, if a chunk that it is known to hold is stored there."""
        watched = self.since_clear.of(key)
        return watched is not None and (key.group, last_hash) not in watched

    def forget_clear(self) -> None:
        """What is held is not what it was at the last clear, or nobody knows."""
        if self.since_clear.places:
            self.since_clear = SinceClear({})
            self.is_changed = True


@dataclass(frozen=True, slots=True)
class SinceClear:
    """Of each place that is watched: (group, hash) of what was stored there since the last clear, with references."""

    places: dict[Place, Counter[tuple[int, EngineHash]]]

    def of(self, key: HolderKey) -> Counter[tuple[int, EngineHash]] | None:
        return self.places.get(Place(key.medium, key.owner)) if self.places else None

    def end(self, key: HolderKey) -> None:
        del self.places[Place(key.medium, key.owner)]


def part_hash(engine_hash: EngineHash, blocks_before: int) -> bytes:
    """A hash that no engine publishes, for a block of a chunk of which only the last block's hash is known."""
    data = engine_hash if isinstance(engine_hash, bytes) else engine_hash.to_bytes(8, "big")
    return data + b"~" + blocks_before.to_bytes(4, "big")
