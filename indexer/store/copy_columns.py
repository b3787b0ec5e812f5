"""Columns as rows in PostgreSQL's binary COPY format, without an object per row.

Rows of one holder that have the same fields NULL are of the same length: a row of zeros is repeated, and each column is
laid over it, big-endian. The bytes are those of `copy_format` for the same values.

A value that does not fit its column raises ValueError, before a row of those columns is packed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.index.columns import I32, U32, U64, Flags, ResidencyColumns
from indexer.store.copy_format import CHUNK_BYTES, NULL

INT4_MAX = 2**31 - 1
INT8_MAX = 2**63 - 1

_Values: TypeAlias = npt.NDArray[Any]


class _Field(NamedTuple):
    """One column of the rows: its type in the packed row, as numpy names it, and its values, None = all are NULL."""

    packed_type: str
    values: _Values | None


def removal_rows(prefix: bytes, engine_hashes: U64) -> Iterator[bytearray]:
    """Rows of RESIDENCY_KEY_COLUMNS, in portions of about CHUNK_BYTES."""
    yield from _packed(prefix, [_Field(">u8", engine_hashes)])


def count_rows(prefix: bytes, engine_hashes: U64, counts: U32, cohorts: I32) -> Iterator[bytearray]:
    """Rows of COUNT_COLUMNS, in portions of about CHUNK_BYTES."""
    _check("reference_count", counts, INT4_MAX)
    yield from _packed(prefix, [_Field(">u8", engine_hashes), _Field(">i4", counts), _Field(">i4", cohorts)])


def residency_rows(prefix: bytes, rows: ResidencyColumns) -> Iterator[bytearray]:
    """Rows of RESIDENCY_COLUMNS, in portions of about CHUNK_BYTES; those with the same fields NULL come together."""
    _check("position", rows.positions, INT8_MAX)
    _check("block_tokens", rows.block_tokens, INT4_MAX)
    _check("reference_count", rows.reference_counts, INT4_MAX)
    for has_parent in (True, False):
        for has_local in (True, False):
            alike = (rows.has_parent == has_parent) & (rows.has_local == has_local)
            yield from _packed(prefix, _residency_fields(rows, alike, has_parent, has_local))


def _residency_fields(rows: ResidencyColumns, alike: Flags, has_parent: bool, has_local: bool) -> list[_Field]:
    return [
        _Field(">u8", rows.engine_hashes[alike]),
        _Field(">u8", rows.content_keys[alike]),
        _Field(">u8", rows.parent_keys[alike] if has_parent else None),
        _Field(">u8", rows.local_hashes[alike] if has_local else None),
        _Field(">i8", rows.positions[alike]),
        _Field(">i4", rows.block_tokens[alike]),
        _Field(">i4", rows.reference_counts[alike]),
        _Field(">i4", rows.cohorts[alike]),
    ]


def _check(name: str, values: _Values, largest: int) -> None:
    if len(values) and values.max() > largest:
        raise ValueError(f"{name} {values.max()} is above {largest}")


def _packed(prefix: bytes, fields: Sequence[_Field]) -> Iterator[bytearray]:
    """`prefix` and `fields` of every row."""
    template, row_type = _layout(prefix, fields)
    columns = [field.values for field in fields if field.values is not None]
    length = len(columns[0])
    assert all(len(values) == length for values in columns)
    portion = max(1, CHUNK_BYTES // len(template))
    for first in range(0, length, portion):
        packed = template * min(portion, length - first)
        rows = np.frombuffer(packed, row_type)
        for name, values in zip(row_type.names or (), columns, strict=True):
            rows[name] = values[first : first + portion]
        yield packed


def _layout(prefix: bytes, fields: Sequence[_Field]) -> tuple[bytearray, np.dtype[np.void]]:
    """A row whose values are 0, and where in it the fields are that have values."""
    template = bytearray(prefix)
    types, offsets = [], []
    for field in fields:
        if field.values is None:
            template += NULL
            continue
        size = np.dtype(field.packed_type).itemsize
        template += struct.pack("!i", size)
        types.append(field.packed_type)
        offsets.append(len(template))
        template += bytes(size)
    names = [str(number) for number in range(len(types))]
    layout = {"names": names, "formats": types, "offsets": offsets, "itemsize": len(template)}
    return template, np.dtype(layout)  # type: ignore[call-overload]
