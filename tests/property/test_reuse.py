"""The rules of reuse beside a look-up written as engines do it, on layouts that chance draws."""

from __future__ import annotations

from math import gcd
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from indexer.index.groups import Groups
from indexer.index.options import EngineOptions
from indexer.index.reuse import Spec, Trace, hit_length, rules_of
from tests.plain_index.reuse import PlainGroup, PlainLookUp
from tests.sizes import examples

KINDS = {"full": "full_attention", "window": "sliding_window", "mamba": "mamba", "chunked": "chunked_local_attention"}
LAYOUTS = [
    [("full", 16)],
    [("full", 64)],
    [("window", 16)],
    [("mamba", 32)],
    [("chunked", 16)],
    [("full", 16), ("window", 16)],
    [("full", 64), ("window", 16)],
    [("full", 16), ("window", 64)],
    [("full", 32), ("mamba", 32)],
    [("full", 64), ("mamba", 64)],
    [("full", 16), ("chunked", 16)],
    [("full", 16), ("window", 16), ("mamba", 16)],
    [("full", 16), ("window", 16), ("window", 16)],
    [("full", 64), ("full", 16), ("window", 16)],
    [("full", 64), ("window", 16), ("mamba", 64)],
]
DEPTH = 16


def draw(random: Random) -> list[PlainGroup]:
    """Groups whose cached blocks are mostly there: else every hit is 0."""
    share = random.choice([0.6, 0.85, 0.95])
    has_partial, is_eagle = random.random() < 0.5, random.random() < 0.6
    groups: list[PlainGroup] = []
    for kind, block in random.choice(LAYOUTS):
        blocks = range(1, DEPTH * 16 // block + 1)
        cached = {number for number in blocks if random.random() < (share if kind != "mamba" else 0.4)}
        fine = range(16, DEPTH * 16, 16) if has_partial and block > 16 and kind in ("full", "mamba") else ()
        groups.append(
            PlainGroup(
                kind,
                block,
                frozenset(cached),
                frozenset(end for end in fine if end % block and random.random() < 0.5),
                # windows of several groups differ, or they would be looked up together
                window=random.choice([1, 2, 17, 24, 40, 64, 100, 400])
                + 200 * sum(group.kind == kind for group in groups)
                if kind == "window"
                else 0,
                chunk=random.choice([0, 16, 40, 64]) if kind == "chunked" else 0,
                drops=is_eagle and kind in ("full", "window"),
            )
        )
    return groups


def hit(plain: list[PlainGroup], tokens: int) -> int:
    groups = Groups()
    for i, group in enumerate(plain):
        groups.learn(i, KINDS[group.kind], group.window or None, group.block)
        if group.fine:
            groups.learn(i, None, None, 16)
    chunks = {i: group.chunk for i, group in enumerate(plain) if group.chunk}
    drops = any(group.drops for group in plain)
    rules = rules_of(groups, EngineOptions(attention_chunk_size=chunks), drops=drops)

    def holds(spec: Spec, end: int) -> bool:
        return all(
            end in plain[i].fine or (end % plain[i].block == 0 and end // plain[i].block in plain[i].cached)
            for i in spec.groups
        )

    def contiguous(spec: Spec) -> int:
        end = 0
        while holds(spec, end + spec.block_tokens):
            end += spec.block_tokens
        return end

    trace = Trace(tokens - 1)
    length = hit_length(rules, tokens - 1, holds, contiguous, trace)
    assert trace.length == length, (trace.steps, rules)
    assert length == hit_length(rules, tokens - 1, holds, contiguous)
    return length


@given(st.integers(0, 2**32))
@examples(3_000)
def test_hits_are_those_of_an_engine_that_pops_blocks_from_lists(seed: int) -> None:
    random = Random(seed)
    groups = draw(random)
    for _ in range(5):
        tokens = random.randint(1, DEPTH * 16 + 20)
        assert hit(groups, tokens) == PlainLookUp(groups, tokens).hit(), (groups, tokens)


def test_chance_draws_hits_with_and_without_dropped_blocks() -> None:
    """So that the test above is not true of rules that never hit."""
    random = Random(1)
    drawn = [draw(random) for _ in range(400)]
    hits = [(hit(groups, 250), any(group.drops for group in groups)) for groups in drawn]
    assert all(sum(1 for tokens, drops in hits if tokens and drops is wanted) > 50 for wanted in (True, False))
    assert gcd(*(tokens for tokens, _ in hits)) == 16
