"""Multipart ZMQ messages <-> numbered payloads: live messages, the replay request, and replay answers.

A live message is `[topic, sequence number, payload]`; the number is 8 bytes, big-endian. A replay is asked for at a
ROUTER with `[identity, empty, first number]`, so a DEALER sends the last two. Every answer is read from its end, since
what stands in front differs: `[empty, topic, number, payload]` (vLLM >= 0.26), `[empty, number, payload]` (up to
0.25.1, SGLang), and without the empty delimiter. The end marker carries the number -1 and an empty payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import isfinite
from struct import Struct
from typing import Final, Literal, NamedTuple, TypeAlias

from indexer.wire.errors import WireError

SEQUENCE_BYTES: Final = 8
SEQUENCE_NUMBER_MAX: Final = (1 << 63) - 1
"""Numbers above are refused: no engine publishes 2^63 batches, and checkpoints are kept as signed 64-bit integers."""

_BATCH_HEADS = (0x92, 0x93)  # msgpack: an array of 2 or 3
_FLOAT64 = 0xCB
_SENT_AT = Struct(">d")
_END_NUMBER = b"\xff" * SEQUENCE_BYTES


class ReplayMarker(Enum):
    """The type of `END_OF_REPLAY`."""

    END = "end"


END_OF_REPLAY: Final = ReplayMarker.END


class Message(NamedTuple):
    """One live message. `topic` is what the publisher was configured with; it identifies nothing."""

    topic: bytes
    sequence_number: int
    payload: bytes


class ReplayedBatch(NamedTuple):
    """One past message, as a replay endpoint answers it."""

    sequence_number: int
    payload: bytes


ReplayAnswer: TypeAlias = ReplayedBatch | Literal[ReplayMarker.END]


def split_message(frames: Sequence[bytes]) -> Message:
    """The parts of a live message.

    Raises WireError: `frame_count` (not three frames), `sequence_bytes` (not 8 bytes), `sequence_range`.
    """
    if len(frames) != 3:
        raise WireError("frame_count", f"a message has {len(frames)} frames instead of 3")
    topic, number, payload = frames
    return Message(topic, read_sequence_number(number), payload)


def replay_request(start: int) -> list[bytes]:
    """The frames a DEALER sends to be answered with every batch from number `start` on."""
    return [b"", start.to_bytes(SEQUENCE_BYTES, "big")]


def split_replay(frames: Sequence[bytes]) -> ReplayAnswer:
    """One answer of a replay endpoint, as a DEALER receives it. Raises WireError, as `split_message`."""
    if not 2 <= len(frames) <= 4:
        raise WireError("frame_count", f"a replay answer has {len(frames)} frames instead of 2 to 4")
    number, payload = frames[-2], frames[-1]
    if number == _END_NUMBER and not payload:
        return END_OF_REPLAY
    return ReplayedBatch(read_sequence_number(number), payload)


def timestamp_of(payload: bytes) -> float | None:
    """When the engine says it sent a batch, in seconds since 1970, without decoding it; None = it does not say."""
    if len(payload) < 10 or payload[0] not in _BATCH_HEADS or payload[1] != _FLOAT64:
        return None
    sent_at: float = _SENT_AT.unpack_from(payload, 2)[0]
    return sent_at if isfinite(sent_at) else None


def read_sequence_number(frame: bytes) -> int:
    """The number in a sequence frame. Raises WireError: `sequence_bytes`, `sequence_range`."""
    if len(frame) != SEQUENCE_BYTES:
        raise WireError("sequence_bytes", f"a sequence number has {len(frame)} bytes instead of {SEQUENCE_BYTES}")
    number = int.from_bytes(frame, "big")
    if number > SEQUENCE_NUMBER_MAX:
        raise WireError("sequence_range", f"sequence number {number} is not below 2^63")
    return number
