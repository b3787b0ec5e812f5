"""Kernels that find one array of integers in a body and read it, with no Python object per integer.

Purpose: say where the array is and what it holds. What they do not understand they do not claim: the caller then lets
msgspec read the whole body.

Invariants, for a body that *is* valid JSON or msgpack: the claimed array is the value of the only top-level member of
that name. Nothing is promised of an invalid body, and nothing need be: an array in the place of an array neither
makes a body valid nor invalid, so whoever reads the rest of the body refuses it. No kernel recurses, and none looks at
a byte more than a fixed number of times.

If broken: the index would answer for another prompt than the one asked about, or read beyond a body's end.

The kernels also run as plain Python (NUMBA_DISABLE_JIT=1). A body is `bytes`, whose elements are plain numbers there.
All arithmetic is on int64, except for what may need 64 bits: that is uint64 throughout, since Numba, like NumPy, makes
floats of a mixture.
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from indexer.compiled import kernel, trailing_zeros

UNCLAIMED = (-1, 0, 0)
"""In place of: how many integers, position of the array, position after it."""

NOT_FOUND = -1
NOT_UNDERSTOOD = -2

U32_LIMIT = 1 << 32
U32_DIGITS = 10  # of the largest; any number of that many digits is far below 2^63
WORTH_TWO_READERS = 128  # bytes of text for each

# ---------------------------------------------------------------------- JSON

TAB, LINE_FEED, CARRIAGE_RETURN, SPACE = b"\t\n\r "
QUOTE, BACKSLASH, COLON, COMMA = b'"\\:,'
OPEN_ARRAY, CLOSE_ARRAY, OPEN_OBJECT, CLOSE_OBJECT = b"[]{}"
MINUS, ZERO, NINE = b"-09"

U64 = numpy.uint64
U64_ZERO, U64_ONE, U64_TEN, U64_SIGN = U64(0), U64(1), U64(10), U64(1 << 63)
U64_TENTH, U64_LAST_DIGIT = U64((2**64 - 1) // 10), U64((2**64 - 1) % 10)
U64_DIGITS = 20  # of the largest; any number of one digit less is below 2^64
U64_SAFE_DIGITS = U64_DIGITS - 1


@kernel
def json_tokens(text: bytes, name: bytes, tokens: NDArray[numpy.uint32]) -> tuple[int, int, int]:
    """Reads the top-level array `name`, of integers below 2^32, into `tokens`.

    `tokens` needs room for half as many as the text has bytes, and two. Returns (count, start, stop) or UNCLAIMED.
    """
    start = _json_array(text, name)
    if start < 0:
        return UNCLAIMED
    count, stop = _read_json_tokens(text, start, tokens)
    if stop < 0 or _next_member(text, stop, name) != NOT_FOUND:
        return UNCLAIMED
    return count, start, stop


@kernel
def json_hashes(text: bytes, name: bytes, hashes: NDArray[numpy.uint64]) -> tuple[int, int, int]:
    """The same for integers from -2^63 to 2^64 - 1; the negative ones become their two's complement."""
    start = _json_array(text, name)
    if start < 0:
        return UNCLAIMED
    count, stop = _read_json_hashes(text, start, hashes)
    if stop < 0 or _next_member(text, stop, name) != NOT_FOUND:
        return UNCLAIMED
    return count, start, stop


@kernel
def _json_array(text: bytes, name: bytes) -> int:
    """Position of the first array `name` in the object that the text is."""
    if not _ends_an_object(text):
        return NOT_UNDERSTOOD
    at = _after_space(text, 0)
    if text[at] != OPEN_OBJECT:
        return NOT_UNDERSTOOD
    start = _next_member(text, at + 1, name)
    if start >= 0 and text[start] != OPEN_ARRAY:
        return NOT_UNDERSTOOD
    return start


@kernel
def _ends_an_object(text: bytes) -> bool:
    """Whether the last byte, but for space, is `}`: it stops the loops over digits and space, which look for no end."""
    at = len(text) - 1
    while at >= 0 and _is_space(text[at]):
        at -= 1
    return at >= 0 and text[at] == CLOSE_OBJECT


@kernel
def _next_member(text: bytes, at: int, name: bytes) -> int:
    """Position of the value of the next member `name`; `at` is in the top-level object, but in no member's value.

    NOT_FOUND if the object ends before. A key with an escape is not understood: it may spell the name.
    """
    depth = 1
    size = len(text)
    while at < size:
        byte = text[at]
        at += 1
        if byte == QUOTE:
            first = at
            at, is_escaped = _after_string(text, first)
            if depth == 1 and at < size and text[_after_space(text, at)] == COLON:
                if is_escaped:
                    return NOT_UNDERSTOOD
                if _is_name(text, first, at - 1, name):
                    return _after_space(text, _after_space(text, at) + 1)
        elif byte in (OPEN_OBJECT, OPEN_ARRAY):
            depth += 1
        elif byte in (CLOSE_OBJECT, CLOSE_ARRAY):
            depth -= 1
            if depth == 0:
                return NOT_FOUND
    return NOT_UNDERSTOOD


@kernel
def _after_space(text: bytes, at: int) -> int:
    while _is_space(text[at]):
        at += 1
    return at


@kernel
def _is_space(byte: int) -> bool:
    return byte in (SPACE, LINE_FEED, CARRIAGE_RETURN, TAB)


@kernel
def _after_string(text: bytes, at: int) -> tuple[int, bool]:
    """The position after the string whose first character is at `at`, and whether an escape is in it."""
    size = len(text)
    is_escaped = False
    while at < size:
        byte = text[at]
        at += 1
        if byte == QUOTE:
            return at, is_escaped
        if byte == BACKSLASH:
            is_escaped = True
            at += 1
    return size, is_escaped


@kernel
def _is_name(text: bytes, start: int, stop: int, name: bytes) -> bool:
    if stop - start != len(name):
        return False
    for i in range(len(name)):
        if text[start + i] != name[i]:
            return False
    return True


@kernel
def _read_json_tokens(text: bytes, start: int, tokens: NDArray[numpy.uint32]) -> tuple[int, int]:
    """Reads the array at `start`. Returns how many, and the position after the array or NOT_UNDERSTOOD.

    Where one number ends must be known before the next is looked at. So two are read at a time: one from the array's
    beginning on, one from a comma in the middle of the text on, whose tokens wait in the second half of the room. They
    count only if the first reader comes to that comma by itself; if the array ends before, they were never asked for.
    """
    at = _after_space(text, start + 1)
    if text[at] == CLOSE_ARRAY:
        return 0, at + 1
    comma = _middle_comma(text, at)
    if comma < 0:
        return _read_tokens(text, at, -1, tokens, 0)
    middle, half = _after_space(text, comma + 1), len(tokens) >> 1
    pairs, at, later = _read_in_pairs(text, at, middle, middle - comma, tokens, half)
    count, at = _read_tokens(text, at, middle, tokens, pairs)
    if at != middle:
        return count, at
    for i in range(pairs):
        tokens[count + i] = tokens[half + i]
    return _read_tokens(text, later, -1, tokens, count + pairs)


@kernel
def _middle_comma(text: bytes, start: int) -> int:
    """Of the text from `start` on, if it is long enough to be worth it and has one near there; otherwise -1."""
    at = (start + len(text)) >> 1
    if at - start < WORTH_TWO_READERS:
        return -1
    for comma in range(at, at + U32_DIGITS):
        if text[comma] == COMMA:
            return comma
    return -1


@kernel
def _read_in_pairs(
    text: bytes, start: int, middle: int, step: int, tokens: NDArray[numpy.uint32], half: int
) -> tuple[int, int, int]:
    """Reads tokens from `start` and as many from `middle`, while all are short and `step` bytes lie between them: a
    comma and perhaps one space. With anything else between them, none.

    Returns how many of each, and where each reader stands: before a token or the space before it.
    """
    first, second, end = U64(start), U64(middle), U64(middle)
    limit = U64(max(middle, len(text) - 2 * EIGHT))  # the last token is never read here: what follows it is no comma
    width = U64(step)
    pairs = 0
    if step > 2:
        return pairs, start, middle
    while first < end and second < limit:
        one, one_stop = _short_number(text, first)
        two, two_stop = _short_number(text, second)
        if one_stop == first or two_stop == second or text[one_stop] != COMMA or text[two_stop] != COMMA:
            break
        if step == 2 and (text[one_stop + U64_ONE] != SPACE or text[two_stop + U64_ONE] != SPACE):
            break
        tokens[pairs] = one
        tokens[half + pairs] = two
        pairs += 1
        first, second = one_stop + width, two_stop + width
    return pairs, _signed(first), _signed(second)


@kernel
def _read_tokens(text: bytes, at: int, middle: int, tokens: NDArray[numpy.uint32], count: int) -> tuple[int, int]:
    """Reads on, one by one, after the `count` tokens that are there, to the token at `middle` or the array's end.

    Returns how many there are now, and `middle` or the position after the array or NOT_UNDERSTOOD.
    """
    at = _after_space(text, at)
    while at != middle:
        value, at = _read_token(text, at)
        if at < 0:
            return count, NOT_UNDERSTOOD
        tokens[count] = value
        count += 1
        at = _after_space(text, at)
        if text[at] != COMMA:
            return count, at + 1 if text[at] == CLOSE_ARRAY else NOT_UNDERSTOOD
        at = _after_space(text, at + 1)
    return count, at


@kernel
def _read_token(text: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and the position after it or NOT_UNDERSTOOD."""
    value, stop = _read_short_number(text, at)
    if stop == at:
        while ZERO <= text[stop] <= NINE:
            value = value * 10 + (text[stop] - ZERO)
            stop += 1
    if _is_no_number(text, at, stop, U32_DIGITS) or value >= U32_LIMIT:
        return value, NOT_UNDERSTOOD
    return value, stop


@kernel
def _is_no_number(text: bytes, start: int, stop: int, digits_max: int) -> bool:
    """Whether these digits are none, too many, or begin with a zero that is not all of them."""
    digits = stop - start
    return digits == 0 or digits > digits_max or (digits > 1 and text[start] == ZERO)


@kernel
def _read_json_hashes(text: bytes, start: int, hashes: NDArray[numpy.uint64]) -> tuple[int, int]:
    """Reads the array at `start`. Returns how many, and the position after the array or NOT_UNDERSTOOD."""
    count = 0
    at = _after_space(text, start + 1)
    if text[at] == CLOSE_ARRAY:
        return count, at + 1
    while True:
        is_negative = text[at] == MINUS
        value, at = _read_u64(text, at + 1 if is_negative else at)
        if at < 0 or (is_negative and (value == U64_ZERO or value > U64_SIGN)):
            return count, NOT_UNDERSTOOD
        hashes[count] = ~(value - U64_ONE) if is_negative else value
        count += 1
        at = _after_space(text, at)
        if text[at] != COMMA:
            return count, at + 1 if text[at] == CLOSE_ARRAY else NOT_UNDERSTOOD
        at = _after_space(text, at + 1)


@kernel
def _read_u64(text: bytes, at: int) -> tuple[numpy.uint64, int]:
    """The number at `at`, and the position after it or NOT_UNDERSTOOD."""
    value, stop = _read_eights(text, at)
    while ZERO <= text[stop] <= NINE:
        digit = U64(text[stop] - ZERO)
        if stop - at >= U64_SAFE_DIGITS and (value > U64_TENTH or (value == U64_TENTH and digit > U64_LAST_DIGIT)):
            return value, NOT_UNDERSTOOD
        value = value * U64_TEN + digit
        stop += 1
    if _is_no_number(text, at, stop, U64_DIGITS):
        return value, NOT_UNDERSTOOD
    return value, stop


# Eight digits at once: as the bytes of one number, the first digit in its lowest byte.

EIGHT = 8
ASCII_ZEROS = U64(0x3030303030303030)
HIGH_BITS = U64(0x8080808080808080)
NINE_TO_HIGH_BIT = U64(0x7676767676767676)  # added to a byte above 9, it reaches the byte's high bit, or the next byte


@kernel
def _read_short_number(text: bytes, at: int) -> tuple[int, int]:
    """A number of one to seven digits and the position after it; (0, `at`) for any other, or near the text's end."""
    if at + EIGHT > len(text):
        return 0, at
    value, stop = _short_number(text, U64(at))
    return _signed(value), _signed(stop)


@kernel
def _short_number(text: bytes, at: numpy.uint64) -> tuple[numpy.uint64, numpy.uint64]:
    """The same where the text has eight more bytes."""
    word = _eight_digits(text, at)
    digits = trailing_zeros(_non_digits(word)) >> U64(3)
    if digits == U64_ZERO or digits == U64(EIGHT) or (digits > U64_ONE and word & U64(0xFF) == U64_ZERO):
        return U64_ZERO, at
    return _number(word << (U64(8) * (U64(EIGHT) - digits))), at + digits


@kernel
def _read_eights(text: bytes, at: int) -> tuple[numpy.uint64, int]:
    """Up to sixteen digits, by eight, and the position after them."""
    value = U64_ZERO
    for _ in range(2):
        if at + EIGHT > len(text):
            break
        word = _eight_digits(text, U64(at))
        if _non_digits(word) != U64_ZERO:
            break
        value = value * U64(100_000_000) + _number(word)
        at += EIGHT
    return value, at


@kernel
def _eight_digits(text: bytes, i: numpy.uint64) -> numpy.uint64:
    """Eight characters as digits: what is no digit becomes a byte above 9. The compiler makes one load of it."""
    word = U64(text[i])
    word |= U64(text[i + U64(1)]) << U64(8)
    word |= U64(text[i + U64(2)]) << U64(16)
    word |= U64(text[i + U64(3)]) << U64(24)
    word |= U64(text[i + U64(4)]) << U64(32)
    word |= U64(text[i + U64(5)]) << U64(40)
    word |= U64(text[i + U64(6)]) << U64(48)
    word |= U64(text[i + U64(7)]) << U64(56)
    return word ^ ASCII_ZEROS


@kernel
def _non_digits(word: numpy.uint64) -> numpy.uint64:
    """0 if all eight are digits; otherwise the lowest bit is the high one of the first byte that is none."""
    return ((word + NINE_TO_HIGH_BIT) | word) & HIGH_BITS


@kernel
def _signed(number: numpy.uint64) -> int:
    """A small uint64 as what all positions and tokens are; `int` alone would leave it one when compiled."""
    return int(numpy.int64(number))


@kernel
def _number(word: numpy.uint64) -> numpy.uint64:
    """The value of eight digits: neighbours are joined to numbers of two digits, those to four, those to eight."""
    word = (word * U64(10) + (word >> U64(8))) & U64(0x00FF00FF00FF00FF)
    word = (word * U64(100) + (word >> U64(16))) & U64(0x0000FFFF0000FFFF)
    return (word * U64(10_000) + (word >> U64(32))) & U64(0xFFFFFFFF)


# ---------------------------------------------------------------------- msgpack

FIXMAP, FIXARRAY, FIXSTR, NIL, NEVER_USED = 0x80, 0x90, 0xA0, 0xC0, 0xC1
BIN_8, EXT_8, FLOAT_32 = 0xC4, 0xC7, 0xCA
UINT_8, UINT_16, UINT_32, INT_8, INT_64 = 0xCC, 0xCD, 0xCE, 0xD0, 0xD3
STR_8, ARRAY_16, MAP_16, NEGATIVE_FIXINT = 0xD9, 0xDC, 0xDE, 0xE0

NO_WIDTH = (0, 0, 0, 0)  # nil, the one never used, false, true
BIN_WIDTHS = EXT_WIDTHS = STR_WIDTHS = (1, 2, 4)
FLOAT_WIDTHS = (4, 8)
INTEGER_WIDTHS = (1, 2, 4, 8, 1, 2, 4, 8)
FIXEXT_WIDTHS = (2, 3, 5, 9, 17)
COUNT_WIDTHS = (2, 4, 2, 4)  # of arrays and maps
WIDTHS = (
    *NO_WIDTH,
    *BIN_WIDTHS,
    *EXT_WIDTHS,
    *FLOAT_WIDTHS,
    *INTEGER_WIDTHS,
    *FIXEXT_WIDTHS,
    *STR_WIDTHS,
    *COUNT_WIDTHS,
)
"""How many bytes follow a code from NIL on: its value or, where that has no fixed size, the length or count."""


@kernel
def msgpack_tokens(data: bytes, name: bytes, tokens: NDArray[numpy.uint32]) -> tuple[int, int, int]:
    """Reads the array `name` of the map that the data is, of integers from 0 to 2^32 - 1, into `tokens`.

    `tokens` needs room for as many as the data has bytes. Returns (count, start, stop) or UNCLAIMED.
    """
    is_packed, claim = _msgpack_prompt(data, name, tokens)
    return UNCLAIMED if is_packed else claim


@kernel
def msgpack_prompt(data: bytes, name: bytes, tokens: NDArray[numpy.uint32]) -> tuple[int, int, int]:
    """The same, or of a `bin` of integers as u32 little-endian."""
    is_packed, claim = _msgpack_prompt(data, name, tokens)
    if not is_packed:
        return claim
    _, start, stop = claim
    first = start + 1 + WIDTHS[data[start] - NIL]
    count = (stop - first) >> 2
    if 4 * count != stop - first:
        return UNCLAIMED
    at = U64(first)
    for i in range(count):
        tokens[i] = _four_bytes(data, at)
        at += U64(4)
    return count, start, stop


@kernel
def _four_bytes(data: bytes, i: numpy.uint64) -> numpy.uint64:
    """As one number, the first byte lowest. The compiler makes one load of it."""
    word = U64(data[i]) | U64(data[i + U64(1)]) << U64(8)
    return word | U64(data[i + U64(2)]) << U64(16) | U64(data[i + U64(3)]) << U64(24)


@kernel
def _msgpack_prompt(data: bytes, name: bytes, tokens: NDArray[numpy.uint32]) -> tuple[bool, tuple[int, int, int]]:
    """Whether it is a `bin`, which is not read here, and the claim."""
    claim = UNCLAIMED
    is_packed = False
    at, members = _map_members(data)
    while members > 0 and at >= 0:
        key, value = _key(data, at)
        if value < 0:
            return False, UNCLAIMED
        if not _is_name(data, key, value, name):
            at = _after_value(data, value)
        elif claim[0] >= 0:
            return False, UNCLAIMED
        else:
            is_packed = BIN_8 <= data[value] < EXT_8
            if is_packed:
                count, at = 0, _after_value(data, value)
            else:
                count, at = _read_msgpack_tokens(data, value, tokens)
            claim = count, value, at
        members -= 1
    return (is_packed, claim) if at >= 0 else (False, UNCLAIMED)


@kernel
def _map_members(data: bytes) -> tuple[int, int]:
    """Where the first member of the map is, if the data is one, and how many there are."""
    if len(data) == 0 or not (FIXMAP <= data[0] < FIXARRAY or MAP_16 <= data[0] < NEGATIVE_FIXINT):
        return NOT_UNDERSTOOD, 0
    at, values = _after_header(data, 0)
    return at, values >> 1


@kernel
def _key(data: bytes, at: int) -> tuple[int, int]:
    """Where the text of the key at `at` begins and ends; NOT_UNDERSTOOD for a key that is no text."""
    if at >= len(data):
        return at, NOT_UNDERSTOOD
    start = at + 1
    if STR_8 <= data[at] < ARRAY_16:
        start += WIDTHS[data[at] - NIL]
    elif not FIXSTR <= data[at] < NIL:
        return at, NOT_UNDERSTOOD
    stop, _ = _after_header(data, at)
    return start, stop if stop < len(data) else NOT_UNDERSTOOD


@kernel
def _after_value(data: bytes, at: int) -> int:
    """The position after the value at `at`, with all that is in it; NOT_UNDERSTOOD if the data ends before."""
    waiting = 1
    while waiting > 0:
        if not 0 <= at < len(data):
            return NOT_UNDERSTOOD
        at, inside = _after_header(data, at)
        waiting += inside - 1
    return at if at <= len(data) else NOT_UNDERSTOOD


@kernel
def _after_header(data: bytes, at: int) -> tuple[int, int]:
    """The position after the value at `at`, or after the header of an array or map, and how many values that holds.

    The position may be beyond the end. Each header adds at most 2^33 values: no body is long enough to overflow that.
    """
    code = data[at]
    if code < FIXMAP or code >= NEGATIVE_FIXINT:
        return at + 1, 0
    if code < FIXARRAY:
        return at + 1, 2 * (code - FIXMAP)
    if code < FIXSTR:
        return at + 1, code - FIXARRAY
    if code < NIL:
        return at + 1 + (code - FIXSTR), 0
    return _after_wide_header(data, at, code)


@kernel
def _after_wide_header(data: bytes, at: int, code: int) -> tuple[int, int]:
    after = at + 1 + WIDTHS[code - NIL]
    if code == NEVER_USED or after > len(data):
        return NOT_UNDERSTOOD, 0
    if code < BIN_8 or FLOAT_32 <= code < STR_8:
        return after, 0
    length = _big_endian(data, at + 1, after)
    if code >= MAP_16:
        return after, 2 * length
    if code >= ARRAY_16:
        return after, length
    if EXT_8 <= code < FLOAT_32:
        return after + 1 + length, 0
    return after + length, 0


@kernel
def _big_endian(data: bytes, start: int, stop: int) -> int:
    value = 0
    for i in range(start, stop):
        value = (value << 8) | data[i]
    return value


@kernel
def _read_msgpack_tokens(data: bytes, at: int, tokens: NDArray[numpy.uint32]) -> tuple[int, int]:
    """Reads the array at `at`. Returns how many, and the position after the array or NOT_UNDERSTOOD."""
    if not (FIXARRAY <= data[at] < FIXSTR or ARRAY_16 <= data[at] < MAP_16):
        return 0, NOT_UNDERSTOOD
    at, count = _after_header(data, at)
    if at < 0 or count > len(data) - at:
        return 0, NOT_UNDERSTOOD
    for n in range(count):
        value, at = _read_u32(data, at)
        if at < 0:
            return 0, NOT_UNDERSTOOD
        tokens[n] = value
    return count, at


@kernel
def _read_u32(data: bytes, at: int) -> tuple[int, int]:
    """The integer at `at`, and the position after it or NOT_UNDERSTOOD. The usual widths are read without a loop."""
    left = len(data) - at
    if left > 0 and data[at] < FIXMAP:
        return data[at], at + 1
    if left > 2 and data[at] == UINT_16:
        return (data[at + 1] << 8) | data[at + 2], at + 3
    if left > 4 and data[at] == UINT_32:
        high, low = (data[at + 1] << 8) | data[at + 2], (data[at + 3] << 8) | data[at + 4]
        return (high << 16) | low, at + 5
    return _read_other_u32(data, at)


@kernel
def _read_other_u32(data: bytes, at: int) -> tuple[int, int]:
    if at >= len(data) or not UINT_8 <= data[at] <= INT_64:
        return 0, NOT_UNDERSTOOD
    after = at + 1 + WIDTHS[data[at] - NIL]
    if after > len(data) or (data[at] >= INT_8 and data[at + 1] >= 0x80):
        return 0, NOT_UNDERSTOOD
    value = _big_endian(data, at + 1, after)
    return value, after if 0 <= value < U32_LIMIT else NOT_UNDERSTOOD
