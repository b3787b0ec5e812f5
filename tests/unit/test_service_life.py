from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from indexer import service
from indexer.service import Service, ServiceLife
from indexer.store.audit import AuditReport, Difference


@dataclass
class StandInDatabase:
    is_reachable: bool = True
    last_error: str = "it is away"


@dataclass
class StandInFollowed:
    state: str = "connected"
    is_in_first_replay: bool = False


@dataclass
class StandInRegistry:
    entries: list[StandInFollowed] = field(default_factory=list)

    def followed(self) -> list[StandInFollowed]:
        return self.entries


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    return clock


def life_of(*followed: StandInFollowed, database: Any = None) -> ServiceLife:
    database = database or StandInDatabase()
    return ServiceLife(database, StandInRegistry(list(followed)), ready_wait_s=15)  # type: ignore[arg-type]


def test_before_recovery_what_it_waits_for_is_missing(clock: Clock) -> None:
    life = life_of()
    assert not life.is_recovered
    assert life.missing() == ["the kernels are being compiled, which takes half a minute or more at the first start"]
    life.is_compiled = True
    assert life.missing() == ["the index is being recovered from the database"]


def test_recovered_with_nobody_to_wait_for_is_ready(clock: Clock) -> None:
    life = life_of()
    life.note_recovered()
    assert life.missing() == []


def test_a_database_that_is_away_is_missing(clock: Clock) -> None:
    life = life_of(database=StandInDatabase(is_reachable=False))
    life.note_recovered()
    assert life.missing() == ["the database is not reachable: it is away"]


def test_a_first_replay_holds_readiness_back_but_not_for_ever(clock: Clock) -> None:
    life = life_of(StandInFollowed("replaying", is_in_first_replay=True))
    life.note_recovered()
    assert life.missing() == ["publishers in their first replay: 1"]
    clock.now += 15.1
    assert life.missing() == []


def test_an_engine_that_is_gone_holds_it_back_for_a_moment_only(clock: Clock) -> None:
    life = life_of(StandInFollowed("connecting"))
    life.note_recovered()
    assert life.missing()
    clock.now += service.CONNECT_GRACE_S
    assert life.missing() == []


def test_once_ready_a_new_publisher_changes_nothing(clock: Clock) -> None:
    entry = StandInFollowed()
    life = life_of(entry)
    life.note_recovered()
    assert life.missing() == []
    entry.is_in_first_replay = True
    assert life.missing() == []


def test_stopping_is_all_that_is_missing(clock: Clock) -> None:
    life = life_of()
    life.note_recovered()
    life.is_stopping = True
    assert life.missing() == ["the service is stopping"]


@pytest.mark.parametrize("kind", ["checkpoint", "publisher"])
def test_an_audit_that_met_a_change_is_made_again(kind: str) -> None:
    changed, equal = AuditReport(), AuditReport()
    changed.add(Difference("w", 0, kind, "where", None, "registered"))
    reports = [equal, changed]

    async def flush() -> None: ...

    async def audit(*_: object) -> AuditReport:
        return reports.pop()

    async def ask() -> dict[str, object]:
        parts: Any = SimpleNamespace(
            _one_audit=asyncio.Lock(),
            _writer=SimpleNamespace(flush=flush, writes=None),
            index=None,
            database=SimpleNamespace(store=SimpleNamespace(audit=audit), leases=SimpleNamespace(look_now=flush)),
        )
        return await Service.audit(parts)

    assert asyncio.run(ask())["is_equal"]
