"""A fleet with an engine of every dialect against the service itself, before and after the service starts again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from indexer.simulate.flavours import FLAVOURS
from indexer.simulate.fleet import Fleet
from tests.e2e.service_process import ServiceProcess, wait_for

ANSWERS = 120
TOKENS = list(range(1000, 1097))
QUERY = {"model": "demo", "token_ids": TOKENS}


def live(url: str, answers: int, *, unregister: bool) -> Fleet:
    """A fleet's life until so many of the service's answers were compared."""

    async def scenario() -> Fleet:
        fleet = Fleet(url, engines=len(FLAVOURS), rate=100, restarts=False, check_interval_s=0.05)
        task = asyncio.create_task(fleet.live(unregister=unregister))
        async with asyncio.timeout(60):
            while fleet.report.checked < answers and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        return fleet

    return asyncio.run(scenario())


def hits_of(service: ServiceProcess) -> dict[str, int]:
    return {hit["worker_id"]: hit["hit_tokens"] for hit in service.call("POST", "/v1/prefix-hits", QUERY)[1]["hits"]}


def all_disconnected(service: ServiceProcess) -> Any:
    """The publishers, once none of them can say anything more."""
    publishers = service.call("GET", "/v1/publishers")[1]["publishers"]
    return publishers if {p["state"] for p in publishers} == {"disconnected"} else None


def test_every_dialect_is_answered_exactly_and_survives_a_restart_of_the_service(data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        fleet = live(service.url, ANSWERS, unregister=False)
        assert fleet.report.checked >= ANSWERS
        assert fleet.report.exact == fleet.report.checked, fleet.report.wrong
        publishers = wait_for(lambda: all_disconnected(service), "the end of every stream")
        assert service.call("GET", "/v1/audit")[1]["is_equal"]
        assert {p["dialect"] for p in publishers} == {engine.flavour.engine for engine in fleet.engines}
        assert not any(p["counts"]["bad_events"] for p in publishers)
        before = hits_of(service)
        assert len(before) > 1
        assert service.stop() == 0, service.output
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        wait_for(lambda: hits_of(service) == before, "the same hits")
