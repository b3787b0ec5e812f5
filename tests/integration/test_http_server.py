"""The HTTP server on a real socket: what a caller sends that is no request."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import FastAPI

from indexer.http_connection import HEAD_BYTES_MAX
from indexer.http_server import HttpServer

PIECE = b"x" * 16_384


def answer_to(*pieces: bytes) -> tuple[int, dict[str, str | None] | None]:
    """Status and error of the last answer to these bytes, sent one piece after the other."""

    async def ask() -> bytes:
        with HttpServer(FastAPI(), "127.0.0.1", 0) as server:
            serving = asyncio.create_task(server.serve())
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            answering = asyncio.create_task(reader.read())
            for piece in pieces:
                if answering.done():
                    break
                writer.write(piece)
                await asyncio.sleep(0.01)
            answer = await asyncio.wait_for(answering, 10)
            writer.close()
            await server.close()
            await serving
        return answer

    head, _, body = asyncio.run(ask()).rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
    return int(head.split()[0]), json.loads(body).get("error")


@pytest.mark.parametrize(
    "begin", [b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\nx: ", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000]
)
def test_a_head_without_end_is_refused(begin: bytes) -> None:
    pieces = [PIECE] * (4 * HEAD_BYTES_MAX // len(PIECE))
    status, error = answer_to(begin, *pieces)
    assert status == 431
    assert error is not None
    assert (error["code"], error["field"]) == ("head_too_large", None)


def test_a_long_body_and_many_small_requests_are_no_long_head() -> None:
    body = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (len(PIECE) * 10)
    many = [b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 1_000 + b"\r\n\r\n"] * 100
    status, error = answer_to(body, *[PIECE] * 10, *many, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (status, error) == (404, None)


@pytest.mark.parametrize("request_line", [b"BREW / HTTP/1.1", b"GET /\xff HTTP/1.1", b"\xff\x00\x00"])
def test_what_is_no_http_is_refused_in_the_envelope(request_line: bytes) -> None:
    status, error = answer_to(request_line + b"\r\nhost: x\r\n\r\n")
    assert status == 400
    assert error is not None
    assert (error["code"], error["field"]) == ("bad_request", None)
