"""Frames are lost and cannot be replayed: answers get lower, and too high only where nobody can know yet."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from indexer.index.content_index import ContentIndex
from tests.conformance.lossy import LossyPlayer, Policy, Tally
from tests.conformance.player import captures, limits, more_captures
from tests.conformance.test_captures import each, some_captures
from tests.engine_events import Engine, G, removed, stored
from tests.sizes import fewer, some
from tests.store_stand_in import DictStore

SEEDS = fewer(3)


@each(some(captures()) + some(more_captures()))
@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_no_answer_is_too_high_once_a_loss_is_known(path: Path, loss: float) -> None:
    for seed in range(SEEDS):
        player = LossyPlayer(path, loss=loss, seed=seed)
        player.play()
        assert player.tally.too_high_though_known <= limits(path)[1], player.verdict.first_wrong


@some_captures
def test_nor_is_one_after_recoveries_from_the_rows(path: Path) -> None:
    player = LossyPlayer(path, loss=0.05, seed=7, recovers=True)
    player.play()
    assert player.tally.too_high_though_known <= limits(path)[1], player.verdict.first_wrong


def test_most_of_what_is_held_is_still_answered_and_more_than_if_all_was_forgotten() -> None:
    recall = {}
    for policy in (Policy.PROVE, Policy.FORGET_ALL):
        total = Tally()
        for path in some(captures()):
            player = LossyPlayer(path, loss=0.05, policy=policy)
            player.play()
            total.add(player.tally)
        recall[policy] = total.recall
    assert recall[Policy.PROVE] > max(0.75, recall[Policy.FORGET_ALL] + 0.05), recall


class Conversations:
    """An engine with many conversations that share a start and grow turn by turn; those that rest are evicted."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.engine = Engine(ContentIndex())
        self.store = DictStore()
        self.blocks: dict[int, int] = {}
        self.misses: set[int] = set()  # conversations of which a store was lost

    def tokens(self, conversation: int, blocks: int) -> list[int]:
        return [1] * 4 * G + [1_000 * conversation + i // G for i in range((blocks - 4) * G)]

    def hash(self, conversation: int, block: int) -> int:
        return block + 1 if block < 4 else 1_000 * (conversation + 1) + block

    def turn(self, *, is_lost: bool) -> None:
        conversation = self.random.randrange(12)
        before = self.blocks.get(conversation, 4 if self.blocks else 0)
        after = self.blocks[conversation] = max(before, 4) + self.random.randint(1, 3)
        parent = self.hash(conversation, before - 1) if before else None
        hashes = [self.hash(conversation, block) for block in range(before, after)]
        events = [stored(hashes, parent, self.tokens(conversation, after)[before * G :])]
        if after > 24:
            events.append(removed([self.hash(conversation, b) for b in reversed(range(4, after))]))
            del self.blocks[conversation]
            self.misses.discard(conversation)
        engine = self.engine
        if is_lost:
            engine.sequence_number += 1
            engine.publisher.count_gap(engine.sequence_number - 1, engine.sequence_number - 1)
            if conversation in self.blocks:
                self.misses.add(conversation)
            return
        engine.send(*events)
        self.store.flush(engine.publisher)
        self.store.give_links(engine.publisher)
        if conversation in self.blocks and conversation not in self.misses:
            tokens = self.tokens(conversation, after)
            assert engine.resident(tokens) == len(tokens), conversation
        else:
            assert engine.resident(self.tokens(conversation, after)) <= self.blocks.get(conversation, 4) * G


@pytest.mark.parametrize("seed", range(fewer(10)))
def test_a_prompt_that_is_extended_is_answered_whole_at_once(seed: int) -> None:
    """Whatever was lost of others: the store that extends it proves all of it, the shared start, too."""
    world = Conversations(seed)
    for _ in range(400):
        world.turn(is_lost=bool(world.blocks) and world.random.random() < 0.05)
    assert world.engine.publisher.gaps > 5
