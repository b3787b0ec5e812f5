"""Every simulated engine, straight into the index: the answers are the engine's own, whether it was named or not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import xxhash

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import MultimodalItem, PrefixQuery
from indexer.index.publisher import PublisherIndex, addressee_of
from indexer.registration import AUTO, Registration
from indexer.simulate.cache import Prompt
from indexer.simulate.encode import encode_batch
from indexer.simulate.flavours import FLAVOURS, MODEL, Flavour
from indexer.simulate.scheduler import Scheduler
from indexer.simulate.workload import Workload
from indexer.wire.columns import PayloadReader, read_batch
from tests.index_invariants import check_index

REQUESTS = 250
READER = PayloadReader()


class Fed:
    """One engine, and a publisher that hears it. Of several, all meet in one scope."""

    def __init__(self, index: ContentIndex, flavour: Flavour, engine: str, seed: int) -> None:
        self.flavour = flavour
        self.scheduler = Scheduler(flavour.make_cache(Random(seed)), held_steps=flavour.held_steps)
        number = len(index.publishers()) + 1
        registration = Registration(
            f"{number}-{flavour.name}", 0, MODEL, "tcp://h:1", engine=engine, publisher_id=number
        )
        self.publisher: PublisherIndex = index.add_publisher(registration)
        self.batches = 0

    def step(self) -> None:
        mutations = self.scheduler.step()
        if mutations:
            payload = encode_batch(1.0, [self.flavour.encode(mutation) for mutation in mutations])
            batch = read_batch(payload, READER, addressee_of(self.publisher.registration))
            self.publisher.apply(batch, self.batches, xxhash.xxh3_64_intdigest(payload))
            self.batches += 1

    def check(self, index: ContentIndex, prompt: Prompt) -> int:
        """The engine's answer, if ours is that; 0 while it has not said all that it did."""
        if self.scheduler.cache.has_mutations:
            return 0
        items = tuple(MultimodalItem(*image) for image in prompt.images)
        query = PrefixQuery(MODEL, prompt.token_ids, "default", prompt.lora_name, prompt.cache_salt, items)
        hits = {hit.worker_id: hit.hit_tokens for hit in index.prefix_hits(query).hits}
        expected = self.scheduler.cache.lookup(prompt)
        assert hits.get(self.publisher.registration.worker_id, 0) == expected, (
            self.flavour.name,
            len(prompt.token_ids),
        )
        return expected


def play(index: ContentIndex, fed: list[Fed], seed: int, requests: int) -> int:
    """Requests, resets now and then, and a question to everybody after each step. Returns the answers above 0."""
    chance, found = Random(seed), 0
    workload = Workload(seed, [engine.flavour.takes for engine in fed])
    for _ in range(requests):
        assignment = workload.next_assignment()
        engine = fed[assignment.engine]
        engine.scheduler.submit(assignment.job)
        if chance.random() < 0.02:
            engine.scheduler.reset_cache()
        engine.step()
        for other in fed:
            found += other.check(index, workload.variant(assignment.job.prompt)) > 0
    for engine in fed:
        while engine.scheduler.has_work:
            engine.step()
    check_index(index)
    return found


@pytest.mark.parametrize("make_flavour", FLAVOURS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("is_named", [True, False])
def test_answers_are_the_engines_own(make_flavour: Callable[[], Flavour], is_named: bool) -> None:
    index, flavour = ContentIndex(), make_flavour()
    # nothing in LMCache's events tells it from vLLM, whose connectors do not tell content
    engine = flavour.engine if is_named or flavour.name == "lmcache" else AUTO
    fed = Fed(index, flavour, engine, seed=1)
    assert play(index, [fed], seed=1, requests=REQUESTS) > REQUESTS / 4
    assert (fed.publisher.dialect, fed.publisher.status().bad_events) == (flavour.engine, {})


def test_engines_of_every_dialect_answer_in_one_scope() -> None:
    index = ContentIndex()
    fed = [Fed(index, flavour, flavour.engine, seed) for seed, flavour in enumerate(make() for make in FLAVOURS)]
    assert play(index, fed, seed=2, requests=3 * REQUESTS) > REQUESTS
    assert not any(engine.publisher.bad_events for engine in fed)
