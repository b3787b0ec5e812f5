"""Recorded engine streams of publishers that nobody named: they are recognised, and answered as if they had been."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from indexer.registration import AUTO
from tests.conformance.player import Player, captures, limits

BATCHES_MAX = 4


@dataclass
class UnnamedPlayer(Player):
    """Registers every worker with an open engine, and notes how many batches it took to know it."""

    said: dict[str, str] = field(default_factory=dict)

    def register(self, worker: str, engine: str, options: dict[str, object], publisher_id: int) -> None:
        self.said[worker] = engine
        super().register(worker, AUTO, options, publisher_id)


@pytest.mark.parametrize("path", captures(), ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_an_engine_that_nobody_named_is_recognised_and_answered_alike(path: Path) -> None:
    player = UnnamedPlayer(path)
    needed: dict[str, int] = {}
    for record in player.records():
        player.play_one(record)
        if record["type"] == "frame" and (publisher := player.publishers[record["worker"]]).dialect is not None:
            needed.setdefault(record["worker"], publisher.batches_applied)
    assert {worker: publisher.dialect for worker, publisher in player.publishers.items()} == player.said
    assert max(needed.values()) <= BATCHES_MAX
    too_low, too_high = limits(path)
    verdict = player.verdict
    assert (verdict.too_low <= too_low, verdict.too_high <= too_high) == (True, True), verdict.first_wrong
