"""Several services on one Postgres: one writes each publisher, all answer, and whoever dies is not missed."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.conformance.player import CAPTURES
from tests.e2e.recorded_engines import RecordedFleet, audit
from tests.e2e.service_process import Engine, ServiceProcess, wait_for

STREAMS = ("vllm-0.33.0-dense-gpu16-s0", "vllm-0.33.0-hybrid-swa-s1", "sglang-0.5.23-lora-salt-s0")
STREAMS_WITHOUT_RESTARTS = ("vllm-0.33.0-hybrid-swa-s0", "vllm-0.33.0-retention-swa-s0")
PROPAGATED_WITHIN_S = 1.0
ANOTHER_WRITES_WITHIN_S = 5.0
MANY_S = 300  # of seconds that a test may take on a machine with other work


def replica(database_url: str, data_dir: Path, stack: ExitStack) -> ServiceProcess:
    url = database_url.replace("+psycopg", "")
    return stack.enter_context(ServiceProcess(data_dir, "--database-url", url))


def writers(database_url: str) -> dict[str, int]:
    """Process id of the writer of every publisher, as its row names it."""
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        rows = connection.execute("SELECT worker_id, writer FROM publishers WHERE removed_at IS NULL").fetchall()
    return {worker: int(writer.split()[-2]) if writer else 0 for worker, writer in rows}


def is_everything_written_by(service: ServiceProcess, database_url: str) -> bool:
    return set(writers(database_url).values()) == {service.process.pid}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.timeout(MANY_S)
@pytest.mark.parametrize(
    ("streams", "kills", "with_replay"),
    [(STREAMS, 3, True), (STREAMS_WITHOUT_RESTARTS, 2, False)],
    ids=["with replay", "without replay"],
)
def test_the_writer_is_killed_and_another_goes_on_with_the_same_rows_and_answers(
    database_url: str, data_dir: Path, stack: ExitStack, streams: tuple[str, ...], kills: int, with_replay: bool
) -> None:
    """Each time a new replica has come before, in the middle of the streams, and warmed up from rows and engines. It is
    asked while it follows beside the writer, takes over, is asked again, and is killed in its turn."""
    chance = random.Random(7)
    writer = replica(database_url, data_dir, stack).wait_until_ready()
    fleets = [
        stack.enter_context(RecordedFleet(CAPTURES / f"{name}.jsonl.gz", name, with_replay=with_replay, ask_every=2))
        for name in streams
    ]
    for fleet in fleets:
        fleet.may_be_unproven = not with_replay
        fleet.register(writer)
    records = sum(map(len, fleets)) // (kills + 1)
    for _ in range(kills):
        late = replica(database_url, data_dir, stack)
        play(fleets, writer, records // 4, chance)
        late.wait_until_ready()
        wait_until_applied(fleets, writer, late)
        play(fleets, late, records // 2, chance)
        wait_until_applied(fleets, late)
        assert is_everything_written_by(writer, database_url)
        writer.process.kill()
        writer.process.wait(10)
        wait_for(lambda left=late: is_everything_written_by(left, database_url), "leases", ANOTHER_WRITES_WITHIN_S)
        audit(late)
        play(fleets, late, records // 4, chance)
        writer = late
    play(fleets, writer, sum(map(len, fleets)), chance)
    for fleet in fleets:
        fleet.check_stats(writer)
    assert audit(writer)["publishers"] == len(writers(database_url))
    assert writer.stop() == 0, writer.output


def wait_until_applied(fleets: list[RecordedFleet], *services: ServiceProcess) -> None:
    for fleet in fleets:
        fleet.service_died()  # so that all of them are looked at
        for service in services:
            fleet.wait_until_applied(service)


def play(fleets: list[RecordedFleet], service: ServiceProcess, records: int, chance: random.Random) -> None:
    """In turns that the seed decides."""
    for _ in range(min(records, sum(map(len, fleets)))):
        (fleet,) = chance.choices(fleets, weights=list(map(len, fleets)))
        fleet.play_one(service)


def test_registrations_reach_the_others_and_so_does_their_end(
    database_url: str, data_dir: Path, stack: ExitStack
) -> None:
    first, second = (replica(database_url, data_dir, stack) for _ in range(2))
    first.wait_until_ready()
    second.wait_until_ready()
    for here, there in ((first, second), (second, first)):
        with Engine("w") as engine:
            assert engine.register(here)[0] == 201
            wait_for(lambda seen=there: knows(seen, "w"), "registered", PROPAGATED_WITHIN_S)
            assert engine.register(there)[0] == 200, "with the same values"
            engine.wait_for_subscription()
            engine.wait_for_subscription()
            engine.store(1, None, list(range(32)))
            engine.wait_until_applied(here)
            engine.wait_until_applied(there)
            answers = [ask(service, list(range(33))) for service in (here, there)]
            assert [[hit["hit_tokens"] for hit in hits] for hits in answers] == [[32], [32]]
            assert there.call("POST", "/v1/publishers/w/clear")[0] == 200
            assert not ask(there, list(range(33)))
            wait_for(lambda seen=here: not ask(seen, list(range(33))), "cleared", PROPAGATED_WITHIN_S)
            assert here.call("DELETE", "/v1/publishers/w") == (200, {"removed": 1})
            wait_for(lambda seen=there: not knows(seen, "w"), "unregistered", PROPAGATED_WITHIN_S)
    assert [first.stop(), second.stop()] == [0, 0]


def knows(service: ServiceProcess, worker_id: str) -> bool:
    return service.call("GET", f"/v1/publishers/{worker_id}")[0] == 200


def ask(service: ServiceProcess, token_ids: list[int]) -> list[dict[str, Any]]:
    status, answer = service.call("POST", "/v1/prefix-hits", {"model": "m", "token_ids": token_ids})
    assert status == 200
    hits: list[dict[str, Any]] = answer["hits"]
    return hits


@pytest.mark.timeout(MANY_S)
def test_a_frozen_writer_is_overtaken_and_refused_when_it_thaws(
    database_url: str, data_dir: Path, stack: ExitStack
) -> None:
    frozen = replica(database_url, data_dir, stack).wait_until_ready()
    with Engine("w") as engine:
        engine.register(frozen)
        engine.wait_for_subscription()
        other = replica(database_url, data_dir, stack).wait_until_ready()
        engine.wait_for_subscription()
        engine.store(1, None, list(range(32)))
        engine.wait_until_applied(other)
        assert is_everything_written_by(frozen, database_url)
        frozen.process.send_signal(signal.SIGSTOP)
        engine.store(3, 2, list(range(32, 64)))
        wait_for(lambda: is_everything_written_by(other, database_url), "another writes", ANOTHER_WRITES_WITHIN_S + 1)
        engine.wait_until_applied(other)
        audit(other)
        frozen.process.send_signal(signal.SIGCONT)
        engine.wait_until_applied(frozen)
        engine.store(5, 4, list(range(64, 96)))
        engine.wait_until_applied(frozen)
        engine.wait_until_applied(other)
        assert audit(other)["residencies_in_store"] == 6
        assert is_everything_written_by(other, database_url)
        assert ask(frozen, list(range(97)))[0]["hit_tokens"] == ask(other, list(range(97)))[0]["hit_tokens"] == 96
        assert audit(frozen)["publishers_of_others"] == 1
    assert [frozen.stop(), other.stop()] == [0, 0]


# ---------------------------------------------------------------------- serve --replicas


class Replicas(ServiceProcess):
    """`kv-indexer serve --replicas N`; `call` asks whichever the kernel chooses."""

    def pids(self) -> list[int]:
        """Of the services, oldest first."""
        started = [line for line in self.events("replica_started") if psutil.pid_exists(line["pid"])]
        return [line["pid"] for line in started if self._is_running(line["pid"])]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def answering(self) -> int:
        """Services that have joined the shared port, dead ones included."""
        return len(self.events("shared_port_joined"))

    def _is_running(self, pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def until_all(service: Replicas, condition: Callable[[], Any], what: str) -> None:
    """New connections are spread at random: so many in a row have asked all of them, in all likelihood."""

    def is_everywhere() -> bool:
        return all(condition() for _ in range(20))

    wait_for(is_everywhere, what)


@pytest.mark.timeout(MANY_S)
def test_replicas_of_one_command_answer_at_one_port_and_are_started_again(data_dir: Path) -> None:
    with Replicas(data_dir, "--replicas", "2", "--log-level", "info") as service, Engine("w") as engine:
        service.wait_until_ready()
        wait_for(lambda: service.answering() == 2, "both are ready", 60)
        assert engine.register(service)[0] == 201
        engine.wait_for_subscription()
        engine.wait_for_subscription()
        engine.store(1, None, list(range(32)))
        until_all(service, lambda: [hit["hit_tokens"] for hit in hits_or_none(service)] == [32], "the same answer")
        psutil.Process(service.pids()[0]).kill()
        wait_for(lambda: len(service.events("replica_died")) == 1, "noticed")
        wait_for(lambda: [hit["hit_tokens"] for hit in hits_or_none(service)] == [32], "answers go on", 5)
        wait_for(lambda: service.answering() == 3, "started again", 60)
        until_all(service, lambda: [hit["hit_tokens"] for hit in hits_or_none(service)] == [32], "the same answer")
        service.note_children()
        assert service.stop() == 0, service.output
        assert service.is_alone()


def hits_or_none(service: ServiceProcess) -> list[dict[str, Any]]:
    """A connection to a process that was just killed is refused or cut."""
    status, answer = service.call("POST", "/v1/prefix-hits", {"model": "m", "token_ids": list(range(33))})
    return answer["hits"] if status == 200 else []


@pytest.mark.timeout(MANY_S)
def is_service(process: psutil.Process) -> bool:
    """One that has ended meanwhile, as processes of the database do now and then, is none."""
    try:
        return "postgres" not in process.name()
    except psutil.NoSuchProcess:
        return False


def test_replicas_do_not_outlive_a_killed_parent(data_dir: Path) -> None:
    with Replicas(data_dir, "--replicas", "2") as service:
        service.wait_until_ready()
        services = [child for child in service.note_children() if is_service(child)]
        service.process.kill()
        service.process.wait(10)
        gone, alive = psutil.wait_procs(services, timeout=40)
        assert not alive
        assert gone
