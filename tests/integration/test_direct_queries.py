"""Queries that the HTTP server answers itself: the same bytes as from the application, and only where that is plain."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from indexer import http_server
from indexer.api.access import Keyring
from indexer.api.query_route import DirectQueries
from indexer.http_server import HttpServer
from indexer.keys import new_key
from indexer.registration import Registration
from tests.engine_events import decoded, stored
from tests.unit.api.stand_ins import BODY_BYTES_MAX, World, empty_world

LIMIT_S = 10.0
PATH = b"/v1/prefix-hits"
BODY = json.dumps({"model": "nobody's", "token_ids": [1, 2, 3]}).encode()
LAST = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]


def request(
    body: bytes = BODY, *headers: bytes, path: bytes = PATH, method: bytes = b"POST", version: bytes = b"1.1"
) -> bytes:
    length = [b"content-length: %d" % len(body)] if not any(h.startswith(b"transfer") for h in headers) else []
    return b"\r\n".join([b"%b %b HTTP/%b" % (method, path, version), b"host: x", *length, *headers, b"", body])


class Counted(DirectQueries):
    """Counts what is answered directly, and what of it by the kernel."""

    answered = 0
    known = 0

    def answer_known(self, *arguments: Any) -> Any:
        answer = super().answer_known(*arguments)
        self.answered += answer is not None
        self.known += answer is not None
        return answer

    def answer(self, *arguments: Any) -> Any:
        answer = super().answer(*arguments)
        self.answered += answer is not None
        return answer


async def talk_to(app: Any, queries: DirectQueries | None, talk: Talk) -> Any:
    with HttpServer(app, "127.0.0.1", 0, queries) as server:
        serving = asyncio.create_task(server.serve())
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        try:
            return await asyncio.wait_for(talk(reader, writer), LIMIT_S)
        finally:
            writer.close()
            await server.close()
            await serving


def counted(world: World) -> Counted:
    direct = world.client.app.direct
    return Counted(list(direct._routes.values()), direct._limits, direct._meter, direct._known, direct.keyring)


def converse(world: World, talk: Talk) -> tuple[Any, int]:
    """What came of it, and how many queries were answered directly."""
    queries = counted(world)
    return asyncio.run(talk_to(world.client.app, queries, talk)), queries.answered


def sending(*pieces: bytes) -> Talk:
    """All bytes that come back for these pieces, each sent by itself, until the server closes the connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.02)
        return re.sub(rb"date: [^\r]*\r\n", b"date\r\n", await reader.read())

    return talk


def world_with_hits(keyring: Keyring | None = None) -> World:
    """Two publishers of one model hold the first two tokens."""
    world = empty_world(keyring)
    event = stored([7], None, [1, 2], 2)
    for worker_id in ("b", "a"):
        registration = Registration(worker_id, 0, "held", "tcp://127.0.0.1:5557", block_size=2, publisher_id=1)
        world.index.add_publisher(registration).apply(decoded(event), 5, 1)
    return world


PLAIN = request()
HALF = len(PLAIN) - len(BODY) // 2
CHUNKED = b"transfer-encoding: chunked"
ONE_CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
TWO_CHUNKS = b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
CLOSING = b"POST " + PATH + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%b\r\n\r\n"
CONVERSATIONS: dict[str, tuple[Sequence[bytes], int]] = {
    "one query": ([PLAIN], 1),
    "three in turn": ([PLAIN, PLAIN, PLAIN], 3),
    "in msgpack": ([request(b"\x82\xa5model\xa1m\xa9token_ids\x91\x01", b"content-type: application/msgpack")], 1),
    "no JSON": ([request(b"{")], 1),
    "no body": ([request(b"")], 1),
    "no length": ([b"POST %b HTTP/1.1\r\nhost: x\r\n\r\n" % PATH], 0),
    "a wrong value": ([request(b'{"model": 7, "token_ids": [1]}')], 1),
    "another content type": ([request(BODY, b"Content-Type: text/plain")], 1),
    "one chunk": ([request(ONE_CHUNK, CHUNKED)], 0),
    "two chunks": ([request(TWO_CHUNKS, CHUNKED)], 0),
    "a chunk that is none": ([request(b"zz\r\n", CHUNKED)], 0),
    "a chunk, then none": ([request(b"5\r\n%b\r\nzz\r\n" % BODY[:5], CHUNKED)], 0),
    "the body later": ([PLAIN[: -len(BODY)], BODY], 1),
    "half of the body later": ([PLAIN[:HALF], PLAIN[HALF:]], 1),
    "half of the head later": ([PLAIN[:20], PLAIN[20:]], 0),
    "every byte by itself": ([PLAIN[i : i + 1] for i in range(len(PLAIN))], 0),
    "two in one piece": ([PLAIN * 2], 1),
    "many in one piece": ([PLAIN * 30], 1),
    "one and a half, then the rest": ([PLAIN + PLAIN[:HALF], PLAIN[HALF:]], 1),
    "after another route": ([b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" + PLAIN], 0),
    "before another route": ([PLAIN + b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"], 1),
    "waiting for 100": ([request(BODY, b"expect: 100-continue")], 0),
    "body after 100": ([request(BODY, b"expect: 100-continue")[: -len(BODY)], BODY], 0),
    "closing": ([request(BODY, b"connection: close")], 0),
    "HTTP/1.0": ([request(version=b"1.0")], 0),
    "HTTP/1.0, staying": ([request(BODY, b"connection: keep-alive", version=b"1.0")], 0),
    "asking to upgrade": ([request(BODY, b"connection: upgrade", b"upgrade: h2c")], 0),
    "GET": ([request(b"", method=b"GET")], 0),
    "HEAD": ([request(b"", method=b"HEAD")], 0),
    "PUT": ([request(method=b"PUT")], 0),
    "a query string": ([request(path=PATH + b"?x=1")], 0),
    "an encoded path": ([request(path=b"/v1/prefix%2Dhits")], 0),
    "an absolute target": ([request(path=b"http://x" + PATH)], 0),
    "another path": ([request(path=PATH + b"/")], 0),
    "too large": ([request(b" " * (BODY_BYTES_MAX + 1))], 0),
    "too large by its word": ([CLOSING % b"content-length: 99999999"], 0),
    "two lengths": ([request(BODY, b"content-length: 3")], 0),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_both_ways_give_the_same_bytes_and_counts(name: str) -> None:
    pieces, direct = CONVERSATIONS[name]
    world, other = empty_world(), empty_world()
    got, answered = converse(world, sending(*pieces, LAST))
    assert got == asyncio.run(talk_to(other.client.app, None, sending(*pieces, LAST)))
    assert got.startswith(b"HTTP/1.1 ")
    assert answered == direct
    assert requests_counted(world) == requests_counted(other)


FIELDS = {"model": "held", "token_ids": [1, 2, 3]}
HELD = request(json.dumps(FIELDS).encode())
PACKED = request(
    msgspec.msgpack.encode(FIELDS | {"token_ids": b"\1\0\0\0\2\0\0\0"}), b"content-type: application/msgpack"
)
SCORES = request(b'{"model_name":"held","token_ids":[1,2,3]}', path=b"/query")
BY_HASH = request(b'{"model_name":"held","block_hashes":[5,-6]}', path=b"/query_by_hash")
NOT_HELD = request(json.dumps(FIELDS | {"token_ids": [5, 6, 7]}).encode())
SHORT = request(json.dumps(FIELDS | {"token_ids": [1]}).encode())
SALTED = request(json.dumps(FIELDS | {"cache_salt": "salt"}).encode())
BATCH = request(
    json.dumps({"model": "held", "prompts": [{"token_ids": [1, 2, 3]}, {"content_keys": ["0" * 16]}]}).encode(),
    path=PATH + b":batch",
)
FILTERED = request(json.dumps(FIELDS | {"workers": ["a"]}).encode())
KNOWN_CONVERSATIONS: dict[str, tuple[Sequence[bytes], int]] = {
    "the same again and again": ([HELD] * 5, 5),
    "of all routes and formats": ([HELD, PACKED, SCORES, BY_HASH, SCORES, PACKED, HELD], 7),
    "without hits": ([NOT_HELD, SHORT, NOT_HELD, SALTED], 2),
    "batches between": ([HELD, BATCH, HELD, BATCH], 2),
    "others between": ([HELD, PLAIN, FILTERED, HELD, request(b"{"), HELD], 3),
    "the body later": ([HELD[:-20], HELD[-20:], HELD[: -len(b"3]}")], b"3]}"], 2),
    "two in one piece": ([HELD * 2, HELD], 1),
    "one and a half, then the rest": ([HELD + HELD[:50], HELD[50:], HELD], 1),
    "a query string": ([HELD.replace(PATH, PATH + b"?x=1"), HELD], 1),
    "closing": ([HELD, request(HELD.partition(b"\r\n\r\n")[2], b"connection: close")], 1),
}


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("name", KNOWN_CONVERSATIONS)
def test_the_kernel_gives_the_same_bytes_and_counts(name: str, is_complete: bool) -> None:
    pieces, by_kernel = KNOWN_CONVERSATIONS[name]
    world, other = world_with_hits(), world_with_hits()
    for one in (world, other):
        if not is_complete:
            registration = Registration("doubtful", 0, "held", "tcp://127.0.0.1:5557", publisher_id=1)
            publisher = one.index.add_publisher(registration)
            publisher.apply(decoded(), 0, 0)
            publisher.count_gap(1, 2, 1.5)
    queries = counted(world)
    got = asyncio.run(talk_to(world.client.app, queries, sending(*pieces, LAST)))
    assert got == asyncio.run(talk_to(other.client.app, None, sending(*pieces, LAST)))
    assert b"200 OK" in got
    assert queries.known == by_kernel
    assert requests_counted(world) == requests_counted(other)


def test_nonsense_after_a_query_does_not_cost_its_answer() -> None:
    got, answered = converse(empty_world(), sending(PLAIN + b"NONSENSE\r\n\r\n"))
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"400"]
    assert answered == 1


def requests_counted(world: World) -> set[tuple[str, float]]:
    families = world.metrics.registry.collect()
    wanted = (
        "indexer_http_requests",
        "indexer_http_request_seconds",
        "indexer_query_seconds",
        "indexer_query_outcomes",
        "indexer_query_warnings",
        "indexer_query_prompt_tokens",
    )
    return {
        (f"{sample.name} {sample.labels}", sample.value)
        for family in families
        if family.name in wanted
        for sample in family.samples
        if sample.name.endswith(("_total", "_count"))
    }


def test_nothing_is_answered_directly_before_recovery() -> None:
    world = empty_world()
    world.life.is_recovered, world.life.lacks = False, ["the index is being recovered"]
    got, answered = converse(world, sending(PLAIN, LAST))
    assert b"503" in got.splitlines()[0]
    assert b"retry-after: 1\r\n" in got
    assert (b"not_ready" in got, answered) == (True, 1)


def test_a_fault_of_ours_is_a_500_and_the_connection_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    world = empty_world()

    def fail(_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(world.index, "prefix_hits", fail)
    got, answered = converse(world, sending(PLAIN, PLAIN, LAST))
    assert (got.count(b"internal_error"), got.count(b"secret"), answered) == (2, 0, 2)


def test_a_fault_of_the_kernel_does_not_cost_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with_hits()
    queries = counted(world)

    def fail(*_: object) -> int:
        raise ValueError("a defect")

    monkeypatch.setattr(queries._known, "_ask", fail)
    got = asyncio.run(talk_to(world.client.app, queries, sending(HELD, LAST)))
    assert (b'"worker_id":"a"' in got, queries.known) == (True, 0)


def test_at_the_most_requests_the_application_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    world = empty_world()
    queries = counted(world)
    queries._meter.in_flight = queries._limits.requests_max
    got = asyncio.run(talk_to(world.client.app, queries, sending(PLAIN, LAST)))
    assert (b"overloaded" in got, queries.answered) == (True, 0)
    world = world_with_hits()
    queries = counted(world)
    queries._meter.in_flight = queries._limits.requests_max
    got = asyncio.run(talk_to(world.client.app, queries, sending(HELD, LAST)))
    assert (b"overloaded" in got, queries.answered) == (True, 0)


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.api.bounds.BODY_DEADLINE_S", 0.05)
    got, answered = converse(empty_world(), sending(PLAIN[:HALF]))
    assert (b"body_too_slow" in got, answered) == (True, 0)


def test_a_caller_who_reads_nothing_is_not_answered_without_bound() -> None:
    """What it does not read waits in its own requests, and is answered in order when it reads."""
    world = empty_world()
    count, long = 3_000, request(json.dumps({"model": "x" * 1_000, "token_ids": [1]}).encode())

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(count):
            writer.write(long)
            await asyncio.sleep(0)
        writer.write(LAST)
        await asyncio.sleep(0.3)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        return (await reader.read()).count(b"unknown_model")

    answers, direct = converse(world, talk)
    assert answers == count
    assert 0 < direct < count


def test_an_idle_connection_is_closed_and_a_used_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.2)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        for _ in range(10):
            writer.write(PLAIN)
            await asyncio.sleep(0.05)
        used = loop.time()
        return (await reader.read()).count(b"unknown_model"), loop.time() - used

    (answers, idle_s), direct = converse(empty_world(), talk)
    assert (answers, direct) == (10, 10)
    assert idle_s < 2


def test_a_half_request_after_an_answer_is_not_cut_off_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.05)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(PLAIN)
        await asyncio.sleep(0.02)
        writer.write(PLAIN[:HALF])
        await asyncio.sleep(0.2)
        writer.write(PLAIN[HALF:])
        return (await reader.read()).count(b"unknown_model")

    assert converse(empty_world(), talk) == (2, 2)


def test_a_stop_closes_idle_connections_after_their_answers() -> None:
    async def run() -> tuple[bytes, float]:
        world = empty_world()
        loop = asyncio.get_running_loop()
        with HttpServer(world.client.app, "127.0.0.1", 0, world.client.app.direct) as server:
            serving = asyncio.create_task(server.serve())
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(PLAIN)
            first = await reader.read(1)
            began = loop.time()
            await server.close()
            await serving
            rest = await reader.read()
            writer.close()
            return first + rest, loop.time() - began

    got, seconds = asyncio.run(run())
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    assert got.endswith(b"}")
    assert seconds < http_server.GRACEFUL_STOP_S


# ---------------------------------------------------------------------- with keys


TOKENS, KEYS = zip(
    *[new_key(f"k{i}", "query", tenants) for i, tenants in enumerate([None, ["default"], ["t"]])], strict=True
)
ANY_TENANT, ONE, OTHER = (b"authorization: Bearer " + token.encode() for token in TOKENS)
WRONG = b"authorization: Bearer kvi_wrong"
KNOWN = json.dumps({"model": "held", "token_ids": [1, 2, 3]}).encode()


@pytest.mark.parametrize(
    ("header", "code", "direct"),
    [(ANY_TENANT, b"200", 2), (ONE, b"200", 2), (OTHER, b"403", 2), (WRONG, b"401", 0), (b"x: y", b"401", 0)],
    ids=["any tenant", "its tenant", "another tenant", "nobody's", "none"],
)
def test_direct_answers_are_for_those_who_have_a_key(header: bytes, code: bytes, direct: int) -> None:
    world = world_with_hits(Keyring(KEYS))
    sent = [request(KNOWN, header), request(KNOWN, header), LAST]
    got, answered = converse(world, sending(*sent))
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [code, code, b"200"]
    assert answered == direct
    assert got == asyncio.run(talk_to(world.client.app, None, sending(*sent)))


def test_a_connection_may_change_its_key() -> None:
    world = world_with_hits(Keyring(KEYS))
    headers = [ONE, WRONG, ONE, OTHER, ANY_TENANT, b"x: y"]
    got, _ = converse(world, sending(*[request(KNOWN, header) for header in headers], LAST))
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"401", b"200", b"403", b"200", b"401", b"200"]


def test_a_key_that_is_taken_back_is_refused_on_open_connections() -> None:
    keyring = Keyring(KEYS)
    world = world_with_hits(keyring)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bytes]:
        statuses = []
        for keys in (KEYS, KEYS[1:], KEYS):
            keyring.replace(keys)
            writer.write(request(KNOWN, ANY_TENANT))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
            statuses.append(head[9:12])
        return statuses

    assert converse(world, talk)[0] == [b"200", b"401", b"200"]


def test_what_others_have_asked_is_not_known_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a tenant that is not the caller's, the kernel does the same whether its queries are known or not."""
    outcomes: list[int] = []
    world = world_with_hits(Keyring(KEYS))
    known = counted(world)._known
    ask = known._ask

    def ask_and_note(*arguments: Any) -> int:
        outcomes.append(ask(*arguments))
        return outcomes[-1]

    monkeypatch.setattr(known, "_ask", ask_and_note)
    nobodys = json.dumps({"model": "none", "token_ids": [1, 2, 3]}).encode()
    converse(world, sending(request(KNOWN, ANY_TENANT), LAST))  # now it is known
    seen = []
    for body in (KNOWN, nobodys):
        for _ in range(2):
            outcomes.clear()
            converse(world, sending(request(body, OTHER), LAST))
            seen.append(list(outcomes))
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]
    assert not any(outcome > 0 for outcomes in seen for outcome in outcomes)
