"""HTTP/1.1 as bytes: the head of a request, and an answer out of what arrives. Pure; `httptools` parses.

Nothing is followed, unpacked or remembered: no redirects, no encodings, no cookies. An answer is bounded: what is
larger is malformed.
"""

from __future__ import annotations

from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

HEAD_BYTES_MAX = 65_536
ANSWER_BYTES_MAX = 64 * 1024 * 1024
FINAL = 200  # an answer with a status below only announces another one


class MalformedAnswer(Exception):
    """What arrived is no answer, or a larger one than any that is read."""


class Response(NamedTuple):
    status: int
    body: bytes
    can_reuse: bool


def encode_request(method: str, target: str, headers: bytes, content_type: str, body: bytes) -> bytes:
    """`headers`: whole lines that every request to this endpoint has."""
    head = f"{method} {target} HTTP/1.1\r\n".encode() + headers
    if not body:
        return head + b"\r\n"
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (head, content_type.encode(), len(body), body)


class ResponseReader:
    """Reads one answer. `response` once `feed` has returned True."""

    def __init__(self) -> None:
        self.has_begun = False
        self.response: Response | None = None
        self._parser = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._left = HEAD_BYTES_MAX

    def feed(self, data: bytes) -> bool:
        """True once the whole answer is there. Raises MalformedAnswer."""
        self.has_begun = True
        self._left -= len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if self.response is None:
                raise MalformedAnswer(f"no answer in HTTP/1.1: {error}") from error
            self.response = self.response._replace(can_reuse=False)  # something came after the answer
        if self.response is None and self._left < 0:
            raise MalformedAnswer("an answer that is too large")
        return self.response is not None

    # ------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        if self.response is not None:
            self.response = self.response._replace(can_reuse=False)

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= FINAL:
            self._left = ANSWER_BYTES_MAX

    def on_body(self, part: bytes) -> None:
        if self.response is None:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= FINAL and self.response is None:
            self.response = Response(status, b"".join(self._parts), self._parser.should_keep_alive())
