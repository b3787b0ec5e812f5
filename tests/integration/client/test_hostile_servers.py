"""Whatever the other side does, a query ends by its deadline without a signal, and the next one is answered."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from indexer.client import PrefixHits, Reason
from tests.client_stand_ins import (
    HIT,
    Behaviour,
    DrivenClient,
    HostileServer,
    answers_well,
    closes,
    driven,
    floods,
    hits,
    http,
    never_accepts,
    never_answers,
    resets,
    says,
    trickles,
)

DEADLINE_S = 0.1
FAR_BEYOND_S = 5.0
ENOUGH_S = 20.0
TOKENS = list(range(49))
KINDS = pytest.mark.parametrize("kind", ["sync", "async", "uvloop"])

ENDLESS_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\n"
HOSTILE: dict[str, tuple[Behaviour, Reason]] = {
    "never answers": (never_answers, Reason.DEADLINE),
    "trickles its head": (trickles(ENDLESS_HEAD + b"x: " + b"y" * 100_000), Reason.DEADLINE),
    "trickles its body": (trickles(ENDLESS_HEAD + b"content-length: 100000\r\n\r\n" + b"y" * 100_000), Reason.DEADLINE),
    "announces an answer for ever": (
        floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), Reason.MALFORMED,
    ),
    "stops in its head": (says(b"HTTP/1.1 200 OK\r\ncontent-le"), Reason.DEADLINE),
    "stops in its body": (says(hits(HIT)[:-3]), Reason.DEADLINE),
    "closes at once": (closes, Reason.UNREACHABLE),
    "resets": (resets, Reason.UNREACHABLE),
    "closes in its body": (
        lambda connection, closed: (connection.sendall(hits(HIT)[:-3]), connection.close())[1], Reason.UNREACHABLE,
    ),
    "speaks no HTTP": (says(b"SSH-2.0-OpenSSH_9.6\r\n"), Reason.MALFORMED),
    "speaks nothing": (says(bytes(range(256))), Reason.MALFORMED),
    "sends a head without end": (floods(ENDLESS_HEAD, b"x: " + b"y" * 1_000 + b"\r\n"), Reason.MALFORMED),
    "sends a body without end": (
        floods(ENDLESS_HEAD + b"content-length: 99999999999\r\n\r\n", b"y" * 1_000_000), Reason.MALFORMED,
    ),
    "sends chunks that are none": (says(ENDLESS_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"), Reason.MALFORMED),
    "says two lengths": (says(ENDLESS_HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nxx"), Reason.MALFORMED),
    "redirects": (
        says(b"HTTP/1.1 307 Moved\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"), Reason.MALFORMED,
    ),
    "changes the protocol": (
        says(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"), Reason.MALFORMED,
    ),
    "answers with nothing": (says(b"HTTP/1.1 204 No Content\r\n\r\n"), Reason.MALFORMED),
    "answers JSON": (says(http("200 OK", b'{"prompt_tokens":1,"hits":[]}')), Reason.MALFORMED),
    "answers something else": (says(http("200 OK", msgspec.msgpack.encode({"ok": True}))), Reason.MALFORMED),
    "answers with wrong types": (says(hits(HIT | {"hit_tokens": "many"})), Reason.MALFORMED),
    "nests without end": (says(http("200 OK", b"\x91" * 100_000)), Reason.MALFORMED),
    "breaks down": (says(http("500 Internal Server Error", b"<html>oh no</html>", "text/html")), Reason.REFUSED),
    "is a proxy without a service": (says(http("502 Bad Gateway", b"")), Reason.REFUSED),
    "is overloaded": (says(http("503 Service Unavailable", b"\xff\xfe")), Reason.NOT_READY),
}  # fmt: skip


def until_signal(client: DrivenClient) -> PrefixHits:
    """Asks until it is answered: after a failure the endpoint is left alone for a while."""
    ends = time.monotonic() + ENOUGH_S
    while time.monotonic() < ends:
        answer = client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S)
        if answer.is_signal:
            return answer
        assert answer.reason is Reason.COOLING_DOWN, answer.failure
    raise AssertionError("no signal any more")


@KINDS
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_costs_a_signal_and_no_more(kind: str, name: str) -> None:
    behaviour, reason = HOSTILE[name]
    deadline_s = ENOUGH_S if reason is not Reason.DEADLINE else DEADLINE_S
    with HostileServer(behaviour) as server, driven(kind, server.url) as client:
        began = time.monotonic()
        answer = client.prefix_hits("m", TOKENS, deadline_s=deadline_s)
        assert time.monotonic() - began < deadline_s + FAR_BEYOND_S
        assert (answer.is_signal, answer.reason, answer.hits) == (False, reason, ())
        assert answer.failure is not None
        assert server.url in answer.failure.message
        server.behaviour = answers_well
        assert until_signal(client).scores() == {"w": 32}


@KINDS
def test_of_what_comes_after_an_answer_nothing_is_taken_for_the_next_one(kind: str) -> None:
    other = hits(HIT | {"worker_id": "of another question"})
    with HostileServer(says(hits(HIT) + other)) as server, driven(kind, server.url) as client:
        for _ in range(3):
            assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).scores() == {"w": 32}
        assert server.connections == 3


@KINDS
def test_of_what_comes_later_nothing_is_taken_for_the_next_answer(kind: str) -> None:
    late: list[Callable[[], None]] = []

    def answers_and_may_go_on(connection: socket.socket, _: object) -> None:
        late.append(lambda: connection.sendall(hits(HIT | {"worker_id": "of another question"})))
        connection.sendall(hits(HIT))

    with HostileServer(answers_and_may_go_on) as server, driven(kind, server.url) as client:
        for number in range(1, 4):
            assert client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S).scores() == {"w": 32}
            assert server.connections == number
            late.pop()()


@KINDS
def test_a_late_answer_is_not_taken_for_the_next_one(kind: str) -> None:
    gates: list[socket.socket] = []

    def waits(connection: socket.socket, _: object) -> None:
        gates.append(connection)

    with HostileServer(waits) as server, driven(kind, server.url) as client:
        assert client.prefix_hits("m", TOKENS, deadline_s=DEADLINE_S).reason is Reason.DEADLINE
        server.behaviour = answers_well
        with suppress(OSError):  # closed already, which is as well
            gates[0].sendall(hits(HIT | {"worker_id": "of another question"}))
        assert until_signal(client).scores() == {"w": 32}


@KINDS
def test_who_does_not_accept_is_given_up_in_time(kind: str) -> None:
    with never_accepts() as port, driven(kind, f"http://127.0.0.1:{port}") as client:
        began = time.monotonic()
        answer = client.prefix_hits("m", TOKENS, deadline_s=DEADLINE_S)
        assert time.monotonic() - began < FAR_BEYOND_S
        assert answer.reason is Reason.DEADLINE


@KINDS
def test_nobody_at_the_address_is_unreachable_at_once(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with driven(kind, f"http://127.0.0.1:{port}") as client:
        answer = client.prefix_hits("m", TOKENS, deadline_s=ENOUGH_S)
        assert answer.reason is Reason.UNREACHABLE
        assert client.prefix_hits("m", TOKENS).reason is Reason.COOLING_DOWN
        assert client.send("ready").reason is Reason.UNREACHABLE, "a call that is no query asks all the same"


@KINDS
def test_plain_http_where_tls_is_expected_is_no_signal(kind: str) -> None:
    with HostileServer(says(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as server:
        url = server.url.replace("http:", "https:")
        with driven(kind, url) as client:
            answer = client.prefix_hits("m", TOKENS, deadline_s=DEADLINE_S)
            assert answer.reason in (Reason.UNREACHABLE, Reason.DEADLINE)


@KINDS
def test_a_lookup_that_hangs_does_not_outlast_the_deadline(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, gate = socket.getaddrinfo, threading.Event()

    def slow(host: str, *arguments: object, **named: object) -> object:
        if host == "index.example":
            gate.wait(ENOUGH_S)
            host = "127.0.0.1"
        return real(host, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with HostileServer() as server, driven(kind, server.url.replace("127.0.0.1", "index.example")) as client:
        began = time.monotonic()
        assert client.prefix_hits("m", TOKENS, deadline_s=DEADLINE_S).reason is Reason.DEADLINE
        assert time.monotonic() - began < FAR_BEYOND_S
        gate.set()
        assert until_signal(client).scores() == {"w": 32}


@KINDS
def test_a_name_that_nobody_knows_is_unreachable(kind: str) -> None:
    with driven(kind, "http://nowhere.invalid:8090") as client:
        assert client.send("ready", timeout_s=ENOUGH_S).reason is Reason.UNREACHABLE
