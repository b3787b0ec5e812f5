"""The service is stopped, killed, or loses its database in the middle of recorded streams: no later answer differs.

Several captures are played at once, in turns that the seed decides, to one service; engines go on while it is away, and
keep for replay what they sent. Every answer and, at the end, all statistics are those of an uninterrupted run, and rows
and memory are equal.

`make crash` kills it more often, and says the seed with which to see the same again: KV_INDEX_CRASHES,
KV_INDEX_CRASH_SEED.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from indexer.store.embedded import EmbeddedPostgres
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
CRASHES = int(os.environ.get("KV_INDEX_CRASHES", "4"))
CRASH_SEED = int(os.environ.get("KV_INDEX_CRASH_SEED", "2"))
CRASH_PAUSE_MAX_S = 0.4
FLUSH_INTERVALS_S = (0.01, 0.05, 0.25)
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

    def wait_until_applied(self, service: ServiceProcess) -> None:
        for fleet in self.fleets:
            fleet.wait_until_applied(service)

    def wait_until_written(self, service: ServiceProcess) -> None:
        for fleet in self.fleets:
            fleet.wait_until_written(service)

    def service_died(self) -> None:
        for fleet in self.fleets:
            fleet.service_died()

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
def test_answers_after_a_kill_and_a_stop_are_those_of_an_uninterrupted_run(data_dir: Path) -> None:
    chance = random.Random(1)
    signals = (signal.SIGKILL, signal.SIGTERM)
    with ExitStack() as stack:
        service = stack.enter_context(ServiceProcess(data_dir)).wait_until_ready()
        port = urlsplit(service.url).port or 0
        play = stack.enter_context(playing(STREAMS, service, chance))
        for number, away in zip(signals, chance.sample(RECORDS_WHILE_AWAY, len(signals)), strict=True):
            play.go_on(service, chance.randrange(100, play.records_left // 2))
            if chance.random() < 0.5:  # then engines may even restart while it is away
                play.wait_until_written(service)
            end(service, number)
            play.service_died()
            play.go_on(None, away)
            service = stack.enter_context(ServiceProcess(data_dir, port=port)).wait_until_ready()
            play.wait_until_applied(service)
            audit(service)
        play.finish(service)


@pytest.mark.timeout(MANY_S + 20 * CRASHES)
def test_kills_at_random_moments_change_nothing(data_dir: Path, tmp_path: Path) -> None:
    """Amid a burst of events that nobody waits for, with flushes so often that many kills are in the middle of one."""
    print(f"{CRASHES} kills with seed {CRASH_SEED}")  # noqa: T201
    chance = random.Random(CRASH_SEED)
    config = tmp_path / "kv-indexer.toml"

    def started(port: int = 0) -> ServiceProcess:
        config.write_text(f"flush_interval_s = {chance.choice(FLUSH_INTERVALS_S)}\n")
        process = ServiceProcess(data_dir, "--config", str(config), port=port)
        return stack.enter_context(process).wait_until_ready()

    with ExitStack() as stack:
        service = started()
        port = urlsplit(service.url).port or 0
        play = stack.enter_context(playing(STREAMS, service, chance))
        for kills_left in range(CRASHES, 0, -1):
            records = play.records_left // (kills_left + 1)
            asked = chance.randrange(records)
            play.go_on(service, asked)
            if chance.random() < 0.5:
                play.wait_until_written(service)
            play.go_on(None, records - asked)
            time.sleep(chance.uniform(0, CRASH_PAUSE_MAX_S))  # waits for nothing: when it dies is what differs
            end(service, signal.SIGKILL)
            if chance.random() < 0.3:  # as in a power cut
                service.kill_children()
            play.service_died()
            play.go_on(None, chance.choice(RECORDS_WHILE_AWAY[:2]))
            service = started(port)
            play.wait_until_applied(service)
            if chance.random() < 0.5:
                audit(service)
        play.finish(service)


@pytest.mark.timeout(MANY_S)
def test_while_the_database_is_away_all_else_goes_on_and_nothing_is_lost(data_dir: Path) -> None:
    database = EmbeddedPostgres(data_dir)
    database.start_now()
    streams = ("vllm-0.33.0-hybrid-swa-s0", "vllm-0.33.0-retention-swa-s0")  # no restarts
    try:
        with ServiceProcess(data_dir, "--database-url", database.database_url) as service:
            service.wait_until_ready()
            with playing(streams, service, random.Random(4)) as play:
                play.go_on(service, play.records_left // 3)
                play.wait_until_written(service)
                assert database.pid is not None
                os.kill(database.pid, signal.SIGKILL)
                wait_for(lambda: service.call("GET", "/readyz")[0] == 503, "not ready")
                (missing,) = service.call("GET", "/readyz")[1]["missing"]
                assert "database" in missing
                before = play.probes
                play.go_on(service, play.records_left // 2)
                assert play.probes > before, "queries were answered, and the answers were right"
                play.wait_until_applied(service)
                lags = [service.metric("indexer_flush_lag_seconds")]
                wait_for(lambda: service.metric("indexer_flush_lag_seconds") > lags[0] + 0.2, "lag grows")
                assert service.metric("indexer_flush_pending_changes") > 0
                assert service.metric("indexer_store_reachable") == 0
                database.stop_now()
                database.start_now()
                wait_for(lambda: service.call("GET", "/readyz")[0] == 200, "ready again")
                play.wait_until_written(service)
                wait_for(lambda: service.metric("indexer_flush_lag_seconds") == 0, "no lag")
                play.finish(service)
            assert service.stop() == 0, service.output
    finally:
        database.stop_now()


@pytest.mark.timeout(MANY_S)
def test_a_killed_database_costs_no_answer_and_no_row(data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        with playing(("vllm-0.33.0-hybrid-swa-s0", "sglang-0.5.23-page64-s0"), service, random.Random(3)) as play:
            play.go_on(service, play.records_left // 3)
            before = play.probes
            service.note_children()
            service.kill_children()
            play.go_on(service, play.records_left // 3)
            assert play.probes > before
            wait_for(lambda: "database_died" in service.output, "its death noticed")
            wait_for(lambda: service.call("GET", "/readyz")[0] == 200, "the database is back")
            play.finish(service)
        assert service.stop() == 0, service.output
        assert service.is_alone()
