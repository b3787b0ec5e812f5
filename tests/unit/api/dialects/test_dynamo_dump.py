from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from indexer.api.dialects.dynamo_dump import DumpedModel
from indexer.index.state import StoredBlock, StoredCut
from indexer.registration import Registration
from tests.unit.api.stand_ins import World, error_of

ROOT, CHILD = 2**64 - 1, 12466389667045779788


def cut(worker_id: str, number: int | None, model: str = "m", tenant: str = "default", dp_rank: int = 0) -> StoredCut:
    registration = Registration(worker_id, dp_rank, model, "tcp://127.0.0.1:5557", tenant=tenant, block_size=16)
    return StoredCut(registration, None if number is None else 16, "complete", number)


def block(key: int, parent: int | None, local: int | None, position: int, medium: str = "GPU") -> StoredBlock:
    return StoredBlock(medium, 0, key, parent, local, 16, position)


def event(
    worker_id: int | str, number: int, key: int, parent: int | None, local: int | None, **where: object
) -> object:
    stored = {
        "parent_hash": parent,
        "start_position": where.get("start", 0),
        "blocks": [{"block_hash": key, "tokens_hash": local}],
    }
    return {
        "worker_id": worker_id,
        "storage_tier": where.get("tier", "device"),
        "event": {"event_id": number, "data": {"stored": stored}, "dp_rank": where.get("rank", 0)},
        "group_idx": 0,
    }


def test_every_block_is_an_event_at_its_publishers_cut(world: World) -> None:
    world.store.dumped = [
        cut("7", 41),
        [block(ROOT, None, ROOT, 0), block(CHILD, ROOT, 5, 16)],
        [block(CHILD, ROOT, None, 16, "CPU"), block(9, ROOT, 4, 16, "GPU@REMOTE")],
        cut("7", 12, dp_rank=1),
        [block(ROOT, None, ROOT, 0, "DISK")],
        cut("http://w", None),
        cut("8", 1, model="other", tenant="t"),
        [block(ROOT, None, ROOT, 0, "EXTERNAL")],
    ]
    response = world.client.get("/dump")
    TypeAdapter(dict[str, DumpedModel]).validate_python(response.json())
    known = {"block_size": 16, "coverage": "complete"}
    assert response.json() == {
        "m:default": {
            "block_size": 16,
            "events": [
                event(7, 41, ROOT, None, ROOT),
                event(7, 41, CHILD, ROOT, 5, start=1),
                event(7, 41, CHILD, ROOT, None, start=1, tier="host_pinned"),
                event(7, 12, ROOT, None, ROOT, tier="disk", rank=1),
            ],
            "publishers": [
                {"instance_id": 7, "dp_rank": 0, "sequence_number": 41, **known},
                {"instance_id": 7, "dp_rank": 1, "sequence_number": 12, **known},
                {"instance_id": "http://w", "dp_rank": 0, "sequence_number": None, **known},
            ],
        },
        "other:t": {
            "block_size": 16,
            "events": [event(8, 1, ROOT, None, ROOT, tier="external")],
            "publishers": [{"instance_id": 8, "dp_rank": 0, "sequence_number": 1, **known}],
        },
    }


def test_nothing_registered_is_an_empty_dump(world: World) -> None:
    response = world.client.get("/dump")
    assert (response.status_code, response.json()) == (200, {})
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("portions", [[[]], [[], [block(ROOT, None, ROOT, 0)]], [[block(9, None, 9, 0, "X@REMOTE")]]])
def test_portions_may_be_empty(world: World, portions: list[list[StoredBlock]]) -> None:
    world.store.dumped = [cut("7", 1), *portions, cut("8", 2, model="n"), *portions]
    assert set(world.client.get("/dump").json()) == {"m:default", "n:default"}


def test_a_database_that_is_away_is_a_503(world: World) -> None:
    world.store.is_away = True
    assert error_of(world.client.get("/dump")) == (503, "store_unavailable", None)


def test_nothing_is_dumped_before_recovery(world: World) -> None:
    world.life.is_recovered, world.life.lacks = False, ["the index is being recovered"]
    assert error_of(world.client.get("/dump")) == (503, "not_ready", None)
