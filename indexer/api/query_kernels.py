"""The kernel that answers a known query: from the bytes of its request to the bytes of its answer.

Purpose: routers ask thousands of times a second, and most queries say the same but for their tokens. What a query says
beside them, as the bytes it says it with, is its shape. Python reads each shape once (known_queries.py); this kernel
recognises it, reads the tokens, looks the prompt up, judges publishers of the plain kind and writes the answer, with no
object made on the way.

Invariants: the answer is, byte by byte, that of the route's own function (query_route.py) for the same request. What
the kernel does not know it does not claim: it says why, and has changed nothing but what it works in. No byte beyond
the request is looked at, and none is written beyond the room for the answer.

If broken: routers would get answers to other questions, depending on how often they ask.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numba
import numpy as np

from indexer.api import request_kernels
from indexer.api.request_kernels import METHOD, read_head
from indexer.compiled import IS_COMPILED, kernel_over, trailing_zeros
from indexer.identity import chain_kernels
from indexer.identity.chain_kernels import xxh3
from indexer.index import kernels as index_kernels
from indexer.index.kernels import look_up_hashes, look_up_prompt
from indexer.wire import token_kernels
from indexer.wire.token_kernels import json_hashes, json_tokens, msgpack_prompt

kernel = kernel_over(request_kernels, token_kernels, index_kernels, chain_kernels)

# what the kernel returns: the size of the answer, or one of these
UNCLAIMED, UNKNOWN_SHAPE, OTHER_PLAN, UNKNOWN_SLOTS, NOT_WHOLE = range(-1, -6, -1)

# routes
PREFIX_HITS_PATH, QUERY_PATH, HASH_QUERY_PATH = "/v1/prefix-hits", "/query", "/query_by_hash"
NATIVE, SCORES, SCORES_BY_HASH = range(3)
ROUTES = 3
PATHS = PREFIX_HITS_PATH, QUERY_PATH, HASH_QUERY_PATH
_NATIVE, _QUERY, _HASH_QUERY = (tuple(path.encode()) for path in PATHS)
_TOKEN_IDS, _BLOCK_HASHES = tuple(b"token_ids"), tuple(b"block_hashes")
_TARGET_START = len(METHOD)
MSGPACK_MAP = 0x80  # a body that begins with this byte or a higher one is no JSON

# what the kernel says of the request in `found`
BODY, ARRAY_START, ARRAY_STOP, TARGET_STOP, TYPE_START, TYPE_STOP, ROUTE = range(7)
SHAPE_SIZE, PLAN, RUNS, ANSWER, CLOCK_S, CLOCK_NS = range(7, 13)
FOUND_FIELDS = 13

# shapes: rows of a hash table
SHAPE_HASH, TEXT_START, TEXT_SIZE, SHAPE_PLAN, FIRST_SEED, SEED = range(6)
SHAPE_WORDS = 6
SHAPE_ROWS = 8_192
SHAPE_BYTES_MAX = 1_024
SHAPE_HEAD = 6
NEVER = np.uint64((1 << 64) - 1)  # plan of a shape that the kernel shall not answer
NO_PLAN = -1

# frames: the texts that all answers are made of, by number
HEAD, JSON_TYPE, MSGPACK_TYPE, JSON_BEFORE, JSON_HITS, JSON_AFTER, MSGPACK_BEFORE, MSGPACK_HITS, MSGPACK_AFTER = range(9)
SCORES_BEFORE, SCORES_BETWEEN, SCORES_AFTER = range(9, 12)
FRAMES = 12
HEAD_ROOM = 1_024  # before the answer's body, for its head
TAIL_ROOM = 256  # behind its last hit
LENGTH_DIGITS = 20

# cards: what answers say of the holder in one slot; then the slot of each rank
RANK, NUMBER_ROW, NAME, TEXTS = range(4)
JSON_HIT, MSGPACK_HIT, SCORE, INSTANCE = range(4)  # texts: where each starts and stops
CARD_FIELDS = TEXTS + 2 * 4
HIT_BYTES_MAX = 6 * 20  # what is filled into the holes of one text

# holes in a text; each follows a piece of text, whose size stands before it in two bytes
END, RESIDENT, HIT, NUMBER = range(4)

# numbers of queries, by route; of the index, by outcome; then histograms, one more bucket than bounds each
LATENCY_BOUNDS, PROMPT_BOUNDS = 17, 8
QUERIES, HITS, MISSES = 0, ROUTES, ROUTES + 1
ROUTE_SECONDS = ROUTES + 2
INDEX_SECONDS = ROUTE_SECONDS + ROUTES * (LATENCY_BOUNDS + 1)
PROMPT_TOKENS = INDEX_SECONDS + LATENCY_BOUNDS + 1
COUNTS = PROMPT_TOKENS + PROMPT_BOUNDS + 1
# their bounds and totals
ROUTE_TOTALS = LATENCY_BOUNDS + PROMPT_BOUNDS
INDEX_TOTAL, PROMPT_TOTAL = ROUTE_TOTALS + ROUTES, ROUTE_TOTALS + ROUTES + 1
TOTALS = PROMPT_TOTAL + 1

COMMA, ZERO_DIGIT = b",0"
NULL = tuple(b"null")
NIL, UINT_8, FIXARRAY, ARRAY_16, FIXARRAY_COUNTS = 0xC0, 0xCC, 0x90, 0xDC, 16  # msgpack

_MONOTONIC = time.CLOCK_MONOTONIC
_clock_gettime: Any = numba.types.ExternalFunction("clock_gettime", numba.intc(numba.intc, numba.uintp))

U64 = np.uint64
ZERO, ONE = U64(0), U64(1)
WORD_BITS = 64


class Answer(NamedTuple):
    """What the answer is written of and into."""

    out: Any
    frames: Any
    places: Any
    cards: Any
    texts: Any
    numbers: Any


class Groups(NamedTuple):
    """Holders that have the prompt up to the same granule: how far, and their slots as bits. The farthest are last.

    `bits`: words of all slots that hold anything, of those that still hold the prefix, of ranks, of names; then of each
    group.
    """

    reaches: Any
    bits: Any
    words: int


@kernel
def answer_query(
    data, filled, body_max, tokens_max, found, shapes, shape_texts, frames, places, tokens, keys, local_hashes, set_ids,
    runs, bits, out, counts, totals, plan, granule, stops_at_miss, is_complete, words, slots, old, meta, masks, kinds,
    cards, texts, numbers,
):  # fmt: skip
    """The request is the first `filled` bytes of `data`; its answer is written into `out`, from `found[ANSWER]` on.

    `plan` and all that follows: the key space that queries with this plan ask, see known_queries.py. `is_complete`:
    no answer has a warning. Returns the size of the answer, or an outcome.
    """
    began = _clock(found)
    outcome = _read_request(data, filled, body_max, found)
    if outcome != 0:
        return outcome
    count, is_binary = _read_prompt(data, filled, found, tokens, local_hashes)
    if count <= 0:
        return UNCLAIMED
    found[SHAPE_SIZE] = _write_shape(data, filled, found, out)
    if found[SHAPE_SIZE] < 0:
        return UNCLAIMED
    row = _find_shape(out, found[SHAPE_SIZE], shapes, shape_texts)
    if row < 0:
        return UNKNOWN_SHAPE
    route = found[ROUTE]
    if shapes[row + SHAPE_PLAN] == NEVER:
        return UNCLAIMED
    found[PLAN] = np.int64(shapes[row + SHAPE_PLAN])
    if found[PLAN] != plan:
        return OTHER_PLAN
    prompt_tokens = count * granule if route == SCORES_BY_HASH else count
    if prompt_tokens > tokens_max or (route == NATIVE and not is_complete):
        return UNCLAIMED
    asked = _clock(found)
    if route == SCORES_BY_HASH:
        _, run_count = look_up_hashes(
            count, slots, old, meta, stops_at_miss, local_hashes, keys, set_ids, runs, keys[len(keys) - 2 :]
        )
    else:
        _, run_count = look_up_prompt(
            tokens, count // granule, granule, shapes[row + FIRST_SEED], shapes[row + SEED], slots, old, meta,
            stops_at_miss, local_hashes, keys, set_ids, runs, keys[len(keys) - 2 :],
        )  # fmt: skip
    found[RUNS] = run_count
    groups = Groups(set_ids, bits, words)
    group_count = _judge(runs, run_count, masks, kinds, groups)
    if group_count < 0:
        return group_count
    answered = _clock(found)
    answer = Answer(out, frames, places, cards, texts, numbers)
    if route == NATIVE:
        end = _write_hits(answer, groups, group_count, granule, prompt_tokens, is_binary)
    else:
        end = _write_scores(answer, groups, group_count, granule)
    if end < 0:
        return UNCLAIMED
    size = _write_head(answer, found, end, is_binary)
    counts[QUERIES + route] += 1
    counts[HITS if group_count > 0 else MISSES] += 1
    if route != SCORES_BY_HASH:
        _observe(counts, PROMPT_TOKENS, totals, LATENCY_BOUNDS, PROMPT_BOUNDS, PROMPT_TOTAL, np.float64(count))
    _observe(counts, INDEX_SECONDS, totals, 0, LATENCY_BOUNDS, INDEX_TOTAL, answered - asked)
    at = ROUTE_SECONDS + route * (LATENCY_BOUNDS + 1)
    _observe(counts, at, totals, 0, LATENCY_BOUNDS, ROUTE_TOTALS + route, _clock(found) - began)
    return size


# ---------------------------------------------------------------------- the request


@kernel
def _read_request(data, filled, body_max, found):
    """0, or NOT_WHOLE: not the head of a query, or more or less than its body has come."""
    start, length, target_stop, type_start, type_stop = read_head(data, filled)
    if start < 0 or length <= 0 or length > body_max or start + length != filled:
        return NOT_WHOLE
    if _is_target(data, target_stop, _QUERY):
        route = SCORES
    elif _is_target(data, target_stop, _NATIVE):
        route = NATIVE
    elif _is_target(data, target_stop, _HASH_QUERY):
        route = SCORES_BY_HASH
    else:
        return NOT_WHOLE
    found[BODY], found[TARGET_STOP], found[TYPE_START], found[TYPE_STOP] = start, target_stop, type_start, type_stop
    found[ROUTE] = route
    return 0


@kernel
def _is_target(data, stop, target):
    if stop - _TARGET_START != len(target):
        return False
    for i in range(len(target)):
        if data[_TARGET_START + i] != target[i]:
            return False
    return True


@kernel
def _read_prompt(data, filled, found, tokens, local_hashes):
    """How many tokens or hashes, -1 if that is not understood, and whether the body is msgpack."""
    body = data[found[BODY] : filled]
    is_binary = body[0] >= MSGPACK_MAP
    count, start, stop = -1, 0, 0
    if found[ROUTE] == SCORES_BY_HASH:
        count, start, stop = json_hashes(body, _BLOCK_HASHES, local_hashes)
    elif not is_binary:  # whose tokens wait in the middle of the room: near by, or caches suffer
        count, start, stop = json_tokens(body, _TOKEN_IDS, tokens[: len(body) // 2 + 2])
    elif found[ROUTE] == NATIVE:
        count, start, stop = msgpack_prompt(body, _TOKEN_IDS, tokens)
    found[ARRAY_START], found[ARRAY_STOP] = found[BODY] + start, found[BODY] + stop
    return count, is_binary


@kernel
def _find_shape(key, size, shapes, shape_texts):
    """The first word of the row of the shape with this text, or -1."""
    digest = xxh3(np.uintp(key.ctypes.data), np.uintp(size), ZERO)
    row = np.int64(digest & U64(SHAPE_ROWS - 1)) * SHAPE_WORDS
    while shapes[row + TEXT_SIZE] != ZERO:
        start = np.int64(shapes[row + TEXT_START])
        if shapes[row + SHAPE_HASH] == digest and np.int64(shapes[row + TEXT_SIZE]) == size:
            i = 0
            while i < size and shape_texts[start + i] == key[i]:
                i += 1
            if i == size:
                return row
        row += SHAPE_WORDS
        if row == len(shapes):
            row = 0
    return -1


@kernel
def _write_shape(data, filled, found, key):
    """Target, content type, and the body before and after its array, with the sizes of all but the last before them.
    Returns its size; -1 if it is too long."""
    target = found[TARGET_STOP] - _TARGET_START
    kind = found[TYPE_STOP] - found[TYPE_START]
    before, after = found[ARRAY_START] - found[BODY], filled - found[ARRAY_STOP]
    if target + kind + before + after > SHAPE_BYTES_MAX - SHAPE_HEAD:
        return -1
    at = _write_size(key, 0, target)
    at = _write_size(key, at, kind)
    at = _write_size(key, at, before)
    at = _copy(key, at, data, _TARGET_START, found[TARGET_STOP])
    at = _copy(key, at, data, found[TYPE_START], found[TYPE_STOP])
    at = _copy(key, at, data, found[BODY], found[ARRAY_START])
    return _copy(key, at, data, found[ARRAY_STOP], filled)


@kernel
def _write_size(out, at, size):
    out[at] = size & 0xFF
    out[at + 1] = size >> 8
    return at + 2


@kernel
def _copy(out, at, data, start, stop):
    for i in range(stop - start):
        out[at + i] = data[start + i]
    return at + stop - start


# ---------------------------------------------------------------------- the holders

_ANY, _LEFT, _RANKS, _NAMES, _GROUPS = range(5)


@kernel
def _judge(runs, run_count, masks, kinds, groups):
    """Groups of plain holders; how many, or UNKNOWN_SLOTS if others have anything, or UNCLAIMED if there are too many.
    `kinds`: words of plain slots, then of those that nobody asks for."""
    bits, words = groups.bits, groups.words
    for w in range(words):
        held = ZERO
        for r in range(run_count):
            held |= masks[runs[2 * r] * words + w]
        if held & ~(kinds[w] | kinds[words + w]) != ZERO:
            return UNKNOWN_SLOTS
        bits[_LEFT * words + w] = held & kinds[w]
    count = 0
    reach = 0
    for r in range(run_count):
        count = _end_groups(groups, count, reach, masks, runs[2 * r])
        if count < 0 or not _is_any(bits, _LEFT * words, words):
            return count
        reach += runs[2 * r + 1]
    return _end_group(groups, count, reach, _LEFT) if run_count > 0 else 0


@kernel
def _end_groups(groups, count, reach, masks, set_id):
    """Those that are left, but not in this set, are a group if they had anything."""
    bits, words = groups.bits, groups.words
    for w in range(words):
        mask = masks[set_id * words + w]
        bits[_ANY * words + w] = bits[_LEFT * words + w] & ~mask
        bits[_LEFT * words + w] &= mask
    if reach == 0 or not _is_any(bits, _ANY * words, words):
        return count
    return _end_group(groups, count, reach, _ANY)


@kernel
def _end_group(groups, count, reach, part):
    """One more group, of the slots in this part of the words; UNCLAIMED if there is no room for it."""
    bits, words = groups.bits, groups.words
    at = (_GROUPS + count) * words
    if at + words > len(bits) or count >= len(groups.reaches):
        return UNCLAIMED
    for w in range(words):
        bits[at + w] = bits[part * words + w]
    groups.reaches[count] = reach
    return count + 1


@kernel
def _is_any(bits, start, words):
    for w in range(start, start + words):
        if bits[w] != ZERO:
            return True
    return False


@kernel
def _rank_group(groups, group, cards):
    """The ranks of the slots of this group, as bits: in the order in which answers name them."""
    bits, words = groups.bits, groups.words
    for w in range(words):
        bits[_RANKS * words + w] = ZERO
    for w in range(words):
        word = bits[(_GROUPS + group) * words + w]
        while word != ZERO:
            slot = w * WORD_BITS + np.int64(trailing_zeros(word))
            word &= word - ONE
            _set_bit(bits, _RANKS * words, cards[slot * CARD_FIELDS + RANK])


@kernel
def _set_bit(bits, start, place):
    """Whether it was set before."""
    w = start + (place >> 6)
    bit = ONE << U64(place & 63)
    was_set = bits[w] & bit != ZERO
    bits[w] |= bit
    return was_set


# ---------------------------------------------------------------------- the answer


@kernel
def _write_hits(answer, groups, group_count, granule, prompt_tokens, is_binary):
    """The native answer's body, from HEAD_ROOM on. Where it ends, or -1 if there is no room for it."""
    shift = MSGPACK_BEFORE - JSON_BEFORE if is_binary else 0
    at = _write_frame(answer, HEAD_ROOM, JSON_BEFORE + shift)
    at = _write_number(answer.out, at, prompt_tokens, is_binary)
    at = _write_frame(answer, at, JSON_HITS + shift)
    if is_binary:
        at = _write_array_head(answer.out, at, _count_bits(groups, group_count))
    limit = (prompt_tokens - 1) // granule * granule
    text = MSGPACK_HIT if is_binary else JSON_HIT
    is_first = True
    for group in range(group_count - 1, -1, -1):
        reach = np.int64(groups.reaches[group]) * granule
        _rank_group(groups, group, answer.cards)
        for w in range(groups.words):
            word = groups.bits[_RANKS * groups.words + w]
            while word != ZERO:
                slot = _slot_of_rank(answer, w * WORD_BITS + np.int64(trailing_zeros(word)))
                word &= word - ONE
                if not (is_first or is_binary):
                    at = _write_comma(answer, at)
                at = _write_text(answer, at, slot, text, reach, min(reach, limit), is_binary)
                if at < 0:
                    return -1
                is_first = False
    return _write_frame(answer, at, JSON_AFTER + shift)


@kernel
def _write_scores(answer, groups, group_count, granule):
    """The other dialect's answer, as `_write_hits`; also -1 if an instance has several ranks: it has one entry."""
    bits, words = groups.bits, groups.words
    for w in range(words):
        bits[_NAMES * words + w] = ZERO
    at = HEAD_ROOM
    for part in range(2):
        at = _write_frame(answer, at, SCORES_BEFORE + part)
        is_first = True
        for group in range(group_count - 1, -1, -1):
            reach = np.int64(groups.reaches[group]) * granule
            _rank_group(groups, group, answer.cards)
            for w in range(words):
                word = bits[_RANKS * words + w]
                while word != ZERO:
                    slot = _slot_of_rank(answer, w * WORD_BITS + np.int64(trailing_zeros(word)))
                    word &= word - ONE
                    if part == 0 and _set_bit(bits, _NAMES * words, answer.cards[slot * CARD_FIELDS + NAME]):
                        return -1
                    if not is_first:
                        at = _write_comma(answer, at)
                    at = _write_text(answer, at, slot, SCORE + part, reach, reach, False)
                    if at < 0:
                        return -1
                    is_first = False
    return _write_frame(answer, at, SCORES_AFTER)


@kernel
def _slot_of_rank(answer, rank):
    slots = len(answer.cards) // (CARD_FIELDS + 1)
    return answer.cards[slots * CARD_FIELDS + rank]


@kernel
def _count_bits(groups, group_count):
    count = 0
    for w in range(_GROUPS * groups.words, (_GROUPS + group_count) * groups.words):
        word = groups.bits[w]
        while word != ZERO:
            word &= word - ONE
            count += 1
    return count


@kernel
def _write_text(answer, at, slot, text, resident, hit, is_binary):
    """A text of this slot's card with its holes filled. Where it ends, or -1 if there is no room for it."""
    out, texts = answer.out, answer.texts
    place = slot * CARD_FIELDS + TEXTS + 2 * text
    i, stop = answer.cards[place], answer.cards[place + 1]
    if at + stop - i + HIT_BYTES_MAX + TAIL_ROOM > len(out):
        return -1
    while True:
        size = np.int64(texts[i]) | np.int64(texts[i + 1]) << 8
        at = _copy(out, at, texts, i + 2, i + 2 + size)
        hole = texts[i + 2 + size]
        i += size + 3
        if hole == END:
            return at
        value = resident
        if hole == HIT:
            value = hit
        elif hole == NUMBER:
            value = answer.numbers[answer.cards[slot * CARD_FIELDS + NUMBER_ROW]]
        at = _write_number(out, at, value, is_binary)


@kernel
def _write_comma(answer, at):
    answer.out[at] = COMMA
    return at + 1


@kernel
def _write_frame(answer, at, frame):
    return _copy(answer.out, at, answer.frames, answer.places[frame], answer.places[frame + 1])


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
    if number < MSGPACK_MAP:
        out[at] = number
        return at + 1
    code, size = UINT_8, 1
    while size < 8 and number >> (8 * size) != 0:
        code, size = code + 1, 2 * size
    out[at] = code
    return _write_bytes(out, at + 1, number, size)


@kernel
def _write_array_head(out, at, count):
    if count < FIXARRAY_COUNTS:
        out[at] = FIXARRAY + count
        return at + 1
    out[at] = ARRAY_16
    return _write_bytes(out, at + 1, count, 2)


@kernel
def _write_bytes(out, at, number, size):
    for i in range(size):
        out[at + i] = (number >> (8 * (size - 1 - i))) & 0xFF
    return at + size


@kernel
def _write_head(answer, found, end, is_binary):
    """The head before the body, which ends at `end`; how long both are."""
    type_frame = MSGPACK_TYPE if is_binary else JSON_TYPE
    places = answer.places
    at = HEAD_ROOM - (places[type_frame + 1] - places[type_frame])
    _write_frame(answer, at, type_frame)
    length = end - HEAD_ROOM
    while length > 9:
        at -= 1
        answer.out[at] = ZERO_DIGIT + length % 10
        length //= 10
    at -= 1
    answer.out[at] = ZERO_DIGIT + length
    at -= places[HEAD + 1] - places[HEAD]
    _write_frame(answer, at, HEAD)
    found[ANSWER] = at
    return end - at


# ---------------------------------------------------------------------- the numbers


@kernel
def _observe(counts, first, totals, first_bound, bounds, total, value):
    """Into the bucket of the first bound that is not below the value."""
    bucket = 0
    while bucket < bounds and totals[first_bound + bucket] < value:
        bucket += 1
    counts[first + bucket] += 1
    totals[total] += value


def _plain_clock(_: Any) -> float:
    return time.perf_counter()


@kernel
def _compiled_clock(found):
    """Seconds, of the clock that `time.perf_counter` reads."""
    _clock_gettime(_MONOTONIC, np.uintp(found.ctypes.data + 8 * CLOCK_S))
    return np.float64(found[CLOCK_S]) + np.float64(found[CLOCK_NS]) * 1e-9


_clock = _compiled_clock if IS_COMPILED else _plain_clock
