"""The engine's own hit length: which prefix would it not compute again, for a fresh request?

The rules are vLLM's KV-cache managers and coordinators (0.21 to 0.33; design document "engine events", section 7),
which reproduce 37,449 of 37,450 recorded answers; SGLang's are those of one full-attention group. All lengths are in
tokens. `holds(spec, end)` says whether a live block of every group with that spec ends at token `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from indexer.index.groups import CHUNKED_LOCAL, MAMBA, WINDOW_KINDS, Groups


@dataclass(frozen=True, slots=True)
class Spec:
    """Groups with an equal specification: the engine looks them up together, and all must have a block."""

    kind: str
    block_tokens: int
    window: int | None
    chunk_tokens: int | None
    groups: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        return self.kind not in WINDOW_KINDS and self.kind not in (MAMBA, CHUNKED_LOCAL)


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """What is known of one engine. `alignment` and `hash_tokens`: see groups.py; specs have full attention first."""

    specs: tuple[Spec, ...]
    alignment: int
    hash_tokens: int


Holds = Callable[[Spec, int], bool]
Contiguous = Callable[[Spec], int]


def hit_length(rules: ReuseRules, limit: int, holds: Holds, contiguous: Contiguous) -> int:
    """The longest prefix of at most `limit` tokens on which all groups agree.

    `contiguous(spec)`: tokens held from token 0 without a hole, in whole blocks. Each pass may only shrink the
    candidate; it ends when a pass leaves it as it is. Full attention is downward closed, so it is looked up once and
    then only trimmed.
    """
    length = limit
    for spec in rules.specs:
        if spec.is_full:
            length = min(length, _full(spec, rules, length, holds, contiguous(spec)))
    others = [spec for spec in rules.specs if not spec.is_full]
    if not others:
        return length
    while length > 0:
        before = length
        for spec in others:
            length = min(length, _find(spec, rules, length, holds))
        if length == before or len(rules.specs) == 1:
            break
    return length


def _find(spec: Spec, rules: ReuseRules, limit: int, holds: Holds) -> int:
    if spec.kind == MAMBA:
        return _mamba(spec, rules, limit, holds)
    if spec.kind == CHUNKED_LOCAL:
        return _chunked_local(spec, limit, holds)
    return _sliding_window(spec, rules, limit, holds)


def _full(spec: Spec, rules: ReuseRules, limit: int, holds: Holds, contiguous: int) -> int:
    """Every block from the start; with fine-grained hits also a partial entry inside the next block."""
    length = min(contiguous, limit // spec.block_tokens * spec.block_tokens)
    if rules.alignment < spec.block_tokens:
        fine = rules.hash_tokens
        furthest = min(limit, length + spec.block_tokens) // fine * fine
        length = next((end for end in range(furthest, length, -fine) if holds(spec, end)), length)
    return length // rules.alignment * rules.alignment


def _sliding_window(spec: Spec, rules: ReuseRules, limit: int, holds: Holds) -> int:
    """The right-most run of enough blocks that ends on the alignment; a shorter run counts if it touches token 0."""
    block = spec.block_tokens
    needed = -(-((spec.window or 1) - 1) // block)
    run = run_end = 0
    for end in range(limit // block * block, 0, -block):
        if not holds(spec, end):
            run = 0
            continue
        if run == 0:
            if end % rules.alignment:
                continue
            run_end = end
        run += 1
        if run >= needed:
            return run_end
    return run * block // rules.alignment * rules.alignment


def _mamba(spec: Spec, rules: ReuseRules, limit: int, holds: Holds) -> int:
    """The right-most state saved on the alignment."""
    step = rules.alignment
    return next((end for end in range(limit // step * step, 0, -step) if holds(spec, end)), 0)


def _chunked_local(spec: Spec, limit: int, holds: Holds) -> int:
    """Blocks of earlier chunks count as computed; then every block of the last chunk from its start.

    The chunk's length is not on the wire: without it every block from token 0 is asked for, which promises less.
    """
    block = spec.block_tokens
    length = limit // spec.chunk_tokens * spec.chunk_tokens if spec.chunk_tokens else 0
    while length + block <= limit and holds(spec, length + block):
        length += block
    return length


def rules_of(groups: Groups, chunk_tokens: Mapping[int, int]) -> ReuseRules:
    """The rules of an engine with these groups, of which there is one at least. `chunk_tokens`: chunk lengths of
    chunked local attention by group; no event says them."""
    by_spec: dict[tuple[str, int, int | None, int | None], list[int]] = {}
    for index, group in groups.by_index.items():
        chunk = chunk_tokens.get(index) if group.kind == CHUNKED_LOCAL else None
        block = groups.coarse_tokens(index, group.block_tokens) or group.block_tokens
        by_spec.setdefault((group.kind, block, group.window, chunk), []).append(index)
    specs = [Spec(*spec, tuple(indexes)) for spec, indexes in by_spec.items()]
    specs.sort(key=lambda spec: (not spec.is_full, spec.groups))
    if groups.is_coarse:
        return ReuseRules(tuple(specs), groups.block_tokens_min, groups.block_tokens_min)
    return ReuseRules(tuple(specs), groups.alignment, groups.hash_tokens)
