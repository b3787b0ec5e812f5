"""What answers say of a publisher, as texts with holes for the numbers: a kernel copies the one and fills the others.

A text is what the encoder of its answer writes for numbers that stand for the holes, so that it cannot differ from it.
Each piece has its size before it, in two bytes, and the code of the hole after it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from indexer.api.dialects.dynamo_bodies import InstanceBody
from indexer.api.formats import encode_json, encode_msgpack
from indexer.api.query_kernels import END, HIT, NUMBER, RESIDENT
from indexer.index.prefix_hits import PrefixAnswer, PublisherHit
from indexer.index.state import Trust
from indexer.index.tiers import CPU, GPU

TEXTS_KEPT_MAX = 4_096
PIECE_BYTES_MAX = 65_535
STAND_INS = {RESIDENT: 7_310_552_948_117_640_219, HIT: 6_914_027_731_840_552_867, NUMBER: 5_827_406_119_553_318_041}
_IN_HIT = {RESIDENT: 3, HIT: 1, NUMBER: 1}


@lru_cache(maxsize=TEXTS_KEPT_MAX)
def texts_of(worker_id: str, dp_rank: int, trust: Trust) -> tuple[bytes, bytes, bytes, bytes] | None:
    """A hit as JSON, as msgpack, and the members of `scores` and `instances`; None if a name looks like a number that
    stands for a hole. Cost: 20 us."""
    resident = STAND_INS[RESIDENT]
    tiers = {GPU: resident, CPU: resident}
    hit = PublisherHit(worker_id, dp_rank, STAND_INS[HIT], resident, tiers, *trust, STAND_INS[NUMBER])
    instance = InstanceBody(resident, resident, {dp_rank: resident}, resident, resident)
    try:
        return (
            _cut(encode_json(hit), encode_json, _IN_HIT),
            _cut(encode_msgpack(hit), encode_msgpack, _IN_HIT),
            _cut(encode_json({worker_id: {dp_rank: resident}})[1:-1], encode_json, {RESIDENT: 1}),
            _cut(encode_json({worker_id: instance})[1:-1], encode_json, {RESIDENT: 5}),
        )
    except ValueError:
        return None


def _cut(text: bytes, encode: Callable[[Any], bytes], wanted: Mapping[int, int]) -> bytes:
    """Raises ValueError if the holes are not the wanted ones."""
    holes = {encode(number): hole for hole, number in STAND_INS.items()}
    pieces, start, found = [], 0, Counter[int]()
    for match in re.finditer(b"|".join(map(re.escape, holes)), text):
        hole = holes[match[0]]
        found[hole] += 1
        pieces.append(_piece(text[start : match.start()], hole))
        start = match.end()
    if found != wanted:
        raise ValueError("the text is not to be told from a hole")
    return b"".join([*pieces, _piece(text[start:], END)])


def _piece(text: bytes, hole: int) -> bytes:
    if len(text) > PIECE_BYTES_MAX:
        raise ValueError("the text is too long")
    return len(text).to_bytes(2, "little") + text + bytes([hole])


def frames_of(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """The texts around hits, in the order of the kernel's frames; `headers` come first in every answer."""
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return [
        b"HTTP/1.1 200 OK\r\n" + lines + b"content-length: ",
        *(b"\r\ncontent-type: %b\r\n\r\n" % kind for kind in (b"application/json", b"application/msgpack")),
        *_around_hits(encode_json, b"[]"),
        *_around_hits(encode_msgpack, encode_msgpack([])),
        *(b'{"scores":{', b'},"frequencies":[],"instances":{', b"}}"),
    ]


def _around_hits(encode: Callable[[Any], bytes], empty: bytes) -> tuple[bytes, bytes, bytes]:
    """Before the number of tokens, between it and the first hit (or, in msgpack, their number), and after the last."""
    stand_in = STAND_INS[RESIDENT]
    before, _, rest = encode(PrefixAnswer(stand_in, [], [])).partition(encode(stand_in))
    name, _, after = rest.partition(empty)
    return (before, name, after) if encode is encode_msgpack else (before, name + b"[", b"]" + after)
