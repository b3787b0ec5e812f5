"""For tests of the client library: servers that misbehave on real sockets, and both clients driven alike."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias

import msgspec
import pytest
import uvloop

from indexer.client import AsyncIndexClient, IndexClient, Outcome, PrefixHits

Behaviour: TypeAlias = Callable[[socket.socket, threading.Event], None]
"""What a server does once it has read a request. The event is set when the server is closed."""

LOOPS = {"async": None, "uvloop": uvloop.new_event_loop}

HIT = {"worker_id": "w", "dp_rank": 0, "hit_tokens": 32, "resident_tokens": 48, "tiers": {"GPU": 48}}


def http(status: str, body: bytes, content_type: str = "application/msgpack") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def says(answer: bytes) -> Behaviour:
    return lambda connection, _: connection.sendall(answer)


def hits(*found: dict[str, Any]) -> bytes:
    return http("200 OK", msgspec.msgpack.encode({"prompt_tokens": 49, "hits": list(found), "warnings": []}))


answers_well = says(hits(HIT))


def closes(connection: socket.socket, _: threading.Event) -> None:
    connection.close()


def resets(connection: socket.socket, _: threading.Event) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def never_answers(_: socket.socket, closed: threading.Event) -> None:
    closed.wait()


def waits_for(gate: threading.Event) -> Behaviour:
    """And then answers well."""

    def behave(connection: socket.socket, closed: threading.Event) -> None:
        gate.wait()
        answers_well(connection, closed)

    return behave


def trickles(answer: bytes) -> Behaviour:
    """A byte now and then, for ever if need be."""

    def behave(connection: socket.socket, closed: threading.Event) -> None:
        for place in range(len(answer)):
            connection.sendall(answer[place : place + 1])
            if closed.wait(0.005):
                return

    return behave


def floods(head: bytes, part: bytes) -> Behaviour:
    def behave(connection: socket.socket, closed: threading.Event) -> None:
        connection.sendall(head)
        while not closed.is_set():
            connection.sendall(part)

    return behave


@contextmanager
def never_accepts(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port whose queue of connections is full."""
    with socket.socket() as full, ExitStack() as stack:
        full.bind((host, port))
        full.listen(0)
        for _ in range(5):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def name_addresses(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """The host `index.example` has these."""
    real = socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **named: Any) -> Any:
        if host != "index.example":
            return real(host, *arguments, **named)
        return [found for address in addresses for found in real(address, *arguments, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


class HostileServer:
    """Reads requests, and does with each what `behaviour` says at that moment."""

    def __init__(self, behaviour: Behaviour = answers_well) -> None:
        self.behaviour = behaviour
        self.requests: list[bytes] = []
        self.connections = 0
        self.ended = 0
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close_connections(self) -> None:
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> HostileServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listener.close()
        self.close_connections()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection:
            while request := _read_request(connection):
                self.requests.append(request)
                self.behaviour(connection, self._closed)
        self.ended += 1


def _read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65_536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


class DrivenClient:
    """Either client, by the same synchronous methods."""

    def __init__(self, kind: str, urls: Any, **settings: Any) -> None:
        self._runner = None if kind == "sync" else asyncio.Runner(loop_factory=LOOPS[kind])
        self._is_closed = False
        client = IndexClient if kind == "sync" else AsyncIndexClient
        self.client: Any = client(urls, **settings)

    def prefix_hits(self, *arguments: Any, **named: Any) -> PrefixHits:
        answer = self._run("prefix_hits", arguments, named)
        assert isinstance(answer, PrefixHits)
        return answer

    def send(self, name: str, *arguments: Any, **named: Any) -> Outcome:
        outcome = self._run(name, arguments, named)
        assert isinstance(outcome, Outcome)
        return outcome

    def together(self, count: int, *arguments: Any, **named: Any) -> list[PrefixHits]:
        """So many queries at once."""
        if self._runner is not None:
            return list(self._runner.run(self._gather(count, arguments, named)))
        answers: list[PrefixHits] = []
        threads = [
            threading.Thread(target=lambda: answers.append(self.client.prefix_hits(*arguments, **named)))
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def close(self) -> None:
        """May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._runner is None:
            self.client.close()
        else:
            self._runner.run(self.client.close())
            self._runner.close()

    async def _gather(self, count: int, arguments: Any, named: Any) -> list[PrefixHits]:
        return await asyncio.gather(*(self.client.prefix_hits(*arguments, **named) for _ in range(count)))

    def _run(self, name: str, arguments: Any, named: Any) -> Any:
        result = getattr(self.client, name)(*arguments, **named)
        return result if self._runner is None else self._runner.run(_awaited(result))


async def _awaited(result: Any) -> Any:
    return await result


@contextmanager
def driven(kind: str, urls: Any, **settings: Any) -> Iterator[DrivenClient]:
    client = DrivenClient(kind, urls, **settings)
    try:
        yield client
    finally:
        client.close()
