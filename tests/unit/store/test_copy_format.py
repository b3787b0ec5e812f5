"""The binary COPY format, byte by byte."""

from __future__ import annotations

import struct

import pytest

from indexer.index.state import CountChange, GhostRow, ResidencyRow
from indexer.store.copy_format import (
    CHUNK_BYTES,
    COUNT_COLUMNS,
    HEADER,
    TRAILER,
    count_field,
    ghost_fields,
    hash_field,
    holder_prefix,
    in_chunks,
    residency_fields,
)


def fields_of(packed: bytes) -> list[bytes | None]:
    """The fields of a row, without its field count."""
    fields: list[bytes | None] = []
    while packed:
        (length,) = struct.unpack_from("!i", packed)
        fields.append(None if length < 0 else packed[4 : 4 + length])
        packed = packed[4 + max(length, 0) :]
    return fields


def test_a_holder_prefix_has_the_field_count_and_the_holder() -> None:
    packed = holder_prefix(COUNT_COLUMNS, 7)
    assert packed[:2] == b"\x00\x04"
    assert fields_of(packed[2:]) == [b"\x00\x00\x00\x07"]


def test_an_integer_hash_is_eight_bytes_and_other_hashes_are_as_they_are() -> None:
    assert fields_of(hash_field(2**64 - 2)) == [b"\xff" * 7 + b"\xfe"]
    assert fields_of(hash_field(b"abc")) == [b"abc"]
    assert fields_of(hash_field(b"")) == [b""]


@pytest.mark.parametrize("parent", [None, 0, 2**63])
@pytest.mark.parametrize("local", [None, 0, 2**64 - 1])
def test_residencies_keep_every_bit_and_every_null(parent: int | None, local: int | None) -> None:
    row = ResidencyRow(2**64 - 1, parent, local, block_tokens=16, position=2**40, reference_count=3, cohort=2)
    key, *hashes, position, tokens, count, cohort = fields_of(residency_fields(row))
    assert key == b"\xff" * 8
    assert hashes == [None if h is None else h.to_bytes(8, "big") for h in (parent, local)]
    assert (position, tokens) == (struct.pack("!q", 2**40), struct.pack("!i", 16))
    assert (count, cohort) == (struct.pack("!i", 3), struct.pack("!i", 2))


def test_ghosts_and_counts() -> None:
    assert fields_of(ghost_fields(GhostRow(2**63, 5, 9))) == [struct.pack("!Q", 2**63), *map(_int8, (5, 9))]
    assert fields_of(count_field(CountChange(5, 2))) == [b"\x00\x00\x00\x05", b"\x00\x00\x00\x02"]


def test_a_value_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(struct.error):
        hash_field(2**64)
    with pytest.raises(struct.error):
        count_field(CountChange(2**31))
    with pytest.raises(struct.error):
        holder_prefix(COUNT_COLUMNS, 2**31)


def test_a_stream_has_one_header_and_one_trailer_in_chunks_of_a_bounded_size() -> None:
    rows = [bytes([n % 256]) * 1_000 for n in range(200)]
    chunks = list(in_chunks(rows))
    assert b"".join(chunks) == HEADER + b"".join(rows) + TRAILER
    assert len(chunks) > 2
    assert max(map(len, chunks)) <= CHUNK_BYTES + 1_000 + len(HEADER)
    assert list(in_chunks([])) == [HEADER + TRAILER]


def _int8(value: int) -> bytes:
    return struct.pack("!q", value)
