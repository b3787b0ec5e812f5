"""What last happened to blocks, beside a model that notes it for each prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from indexer.index.content_index import ContentIndex
from indexer.index.explain import LastEvent
from indexer.index.limits import IndexLimits
from indexer.index.prefix_query import PrefixQuery
from tests.engine_events import MODEL, Engine, G, cleared, removed, stored
from tests.explaining import explained, last_events
from tests.sizes import examples

BRANCHES = 3
DEPTH = 8
Prefix = tuple[int, ...]  # which branch each block takes


@dataclass
class Model:
    held: set[Prefix] = field(default_factory=set)
    last: dict[Prefix, tuple[str, int]] = field(default_factory=dict)

    def note(self, prefix: Prefix, kind: str, number: int) -> None:
        self.last[prefix] = kind, number

    def end_all(self, kind: str, number: int) -> None:
        for prefix in self.held:
            self.note(prefix, kind, number)
        self.held.clear()


def tokens_of(prefix: Prefix) -> list[int]:
    return [1_000 * depth + 100 * branch + i for depth, branch in enumerate(prefix) for i in range(G)]


def hash_of(prefix: Prefix) -> int:
    return hash(("block", *prefix)) % (1 << 62) + 1


class World:
    def __init__(self, seed: int, ghosts_max: int) -> None:
        self.random = Random(seed)
        self.index = ContentIndex(IndexLimits(ghosts_max=ghosts_max))
        self.engine = Engine(self.index)
        self.model = Model()

    def prefix(self) -> Prefix:
        return tuple(self.random.randrange(BRANCHES) for _ in range(self.random.randint(1, DEPTH)))

    def step(self) -> None:
        number, roll = self.engine.sequence_number, self.random.random()
        if roll < 0.55:
            self.store(self.prefix(), number)
        elif roll < 0.94:
            gone = self.random.sample(sorted(self.model.held), min(3, len(self.model.held)))
            if gone:
                self.engine.send(removed([hash_of(prefix) for prefix in gone]))
            for prefix in gone:
                self.model.held.remove(prefix)
                self.model.note(prefix, "removed", number)
        elif roll < 0.97:
            self.engine.send(cleared())
            self.model.end_all("cleared", number)
        else:
            self.engine.publisher.clear()
            self.model.end_all("cleared_by_operator", number - 1)

    def store(self, prefix: Prefix, number: int) -> None:
        """What is missing of it, run by run."""
        ends = [end for end in range(1, len(prefix) + 1) if prefix[:end] not in self.model.held]
        events = []
        for end in ends:
            parent = hash_of(prefix[: end - 1]) if end > 1 else None
            events.append(stored([hash_of(prefix[:end])], parent, tokens_of(prefix)[(end - 1) * G : end * G]))
            self.model.held.add(prefix[:end])
            self.model.note(prefix[:end], "stored", number)
        if events:
            self.engine.send(*events)

    def compare(self) -> None:
        prefix = self.prefix()
        query = PrefixQuery(MODEL, [*tokens_of(prefix), 7])
        (told,) = explained(self.index, query, self.engine.publisher).publishers
        for start, end, state, last_event in last_events(told) if told.groups else ():
            for block in range(start // G + 1, end // G + 1):
                self.check(prefix[:block], state, last_event)

    def check(self, prefix: Prefix, state: str, told: LastEvent | None) -> None:
        assert (state == "held") == (prefix in self.model.held)
        if told is not None:
            kind, number = self.model.last.get(prefix, ("never_seen", None))
            assert (told.kind, told.sequence_number) == (kind, None if number == -1 else number)


@given(st.integers(0, 2**32), st.sampled_from([0, 5, 8_192]))
@examples(60)
def test_explanations_name_the_last_event_of_each_missing_block(seed: int, ghosts_max: int) -> None:
    """However few ghosts are kept: the journal's own stores tell what its hashes mean."""
    world = World(seed, ghosts_max)
    for _ in range(40):
        world.step()
        world.compare()
