"""Connections are reused, bounded, and never trusted longer than they live; endpoints fail over within the deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time

import pytest

from indexer.client import AsyncIndexClient, Failure, IndexClient, PrefixHits, Reason
from tests.client_stand_ins import (
    HIT,
    LOOPS,
    Behaviour,
    HostileServer,
    answers_well,
    closes,
    driven,
    hits,
    http,
    name_addresses,
    never_accepts,
    never_answers,
    says,
    waits_for,
)
from tests.e2e.service_process import wait_for

ENOUGH_S = 20.0
TOKENS = list(range(49))
KINDS = pytest.mark.parametrize("kind", ["sync", "async", "uvloop"])
REFUSAL = b'{"error":{"code":"prompt_too_long","message":"token_ids holds 9 tokens","field":"token_ids"}}'


@KINDS
def test_queries_in_turn_take_one_connection(kind: str) -> None:
    with HostileServer() as server, driven(kind, server.url) as client:
        for _ in range(5):
            assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
        assert (server.connections, client.client.counts().answered) == (1, 5)


@KINDS
def test_a_connection_that_was_closed_meanwhile_is_replaced_without_a_failure(kind: str) -> None:
    with HostileServer() as server, driven(kind, server.url) as client:
        for number in range(1, 4):
            assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
            assert server.connections == number
            server.close_connections()
        assert client.client.counts().failed_over == {}


@KINDS
def test_a_connection_that_closes_instead_of_answering_again_is_replaced(kind: str) -> None:
    turns = iter([answers_well, closes, answers_well])

    def takes_turns(connection: socket.socket, closed: threading.Event) -> None:
        next(turns)(connection, closed)

    with HostileServer(takes_turns) as server, driven(kind, server.url) as client:
        assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
        assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
        assert (server.connections, len(server.requests)) == (2, 3)


@KINDS
def test_a_server_that_wants_to_close_is_not_asked_on_that_connection_again(kind: str) -> None:
    answer = hits(HIT).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    with HostileServer(says(answer)) as server, driven(kind, server.url) as client:
        for number in (1, 2):
            assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
            assert server.connections == number


@KINDS
def test_no_more_connections_than_allowed(kind: str) -> None:
    with HostileServer() as server, driven(kind, server.url, connections_max=2) as client:
        answers = client.together(20, "m", TOKENS, deadline_s=ENOUGH_S)
        assert all(answer.is_signal for answer in answers)
        assert server.connections <= 2


def is_busy(answer: PrefixHits) -> bool:
    return answer.reason is Reason.DEADLINE and answer.failure is not None and "busy" in answer.failure.message


def test_a_thread_waits_for_a_connection_until_its_deadline() -> None:
    gate = threading.Event()
    with HostileServer(waits_for(gate)) as server, IndexClient(server.url, connections_max=1) as client:
        first: list[PrefixHits] = []
        thread = threading.Thread(target=lambda: first.append(client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S)))
        thread.start()
        wait_for(lambda: server.requests, "the first request")
        assert is_busy(client.prefix_hits("m", TOKENS, deadline_s=0.02))
        gate.set()
        thread.join()
        assert first[0].is_signal
        assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal, "nothing was held against the endpoint"


def test_a_task_waits_for_a_connection_until_its_deadline() -> None:
    gate = threading.Event()

    async def scenario(url: str) -> None:
        async with AsyncIndexClient(url, connections_max=1) as client:
            first = asyncio.create_task(client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S))
            await asyncio.to_thread(wait_for, lambda: server.requests, "the first request")
            assert is_busy(await client.prefix_hits("m", TOKENS, deadline_s=0.02))
            gate.set()
            assert (await first).is_signal
            assert (await client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S)).is_signal

    with HostileServer(waits_for(gate)) as server:
        asyncio.run(scenario(server.url))


@KINDS
@pytest.mark.parametrize("behaviour", [closes, never_answers, says(http("503 Service Unavailable", b""))])
def test_the_next_endpoint_answers_within_the_same_deadline(kind: str, behaviour: Behaviour) -> None:
    with HostileServer(behaviour) as first, HostileServer() as second, driven(kind, [first.url, second.url]) as client:
        answer = client.prefix_hits("m", TOKENS, deadline_s=2.0)
        assert answer.scores() == {"w": 32}
        counts = client.client.counts()
        assert (counts.answered, counts.no_signal, sum(counts.failed_over.values())) == (1, {}, 1)


@KINDS
def test_an_endpoint_that_failed_is_left_alone_then_probed_and_preferred_again(kind: str) -> None:
    with HostileServer(closes) as first, HostileServer() as second:
        urls = [first.url, second.url]
        with driven(kind, urls) as client:
            for _ in range(3):
                assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
            assert len(second.requests) == 3
            assert len(first.requests) < 3
            first.behaviour = answers_well
            ends = time.monotonic() + ENOUGH_S
            asked = len(first.requests)
            while len(first.requests) == asked:
                assert time.monotonic() < ends, "the first was never asked again"
                assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
            asked = len(second.requests)
            assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
            assert len(second.requests) == asked


@KINDS
def test_a_refusal_is_final_and_says_its_code(kind: str) -> None:
    seen: list[Failure] = []
    refuses = says(http("422 Unprocessable Entity", REFUSAL, "application/json"))
    with HostileServer(refuses) as first, HostileServer() as second:
        urls = [first.url, second.url]
        with driven(kind, urls, on_no_signal=seen.append) as client:
            answer = client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S)
            assert (answer.reason, answer.failure) == (Reason.REFUSED, seen[0])
            assert (seen[0].status, seen[0].code, seen[0].field) == (422, "prompt_too_long", "token_ids")
            assert seen[0].message == f"{first.url} answered 422: token_ids holds 9 tokens"
            assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).reason is Reason.REFUSED
            assert (len(first.requests), second.requests) == (2, [])
            assert client.client.counts().no_signal == {Reason.REFUSED: 2}


@KINDS
def test_the_key_and_the_path_before_the_routes_are_sent(kind: str) -> None:
    with HostileServer() as server, driven(kind, server.url + "/index/", api_key="k-1") as client:
        assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
        head = server.requests[0].partition(b"\r\n\r\n")[0]
        assert head.startswith(b"POST /index/v1/prefix-hits HTTP/1.1\r\n")
        assert b"\r\nauthorization: Bearer k-1\r\n" in head


@KINDS
def test_closing_a_client_closes_its_connections(kind: str) -> None:
    with HostileServer() as server, driven(kind, server.url) as client:
        assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal
        client.close()
        wait_for(lambda: server.ended == 1, "the end of the connection")


def test_use_after_close_is_a_mistake() -> None:
    client = IndexClient("http://127.0.0.1:1")
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.prefix_hits("m", TOKENS)


def test_many_threads_share_one_client() -> None:
    with HostileServer() as server, IndexClient(server.url, deadline_s=ENOUGH_S) as client:
        answers: list[bool] = []

        def ask() -> None:
            answers.extend(client.prefix_hits("m", TOKENS).scores() == {"w": 32} for _ in range(50))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [True] * 400
        assert server.connections <= 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_use_its_parents_connections() -> None:
    with HostileServer() as server, IndexClient(server.url, deadline_s=ENOUGH_S) as client:
        assert client.prefix_hits("m", TOKENS).is_signal
        child = os.fork()
        if child == 0:
            os._exit(0 if client.prefix_hits("m", TOKENS).is_signal else 1)
        try:
            assert os.waitpid(child, 0)[1] == 0
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        assert client.prefix_hits("m", TOKENS).is_signal
        assert (server.connections, client.counts().answered) == (2, 2)


def test_an_async_client_goes_on_in_another_event_loop() -> None:
    with HostileServer() as server:
        client = AsyncIndexClient(server.url, deadline_s=ENOUGH_S)
        for number in (1, 2):
            assert asyncio.run(client.prefix_hits("m", TOKENS)).is_signal
            assert server.connections == number


def test_a_cancelled_call_leaves_no_connection_behind() -> None:
    async def cancelled(server: HostileServer) -> None:
        async with AsyncIndexClient(server.url, deadline_s=ENOUGH_S) as client:
            task = asyncio.create_task(client.prefix_hits("m", TOKENS))
            await asyncio.to_thread(wait_for, lambda: server.requests, "the request")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.behaviour = answers_well
            assert (await client.prefix_hits("m", TOKENS)).is_signal
            assert server.connections == 2

    with HostileServer(never_answers) as server:
        asyncio.run(cancelled(server))


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    name_addresses(monkeypatch, "127.0.0.9", "127.0.0.1")
    with HostileServer() as server:
        url = server.url.replace("127.0.0.1", "index.example")
        with IndexClient(url, deadline_s=ENOUGH_S) as client:
            assert client.prefix_hits("m", TOKENS).is_signal


@KINDS
def test_an_address_that_does_not_accept_costs_one_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name_addresses(monkeypatch, "127.0.0.9", "127.0.0.1")
    with HostileServer() as server:
        port = int(server.url.rpartition(":")[2])
        with never_accepts("127.0.0.9", port), driven(kind, f"http://index.example:{port}") as client:
            assert client.prefix_hits("m", TOKENS, deadline_s=0.1).reason is Reason.DEADLINE
            wait_for(lambda: client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).is_signal, "the other address")


@pytest.mark.parametrize("kind", ["async", "uvloop"])
def test_what_came_while_the_loop_was_held_up_is_not_too_late(kind: str) -> None:
    gate, answered = threading.Event(), threading.Event()
    deadline_s = 0.05

    def answers_once_let(connection: socket.socket, closed: threading.Event) -> None:
        waits_for(gate)(connection, closed)
        answered.set()

    async def scenario(url: str) -> None:
        async with AsyncIndexClient(url) as client:
            assert (await client.ready(timeout_s=ENOUGH_S)).is_done
            gate.clear()
            answered.clear()
            task = asyncio.create_task(client.prefix_hits("m", TOKENS, deadline_s=deadline_s))
            began = time.monotonic()
            while len(server.requests) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            asyncio.get_running_loop().add_reader(bell, hold_up, began + 2 * deadline_s)
            ringer.send(b"1")
            assert (await task).is_signal

    def hold_up(until: float) -> None:
        """Among what comes in: the event loop may look at its timers before it reads anything else."""
        asyncio.get_running_loop().remove_reader(bell)
        gate.set()
        wait_for(lambda: answered.is_set() and time.monotonic() > until, "a late look")

    bell, ringer = socket.socketpair()
    gate.set()
    with HostileServer(answers_once_let) as server, asyncio.Runner(loop_factory=LOOPS[kind]) as runner, bell, ringer:
        runner.run(scenario(server.url))
