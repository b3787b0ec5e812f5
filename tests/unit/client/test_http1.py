from __future__ import annotations

import pytest

from indexer.client.http1 import HEAD_BYTES_MAX, MalformedAnswer, ResponseReader, encode_request

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


def test_an_answer_is_read_however_it_is_cut() -> None:
    for first in range(len(ANSWER)):
        reader = ResponseReader()
        assert not reader.feed(ANSWER[:first]) or not first
        assert reader.feed(ANSWER[first:])
        assert reader.response == (200, b"hello", True)


def test_chunks_are_joined_and_announcements_passed_over() -> None:
    reader = ResponseReader()
    assert not reader.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
    assert reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")
    assert reader.response == (200, b"hello", True)


@pytest.mark.parametrize("more", [ANSWER, b"nonsense", b"\r\nHTTP"])
def test_with_something_after_the_answer_a_connection_is_not_used_again(more: bytes) -> None:
    reader = ResponseReader()
    assert reader.feed(ANSWER + more)
    assert reader.response == (200, b"hello", False)


@pytest.mark.parametrize("line", [b"connection: close\r\n", b""])
def test_who_closes_is_not_asked_again(line: bytes) -> None:
    version = b"1.1" if line else b"1.0"
    reader = ResponseReader()
    assert reader.feed(b"HTTP/" + version + b" 200 OK\r\n" + line + b"content-length: 0\r\n\r\n")
    assert reader.response == (200, b"", False)


def test_a_head_is_bounded() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nx: ")
    reader.feed(b"y" * (HEAD_BYTES_MAX - 1_000))
    with pytest.raises(MalformedAnswer):
        reader.feed(b"y" * 1_000)


UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"


@pytest.mark.parametrize("data", [b"no\r\n\r\n", b"HTTP/9.9 200 OK\r\n\r\n", b"\x00", UPGRADE])
def test_what_is_no_answer_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        ResponseReader().feed(data)


def test_a_request_says_its_length_if_it_has_a_body() -> None:
    assert encode_request("GET", "/readyz", b"host: h\r\n", "x", b"") == b"GET /readyz HTTP/1.1\r\nhost: h\r\n\r\n"
    assert encode_request("POST", "/q", b"host: h\r\n", "t/x", b"body") == (
        b"POST /q HTTP/1.1\r\nhost: h\r\ncontent-type: t/x\r\ncontent-length: 4\r\n\r\nbody"
    )
