from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from indexer.api.dialects.dynamo_bodies import Worker
from tests.unit.api.stand_ins import World, error_of

ID = 2**64 - 1
REGISTRATION = {"instance_id": ID, "endpoint": "tcp://10.0.0.7:5557", "model_name": "m", "block_size": 16}


def workers(world: World, query: str = "") -> Any:
    response = world.client.get(f"/workers{query}")
    assert response.status_code == 200
    TypeAdapter(list[Worker]).validate_python(response.json())
    return response.json()


@pytest.fixture
def fleet(world: World) -> World:
    for values in ({}, {"dp_rank": 1, "endpoint": "tcp://10.0.0.7:5558"}):
        assert world.client.post("/register", json=REGISTRATION | values).status_code == 201
    assert world.register(worker_id="http://w", model="other", tenant="t").status_code == 201
    assert world.register(worker_id="store", kind="pool").status_code == 201
    return world


def test_an_instance_is_listed_with_its_ranks(fleet: World) -> None:
    failed = fleet.registry.find(str(ID), 1)
    assert failed
    failed.state, failed.last_error = "failed", "no route"
    assert workers(fleet) == [
        {
            "instance_id": ID,
            "source": "zmq",
            "status": "failed",
            "model_name": "m",
            "routing_group": "default",
            "block_size": 16,
            "endpoints": {"0": "tcp://10.0.0.7:5557", "1": "tcp://10.0.0.7:5558"},
            "listeners": {
                "0": {"endpoint": "tcp://10.0.0.7:5557", "status": "active"},
                "1": {"endpoint": "tcp://10.0.0.7:5558", "status": "failed", "last_error": "no route"},
            },
        },
        {
            "instance_id": "http://w",
            "source": "zmq",
            "status": "active",
            "model_name": "other",
            "routing_group": "t",
            "block_size": None,
            "endpoints": {"0": "tcp://127.0.0.1:5557"},
            "listeners": {"0": {"endpoint": "tcp://127.0.0.1:5557", "status": "active"}},
        },
    ]


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (("connected", "replaying"), "active"),
        (("connected", "connecting"), "pending"),
        (("connected", "disconnected"), "pending"),
        (("connecting", "failed"), "failed"),
    ],
)
def test_the_worst_rank_decides(fleet: World, states: tuple[str, str], status: str) -> None:
    for rank, state in enumerate(states):
        followed = fleet.registry.find(str(ID), rank)
        assert followed
        followed.state = state
    assert workers(fleet)[0]["status"] == status


def test_workers_are_filtered_by_model_and_group(fleet: World) -> None:
    assert [w["instance_id"] for w in workers(fleet, "?model_name=m")] == [ID]
    assert [w["instance_id"] for w in workers(fleet, "?routing_group=t")] == ["http://w"]
    assert workers(fleet, "?model_name=x") == []
    assert workers(fleet, "?model_name=m&routing_group=t") == []


@pytest.mark.parametrize("worker_id", ["07", "+7", "18446744073709551616", "\u0667", "1_0"])
def test_what_is_no_u64_stays_text(world: World, worker_id: str) -> None:
    assert world.register(worker_id=worker_id).status_code == 201
    assert workers(world)[0]["instance_id"] == worker_id


def test_there_are_no_peers_and_none_can_be_registered(world: World) -> None:
    assert world.client.get("/peers").json() == []
    peer = {"url": "http://10.0.0.9:8090"}
    assert error_of(world.client.post("/register_peer", json=peer)) == (422, "peers_not_supported", "url")
    assert error_of(world.client.post("/deregister_peer", json=peer)) == (404, "unknown_peer", "url")
    for path in ("/register_peer", "/deregister_peer"):
        assert error_of(world.client.post(path, json={})) == (422, "missing_field", "url")
        assert error_of(world.client.post(path, content=b"{")) == (400, "invalid_json", None)


def test_workers_are_not_listed_before_recovery(world: World) -> None:
    world.life.is_recovered, world.life.lacks = False, ["the index is being recovered"]
    assert error_of(world.client.get("/workers")) == (503, "not_ready", None)
