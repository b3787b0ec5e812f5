"""An engine that announces blocks without what lies before them, beside a model that knows what it has: told how the
engine hashes, the index answers all the same what the engine itself would."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from indexer.index.content_index import ContentIndex
from tests.engine_events import Engine, removed, stored
from tests.naive_vllm_hash import digests, number
from tests.plain_index.reuse import PlainGroup, PlainLookUp
from tests.property.test_reuse import KINDS
from tests.sizes import examples

UNIT, DEPTH = 16, 12
LAYOUTS = [[("full", 64), ("mamba", 64)], [("full", 16)], [("chunked", 16)], [("full", 16), ("mamba", 16)]]
CHUNK = 64
Prompt = tuple[str | None, tuple[int, ...]]  # salt, tokens


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.layout = self.random.choice(LAYOUTS)
        self.is_eagle = self.random.random() < 0.3
        self.is_wide = self.random.random() < 0.5
        options = {
            "eagle": self.is_eagle,
            "engine_hash": {"algorithm": "sha256", "seed": "7"},
            "attention_chunk_size": {"0": CHUNK},
        }
        self.engine = Engine(ContentIndex(), options=options)
        self.held: Counter[tuple[int, Prompt]] = Counter()
        for group, (_, block) in enumerate(self.layout):
            self.store(group, (None, tuple(range(50_000, 50_000 + block))))
            if block > UNIT:
                self.store(group, (None, tuple(range(50_000, 50_000 + UNIT))))

    def prompt(self) -> Prompt:
        """Many share their start."""
        choices = [self.random.randrange(2) if self.random.random() < 0.2 else 0 for _ in range(DEPTH)]
        tokens = tuple(70_000 * choice + i for i, choice in enumerate(choices) for _ in range(UNIT))
        return self.random.choice([None, None, "salt"]), tokens[: self.random.randint(1, len(tokens))]

    def hashes(self, prompt: Prompt) -> list[Any]:
        found = digests(prompt[1], UNIT, salt=prompt[0], seed="7")
        return list(found) if self.is_wide else [number(digest) for digest in found]

    def store(self, group: int, block: Prompt) -> None:
        """The block, or the partial entry, that ends this prefix; what lies before it is nowhere."""
        kind, whole = self.layout[group]
        salt, tokens = block
        size = whole if len(tokens) % whole == 0 else UNIT
        start = len(tokens) - size
        hashes = self.hashes(block)
        self.engine.send(
            stored(
                [hashes[-1]],
                hashes[start // UNIT - 1] if start else None,
                tokens[start:],
                size,
                extra_keys=[[salt] if salt and not start else None],
                group_idx=group,
                kv_cache_spec_kind=KINDS[kind],
            )
        )
        self.held[group, block] += 1

    def step(self) -> None:
        if self.random.random() < 0.35 and self.held:
            group, block = self.random.choice(list(self.held))
            self.engine.send(removed([self.hashes(block)[-1]], group_idx=group))
            self.held[group, block] -= 1
            if not self.held[group, block]:
                del self.held[group, block]
            return
        group = self.random.randrange(len(self.layout))
        salt, tokens = self.prompt()
        ends = range(UNIT, len(tokens) + 1, UNIT)
        if ends:
            self.store(group, (salt, tokens[: self.random.choice(ends)]))

    def expected(self, prompt: Prompt) -> int:
        groups = []
        for group, (kind, block) in enumerate(self.layout):
            ends = range(UNIT, len(prompt[1]) + 1, UNIT)
            held = {end for end in ends if self.held[group, (prompt[0], prompt[1][:end])]}
            groups.append(
                PlainGroup(
                    kind,
                    block,
                    frozenset(end // block for end in held if end % block == 0),
                    frozenset(end for end in held if end % block),
                    chunk=CHUNK if kind == "chunked" else 0,
                    drops=self.is_eagle and kind == "full",
                )
            )
        return PlainLookUp(groups, len(prompt[1]), UNIT).hit()


@given(st.integers(0, 2**32))
@examples(200)
def test_answers_are_the_engines_own_though_no_event_says_where_blocks_lie(seed: int) -> None:
    world = World(seed)
    for _ in range(80):
        world.step()
        prompt = world.prompt()
        assert world.engine.hit_tokens(prompt[1], cache_salt=prompt[0]) == world.expected(prompt)


def test_there_are_hits_that_no_event_explains() -> None:
    """So that the test above is not true of an index that finds nothing."""
    found = orphans = 0
    for seed in range(20):
        world = World(seed)
        for _ in range(80):
            world.step()
        found += sum(world.expected(world.prompt()) > 0 for _ in range(20))
        orphans += world.engine.publisher.status().orphans
    assert (found > 60, orphans > 60) == (True, True), (found, orphans)
