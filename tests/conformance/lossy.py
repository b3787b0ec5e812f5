"""Plays a capture of which some frames are lost and cannot be had again, and counts what that does to answers.

A lost frame is found by the next one of its worker that arrives. Until then nobody can know, so answers for that worker
are counted apart.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from tests.conformance.player import Player, Record
from tests.store_stand_in import DictStore


class Policy(Enum):
    """What becomes of residencies at a gap."""

    PROVE = "unverified until proven"
    CREDIT_ALL = "credited as before"
    FORGET_ALL = "forgotten"


@dataclass
class Tally:
    """Tokens that the engines held, those of them that were answered; answers, and how many were too high."""

    held: int = 0
    answered: int = 0
    answers: int = 0
    too_high: int = 0
    too_high_though_known: int = 0

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def recall(self) -> float:
        return self.answered / self.held if self.held else 1.0

    @property
    def share_too_high(self) -> float:
        return self.too_high / self.answers if self.answers else 0.0


@dataclass
class LossyPlayer(Player):
    """`loss`: the share of frames that never arrive. `recovers`: each publisher is loaded anew from its rows now and
    then, after a flush."""

    loss: float = 0.0
    seed: int = 0
    policy: Policy = Policy.PROVE
    recovers: bool = False
    tally: Tally = field(default_factory=Tally)
    lost: Counter[str] = field(default_factory=Counter)  # frames of each worker that nobody knows to be lost
    stores: dict[str, DictStore] = field(default_factory=lambda: defaultdict(DictStore))

    def __post_init__(self) -> None:
        self.random = Random(f"{self.seed} {self.loss}")

    def play_one(self, record: Record) -> None:
        worker = record.get("worker", "")
        if record["type"] != "frame":
            super().play_one(record)
        elif self.random.random() < self.loss:
            self.lost[worker] += 1
        else:
            self._find_gap(worker, record["seq"])
            super().play_one(record)
            self._give_links(worker)

    def _find_gap(self, worker: str, sequence_number: int) -> None:
        last = self.last_sequence_number.get(worker, -1)
        publisher = self.publishers[worker]
        self.lost[worker] = 0
        if last + 1 >= sequence_number:  # the next one, or the engine began again
            return
        if self.policy is Policy.PROVE:
            publisher.count_gap(last + 1, sequence_number - 1)
        elif self.policy is Policy.FORGET_ALL:
            publisher.drop_residencies()

    def _give_links(self, worker: str) -> None:
        """As the service does: from the rows."""
        publisher, store = self.publishers[worker], self.stores[worker]
        if publisher.wanted_links():
            store.flush(publisher)
            store.give_links(publisher)
        if self.recovers and self.random.random() < 0.1:
            store.flush(publisher)
            self.rebuild(worker, store.recover)
            store.assert_equals(self.publishers[worker])

    def _compare(self, probe: Record) -> None:
        answers = self.answers(probe)
        for worker, expected in self.expected(probe):
            got = answers[worker]
            is_high = got > expected
            is_known = not self.lost[worker]
            self.tally.add(Tally(expected, min(got, expected), 1, is_high, is_high and is_known))
            if is_high and is_known:
                self.verdict.count(got, expected, f"{worker}: {json.dumps(probe['tokens'][:8])}")
