"""The service is stopped, killed, or loses its database in the middle of recorded streams: no later answer differs.

Several captures are played at once, in turns that the seed decides, to one service; engines go on while it is away, and
keep for replay what they sent. Every answer and, at the end, all statistics are those of an uninterrupted run, and rows
and memory are equal.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conformance.player import CAPTURES
from tests.e2e.recorded_engines import RecordedFleet, audit
from tests.e2e.service_process import ServiceProcess, wait_for

STREAMS = (
    "vllm-0.33.0-dense-gpu16-s0",  # four restarts
    "vllm-0.33.0-hybrid-swa-s1",  # sparse placement
    "vllm-0.33.0-mla-swa-s0",
    "vllm-0.32.0+skipped-skipped-s1",
    "sglang-0.5.23-lora-salt-s0",
)
RECORDS_WHILE_AWAY = (0, 12, 80)
MANY_S = 300  # of seconds that a test may take on a machine with other work


class Play:
    """Several captures in turns."""

    def __init__(self, fleets: list[RecordedFleet], chance: random.Random) -> None:
        self.fleets = fleets
        self._chance = chance

    @property
    def records_left(self) -> int:
        return sum(map(len, self.fleets))

    @property
    def probes(self) -> int:
        return sum(fleet.probes for fleet in self.fleets)

    def go_on(self, service: ServiceProcess | None, records: int) -> None:
        for _ in range(min(records, self.records_left)):
            (fleet,) = self._chance.choices(self.fleets, weights=list(map(len, self.fleets)))
            fleet.play_one(service)

    def finish(self, service: ServiceProcess) -> None:
        self.go_on(service, self.records_left)
        for fleet in self.fleets:
            fleet.check_stats(service)
        audit(service)


@contextmanager
def playing(names: tuple[str, ...], service: ServiceProcess, chance: random.Random) -> Iterator[Play]:
    with ExitStack() as stack:
        fleets = [RecordedFleet(CAPTURES / f"{name}.jsonl.gz", name, with_replay=True, ask_every=2) for name in names]
        for fleet in fleets:
            stack.enter_context(fleet)
            fleet.register(service)
        yield Play(fleets, chance)


def end(service: ServiceProcess, number: signal.Signals) -> None:
    service.note_children()
    if number is signal.SIGKILL:
        service.process.kill()
        service.process.wait(10)
    else:
        assert service.stop(number) == 0, service.output
        assert service.is_alone()


@pytest.mark.timeout(MANY_S)
@pytest.mark.parametrize(
    ("seed", "signals"),
    [(1, [signal.SIGKILL, signal.SIGTERM]), (2, [signal.SIGKILL, signal.SIGKILL])],
    ids=["killed and stopped", "killed twice"],
)
def test_answers_are_those_of_an_uninterrupted_run(data_dir: Path, seed: int, signals: list[signal.Signals]) -> None:
    chance = random.Random(seed)
    with ExitStack() as stack:
        service = stack.enter_context(ServiceProcess(data_dir)).wait_until_ready()
        port = urlsplit(service.url).port or 0
        play = stack.enter_context(playing(STREAMS, service, chance))
        for number, away in zip(signals, chance.sample(RECORDS_WHILE_AWAY, len(signals)), strict=True):
            play.go_on(service, chance.randrange(100, play.records_left // 2))
            if chance.random() < 0.5:  # then engines may even restart while it is away
                for fleet in play.fleets:
                    fleet.wait_until_written(service)
            end(service, number)
            for fleet in play.fleets:
                fleet.service_died()
            play.go_on(None, away)
            service = stack.enter_context(ServiceProcess(data_dir, port=port)).wait_until_ready()
            for fleet in play.fleets:
                fleet.wait_until_applied(service)
            audit(service)
        play.finish(service)


@pytest.mark.timeout(MANY_S)
def test_a_killed_database_costs_no_answer_and_no_row(data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        with playing(("vllm-0.33.0-hybrid-swa-s0", "sglang-0.5.23-page64-s0"), service, random.Random(3)) as play:
            play.go_on(service, play.records_left // 3)
            before = play.probes
            for child in service.note_children():
                child.kill()
            play.go_on(service, play.records_left // 3)
            assert play.probes > before
            wait_for(lambda: "database_died" in service.output, "its death noticed")
            wait_for(lambda: service.call("GET", "/readyz")[0] == 200, "the database is back")
            play.finish(service)
        assert service.stop() == 0, service.output
        assert service.is_alone()
