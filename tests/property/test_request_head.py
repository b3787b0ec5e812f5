"""What `read_head` claims, the HTTP parser reads the same way: over random and damaged heads."""

from __future__ import annotations

from random import Random

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.api.request_kernels import METHOD, UNCLAIMED, read_head
from tests.sizes import examples

BODY = b'{"a": 1}'
HEADERS = [
    b"host: x",
    b"Host:x",
    b"content-type: application/json",
    b"Content-Type:\tapplication/msgpack \t",
    b"content-type:",
    b"accept: */*",
    b"x-long: " + b"y" * 300,
    b"x-empty:",
    b"connection: keep-alive",
    b"Connection: Keep-Alive",
    b"connection: close",
    b"connection: keep-alive, upgrade",
    b"proxy-connection: close",
    b"transfer-encoding: chunked",
    b"expect: 100-continue",
    b"upgrade: h2c",
    b"content-length: 8",
    b"content-length: +8",
    b"content-length: 0x8",
    b"content-length: 99999999999999999999",
    b"x-latin: \xe9",
    b" folded",
    b"no colon",
    b"spaced : 1",
]
LENGTHS = [b"content-length: 8", b"Content-Length: 8", b"CONTENT-LENGTH:8 ", b"content-length: 08", b"x: 1"]
LINES = [b"POST /query HTTP/1.1"] * 5 + [
    b"GET /query HTTP/1.1",
    b"POST /query HTTP/1.0",
    b"POST  /query HTTP/1.1",
    b"POST http://x/query?y#z HTTP/1.1",
    b"POST * HTTP/1.1",
    b"POST /qu\xe9ry HTTP/1.1",
]
PIECES = [b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\n\n", b" ", b"\t", b":", b"\0", b"\x7f", b"8", b"\x80", b"a"]


class Parsed:
    """What the parser that uvicorn uses finds in one request."""

    def __init__(self, data: bytes) -> None:
        self.url = self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.messages = self.begun = 0
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.messages += 1

    def values(self, name: bytes) -> list[bytes]:
        return [value for n, value in self.headers if n == name]


def check(data: bytes) -> bool:
    """Whether it was claimed. Bytes beyond the size are not looked at."""
    read = read_head(memoryview(bytearray(data + b"\r\n\r\n\r\n")), len(data))
    if read == UNCLAIMED:
        return False
    start, length, target_stop, type_start, type_stop = read
    body = b"z" * min(length, 10_000)
    parsed = Parsed(data[:start] + body)
    assert (parsed.messages, parsed.begun, parsed.body) == (int(length <= len(body)), 1, body)
    assert (parsed.parser.get_method(), parsed.parser.get_http_version()) == (b"POST", "1.1")
    assert parsed.parser.should_keep_alive()
    assert not parsed.parser.should_upgrade()
    assert parsed.url == data[len(METHOD) : target_stop]
    assert not parsed.values(b"expect")
    types = [value.strip(b" \t") for value in parsed.values(b"content-type")]  # which that parser leaves to others
    assert types == ([data[type_start:type_stop]] if type_stop else [])
    return True


def damaged(data: bytes, random: Random) -> bytes:
    for _ in range(random.randint(1, 2)):
        at = random.randint(0, len(data))
        data = data[:at] + random.choice([b"", *PIECES, random.randbytes(1)]) + data[at + random.randint(0, 2) :]
    return data


@given(
    st.sampled_from(LINES),
    st.lists(st.sampled_from(HEADERS), max_size=4),
    st.sampled_from(LENGTHS),
    st.integers(0, 2**32).map(Random),
)
@examples(200)
def test_what_is_claimed_is_parsed_the_same(line: bytes, headers: list[bytes], length: bytes, random: Random) -> None:
    lines = [*headers, length]
    random.shuffle(lines)
    data = b"\r\n".join([line, *lines, b"", BODY])
    check(data)
    for _ in range(20):
        check(damaged(data, random))


@pytest.mark.parametrize("length", LENGTHS[:3])
@pytest.mark.parametrize("header", [b"host: x", *HEADERS[2:4], b"connection: Keep-alive", b"x-latin: \xe9"])
def test_plain_heads_are_claimed(header: bytes, length: bytes) -> None:
    assert check(b"\r\n".join([b"POST /query HTTP/1.1", b"host: x", header, length, b"", BODY]))


def test_a_head_is_not_claimed_before_it_is_complete() -> None:
    head = b"POST /query HTTP/1.1\r\ncontent-length: 8\r\n\r\n"
    assert check(head)
    assert not any(check(head[:size]) for size in range(len(head)))
