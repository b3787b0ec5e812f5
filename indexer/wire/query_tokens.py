"""A query body -> its tokens or hashes as packed bytes, and the rest of the body, for msgspec to read.

Read into a list, a prompt is one Python object per token; here it is none. The rest is the body with an empty array in
the place of the full one. It says what the whole body says, but for that array, and is valid if and only if the whole
is; only the positions in error messages may differ. `None` means "not understood here, let msgspec read the whole":
that is no fault of the body yet.
"""

from __future__ import annotations

import numpy

from indexer.wire.token_kernels import json_hashes, json_tokens, msgpack_tokens

EMPTY_JSON_ARRAY = b"[]"
EMPTY_MSGPACK_ARRAY = b"\x90"


def split_json(body: bytes, name: bytes) -> tuple[bytes, bytes] | None:
    """(u32 little-endian tokens, the rest) of an object whose only member `name` is an array of integers below 2^32."""
    tokens = numpy.empty(_json_numbers_max(body), "<u4")
    count, start, stop = json_tokens(body, name, tokens)
    if count < 0:
        return None
    return tokens[:count].tobytes(), body[:start] + EMPTY_JSON_ARRAY + body[stop:]


def split_msgpack(body: bytes, name: bytes) -> tuple[bytes, bytes] | None:
    """The same of a msgpack map with text for keys. A `bin` is not split: msgspec reads that without a list."""
    tokens = numpy.empty(len(body), "<u4")
    count, start, stop = msgpack_tokens(body, name, tokens)
    if count < 0:
        return None
    return tokens[:count].tobytes(), body[:start] + EMPTY_MSGPACK_ARRAY + body[stop:]


def split_json_hashes(body: bytes, name: bytes) -> tuple[bytes, bytes] | None:
    """(u64 little-endian hashes, the rest), like `split_json`, for integers from -2^63 to 2^64 - 1.

    The negative ones become their two's complement.
    """
    hashes = numpy.empty(_json_numbers_max(body), "<u8")
    count, start, stop = json_hashes(body, name, hashes)
    if count < 0:
        return None
    return hashes[:count].tobytes(), body[:start] + EMPTY_JSON_ARRAY + body[stop:]


def compile_kernels() -> None:
    """So that no query waits for the compiler: some ten seconds the first time, then half a second from its cache."""
    split_json(b"{}", b"")
    split_msgpack(b"\x80", b"")
    split_json_hashes(b"{}", b"")


def _json_numbers_max(body: bytes) -> int:
    """A digit and a comma each, though the last of each half may have no comma."""
    return len(body) // 2 + 2
