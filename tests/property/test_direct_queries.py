"""However requests follow each other and are cut into pieces, the server's own answers are those of the application."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from indexer.api.access import Keyring
from indexer.api.query_route import DirectQueries
from indexer.http_connection import Connection
from indexer.http_server import HttpServer
from indexer.keys import new_key
from indexer.registration import Registration
from tests.engine_events import decoded, stored
from tests.sizes import examples
from tests.unit.api.stand_ins import BODY_BYTES_MAX, empty_world

TOKENS, KEYS = zip(
    *[new_key(f"k{i}", "query", tenants) for i, tenants in enumerate([None, ["default"], ["t"]])], strict=True
)
WORLD, WORLD_WITH_KEYS = empty_world(), empty_world(Keyring(KEYS))
for world in (WORLD, WORLD_WITH_KEYS):
    for tenant in ("default", "t"):
        registration = Registration(tenant, 0, "m", "tcp://127.0.0.1:1", tenant=tenant, block_size=2, publisher_id=1)
        world.index.add_publisher(registration).apply(decoded(stored([7], None, [1, 2], 2)), 0, 0)
APP, APP_WITH_KEYS = WORLD.client.app, WORLD_WITH_KEYS.client.app
TURNS = 300


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


QUERY = json.dumps({"model": "m", "token_ids": [1, 2, 3]}).encode()
CHUNKS = b"5\r\n%b\r\n%x;x=1\r\n%b\r\n0\r\nlate: 1\r\n\r\n" % (QUERY[:5], len(QUERY) - 5, QUERY[5:])
REQUESTS = [
    post(b"/v1/prefix-hits", QUERY),
    post(b"/query", b'{"model_name":"m","token_ids":[]}'),
    post(b"/query_by_hash", b"{}", b"content-type: application/json"),
    post(b"/v1/prefix-hits", b"{"),
    post(b"/v1/prefix-hits", b""),
    post(b"/v1/prefix-hits", QUERY, b"expect: 100-continue"),
    post(b"/v1/prefix-hits", b" " * (BODY_BYTES_MAX + 1)),
    b"POST /v1/prefix-hits HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
    b"GET /v1/prefix-hits HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD /query HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
    post(b"/v1/prefix-hits", QUERY, b"connection: close"),
]

ITS = json.dumps({"model": "m", "token_ids": [1, 2, 3], "tenant": "t"}).encode()
SCHEMES = [b"", *(b"authorization: Bearer " + token.encode() for token in (*TOKENS, "kvi_wrong"))]
SCHEMES += [SCHEMES[1].replace(b"authorization", b"Authorization"), SCHEMES[1] + b"\r\n" + SCHEMES[2], SCHEMES[1][:-1]]
SCHEMES += [SCHEMES[1].replace(b"Bearer ", b"bearer  "), SCHEMES[1].replace(b"Bearer", b"Basic")]
REQUESTS_WITH_KEYS = [
    post(path, body, *[scheme] * bool(scheme))
    for scheme in SCHEMES
    for path, body in [
        (b"/v1/prefix-hits", QUERY),
        (b"/v1/prefix-hits", ITS),
        (b"/query", b'{"model_name":"m","token_ids":[1,2],"tenant_id":"t"}'),
        (b"/query_by_hash", b'{"model_name":"none","block_hashes":[1]}'),
    ]
]


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self._is_closing = False

    def write(self, data: bytes) -> None:
        if not self._is_closing:
            self.written += data

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def get_extra_info(self, _: str) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def converse(pieces: list[bytes], queries: DirectQueries | None, app: Any = APP) -> bytes:
    config = HttpServer(app, "127.0.0.1", 0, queries)._server.config
    config.load()
    wire: Any = Wire()
    connection = Connection(config, ServerState(), {})
    connection.connection_made(wire)
    for piece in pieces:
        if not wire.is_closing():
            receive(connection, piece)
        await asyncio.sleep(0)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return bytes(wire.written)


def receive(connection: Connection, piece: bytes) -> None:
    buffer = connection.get_buffer(-1)
    buffer[: len(piece)] = piece
    connection.buffer_updated(len(piece))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [*sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@examples(100)
@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=6), st.lists(st.integers(0, 10_000), max_size=8))
def test_the_same_bytes_however_they_come(requests: list[bytes], places: list[int]) -> None:
    pieces = cut(b"".join(requests), places)
    expected = asyncio.run(converse(pieces, None))
    assert asyncio.run(converse(pieces, APP.direct)) == expected
    assert expected.startswith(b"HTTP/1.1 ")


@examples(100)
@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=6))
def test_the_same_bytes_one_request_after_the_other(requests: list[bytes]) -> None:
    assert asyncio.run(converse(requests, APP.direct)) == asyncio.run(converse(requests, None))


@examples(200)
@given(
    st.lists(st.sampled_from(REQUESTS_WITH_KEYS), min_size=1, max_size=8), st.lists(st.integers(0, 10_000), max_size=4)
)
def test_both_ways_ask_for_the_same_keys(requests: list[bytes], places: list[int]) -> None:
    expected = asyncio.run(converse(requests, None, APP_WITH_KEYS))
    assert asyncio.run(converse(requests, APP_WITH_KEYS.direct, APP_WITH_KEYS)) == expected
    pieces = cut(b"".join(requests), places)
    expected = asyncio.run(converse(pieces, None, APP_WITH_KEYS))
    assert asyncio.run(converse(pieces, APP_WITH_KEYS.direct, APP_WITH_KEYS)) == expected
    assert expected.startswith((b"HTTP/1.1 200", b"HTTP/1.1 401", b"HTTP/1.1 403", b"HTTP/1.1 404"))
