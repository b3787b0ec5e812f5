"""The client library against the service as its users start it."""

from __future__ import annotations

import signal
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from indexer.client import Reason, local_hashes
from tests.client_stand_ins import driven
from tests.e2e.service_process import Engine, ServiceProcess, wait_for

ENOUGH_S = 20.0
TOKENS = list(range(1, 49))
PROMPT = [*TOKENS, 49]
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@pytest.fixture(scope="module")
def service(shared_data_dir: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(shared_data_dir) as service:
        yield service.wait_until_ready()


@pytest.fixture(scope="module")
def engine(service: ServiceProcess) -> Iterator[Engine]:
    """It holds TOKENS."""
    with Engine("http://10.0.0.7:8000") as engine:
        assert engine.register(service)[0] == 201
        engine.wait_for_subscription()
        engine.store(1, None, TOKENS)
        engine.wait_until_applied(service)
        yield engine


@KINDS
def test_registering_asking_and_unregistering(kind: str, service: ServiceProcess) -> None:
    with driven(kind, service.url, deadline_s=ENOUGH_S) as client, Engine("http://10.0.0.8:8000") as engine:
        assert client.send("ready").is_done
        values = {"worker_id": engine.worker_id, "model": "another", "endpoint": engine.endpoint, "engine": "vllm"}
        outcome = client.send("register", **values)
        assert (outcome.is_done, outcome.status) == (True, 201)
        assert msgspec.json.decode(outcome.body)["worker_id"] == engine.worker_id
        assert client.send("register", **values).status == 200
        conflict = client.send("register", **values | {"block_size": 64}).failure
        assert conflict is not None
        assert (conflict.reason, conflict.code, conflict.field) == (Reason.REFUSED, "publisher_conflict", "block_size")
        engine.wait_for_subscription()
        engine.store(1, None, TOKENS)
        engine.wait_until_applied(service)
        answer = client.prefix_hits("another", PROMPT)
        assert (answer.is_signal, answer.prompt_tokens, answer.warnings) == (True, 49, ())
        (hit,) = answer.hits
        assert (hit.worker_id, hit.dp_rank, hit.hit_tokens, hit.resident_tokens) == (engine.worker_id, 0, 48, 48)
        assert (hit.tiers, hit.coverage, hit.sequence_number) == ({"GPU": 48, "CPU": 48}, "complete", 0)
        assert client.send("unregister", engine.worker_id).is_done
        assert client.prefix_hits("another", PROMPT).warnings[0].code == "unknown_model"
        gone = client.send("unregister", engine.worker_id, dp_rank=0).failure
        assert gone is not None
        assert (gone.status, gone.code) == (404, "unknown_publisher")


@KINDS
def test_every_field_of_a_query_is_understood(kind: str, service: ServiceProcess, engine: Engine) -> None:
    with driven(kind, service.url, deadline_s=ENOUGH_S) as client:
        for tokens in (PROMPT, array("I", PROMPT), array("I", PROMPT).tobytes(), tuple(PROMPT)):
            assert client.prefix_hits("m", tokens).scores() == {engine.worker_id: 48}
        for options in (
            {"lora_name": "adapter"},
            {"cache_salt": "salt"},
            {"tenant": "another"},
            {"workers": ["nobody"]},
            {"multimodal": [("image", 0, 4)]},
        ):
            answer = client.prefix_hits("m", PROMPT, **options)
            assert (answer.is_signal, answer.hits) == (True, ()), options
        assert client.prefix_hits("m", PROMPT, workers=[engine.worker_id]).scores() == {engine.worker_id: 48}
        (hit,) = client.prefix_hits("m", PROMPT, detail=True).hits
        assert [(span.start, span.end, span.tier) for span in hit.spans] == [(0, 48, "GPU")]
        (hit,) = client.prefix_hits("m", PROMPT, detail="tiers").hits
        assert hit.tier_tokens == {"GPU": 48, "CPU": 0}
        (hit,) = client.prefix_hits("m", PROMPT, detail="groups").hits
        assert [(group.kind, group.held_tokens) for group in hit.groups] == [("unknown", 48)]
        assert client.prefix_hits("m", PROMPT, min_hit_tokens=48, limit=1).scores() == {engine.worker_id: 48}
        assert client.prefix_hits("m", PROMPT, min_hit_tokens=49).hits == ()
        assert client.prefix_hits("m", [*TOKENS[:32], 2**40]).scores() == {engine.worker_id: 32}


@KINDS
def test_what_the_service_refuses_is_no_signal_and_says_why(kind: str, service: ServiceProcess) -> None:
    with driven(kind, service.url, deadline_s=ENOUGH_S) as client:
        failure = client.prefix_hits("m", []).failure
        assert failure is not None
        assert (failure.reason, failure.status, failure.code, failure.field) == (
            Reason.REFUSED, 422, "empty_prompt", "token_ids",
        )  # fmt: skip
        assert client.prefix_hits("m", PROMPT).is_signal, "the connection and the endpoint are as good as before"
        assert client.send("call", "GET", "/v1/nothing").failure is not None
        assert client.send("call", "GET", "/v1/stats").is_done


@KINDS
def test_hashes_of_the_client_find_what_tokens_find(kind: str, service: ServiceProcess, engine: Engine) -> None:
    hashes = array("Q", local_hashes(PROMPT, 16)).tolist()
    with driven(kind, service.url) as client:
        outcome = client.send("call", "POST", "/query_by_hash", {"model_name": "m", "block_hashes": hashes})
        assert msgspec.json.decode(outcome.body)["scores"] == {engine.worker_id: {"0": 48}}


@KINDS
def test_only_hashes_travel(kind: str, service: ServiceProcess, engine: Engine) -> None:
    with driven(kind, service.url, deadline_s=ENOUGH_S, granule=16) as client:
        answer = client.prefix_hits("m", PROMPT)
        assert (answer.prompt_tokens, answer.hits[0].resident_tokens) == (48, 48)
        assert client.prefix_hits("m", local_hashes=local_hashes(PROMPT, 16)).hits[0].resident_tokens == 48
        assert client.prefix_hits("m", PROMPT, cache_salt="salt").hits == ()


@KINDS
def test_a_service_that_is_not_ready_gives_no_signal(kind: str, tmp_path: Path) -> None:
    database = "postgresql://me@127.0.0.1:1/x"
    with ServiceProcess(tmp_path, "--database-url", database, "--wait") as service, driven(kind, service.url) as client:
        answer = client.prefix_hits("m", PROMPT, deadline_s=ENOUGH_S)
        assert answer.failure is not None
        assert (answer.reason, answer.failure.code) == (Reason.NOT_READY, "not_ready")
        ready = client.send("ready").failure
        assert ready is not None
        assert (ready.reason, ready.status) == (Reason.NOT_READY, 503)
        wait_for(lambda: "database" in str(client.send("ready").failure), "what is missing, in words")


@KINDS
def test_a_service_that_stands_still_costs_the_deadline_and_is_asked_again_when_it_goes_on(
    kind: str, service: ServiceProcess, engine: Engine
) -> None:
    with driven(kind, service.url) as client:
        assert client.prefix_hits("m", PROMPT, deadline_s=ENOUGH_S).is_signal
        service.process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            reasons = [client.prefix_hits("m", PROMPT).reason for _ in range(100)]
            assert time.monotonic() - began < ENOUGH_S
            assert set(reasons) == {Reason.DEADLINE, Reason.COOLING_DOWN}
        finally:
            service.process.send_signal(signal.SIGCONT)
        wait_for(lambda: client.prefix_hits("m", PROMPT, deadline_s=ENOUGH_S).is_signal, "a signal again")


@KINDS
def test_a_killed_service_is_failed_over_and_one_that_comes_back_is_asked_again(
    kind: str, service: ServiceProcess, engine: Engine, data_dir: Path
) -> None:
    with ServiceProcess(data_dir) as first:
        first.wait_until_ready()
        port = int(first.url.rpartition(":")[2])
        with driven(kind, [first.url, service.url], deadline_s=ENOUGH_S) as client:
            assert client.prefix_hits("m", PROMPT).hits == (), "the first knows no engine"
            first.process.kill()
            first.process.wait(10)
            assert client.prefix_hits("m", PROMPT).scores() == {engine.worker_id: 48}
            first.kill_children()
            with ServiceProcess(data_dir, port=port) as again:
                again.wait_until_ready()
                wait_for(lambda: client.prefix_hits("m", PROMPT).hits == (), "the first asked again")
            assert client.client.counts().no_signal == {}


@KINDS
def test_with_nobody_there_a_router_goes_on_at_once(kind: str, data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service, driven(kind, service.url) as client:
        service.wait_until_ready()
        assert client.prefix_hits("m", PROMPT, deadline_s=ENOUGH_S).is_signal
        service.stop()
        began = time.monotonic()
        answers = [client.prefix_hits("m", PROMPT, deadline_s=ENOUGH_S) for _ in range(100)]
        assert time.monotonic() - began < ENOUGH_S
        assert {answer.reason for answer in answers} == {Reason.UNREACHABLE, Reason.COOLING_DOWN}
