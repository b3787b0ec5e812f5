"""Payloads -> columns, for batches of nothing but simple events: most of the traffic, without an object per event.

Simple are stores and removals as arrays or maps whose hashes are integers, whose tokens are below 2^32, and that carry
no extra keys, salt, lookahead or skipped context. What such an event says beside hashes, parent and tokens (medium,
group, block size ...) is its shape: the bytes of those fields, and whether extra keys are sent that say nothing.
Anything else, and anything damaged, is not simple: the whole payload is then read by `decode.py`, so a doubt costs time
and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from indexer.compiled import kernel

STORED, REMOVED = 1, 2
WHOLE, NOT_SIMPLE, NEW_SHAPE = 0, -1, -2

SMALLEST_BATCH = 11  # array of two or three, float of 64 bits, events
SHAPES_MAX = 64  # so that the shapes of a batch are one word of bits
SHAPE_BYTES_MAX = 256

# fields, by their place in the array form (engines up to vLLM 0.23 and SGLang 0.5.19); the tag is 0
HASHES, PARENT, TOKENS, BLOCK_SIZE, LORA_ID, MEDIUM, LORA_NAME, EXTRA_KEYS = range(1, 9)
GROUP, KIND, WINDOW, LOCALITY, OWNERSHIP, SESSION_ID = range(9, 15)
ARRAY_FIELDS = 15
TYPE = 0
UNKNOWN = -1

# results of the reading kernel
OUTCOME, SHAPES_SEEN, SHAPE_LENGTH, EVENT_START, EVENT_END = range(5)
RESULT_FIELDS = 5

_STORED_TAG = np.frombuffer(b"BlockStored", np.uint8)
_REMOVED_TAG = np.frombuffer(b"BlockRemoved", np.uint8)
_NAMES = (
    b"type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx"
    b" kv_cache_spec_kind kv_cache_spec_sliding_window locality ownership session_id"
).split()
_NAME_ENDS = np.cumsum([len(name) for name in _NAMES])
_NAME_BYTES = np.frombuffer(b"".join(_NAMES), np.uint8)
_REMOVED_FIELDS = np.array([TYPE, HASHES, MEDIUM, GROUP, LOCALITY, OWNERSHIP])
_NEEDED_STORED = sum(1 << field for field in (HASHES, TOKENS, BLOCK_SIZE))
_OF_SHAPE = sum(1 << f for f in (BLOCK_SIZE, MEDIUM, LORA_NAME, EXTRA_KEYS, GROUP, KIND, WINDOW, LOCALITY, OWNERSHIP))
_ONLY_STORED = sum(1 << field for field in (PARENT, TOKENS, BLOCK_SIZE, LORA_NAME, EXTRA_KEYS, KIND, WINDOW))

U32_MAX = np.uint64(0xFFFFFFFF)
ONE, TWO, THREE = np.uint64(1), np.uint64(2), np.uint64(3)
FAULT = -1  # a position that no value ends at


@kernel
def _big_endian(data, i, size):
    value = np.uint64(0)
    for j in range(i, i + size):
        value = (value << np.uint64(8)) | np.uint64(data[j])
    return value


@kernel
def _four_bytes(data, i):
    """Big-endian. With an unsigned position, which cannot mean one from the end, they are loaded as one."""
    high = (np.uint32(data[i]) << np.uint32(24)) | (np.uint32(data[i + ONE]) << np.uint32(16))
    return high | (np.uint32(data[i + TWO]) << np.uint32(8)) | np.uint32(data[i + THREE])


@kernel
def _read_integer(data, i):
    """(value modulo 2^64, end, whether it is negative); end FAULT if no integer is there."""
    size = len(data)
    if i >= size:
        return np.uint64(0), FAULT, False
    first = np.int64(data[i])
    if first < 0x80:
        return np.uint64(first), i + 1, False
    if first >= 0xE0:
        return np.uint64(first) | np.uint64(0xFFFFFFFFFFFFFF00), i + 1, True
    if first == 0xCF and i + 8 < size:
        high = np.uint64(_four_bytes(data, np.uint64(i + 1)))
        return (high << np.uint64(32)) | np.uint64(_four_bytes(data, np.uint64(i + 5))), i + 9, False
    if 0xCC <= first <= 0xCF:
        width = 1 << (first - 0xCC)
        if i + width >= size:
            return np.uint64(0), FAULT, False
        return _big_endian(data, i + 1, width), i + 1 + width, False
    if 0xD0 <= first <= 0xD3:
        width = 1 << (first - 0xD0)
        if i + width >= size:
            return np.uint64(0), FAULT, False
        value = _big_endian(data, i + 1, width)
        is_negative = data[i + 1] >= 0x80
        if is_negative and width < 8:
            value |= np.uint64(0xFFFFFFFFFFFFFFFF) << np.uint64(8 * width)
        return value, i + 1 + width, is_negative
    return np.uint64(0), FAULT, False


@kernel
def _read_count(data, i, fixed, wide):
    """(elements, position of the first) of an array (0x90, 0xDC) or map (0x80, 0xDE); position FAULT if it is none."""
    size = len(data)
    if i < size and data[i] & 0xF0 == fixed:
        return np.int64(data[i] & 0x0F), i + 1
    if i + 2 < size and data[i] == wide:
        return np.int64(_big_endian(data, i + 1, 2)), i + 3
    if i + 4 < size and data[i] == wide + 1:
        return np.int64(_big_endian(data, i + 1, 4)), i + 5
    return 0, FAULT


@kernel
def _read_text(data, i):
    """(position of the first byte, end) of a short text; end FAULT if it is none or goes past the payload."""
    size = len(data)
    start, length = i, 0
    if i < size and data[i] & 0xE0 == 0xA0:
        start, length = i + 1, np.int64(data[i] & 0x1F)
    elif i + 1 < size and data[i] == 0xD9:
        start, length = i + 2, np.int64(data[i + 1])
    else:
        return i, FAULT
    return (start, start + length) if start + length <= size else (i, FAULT)


@kernel
def _equals(data, start, end, text):
    if end - start != len(text):
        return False
    for j in range(len(text)):
        if data[start + j] != text[j]:
            return False
    return True


@kernel
def _field_of(data, start, end, name_bytes, name_ends):
    """Which field has this name."""
    before = 0
    for field in range(len(name_ends)):
        if _equals(data, start, end, name_bytes[before : name_ends[field]]):
            return field
        before = name_ends[field]
    return UNKNOWN


@kernel
def _read_hashes(data, i, hashes, filled):
    """(end, filled) after an array of integers."""
    count, i = _read_count(data, i, 0x90, 0xDC)
    if i == FAULT or count > len(data) - i:
        return FAULT, filled
    for j in range(filled, filled + count):
        hashes[j], i, _ = _read_integer(data, i)
        if i == FAULT:
            return FAULT, filled
    return i, filled + count


@kernel
def _read_tokens(data, i, tokens, filled):
    """(end, filled) after an array of token ids below 2^32."""
    count, i = _read_count(data, i, 0x90, 0xDC)
    size = len(data)
    if i == FAULT or count > size - i:
        return FAULT, filled
    for j in range(filled, filled + count):
        if i + 5 <= size and 0xCD <= data[i] <= 0xCE:  # of two or of four bytes, without a branch between them
            is_wide = np.int64(data[i] - 0xCD)
            tokens[j] = _four_bytes(data, np.uint64(i + 1)) >> np.uint32(16 - 16 * is_wide)
            i += 3 + 2 * is_wide
        else:
            value, i, is_negative = _read_integer(data, i)
            if i == FAULT or is_negative or value > U32_MAX:
                return FAULT, filled
            tokens[j] = np.uint32(value)
    return i, filled + count


@kernel
def _skip_empty(data, i):
    """The end of extra keys that say nothing: nil, or an array of nil and `[]`."""
    size = len(data)
    if i < size and data[i] == 0xC0:
        return i + 1
    count, i = _read_count(data, i, 0x90, 0xDC)
    if i == FAULT or count > size - i:
        return FAULT
    for _ in range(count):
        if i < size and (data[i] == 0xC0 or data[i] == 0x90):
            i += 1
        else:
            return FAULT
    return i


@kernel
def _skip_plain(data, i):
    """The end of a nil, integer or short ASCII text."""
    if i < len(data) and data[i] == 0xC0:
        return i + 1
    _, end, _ = _read_integer(data, i)
    if end != FAULT:
        return end
    start, end = _read_text(data, i)
    if end != FAULT:
        for j in range(start, end):
            if data[j] >= 0x80:
                return FAULT
    return end


@kernel
def _note_shape(data, i, end, field, shape, length):
    """The shape's new length with this field's bytes at its end; FAULT if it grows too long. Nil is as if absent."""
    if data[i] == 0xC0:
        return length
    if length + 1 + end - i > SHAPE_BYTES_MAX:
        return FAULT
    shape[length] = field
    for j in range(i, end):
        shape[length + 1 + j - i] = data[j]
    return length + 1 + end - i


@kernel
def _known_shape(shapes, length):
    """The number of the shape that was read, or -1."""
    for k in range(shapes.known):
        if shapes.lengths[k] == length and _equals(shapes.rows[k], 0, length, shapes.scratch[:length]):
            return k
    return -1


@kernel
def _read_header(data, i):
    """(kind, whether a map, fields, position of the first field after the tag); kind 0 if it is no simple event."""
    is_map = i < len(data) and (data[i] & 0xF0 == 0x80 or data[i] == 0xDE)
    count, i = _read_count(data, i, 0x80, 0xDE) if is_map else _read_count(data, i, 0x90, 0xDC)
    if i == FAULT or count == 0:
        return 0, is_map, 0, i
    if is_map:  # engines write the type first
        start, end = _read_text(data, i)
        if end == FAULT or not _equals(data, start, end, _NAME_BYTES[:4]):
            return 0, is_map, 0, i
        i = end
    start, end = _read_text(data, i)
    if end == FAULT:
        return 0, is_map, 0, i
    if _equals(data, start, end, _STORED_TAG):
        return STORED, is_map, count - 1, end
    if _equals(data, start, end, _REMOVED_TAG):
        return REMOVED, is_map, count - 1, end
    return 0, is_map, 0, i


class Shapes(NamedTuple):
    """The shapes known so far, a row of `rows` each, and the one being read."""

    rows: Any
    lengths: Any
    known: Any
    scratch: Any


class Columns(NamedTuple):
    """What is read, see `columns.BatchColumns`."""

    hashes: Any
    tokens: Any
    kinds: Any
    shape_ids: Any
    parents: Any
    has_parent: Any
    hash_ends: Any
    token_ends: Any
    event_starts: Any
    event_ends: Any


@kernel
def read_payloads(
    data, payload_ends, batch_ends, shape_rows, shape_lengths, shapes_known, shape, result, hashes, tokens, kinds,
    shape_ids, parents, has_parent, hash_ends, token_ends, event_starts, event_ends,
):  # fmt: skip
    """Read all events of payloads that lie one behind the other, as far as they are simple. Returns how many payloads.

    `payload_ends`: where each ends in `data`. `batch_ends`: where its events end. `result`: RESULT_FIELDS; its OUTCOME
    is WHOLE, or what is in the way of the next payload: NOT_SIMPLE, or NEW_SHAPE (then `shape` holds it). The other
    arrays are long enough for anything that takes so many bytes.
    """
    shapes = Shapes(shape_rows, shape_lengths, shapes_known, shape)
    columns = Columns(
        hashes, tokens, kinds, shape_ids, parents, has_parent, hash_ends, token_ends, event_starts, event_ends
    )
    start, events, shapes_seen = 0, 0, 0
    for k in range(len(payload_ends)):
        result[SHAPES_SEEN] = shapes_seen
        outcome = _read_payload(data[: payload_ends[k]], start, events, columns, shapes, result)
        if outcome < 0:
            result[OUTCOME] = outcome
            result[SHAPES_SEEN] = shapes_seen
            return k
        start, events, shapes_seen = payload_ends[k], outcome, result[SHAPES_SEEN]
        batch_ends[k] = events
    result[OUTCOME] = WHOLE
    return len(payload_ends)


@kernel
def _read_payload(data, start, first, columns, shapes, result):
    """Read the payload from `start` to the end of the data as events from number `first` on. Returns the number after
    its last, NOT_SIMPLE or NEW_SHAPE."""
    size = len(data)
    if size - start < SMALLEST_BATCH or not 0x92 <= data[start] <= 0x93 or data[start + 1] != 0xCB:
        return NOT_SIMPLE
    events, i = _read_count(data, start + SMALLEST_BATCH - 1, 0x90, 0xDC)
    if i == FAULT or events == 0 or events > size - i:
        return NOT_SIMPLE
    for n in range(first, first + events):
        result[EVENT_START] = i
        columns.event_starts[n] = i
        i, length = _read_event(data, i, n, columns, shapes)
        if i == FAULT:
            return NOT_SIMPLE
        known = _known_shape(shapes, length)
        if known < 0:
            result[SHAPE_LENGTH] = length
            result[EVENT_END] = i
            return NEW_SHAPE
        result[SHAPES_SEEN] |= np.int64(1) << np.int64(known)
        columns.shape_ids[n] = known
        columns.event_ends[n] = i
    is_whole = size - i == data[start] - 0x92 and (i == size or data[i] < 0x80 or data[i] == 0xC0)
    return first + events if is_whole else NOT_SIMPLE


@kernel
def _read_event(data, i, n, columns, shapes):
    """(end, length of the shape) of one event; end FAULT if it is not simple."""
    kind, is_map, fields, i = _read_header(data, i)
    if kind == 0:
        return FAULT, 0
    columns.kinds[n] = kind
    columns.parents[n] = 0
    columns.has_parent[n] = False
    hashes_before = columns.hash_ends[n - 1] if n > 0 else 0
    tokens_before = columns.token_ends[n - 1] if n > 0 else 0
    columns.hash_ends[n] = hashes_before
    columns.token_ends[n] = tokens_before
    shapes.scratch[0] = kind
    length, seen = 1, 0
    for k in range(fields):
        field, i = _next_field(data, i, k, kind, is_map)
        if field == UNKNOWN or seen >> field & 1 or i >= len(data):
            return FAULT, 0
        seen |= 1 << field
        start = i
        i = _read_field(data, i, n, field, columns)
        if i != FAULT and _OF_SHAPE >> field & 1:
            end = start if field == EXTRA_KEYS else i  # those say nothing, but it matters that they are sent
            length = _note_shape(data, start, end, field, shapes.scratch, length)
        if i == FAULT or length == FAULT:
            return FAULT, 0
    needed = _NEEDED_STORED if kind == STORED else 1 << HASHES
    is_whole = seen & needed == needed and columns.hash_ends[n] > hashes_before
    if not is_whole or (kind == STORED and columns.token_ends[n] == tokens_before):
        return FAULT, 0
    return i, length


@kernel
def _next_field(data, i, k, kind, is_map):
    """(field, position of its value) of the field number k after the tag; UNKNOWN if it makes the event not simple."""
    if is_map:
        start, end = _read_text(data, i)
        field = UNKNOWN if end == FAULT else _field_of(data, start, end, _NAME_BYTES, _NAME_ENDS)
        i = end
    elif kind == STORED:
        field = k + 1 if k + 1 < ARRAY_FIELDS else UNKNOWN
    else:
        field = _REMOVED_FIELDS[k + 1] if k + 1 < len(_REMOVED_FIELDS) else UNKNOWN
    if field <= TYPE or (kind == REMOVED and _ONLY_STORED >> field & 1):
        return UNKNOWN, i
    return field, i


@kernel
def _read_field(data, i, n, field, columns):
    """The end of the field's value, FAULT if it makes the event not simple."""
    if field == HASHES:
        i, columns.hash_ends[n] = _read_hashes(data, i, columns.hashes, columns.hash_ends[n])
    elif field == PARENT:
        if data[i] == 0xC0:
            return i + 1
        columns.parents[n], i, _ = _read_integer(data, i)
        columns.has_parent[n] = True
    elif field == TOKENS:
        i, columns.token_ends[n] = _read_tokens(data, i, columns.tokens, columns.token_ends[n])
    elif field == EXTRA_KEYS:
        i = _skip_empty(data, i)
    else:
        i = _skip_plain(data, i)
    return i
