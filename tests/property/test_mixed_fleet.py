"""One prompt, one answer in tokens, over engines with blocks of 16 and 64, a hybrid, pages of one token, and a pool.

The model beside it is written from the engines' side: sets of token prefixes, nothing hashed. A prefix is a node of a
tree of tokens; the salt is the token before the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import Detail, DetailedHit, PrefixQuery, PublisherHit
from tests.engine_events import MODEL, Engine, cleared, removed, stored
from tests.explaining import check_explanations
from tests.index_invariants import check_index
from tests.sizes import fewer

PROMPTS = fewer(2_000)
POOL_BLOCK = 32
TIERS = {"GPU": "GPU", "CPU": "CPU", "CPU_PINNED": "CPU", "DISK": "STORAGE"}
IN_ORDER = ("GPU", "CPU", "STORAGE")

Prefix = int  # a node of the tree


class Tree:
    """Tokens after tokens."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[Prefix, object], Prefix] = {}

    def prefixes(self, salt: str | None, tokens: list[int]) -> list[Prefix]:
        """Of 0, 1, 2 ... tokens."""
        node = self._step(0, salt)
        found = [node]
        for token in tokens:
            node = self._step(node, token)
            found.append(node)
        return found

    def _step(self, node: Prefix, token: object) -> Prefix:
        return self.nodes.setdefault((node, token), len(self.nodes) + 1)


@dataclass
class Group:
    block: int
    window: int | None = None


@dataclass
class Model:
    """One engine, or the pool: which prefixes end a block that it has, by medium and group."""

    name: str
    engine: str
    groups: list[Group]
    slow: str  # the medium of its slower tier, if it has one
    held: dict[tuple[str, int], set[Prefix]] = field(default_factory=lambda: defaultdict(set))

    def has(self, group: int, prefix: Prefix, tiers: set[str]) -> bool:
        return any(prefix in held for (medium, g), held in self.held.items() if g == group and TIERS[medium] in tiers)


class Fleet:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tree = Tree()
        self.index = ContentIndex()
        self.models = [
            Model("sixteen", "vllm", [Group(16)], "CPU"),
            Model("sixty-four", "sglang", [Group(64)], "CPU_PINNED"),
            Model("hybrid", "vllm", [Group(64), Group(16, window=24)], ""),
            Model("pages", "sglang", [Group(1)], ""),
        ]
        self.seen: Counter[str] = Counter()  # answers above 0, those that a pool helped, and spans that were checked
        self.pool = Model("pool", "mooncake", [Group(POOL_BLOCK)], "DISK")
        self.engines = {m.name: Engine(self.index, m.name, engine=m.engine) for m in self.models}
        self.engines["pool"] = Engine(self.index, "pool", engine="mooncake", is_pool=True)

    # ------------------------------------------------------------------ what happens

    def prompt(self) -> tuple[str | None, list[int]]:
        """Few tokens at few branches, so that prompts share prefixes of all lengths."""
        tokens: list[int] = []
        for part in range(self.random.randint(1, 9)):
            choice = self.random.choice([0, 0, 0, 0, 1, 2])
            tokens += [1_000 * part + 100 * choice + i for i in range(self.random.choice([16, 64, 64, 40, 5]))]
        return self.random.choice([None, None, "salt"]), tokens[: self.random.randint(1, len(tokens))]

    def step(self) -> None:
        model = self.random.choice([*self.models, self.pool])
        roll = self.random.random()
        if roll < 0.7:
            self.store(model, *self.prompt())
        elif roll < 0.85:
            self.offload(model)
        elif roll < 0.997:
            self.remove(model)
        else:
            for medium, group in list(model.held):
                if medium == "GPU" or model.engine != "vllm":
                    model.held[medium, group].clear()
            self.engines[model.name].send(cleared())

    def store(self, model: Model, salt: str | None, tokens: list[int]) -> None:
        """All blocks of a prompt that are not there yet, run by run."""
        prefixes = self.tree.prefixes(salt, tokens)
        medium = "GPU" if model is not self.pool else model.slow
        for number, group in enumerate(model.groups):
            held = model.held[medium, number]
            ends = range(group.block, len(tokens) + 1, group.block)
            missing = [end for end in ends if prefixes[end] not in held]
            for run in runs_of(missing, group.block):
                held |= {prefixes[end] for end in run}
                start = run[0] - group.block
                event = self.event(model, number, prefixes, run, medium, salt)
                event["token_ids"] = tokens[start : run[-1]]
                self.engines[model.name].send(event)

    def event(
        self, model: Model, group: int, prefixes: list[Prefix], run: list[int], medium: str, salt: str | None
    ) -> dict[str, Any]:
        start = run[0] - model.groups[group].block
        event = stored(
            [self.hash(model, prefixes[end]) for end in run],
            self.hash(model, prefixes[start]) if start else None,
            [],
            model.groups[group].block,
            medium,
        )
        if model.engine != "vllm":
            return event | {"cache_salt": salt}
        window = model.groups[group].window
        keys = [[salt] if salt and end == model.groups[group].block else [] for end in run]
        kind = "full_attention" if window is None else "sliding_window"
        named = {"group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}
        return event | named | {"extra_keys": keys if medium == "GPU" else None}

    def hash(self, model: Model, prefix: Prefix) -> int:
        return Random(f"{model.name} {prefix}").getrandbits(63) + (1 << 63)

    def offload(self, model: Model) -> None:
        """Some blocks that are on the GPU are copied to the slower tier, each by itself."""
        held = sorted(model.held["GPU", 0] - model.held[model.slow, 0]) if model.slow and model is not self.pool else []
        for prefix in self.random.sample(held, min(len(held), 4)):
            model.held[model.slow, 0].add(prefix)
            group = 0 if model.engine == "vllm" else None
            event = stored([self.hash(model, prefix)], None, [], 0, model.slow, group_idx=group)
            self.engines[model.name].send(event)

    def remove(self, model: Model) -> None:
        places = [(key, held) for key, held in model.held.items() if held]
        if not places:
            return
        (medium, group), held = self.random.choice(places)
        gone = self.random.sample(sorted(held), min(len(held), self.random.choice([1, 1, 2, 8])))
        held.difference_update(gone)
        hashes = [self.hash(model, prefix) for prefix in gone]
        self.engines[model.name].send(removed(hashes, medium, group_idx=group if model.engine == "vllm" else None))

    # ------------------------------------------------------------------ what is true

    def truth(self, model: Model, prefixes: list[Prefix]) -> tuple[int, dict[str, int]]:
        """What the engine would skip, and its reach per tier."""
        every = set(IN_ORDER)
        tiers = {tier: self.reach(model, prefixes, set(IN_ORDER[: i + 1])) for i, tier in enumerate(IN_ORDER)}
        if not any(model.held.values()) and model.name not in self.known:
            return 0, tiers  # never heard of: see the unit tests
        local = {"GPU"} if model.engine == "vllm" else every
        hits = [self.longest(model, prefixes, local, pooled=pooled) for pooled in (False, True)]
        if model.name == "sixteen":
            hits[0] = self.with_loads(model, prefixes, hits[0])
        return max(hits), tiers

    @property
    def known(self) -> set[str]:
        """Those that have shown all their groups; a group that no event has named may make hits shorter."""
        publishers = {model.name: self.engines[model.name].publisher for model in self.models}
        return {m.name for m in self.models if len(publishers[m.name].groups.by_index) == len(m.groups)}

    def pool_covers(self, prefixes: list[Prefix], start: int, end: int) -> bool:
        first, last = start // POOL_BLOCK, -(-end // POOL_BLOCK)
        ends = [(i + 1) * POOL_BLOCK for i in range(first, last)]
        return ends[-1] < len(prefixes) and all(self.pool.has(0, prefixes[e], {"STORAGE"}) for e in ends)

    def has(self, model: Model, group: int, prefixes: list[Prefix], end: int, tiers: set[str], *, pooled: bool) -> bool:
        block = model.groups[group].block
        return model.has(group, prefixes[end], tiers) or (pooled and self.pool_covers(prefixes, end - block, end))

    def reach(self, model: Model, prefixes: list[Prefix], tiers: set[str]) -> int:
        block = model.groups[0].block
        pooled = "STORAGE" in tiers
        ends = range(block, len(prefixes), block)
        return last_of(ends, lambda end: self.has(model, 0, prefixes, end, tiers, pooled=pooled))

    def longest(self, model: Model, prefixes: list[Prefix], tiers: set[str], *, pooled: bool) -> int:
        """The longest prefix on the alignment, less than the prompt, of which every group has what it needs."""
        align = max(group.block for group in model.groups)
        full = range(align, len(prefixes) - 1, align)
        reach = last_of(full, lambda end: self.has(model, 0, prefixes, end, tiers, pooled=pooled))
        for length in range(reach, 0, -align):
            if all(
                self.has(model, number, prefixes, end, tiers, pooled=pooled)
                for number, group in enumerate(model.groups)
                if group.window is not None
                for end in range(
                    length, max(0, length - -(-(group.window - 1) // group.block) * group.block), -group.block
                )
            ):
                return length
        return 0

    def with_loads(self, model: Model, prefixes: list[Prefix], local: int) -> int:
        """A connector goes on from there, block by block."""
        block = model.groups[0].block
        ends = range(local + block, len(prefixes), block)
        loaded = last_of(ends, lambda end: model.has(0, prefixes[end], {"CPU"}))
        return min(max(local, loaded), len(prefixes) - 2)

    # ------------------------------------------------------------------ the comparison

    def compare(self) -> None:
        salt, tokens = self.prompt()
        prefixes = self.tree.prefixes(salt, tokens)
        query = PrefixQuery(MODEL, tokens, cache_salt=salt, detail=self.random.choice([Detail.SUMMARY, *Detail]))
        hits = {hit.worker_id: hit for hit in self.index.prefix_hits(query).hits}
        assert "pool" not in hits
        if len(tokens) % 3 == 0:
            check_explanations(self.index, query)
        for model in self.models:
            hit = hits.get(model.name)
            if model.name in self.known:
                length, tiers = self.truth(model, prefixes)
                assert (hit.hit_tokens if hit else 0) == length, (model.name, salt, len(tokens))
                assert {tier: hit.tiers.get(tier, tiers["CPU"]) if hit else 0 for tier in IN_ORDER} == tiers, model.name
            if hit is not None:
                self.seen[model.name] += hit.hit_tokens > 0
                self.seen["pool"] += isinstance(hit.pools, list)
            if hit is not None and isinstance(hit.spans, list):
                self.check_spans(model, prefixes, hit)
            if isinstance(hit, DetailedHit) and isinstance(hit.tier_tokens, dict):
                assert hit.tier_tokens.keys() == hit.tiers.keys()
                assert sum(hit.tier_tokens.values()) == hit.resident_tokens
                assert hit.tier_tokens["GPU"] >= hit.tiers["GPU"]
                self.seen["tiers"] += 1
            if isinstance(hit, DetailedHit) and isinstance(hit.groups, list) and model.name in self.known:
                assert {group.group for group in hit.groups} == set(range(len(model.groups)))
                assert min(group.held_tokens for group in hit.groups) >= hit.hit_tokens
                self.seen["groups"] += 1

    def check_spans(self, model: Model, prefixes: list[Prefix], hit: PublisherHit) -> None:
        assert isinstance(hit.spans, list)
        edges = [0, *(span.end for span in hit.spans)]
        assert [(span.start, span.end) for span in hit.spans] == list(pairwise(edges))
        assert edges[-1] == hit.resident_tokens
        block = model.groups[0].block
        for span in hit.spans if model.name in self.known else ():
            self.seen["spans"] += 1
            tier = {span.tier}
            for end in range(span.start + block, span.end + 1, block):
                if span.worker_id == model.name:
                    assert model.has(0, prefixes[end], tier)
                else:
                    assert self.pool_covers(prefixes, end - block, end)


def runs_of(ends: list[int], block: int) -> Iterator[list[int]]:
    """Neighbours together."""
    run: list[int] = []
    for end in ends:
        if run and end != run[-1] + block:
            yield run
            run = []
        run.append(end)
    if run:
        yield run


def last_of(ends: range, has: Callable[[int], bool]) -> int:
    """The last of these before the first that is not there; 0 if there is none."""
    last = 0
    for end in ends:
        if not has(end):
            break
        last = end
    return last


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_over_a_mixed_fleet_equals_the_models(seed: int) -> None:
    fleet = Fleet(seed)
    for number in range(PROMPTS // 2):
        for _ in range(3):
            fleet.step()
        fleet.compare()
        if number % 100 == 0:
            check_index(fleet.index)
    assert min(fleet.seen[name] for name in (*fleet.engines, "spans")) > PROMPTS // 20, fleet.seen
