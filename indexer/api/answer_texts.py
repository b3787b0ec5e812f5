"""What answers say of a publisher, as texts with holes for the numbers: a kernel copies the one and fills the others.

A text is what the encoder of its answer writes for numbers that stand for the holes, so that it cannot differ from it.
Each piece has its size before it, in two bytes, and the code of the hole after it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.api.answer_kernels import END, HIT, NUMBER, RANKS, RESIDENT
from indexer.api.dialects.dynamo_bodies import InstanceBody
from indexer.api.formats import encode_json, encode_msgpack
from indexer.index.prefix_query import PrefixAnswer, PrefixQuery, PublisherHit
from indexer.index.query_warnings import Cause, not_complete, not_complete_warning, troubles
from indexer.index.scope import Scope
from indexer.index.state import Trust
from indexer.index.table import I64
from indexer.index.tiers import CPU, GPU
from indexer.registration import PublisherKey

TEXTS_KEPT_MAX = 4_096
PIECE_BYTES_MAX = 65_535
STAND_INS = {RESIDENT: 7_310_552_948_117_640_219, HIT: 6_914_027_731_840_552_867, NUMBER: 5_827_406_119_553_318_041}
_RESIDENT = STAND_INS[RESIDENT]
_DP = {STAND_INS[NUMBER]: STAND_INS[HIT]}  # stands for all ranks
_IN_HIT = {RESIDENT: 3, HIT: 1, NUMBER: 1}
_IN_SCORE, _IN_INSTANCE = {RANKS: 1}, {RANKS: 1, RESIDENT: 4}

CAUSES = [
    Cause.COVERAGE_BELOW_COMPLETE,
    Cause.NO_PUBLISHER_CONNECTED,
    Cause.PUBLISHER_NEVER_SPOKE,
    Cause.EVENTS_REFUSED,
]
"""Of warnings that the kernel writes."""

Texts: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes]


@lru_cache(maxsize=TEXTS_KEPT_MAX)
def texts_of(worker_id: str, dp_rank: int, trust: Trust) -> Texts | None:
    """The texts of a card, in their order; None if a name looks like a number that stands for a hole. Cost: 20 us."""
    tiers = {GPU: _RESIDENT, CPU: _RESIDENT}
    hit = PublisherHit(worker_id, dp_rank, STAND_INS[HIT], _RESIDENT, tiers, *trust, STAND_INS[NUMBER])
    instance = InstanceBody(_RESIDENT, _RESIDENT, _DP, _RESIDENT, _RESIDENT)
    try:
        return (
            _cut(encode_json(hit), _holes(encode_json), _IN_HIT),
            _cut(encode_msgpack(hit), _holes(encode_msgpack), _IN_HIT),
            _cut(_members({worker_id: _DP}), _JSON_HOLES, _IN_SCORE),
            _cut(_members({worker_id: instance}), _JSON_HOLES, _IN_INSTANCE),
            _members({dp_rank: 0})[:-1],
        )
    except ValueError:
        return None


def tails_of(scope: Scope) -> tuple[bytes, bytes, int]:
    """What follows the number of tokens in answers without hits, in JSON and in msgpack, and its causes as bits."""
    query = PrefixQuery("")
    warnings = [*troubles(query, scope), *not_complete(query, scope, set())]
    answer = PrefixAnswer(_RESIDENT, [], warnings)
    as_json, as_msgpack = (encode(answer).partition(encode(_RESIDENT))[2] for encode in (encode_json, encode_msgpack))
    return as_json, as_msgpack, sum(1 << CAUSES.index(Cause(warning.code)) for warning in warnings)


def joined(texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], I64]:
    """All of them, and where each starts; the last number is where the last one stops."""
    sizes = np.fromiter((len(text) for text in texts), np.int64, len(texts))
    text = np.frombuffer(bytearray(b"".join(texts) or b"\0"), np.uint8)
    return text, np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def name_of(key: PublisherKey) -> tuple[bytes, bytes]:
    """How a warning names a publisher: as part of a JSON string, and as it is."""
    name = f"{key.worker_id} rank {key.dp_rank}"
    return encode_json(name)[1:-1], name.encode()


def _holes(encode: Callable[[Any], bytes]) -> dict[bytes, int]:
    return {encode(number): hole for hole, number in STAND_INS.items()}


def _members(fields: Mapping[Any, Any]) -> bytes:
    return encode_json(fields)[1:-1]


_JSON_HOLES = {_members(_DP): RANKS, **_holes(encode_json)}


def _cut(text: bytes, holes: Mapping[bytes, int], wanted: Mapping[int, int]) -> bytes:
    """Raises ValueError if the holes are not the wanted ones."""
    pieces, start, found = [], 0, Counter[int]()
    for match in re.finditer(b"|".join(map(re.escape, holes)), text):
        hole = holes[match[0]]
        found[hole] += 1
        pieces.append(_piece(text[start : match.start()], hole))
        start = match.end()
    if found != wanted:
        raise ValueError("a name is not to be told from a hole")
    return b"".join([*pieces, _piece(text[start:], END)])


def _piece(text: bytes, hole: int) -> bytes:
    if len(text) > PIECE_BYTES_MAX:
        raise ValueError("the text is too long")
    return len(text).to_bytes(2, "little") + text + bytes([hole])


def frames_of(headers: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """The texts around hits, in the order of the kernel's frames; `headers` come first in every answer."""
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return [
        b"HTTP/1.1 200 OK\r\n" + lines + b"content-length: ",
        *(b"\r\ncontent-type: %b\r\n\r\n" % kind for kind in (b"application/json", b"application/msgpack")),
        *_JSON_FRAMES,
        *_MSGPACK_FRAMES,
        *(b'{"scores":{', b'},"frequencies":[],"instances":{', b"}}"),
        *_MESSAGE_FRAMES,
    ]


def _native_frames(encode: Callable[[Any], bytes], opens: bytes, closes: bytes) -> list[bytes]:
    """Before the number of tokens; then up to the hits (in msgpack, to their number); what follows them without a
    warning; with one, up to its message (in msgpack, to its size); and after that."""
    warning = not_complete_warning([""], is_more=False)
    start, _, rest = encode(PrefixAnswer(_RESIDENT, [], [])).partition(encode(_RESIDENT))
    hits, _, end = rest.partition(encode([]))
    _, _, warned = encode(PrefixAnswer(_RESIDENT, [], [warning])).partition(encode([]))
    message, _, warning_end = warned.partition(encode(warning.message))
    return [start, hits + opens, closes + end, closes + message + encode("")[:-1], encode("")[1:] + warning_end]


def _message_frames() -> list[bytes]:
    """Before the first name in a warning, between two, and after the last if there are more."""
    before, _, rest = not_complete_warning(["<first>", "<second>"], is_more=True).message.partition("<first>")
    between, _, after = rest.partition("<second>")
    return [before.encode(), between.encode(), after.encode()]


_JSON_FRAMES = _native_frames(encode_json, b"[", b"]")
_MSGPACK_FRAMES = _native_frames(encode_msgpack, b"", b"")
_MESSAGE_FRAMES = _message_frames()
