"""The engine's own hit length: which prefix would it not compute again, for a fresh request?

The rules are vLLM's KV-cache managers and coordinators (0.21 to 0.33; design document "engine events", section 7),
which reproduce 37,449 of 37,450 recorded answers; SGLang's are those of one full-attention group. All lengths are in
tokens. `holds(spec, end)` says whether a live block of every group with that spec ends at token `end`.

Engines that speculate with EAGLE and do not hash ahead have the last block of a hit computed again, for the hidden
states that their draft layers need: a group drops it. So that all groups can agree on one length, a group that drops
first looks one block beyond the candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from indexer.index.groups import CHUNKED_LOCAL, MAMBA, WINDOW_KINDS, Groups
from indexer.index.options import EngineOptions

NEVER_DROP = frozenset({MAMBA, CHUNKED_LOCAL})


@dataclass(frozen=True, slots=True)
class Spec:
    """Groups with an equal specification: the engine looks them up together, and all must have a block.

    `drops`: the last block of a hit is given up (EAGLE).
    """

    kind: str
    block_tokens: int
    window: int | None
    chunk_tokens: int | None
    groups: tuple[int, ...]
    drops: bool = False

    @property
    def is_full(self) -> bool:
        return self.kind not in WINDOW_KINDS and self.kind not in (MAMBA, CHUNKED_LOCAL)


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """What is known of one engine. `alignment` and `hash_tokens`: see groups.py; specs have full attention first."""

    specs: tuple[Spec, ...]
    alignment: int
    hash_tokens: int

    @property
    def takes_for_granted(self) -> bool:
        """Whether a hit may need no block at all: chunked local attention alone, with chunks of a known length."""
        return all(spec.chunk_tokens for spec in self.specs)


class Rule(StrEnum):
    """Why a hit is not longer, or longer than that. A closed set; docs/api.md says what each means."""

    LAST_TOKEN = "last_token"
    WHOLE_BLOCKS = "whole_blocks"
    MISSING_BLOCK = "missing_block"
    PARTIAL_ENTRY = "partial_entry"
    EAGLE_DROP = "eagle_drop"
    ALIGNMENT = "alignment"
    WINDOW = "window"
    MAMBA_STATE = "mamba_state"
    CHUNKED_LOCAL = "chunked_local"
    CONNECTOR_LOADS = "connector_loads"
    CONNECTOR_UNSURE = "connector_unsure"
    POOLS = "pools"


class Step(NamedTuple):
    """A candidate of so many tokens became another one, by a rule that these groups follow; none: all of them."""

    rule: Rule
    groups: tuple[int, ...]
    before: int
    after: int


class Trace:
    """How a hit came about, from the prompt's length on."""

    def __init__(self, tokens: int) -> None:
        self.length = tokens
        self.steps: list[Step] = []

    def note(self, rule: Rule, length: int, groups: tuple[int, ...] = ()) -> None:
        """The candidate is this long by now."""
        if length != self.length:
            self.steps.append(Step(rule, groups, self.length, length))
            self.length = length

    def look(self, spec: Spec, lengths: Sequence[tuple[Rule, int]]) -> None:
        """Groups shortened it, rule by rule; where they looked beyond it, it stays."""
        most = self.length
        for rule, length in lengths:
            self.note(rule, min(length, most), spec.groups)


Holds = Callable[[Spec, int], bool]
Contiguous = Callable[[Spec], int]


def hit_length(rules: ReuseRules, limit: int, holds: Holds, contiguous: Contiguous, trace: Trace | None = None) -> int:
    """The longest prefix of at most `limit` tokens on which all groups agree.

    `contiguous(spec)`: tokens held from token 0 without a hole, in whole blocks. Each pass may only shrink the
    candidate; it ends when a pass leaves it as it is, or after the first if there is one group beside full attention.
    Full attention is downward closed, so it is looked up once and then only trimmed. `trace`: is told why.
    """
    length = limit
    hashed = (limit + 1) // rules.hash_tokens * rules.hash_tokens
    is_alone = len(rules.specs) == 1
    for spec in rules.specs:
        if spec.is_full:
            beyond = 0 if is_alone or not spec.drops else min(rules.alignment, spec.block_tokens)
            reach = min(length + beyond, max(hashed, length))
            length = min(length, _full(spec, rules, reach, holds, contiguous(spec), trace))
    others = [spec for spec in rules.specs if not spec.is_full]
    if is_alone and others:
        found = _find(others[0], rules, length, holds, others[0].drops)
        if trace is not None:
            trace.look(others[0], _reasons(others[0], rules, length, found, others[0].drops))
        return found
    is_one_pass_enough = len(rules.specs) == 2 and len(others) == 1
    dropped: set[Spec] = set()
    before = limit
    while others and length:
        length = _pass(others, rules, length, hashed, holds, dropped, trace)
        if length >= before or is_one_pass_enough:
            break
        before = length
    return length


def _pass(
    specs: Sequence[Spec],
    rules: ReuseRules,
    length: int,
    hashed: int,
    holds: Holds,
    dropped: set[Spec],
    trace: Trace | None,
) -> int:
    """A candidate of `length` tokens, shrunk by each of these in turn. `hashed`: tokens in hashed blocks.

    A group drops once per candidate, and once more after another one has shrunk it; `dropped` have.
    """
    for spec in specs:
        drops = spec.drops and spec not in dropped
        reach = min(length + spec.block_tokens, max(hashed, length)) if drops else length
        found = _find(spec, rules, reach, holds, drops)
        if trace is not None:
            trace.look(spec, _reasons(spec, rules, reach, found, drops))
        if drops:
            dropped.add(spec)
        elif found < length:
            dropped.clear()
        length = min(length, found)
    return length


def _find(spec: Spec, rules: ReuseRules, limit: int, holds: Holds, drops: bool) -> int:
    if spec.kind == MAMBA:
        return _mamba(spec, rules, limit, holds)
    if spec.kind == CHUNKED_LOCAL:
        return _chunked_local(spec, limit, holds)
    return _sliding_window(spec, rules, limit, holds, drops)


def _reasons(spec: Spec, rules: ReuseRules, limit: int, found: int, drops: bool) -> list[tuple[Rule, int]]:
    """Why groups found no more of `limit` tokens: how much it could have been, rule by rule, if they had every block;
    the rest is what they have not got."""
    block, alignment = spec.block_tokens, rules.alignment
    if spec.kind == MAMBA:
        return [(Rule.ALIGNMENT, limit // alignment * alignment), (Rule.MAMBA_STATE, found)]
    whole = limit // block * block
    if spec.kind == CHUNKED_LOCAL:
        return [(Rule.WHOLE_BLOCKS, whole), (Rule.CHUNKED_LOCAL, found)]
    aligned = whole // alignment * alignment
    kept = max(0, whole - block) // alignment * alignment if drops else aligned
    return [(Rule.WHOLE_BLOCKS, whole), (Rule.ALIGNMENT, aligned), (Rule.EAGLE_DROP, kept), (Rule.WINDOW, found)]


def _full(spec: Spec, rules: ReuseRules, limit: int, holds: Holds, contiguous: int, trace: Trace | None) -> int:
    """Every block from the start; with fine-grained hits also a partial entry inside the next block."""
    whole = limit // spec.block_tokens * spec.block_tokens
    length = held = min(contiguous, whole)
    if rules.alignment < spec.block_tokens:
        fine = rules.hash_tokens
        furthest = min(limit, length + spec.block_tokens) // fine * fine
        length = next((end for end in range(furthest, length, -fine) if holds(spec, end)), length)
    kept = length - min(rules.alignment, spec.block_tokens) if spec.drops and length else length
    found = kept // rules.alignment * rules.alignment
    if trace is not None:
        lengths = [(Rule.WHOLE_BLOCKS, whole), (Rule.MISSING_BLOCK, held), (Rule.PARTIAL_ENTRY, length)]
        trace.look(spec, [*lengths, (Rule.EAGLE_DROP, kept), (Rule.ALIGNMENT, found)])
    return found


def _sliding_window(spec: Spec, rules: ReuseRules, limit: int, holds: Holds, drops: bool) -> int:
    """The right-most run of enough blocks that ends on the alignment; a shorter run counts if it touches token 0.

    If the last block is dropped, the run is one block longer, and ends on the alignment without that block.
    """
    block, alignment = spec.block_tokens, rules.alignment
    dropped = block if drops else 0
    needed = -(-((spec.window or 1) - 1) // block) + drops
    run = run_end = 0
    for end in range(limit // block * block, 0, -block):
        if not holds(spec, end):
            run = 0
            continue
        if run == 0:
            if (end - dropped) % alignment:
                continue
            run_end = end
        run += 1
        if run >= needed:
            return run_end - dropped
    length = run * block // alignment * alignment
    return max(0, length - dropped) // alignment * alignment


def _mamba(spec: Spec, rules: ReuseRules, limit: int, holds: Holds) -> int:
    """The right-most state saved on the alignment."""
    step = rules.alignment
    return next((end for end in range(limit // step * step, 0, -step) if holds(spec, end)), 0)


def _chunked_local(spec: Spec, limit: int, holds: Holds) -> int:
    """Blocks of earlier chunks count as computed; then every block of the last chunk from its start.

    The chunk's length is not on the wire: without it every block from token 0 is asked for, which promises less.
    """
    block = spec.block_tokens
    before = limit // spec.chunk_tokens * spec.chunk_tokens if spec.chunk_tokens else 0
    length = before // block * block
    while length + block <= limit and holds(spec, length + block):
        length += block
    return length


def rules_of(groups: Groups, options: EngineOptions, *, drops: bool) -> ReuseRules:
    """The rules of an engine with these groups, of which there is one at least. `drops`: it drops blocks for EAGLE, in
    the groups that hold draft layers and those looked up with them; in all if nobody says which."""
    by_spec: dict[tuple[str, int, int | None, int | None], list[int]] = {}
    for index, group in groups.by_index.items():
        chunk = options.attention_chunk_size.get(index) if group.kind == CHUNKED_LOCAL else None
        block = groups.coarse_tokens(index, group.block_tokens) or group.block_tokens
        by_spec.setdefault((group.kind, block, group.window, chunk), []).append(index)
    specs = []
    for spec, indexes in by_spec.items():
        is_drafting = not options.eagle_groups or not options.eagle_groups.isdisjoint(indexes)
        specs.append(Spec(*spec, tuple(indexes), drops and is_drafting and spec[0] not in NEVER_DROP))
    specs.sort(key=lambda spec: (not spec.is_full, spec.groups))
    if groups.is_coarse:
        return ReuseRules(tuple(specs), groups.block_tokens_min, groups.block_tokens_min)
    return ReuseRules(tuple(specs), groups.alignment, groups.hash_tokens)
