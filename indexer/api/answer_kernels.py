"""Kernels that write the answer to a known query: texts that are kept, and numbers between them.

Purpose: what an answer says of a publisher hardly changes but for its numbers. So it is kept as a text with holes
(answer_texts.py), and writing an answer is copying texts and filling holes.

Invariants: what is written is what the route's encoder would write; nothing is written beyond the room for the answer.

If broken: routers would read nonsense.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from indexer.compiled import kernel

# frames: the texts that all answers are made of, by number
HEAD, JSON_TYPE, MSGPACK_TYPE = range(3)
JSON_BEFORE, JSON_HITS, JSON_END, JSON_WARNING, JSON_WARNING_END = range(3, 8)
MSGPACK_BEFORE, MSGPACK_HITS, MSGPACK_END, MSGPACK_WARNING, MSGPACK_WARNING_END = range(8, 13)
SCORES_BEFORE, SCORES_BETWEEN, SCORES_AFTER, MESSAGE, SEPARATOR, MORE = range(13, 19)
FRAMES = 19
TO_MSGPACK = MSGPACK_BEFORE - JSON_BEFORE
HEAD_ROOM = 1_024  # before the answer's body, for its head
TAIL_ROOM = 1_024  # behind its last hit or name, for frames and numbers
LENGTH_DIGITS = 20

# cards: what answers say of the holder in one slot; texts by where each starts and stops
RANK, NUMBER_ROW, NAME, HAS_SIBLINGS, TEXTS = range(5)
JSON_HIT, MSGPACK_HIT, SCORE, INSTANCE, DP_RANK = range(5)
TEXT_COUNT = 5
CARD_FIELDS = TEXTS + 2 * TEXT_COUNT

# holes in a text; each follows a piece of text, whose size stands before it in two bytes
END, RESIDENT, HIT, NUMBER, RANKS = range(5)

# publishers whose coverage is below `complete`, a row each: the slot of their card or -1, where their name as JSON
# starts and stops, and the same of their name as it is
DOUBT_SLOT, DOUBT_JSON, DOUBT_RAW = 0, 1, 3
DOUBT_FIELDS = 5

# answers without hits: what follows the number of tokens, by where the texts start and stop; the codes of its warnings
# as bits, by their places in CAUSES of answer_texts.py; and of which prompts there may be more to say: those shorter
# than so many tokens, and with an adapter or a salt that is not in the names with this number
JSON_TAIL, MSGPACK_TAIL, TAIL_CAUSES, LEAST_TOKENS, NAMES_NUMBER = 0, 2, 4, 5, 6

# hits, best first
HIT_SLOT, HIT_TOKENS = range(2)
HIT_FIELDS = 2

COMMA, ZERO_DIGIT = b",0"
NULL = tuple(b"null")
NIL, UINT_8, FIXARRAY, ARRAY_16, FIXARRAY_COUNTS = 0xC0, 0xCC, 0x90, 0xDC, 16  # msgpack
FIXINT_LIMIT, FIXSTR, FIXSTR_SIZES, STR_8 = 0x80, 0xA0, 32, 0xD9

U64 = np.uint64
ZERO, ONE = U64(0), U64(1)


class Answer(NamedTuple):
    """What an answer is written into and of. `hits`: `hit_count` of them. `seen`: bits to work in, of a slot each."""

    out: Any
    frames: Any
    places: Any
    cards: Any
    texts: Any
    numbers: Any
    doubts: Any
    hits: Any
    hit_count: int
    seen: Any


@kernel
def write_hits(answer, granule, prompt_tokens, named_max, is_binary):
    """The native answer's body, from HEAD_ROOM on. Where it ends, or -1 if there is no room for it; and how many
    publishers its warning names."""
    frames = JSON_BEFORE + TO_MSGPACK if is_binary else JSON_BEFORE
    at = _write_frame(answer, HEAD_ROOM, frames)
    at = _write_number(answer.out, at, prompt_tokens, is_binary)
    at = _write_frame(answer, at, frames + JSON_HITS - JSON_BEFORE)
    if is_binary:
        at = _write_size(answer.out, at, answer.hit_count, FIXARRAY, FIXARRAY_COUNTS, ARRAY_16, 2)
    limit = (prompt_tokens - 1) // granule * granule
    text = MSGPACK_HIT if is_binary else JSON_HIT
    for i in range(answer.hit_count):
        if i > 0 and not is_binary:
            at = _write_comma(answer, at)
        at = _write_text(answer, at, i, text, limit, is_binary)
        if at < 0:
            return -1, 0
    return _write_warning(answer, at, frames - JSON_BEFORE, named_max, is_binary)


@kernel
def write_nothing(answer, tails, prompt_tokens, is_binary):
    """The native answer without hits, of which all but the number of tokens is prepared. As `write_hits`."""
    at = _write_frame(answer, HEAD_ROOM, JSON_BEFORE + TO_MSGPACK if is_binary else JSON_BEFORE)
    at = _write_number(answer.out, at, prompt_tokens, is_binary)
    tail = MSGPACK_TAIL if is_binary else JSON_TAIL
    start, stop = tails[tail], tails[tail + 1]
    if at + stop - start + TAIL_ROOM > len(answer.out):
        return -1
    return copy(answer.out, at, answer.texts, start, stop)


@kernel
def _write_warning(answer, at, shift, named_max, is_binary):
    """What follows the hits; as `write_hits`."""
    doubts, size = find_doubts(answer, named_max)
    if doubts == 0:
        return _write_frame(answer, at, JSON_END + shift), 0
    named = min(doubts, named_max)
    at = _write_frame(answer, at, JSON_WARNING + shift)
    if is_binary:
        size += _frame_size(answer, MESSAGE) + (named - 1) * _frame_size(answer, SEPARATOR)
        size += _frame_size(answer, MORE) if doubts > named else 0
        at = _write_size(answer.out, at, size, FIXSTR, FIXSTR_SIZES, STR_8, 1)
    at = _write_frame(answer, at, MESSAGE)
    place = DOUBT_RAW if is_binary else DOUBT_JSON
    for i in range(named):
        row = answer.hits[HIT_FIELDS * answer.hit_count + i] * DOUBT_FIELDS + place
        start, stop = answer.doubts[row], answer.doubts[row + 1]
        if at + stop - start + TAIL_ROOM > len(answer.out):
            return -1, 0
        if i > 0:
            at = _write_frame(answer, at, SEPARATOR)
        at = copy(answer.out, at, answer.texts, start, stop)
    if doubts > named:
        at = _write_frame(answer, at, MORE)
    return _write_frame(answer, at, JSON_WARNING_END + shift), doubts


@kernel
def find_doubts(answer, named_max):
    """Publishers below `complete` that have no hit: how many, but no more than one too many, and how long the names of
    those that are to be named are. Their rows are noted behind the hits."""
    seen = answer.seen
    named, size = 0, 0
    if len(answer.doubts) == 0:
        return named, size
    for w in range(len(seen)):
        seen[w] = ZERO
    for i in range(answer.hit_count):
        set_bit(seen, answer.hits[HIT_FIELDS * i + HIT_SLOT])
    for row in range(0, len(answer.doubts), DOUBT_FIELDS):
        slot = answer.doubts[row + DOUBT_SLOT]
        if slot >= 0 and has_bit(seen, slot):
            continue
        named += 1
        if named > named_max:
            break
        size += answer.doubts[row + DOUBT_RAW + 1] - answer.doubts[row + DOUBT_RAW]
        answer.hits[HIT_FIELDS * answer.hit_count + named - 1] = row // DOUBT_FIELDS
    return named, size


@kernel
def write_scores(answer):
    """The other dialect's answer, as `write_hits`: one entry for all ranks of an instance."""
    at = HEAD_ROOM
    for part in range(2):
        at = _write_frame(answer, at, SCORES_BEFORE + part)
        for w in range(len(answer.seen)):
            answer.seen[w] = ZERO
        for i in range(answer.hit_count):
            if set_bit(answer.seen, _card(answer, i, NAME)):
                continue
            if i > 0:
                at = _write_comma(answer, at)
            at = _write_text(answer, at, i, SCORE + part, 0, False)
            if at < 0:
                return -1
    return _write_frame(answer, at, SCORES_AFTER)


@kernel
def _card(answer, hit, field):
    return answer.cards[answer.hits[HIT_FIELDS * hit + HIT_SLOT] * CARD_FIELDS + field]


@kernel
def _write_text(answer, at, hit, text, limit, is_binary):
    """A text of this hit's card with its holes filled. Where it ends, or -1 if there is no room for it."""
    out, texts = answer.out, answer.texts
    i, stop = _card(answer, hit, TEXTS + 2 * text), _card(answer, hit, TEXTS + 2 * text + 1)
    if at + stop - i + TAIL_ROOM > len(out):
        return -1
    tokens = answer.hits[HIT_FIELDS * hit + HIT_TOKENS]
    while True:
        size = np.int64(texts[i]) | np.int64(texts[i + 1]) << 8
        at = copy(out, at, texts, i + 2, i + 2 + size)
        hole = texts[i + 2 + size]
        i += size + 3
        if hole == END:
            return at
        if hole == RESIDENT:
            at = _write_number(out, at, tokens, is_binary)
        elif hole == HIT:
            at = _write_number(out, at, min(tokens, limit), is_binary)
        elif hole == NUMBER:
            at = _write_number(out, at, answer.numbers[_card(answer, hit, NUMBER_ROW)], is_binary)
        else:
            at = _write_ranks(answer, at, hit)
            if at < 0:
                return -1


@kernel
def _write_ranks(answer, at, first):
    """All ranks of the instance whose best one is this hit, as members of an object."""
    name = _card(answer, first, NAME)
    stop = answer.hit_count if _card(answer, first, HAS_SIBLINGS) else first + 1
    for i in range(first, stop):
        if _card(answer, i, NAME) != name:
            continue
        start, end = _card(answer, i, TEXTS + 2 * DP_RANK), _card(answer, i, TEXTS + 2 * DP_RANK + 1)
        if at + end - start + TAIL_ROOM > len(answer.out):
            return -1
        if i > first:
            at = _write_comma(answer, at)
        at = copy(answer.out, at, answer.texts, start, end)
        at = _write_number(answer.out, at, answer.hits[HIT_FIELDS * i + HIT_TOKENS], False)
    return at


@kernel
def write_head(answer, end, is_binary):
    """The head before the body, which ends at `end`. Where the head starts."""
    frame = MSGPACK_TYPE if is_binary else JSON_TYPE
    at = HEAD_ROOM - _frame_size(answer, frame)
    _write_frame(answer, at, frame)
    length = end - HEAD_ROOM
    while True:
        at -= 1
        answer.out[at] = ZERO_DIGIT + length % 10
        length //= 10
        if length == 0:
            break
    at -= _frame_size(answer, HEAD)
    _write_frame(answer, at, HEAD)
    return at


@kernel
def copy(out, at, data, start, stop):
    for i in range(stop - start):
        out[at + i] = data[start + i]
    return at + stop - start


@kernel
def _write_frame(answer, at, frame):
    return copy(answer.out, at, answer.frames, answer.places[frame], answer.places[frame + 1])


@kernel
def _frame_size(answer, frame):
    return answer.places[frame + 1] - answer.places[frame]


@kernel
def _write_comma(answer, at):
    answer.out[at] = COMMA
    return at + 1


@kernel
def _write_number(out, at, number, is_binary):
    """-1 stands for none."""
    if is_binary:
        return _write_packed(out, at, number)
    if number < 0:
        out[at], out[at + 1], out[at + 2], out[at + 3] = NULL
        return at + 4
    digits, rest = 1, number
    while rest > 9:
        rest //= 10
        digits += 1
    for i in range(at + digits - 1, at - 1, -1):
        out[i] = ZERO_DIGIT + number % 10
        number //= 10
    return at + digits


@kernel
def _write_packed(out, at, number):
    """As msgpack, in as few bytes as there can be."""
    if number < 0:
        out[at] = NIL
        return at + 1
    if number < FIXINT_LIMIT:
        out[at] = number
        return at + 1
    code, size = UINT_8, 1
    while size < 8 and number >> (8 * size) != 0:
        code, size = code + 1, 2 * size
    out[at] = code
    return _write_bytes(out, at + 1, number, size)


@kernel
def _write_size(out, at, size, short, short_sizes, wide, width):
    """The head of an array or a text in msgpack: in one byte, or a code and a number of `width` bytes or twice that."""
    if size < short_sizes:
        out[at] = short + size
        return at + 1
    while size >> (8 * width) != 0:
        wide, width = wide + 1, 2 * width
    out[at] = wide
    return _write_bytes(out, at + 1, size, width)


@kernel
def _write_bytes(out, at, number, size):
    for i in range(size):
        out[at + i] = (number >> (8 * (size - 1 - i))) & 0xFF
    return at + size


@kernel
def has_bit(bits, place):
    return bits[place >> 6] & (ONE << U64(place & 63)) != ZERO


@kernel
def set_bit(bits, place):
    """Whether it was set before."""
    was_set = has_bit(bits, place)
    bits[place >> 6] |= ONE << U64(place & 63)
    return was_set
