"""A vLLM-like cache: one pool of physical blocks, shared by one or more groups of layers.

Invariants: a block is in the free queue if and only if no running request refers to it; a block in the free queue may
still carry a name (it is reusable until it is taken); every name given is announced by one `Stored`, every name lost by
one `Removed` (or all of them by `Cleared`).

As in vLLM, blocks are not deduplicated: a prompt whose length is a multiple of the block size recomputes its last
block, and the copy is announced, and removed, on its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from indexer.simulate.cache import Cleared, ExtraKey, Mutation, Prompt, Removed, Request, Stored

NULL_BLOCK = -1
"""Stands in a block table for a block that slid out of the window, or was never needed."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of layers: full attention, or a sliding window of so many tokens."""

    window_tokens: int | None = None


class BlockName(NamedTuple):
    """What a physical block holds: the content of a prefix, for one group."""

    group: int
    digest: bytes


class BlockPool:
    """Physical blocks, who refers to them, and what they hold. Evicts the least recently used free block first."""

    def __init__(self, blocks: int) -> None:
        self.mutations: list[Mutation] = []
        self._references = [0] * blocks
        self._names: list[BlockName | None] = [None] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._copies: dict[BlockName, dict[int, None]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def is_idle(self) -> bool:
        """Whether no running request refers to any block."""
        return len(self._free) == len(self._references)

    def find(self, name: BlockName) -> int | None:
        """The oldest copy of a block."""
        return next(iter(self._copies.get(name, ())), None)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are in the free queue, and would leave it by being reused."""
        return sum(self._references[block] == 0 for block in blocks)

    def take(self, count: int) -> list[int]:
        """So many blocks to write into, one reference each; evicts what they held. The caller checked `free_blocks`."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._evict(block)
            self._references[block] = 1
        return taken

    def reuse(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these blocks."""
        for block in blocks:
            self._free.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; those without any become free, in this order."""
        for block in blocks:
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                self._free[block] = None

    def give_name(self, block: int, name: BlockName) -> None:
        """The block now holds this content. The caller announces it."""
        assert self._names[block] is None
        self._names[block] = name
        self._copies.setdefault(name, {})[block] = None

    def clear(self) -> None:
        """No block holds anything any more. Only while idle."""
        assert self.is_idle
        self._names = [None] * len(self._names)
        self._copies.clear()
        self.mutations.append(Cleared())

    def _evict(self, block: int) -> None:
        name = self._names[block]
        if name is None:
            return
        self._names[block] = None
        copies = self._copies[name]
        del copies[block]
        if not copies:
            del self._copies[name]
        self.mutations.append(Removed(name.group, (name.digest,)))


class VllmCache:
    """A cache with vLLM's rules: prefix chain, last token always computed, window groups free what slid out.

    All groups have the same block size. `none_hash` starts every chain: another one, other digests for equal content.
    Prompts are computed in chunks of `chunk_tokens`.
    """

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        none_hash: bytes,
        groups: tuple[GroupSpec, ...] = (GroupSpec(),),
        chunk_tokens: int = 512,
    ) -> None:
        assert groups[0].window_tokens is None, "the first group is full attention"
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.groups = groups
        self._none_hash = none_hash
        self._chunk_tokens = chunk_tokens

    @property
    def has_mutations(self) -> bool:
        return bool(self.pool.mutations)

    def take_mutations(self) -> list[Mutation]:
        taken, self.pool.mutations = self.pool.mutations, []
        return taken

    def lookup(self, prompt: Prompt) -> int:
        return self._hit_blocks(self._prompt_digests(prompt), len(prompt.token_ids)) * self.block_size

    def admit(self, prompt: Prompt) -> Request | None:
        request = Request(prompt, list(prompt.token_ids), self._prompt_digests(prompt))
        request.stored = self._hit_blocks(request.digests, len(prompt.token_ids))
        request.computed = request.stored * self.block_size
        request.tables = [self._reused(group, request) for group in range(len(self.groups))]
        reused = [block for table in request.tables for block in table if block != NULL_BLOCK]
        if self._blocks_missing(request, len(request.token_ids)) + self.pool.count_free(reused) > self.pool.free_blocks:
            return None
        self.pool.reuse(reused)
        if not self.advance(request):
            raise AssertionError("room was checked for the whole prompt")
        return request

    def advance(self, request: Request) -> bool:
        computed = min(len(request.token_ids), request.computed + self._chunk_tokens)
        self._slide_windows(request)
        if self._blocks_missing(request, computed) > self.pool.free_blocks:
            return False
        for table in request.tables:
            table.extend(self.pool.take(self._blocks_of(computed) - len(table)))
        request.computed = computed
        self._store_full_blocks(request)
        return True

    def finish(self, request: Request) -> None:
        for table in request.tables:
            self.pool.release(block for block in reversed(table) if block != NULL_BLOCK)
        request.tables = []

    def reset(self) -> bool:
        if not self.pool.is_idle:
            return False
        self.pool.clear()
        return True

    # The engine's own hit length.

    def _hit_blocks(self, digests: list[bytes], prompt_tokens: int) -> int:
        """Blocks that a fresh request skips: whole ones, held by all groups, and never the last token."""
        hit = self._full_reach(digests[: (prompt_tokens - 1) // self.block_size])
        while True:
            shorter = hit
            for group, spec in enumerate(self.groups):
                if spec.window_tokens is not None:
                    shorter = self._window_reach(group, spec.window_tokens, digests[:shorter])
            if shorter == hit:
                return hit
            hit = shorter

    def _full_reach(self, digests: list[bytes]) -> int:
        for index, digest in enumerate(digests):
            if self.pool.find(BlockName(0, digest)) is None:
                return index
        return len(digests)

    def _window_reach(self, group: int, window_tokens: int, digests: list[bytes]) -> int:
        """The right-most place whose last window of blocks is held, scanned right to left."""
        need = self._window_blocks(window_tokens)
        run = 0
        for index in range(len(digests) - 1, -1, -1):
            run = run + 1 if self.pool.find(BlockName(group, digests[index])) is not None else 0
            if run >= need:
                return index + run
        return run

    def _window_blocks(self, window_tokens: int) -> int:
        """Blocks that hold the window_tokens - 1 tokens before the next one."""
        return max(1, -(-(window_tokens - 1) // self.block_size))

    def _reused(self, group: int, request: Request) -> list[int]:
        """The block table a request begins with: all hit blocks, or only those in the window."""
        window_tokens = self.groups[group].window_tokens
        first = 0 if window_tokens is None else max(0, request.stored - self._window_blocks(window_tokens))
        found = [self.pool.find(BlockName(group, digest)) for digest in request.digests[first : request.stored]]
        blocks = [block for block in found if block is not None]
        assert len(blocks) == request.stored - first, "a hit block is held"
        return [NULL_BLOCK] * first + blocks

    # Growing.

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _blocks_missing(self, request: Request, tokens: int) -> int:
        return sum(self._blocks_of(tokens) - len(table) for table in request.tables)

    def _slide_windows(self, request: Request) -> None:
        """Let go of window blocks that no later token can see, the last one first."""
        for spec, table in zip(self.groups, request.tables, strict=True):
            if spec.window_tokens is None:
                continue
            slid_out = max(0, request.computed - spec.window_tokens + 1) // self.block_size
            gone = [index for index in range(min(slid_out, len(table))) if table[index] != NULL_BLOCK]
            self.pool.release(table[index] for index in reversed(gone))
            for index in gone:
                table[index] = NULL_BLOCK

    def _store_full_blocks(self, request: Request) -> None:
        """Name and announce, group by group, the blocks that became full."""
        first, end = request.stored, request.computed // self.block_size
        if end <= first:
            return
        self._extend_digests(request, end)
        for group, table in enumerate(request.tables):
            for index in range(first, end):
                self.pool.give_name(table[index], BlockName(group, request.digests[index]))
            self.pool.mutations.append(self._stored(request, group, first, end))
        request.stored = end

    def _stored(self, request: Request, group: int, first: int, end: int) -> Stored:
        size = self.block_size
        return Stored(
            group=group,
            digests=tuple(request.digests[first:end]),
            parent=request.digests[first - 1] if first else None,
            token_ids=tuple(request.token_ids[first * size : end * size]),
            extra_keys=tuple(block_extra_keys(request.prompt, index * size, size) for index in range(first, end)),
            prompt=request.prompt,
        )

    # The hash chain.

    def _prompt_digests(self, prompt: Prompt) -> list[bytes]:
        request = Request(prompt, list(prompt.token_ids), [])
        self._extend_digests(request, len(prompt.token_ids) // self.block_size)
        return request.digests

    def _extend_digests(self, request: Request, blocks: int) -> None:
        size = self.block_size
        for index in range(len(request.digests), blocks):
            parent = request.digests[-1] if request.digests else self._none_hash
            tokens = struct.pack(f"<{size}Q", *request.token_ids[index * size : (index + 1) * size])
            extra_keys = block_extra_keys(request.prompt, index * size, size)
            request.digests.append(hashlib.sha256(parent + tokens + repr(extra_keys).encode()).digest())


def block_extra_keys(prompt: Prompt, start: int, block_size: int) -> tuple[ExtraKey, ...] | None:
    """What sets the block at `start` apart beside its tokens, in vLLM's order; None if nothing does."""
    keys: list[ExtraKey] = []
    if prompt.lora_name is not None:
        keys.append(prompt.lora_name)
    keys += [
        (image.identifier, image.offset - start)
        for image in prompt.images
        if image.offset < start + block_size and start < image.offset + image.length
    ]
    if start == 0 and prompt.cache_salt is not None:
        keys.append(prompt.cache_salt)
    return tuple(keys) or None
