"""The kernel that reads the head of an HTTP request, if it is one that a query usually comes with.

Purpose: find the body of a query, and say how long it is and for which path, without an object per header. What is not
the plain case is not claimed: the HTTP parser then reads the whole request from its first byte.

Invariants: what is claimed is a complete and valid head of a POST of HTTP/1.1 with exactly one length, whose connection
stays open, that waits for nothing and asks for no other protocol or encoding; the parser would read it the same way. No
byte at `size` or beyond is looked at, and none more than a fixed number of times.

If broken: an answer to another request than the one that was sent, or one more or less than the parser would give.
"""

from __future__ import annotations

from indexer.compiled import kernel

UNCLAIMED = (-1, 0, 0, 0, 0)

SPACE, TAB, CARRIAGE_RETURN, LINE_FEED, COLON = b" \t\r\n:"
ZERO, NINE, UPPER_A, UPPER_Z, DELETE = b"09AZ\x7f"
TO_LOWER = 32
LENGTH_DIGITS_MAX = 10

METHOD, VERSION = b"POST ", b" HTTP/1.1\r\n"  # the target lies between, and begins with a slash
BEGINNING, VERSION_BYTES = tuple(METHOD + b"/"), tuple(VERSION)
CONTENT_LENGTH, CONTENT_TYPE = tuple(b"content-length"), tuple(b"content-type")
AUTHORIZATION = tuple(b"authorization")
CONNECTION, KEEP_ALIVE = tuple(b"connection"), tuple(b"keep-alive")
TRANSFER_ENCODING, EXPECT, UPGRADE = tuple(b"transfer-encoding"), tuple(b"expect"), tuple(b"upgrade")
PROXY_CONNECTION = tuple(b"proxy-connection")
IN_NAMES = tuple(byte < 128 and (chr(byte).isalnum() or byte in b"!#$%&'*+-.^_`|~") for byte in range(256))


@kernel
def read_head(data: memoryview, size: int) -> tuple[int, int, int, int, int]:
    """The first `size` bytes -> where the body starts, how long it is, where the target stops (it starts after METHOD),
    and where the content type starts and stops (both 0 without one). Or UNCLAIMED."""
    end = _last_line(data, size)
    target_stop = _target_stop(data, end)
    if target_stop < 0:
        return UNCLAIMED
    length, type_start, type_stop = -1, 0, 0
    at = target_stop + len(VERSION_BYTES)
    while at < end:
        colon = at
        while IN_NAMES[data[colon]]:
            colon += 1
        start, stop, following = _value(data, colon)
        if colon == at or following < 0:
            return UNCLAIMED
        if _is_text(data, at, colon, CONTENT_LENGTH):
            if length >= 0:
                return UNCLAIMED
            length = _number(data, start, stop)
            if length < 0:
                return UNCLAIMED
        elif _is_text(data, at, colon, CONTENT_TYPE):
            if type_stop > 0 or start == stop:
                return UNCLAIMED
            type_start, type_stop = start, stop
        elif _changes_the_connection(data, at, colon, start, stop):
            return UNCLAIMED
        at = following
    return (end + 2, length, target_stop, type_start, type_stop) if length >= 0 else UNCLAIMED


@kernel
def find_authorization(data: memoryview, size: int) -> tuple[int, int]:
    """Where the value of the `authorization` header starts and stops, in a head that is among the first `size` bytes.
    Both 0: there is none, or more than one, or the head is not the plain case."""
    end = _last_line(data, size)
    target_stop = _target_stop(data, end)
    if target_stop < 0:
        return 0, 0
    found_start, found_stop = 0, 0
    at = target_stop + len(VERSION_BYTES)
    while at < end:
        colon = at
        while IN_NAMES[data[colon]]:
            colon += 1
        start, stop, following = _value(data, colon)
        if following < 0:
            return 0, 0
        if _is_text(data, at, colon, AUTHORIZATION):
            if found_stop > 0:
                return 0, 0
            found_start, found_stop = start, stop
        at = following
    return found_start, found_stop


@kernel
def _last_line(data: memoryview, size: int) -> int:
    """Where the empty line starts that ends the head, or -1."""
    at = 3
    while at < size:
        if data[at] == LINE_FEED:
            if data[at - 1] == CARRIAGE_RETURN and data[at - 2] == LINE_FEED and data[at - 3] == CARRIAGE_RETURN:
                return at - 1
            at += 2
        else:
            at += 1 if data[at] == CARRIAGE_RETURN else 4
    return -1


@kernel
def _target_stop(data: memoryview, end: int) -> int:
    """-1 for another method or version, or a target that is no path of visible ASCII."""
    at = len(BEGINNING)
    if end < at + len(VERSION_BYTES) or not _are_bytes(data, 0, BEGINNING):
        return -1
    while SPACE < data[at] < DELETE:
        at += 1
    return at if at + len(VERSION_BYTES) <= end and _are_bytes(data, at, VERSION_BYTES) else -1


@kernel
def _value(data: memoryview, colon: int) -> tuple[int, int, int]:
    """Where the value after this colon starts and stops without space around it, and where the next line starts.

    The last is -1 if there is no colon, a control character in the value, or no proper end of the line.
    """
    if data[colon] != COLON:
        return 0, 0, -1
    start = colon + 1
    while data[start] in (SPACE, TAB):
        start += 1
    end = start
    while (data[end] >= SPACE and data[end] != DELETE) or data[end] == TAB:
        end += 1
    if data[end] != CARRIAGE_RETURN or data[end + 1] != LINE_FEED:
        return 0, 0, -1
    stop = end
    while stop > start and data[stop - 1] in (SPACE, TAB):
        stop -= 1
    return start, stop, end + 2


@kernel
def _changes_the_connection(data: memoryview, name: int, colon: int, start: int, stop: int) -> bool:
    """Whether this header may end the connection, change its protocol, or hold back or encode the body."""
    if _is_text(data, name, colon, CONNECTION):
        return not _is_text(data, start, stop, KEEP_ALIVE)
    return (
        _is_text(data, name, colon, TRANSFER_ENCODING)
        or _is_text(data, name, colon, EXPECT)
        or _is_text(data, name, colon, UPGRADE)
        or _is_text(data, name, colon, PROXY_CONNECTION)
    )


@kernel
def _number(data: memoryview, start: int, stop: int) -> int:
    """-1 for what is no number, or one that is too long for any body."""
    if not 0 < stop - start <= LENGTH_DIGITS_MAX:
        return -1
    number = 0
    for at in range(start, stop):
        if not ZERO <= data[at] <= NINE:
            return -1
        number = number * 10 + (data[at] - ZERO)
    return number


@kernel
def _are_bytes(data: memoryview, start: int, wanted: tuple[int, ...]) -> bool:
    for i in range(len(wanted)):
        if data[start + i] != wanted[i]:
            return False
    return True


@kernel
def _is_text(data: memoryview, start: int, stop: int, wanted: tuple[int, ...]) -> bool:
    """`wanted` is in lower case."""
    if stop - start != len(wanted):
        return False
    for i in range(len(wanted)):
        byte = data[start + i]
        if UPPER_A <= byte <= UPPER_Z:
            byte += TO_LOWER
        if byte != wanted[i]:
            return False
    return True
