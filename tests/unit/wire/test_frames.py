"""Multipart frames: what is accepted, what is refused and under which name."""

from __future__ import annotations

import pytest

from indexer.wire.errors import WireError
from indexer.wire.frames import (
    END_OF_REPLAY,
    SEQUENCE_NUMBER_MAX,
    Message,
    ReplayedBatch,
    replay_request,
    split_message,
    split_replay,
)

SEVEN = b"\0\0\0\0\0\0\0\x07"
MINUS_ONE = b"\xff" * 8


def test_a_message_is_topic_number_and_payload() -> None:
    assert split_message([b"kv-events", SEVEN, b"data"]) == Message(b"kv-events", 7, b"data")
    assert split_message([b"", SEVEN, b""]) == Message(b"", 7, b"")


@pytest.mark.parametrize(
    "frames", [[], [b"data"], [b"topic", b"data"], [b"t", SEVEN, b"data", b"more"], [b""] * 9], ids=len
)
def test_other_frame_counts_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError) as caught:
        split_message(frames)
    assert caught.value.reason == "frame_count"


@pytest.mark.parametrize("number", [b"", b"\0\0\0\x07", b"\0" * 7, b"\0" * 9, b"7"], ids=len)
def test_a_number_that_is_not_8_bytes_is_refused(number: bytes) -> None:
    with pytest.raises(WireError) as caught:
        split_message([b"", number, b"data"])
    assert caught.value.reason == "sequence_bytes"


@pytest.mark.parametrize("number", [MINUS_ONE, b"\x80" + b"\0" * 7])
def test_a_number_of_2_to_63_or_more_is_refused(number: bytes) -> None:
    with pytest.raises(WireError) as caught:
        split_message([b"", number, b"data"])
    assert caught.value.reason == "sequence_range"
    largest = SEQUENCE_NUMBER_MAX.to_bytes(8, "big")
    assert split_message([b"", largest, b""]).sequence_number == SEQUENCE_NUMBER_MAX


def test_a_replay_is_asked_for_with_an_empty_delimiter_and_8_bytes() -> None:
    assert replay_request(0) == [b"", b"\0" * 8]
    assert replay_request(258) == [b"", b"\0\0\0\0\0\0\x01\x02"]


@pytest.mark.parametrize("front", [[], [b""], [b"", b"topic"], [b"", b""]], ids=["bare", "three", "four", "no topic"])
def test_replay_answers_are_read_from_their_end(front: list[bytes]) -> None:
    assert split_replay([*front, SEVEN, b"data"]) == ReplayedBatch(7, b"data")
    assert split_replay([*front, MINUS_ONE, b""]) is END_OF_REPLAY


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "frame_count"),
        ([b"data"], "frame_count"),
        ([b"", b"", b"", SEVEN, b"data"], "frame_count"),
        ([b"", b"\x07", b"data"], "sequence_bytes"),
        ([b"", SEVEN, b"data", b""], "sequence_bytes"),
        ([b"", MINUS_ONE, b"data"], "sequence_range"),
    ],
)
def test_garbage_answers_are_refused(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError) as caught:
        split_replay(frames)
    assert caught.value.reason == reason
