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

from indexer.api import answer_kernels, request_kernels
from indexer.api.answer_kernels import (
    CARD_FIELDS,
    HIT_FIELDS,
    HIT_SLOT,
    HIT_TOKENS,
    LEAST_TOKENS,
    NAMES_NUMBER,
    RANK,
    TAIL_CAUSES,
    Answer,
    copy,
    find_doubts,
    set_bit,
    write_head,
    write_hits,
    write_nothing,
    write_scores,
)
from indexer.api.request_kernels import METHOD, read_head
from indexer.compiled import IS_COMPILED, kernel_over, trailing_zeros
from indexer.identity import chain_kernels
from indexer.identity.chain_kernels import xxh3
from indexer.index import kernels as index_kernels
from indexer.index.kernels import look_up_hashes, look_up_prompt
from indexer.wire import token_kernels
from indexer.wire.token_kernels import json_hashes, json_tokens, msgpack_prompt

kernel = kernel_over(request_kernels, token_kernels, index_kernels, chain_kernels, answer_kernels)

# what the kernel returns: the size of the answer, or one of these
UNCLAIMED, UNKNOWN_SHAPE, OTHER_PLAN, UNKNOWN_SLOTS, NOT_WHOLE, UNKNOWN_NAMES = range(-1, -7, -1)

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
SHAPE_SIZE, PLAN, RUNS, ANSWER, CLOCK_S, CLOCK_NS, ROW, REACH = range(7, 15)
CALLERS = 15  # what is said to the kernel: the number of those for whom shapes are told apart
FOUND_FIELDS = 16

# shapes: rows of a hash table
SHAPE_HASH, TEXT_START, TEXT_SIZE, SHAPE_PLAN, FIRST_SEED, SEED, KNOWN_NAMES = range(7)
SHAPE_WORDS = 7
SHAPE_ROWS = 8_192
SHAPE_BYTES_MAX = 1_024
SHAPE_HEAD = 8
CALLERS_MAX = 1 << 16
NEVER = np.uint64((1 << 64) - 1)  # plan of a shape that the kernel shall not answer
NO_PLAN = -1
# of a shape, instead of the number of the `NamesSeen` that have its adapter and salt
NO_NAMES, UNSEEN_NAMES = 0, 1 << 62

# numbers of queries, by route; of the index, by outcome; then histograms, one more bucket than bounds each
LATENCY_BOUNDS, PROMPT_BOUNDS = 17, 8
QUERIES, HITS, WARNED, MISSES = 0, ROUTES, ROUTES + 1, ROUTES + 2
ROUTE_SECONDS = ROUTES + 3
INDEX_SECONDS = ROUTE_SECONDS + ROUTES * (LATENCY_BOUNDS + 1)
PROMPT_TOKENS = INDEX_SECONDS + LATENCY_BOUNDS + 1
CAUSES = PROMPT_TOKENS + PROMPT_BOUNDS + 1  # of warnings
CAUSE_COUNT = 4
COUNTS = CAUSES + CAUSE_COUNT
COVERAGE = 1  # below `complete`, as one of their bits
# their bounds and totals
ROUTE_TOTALS = LATENCY_BOUNDS + PROMPT_BOUNDS
INDEX_TOTAL, PROMPT_TOTAL = ROUTE_TOTALS + ROUTES, ROUTE_TOTALS + ROUTES + 1
TOTALS = PROMPT_TOTAL + 1

_MONOTONIC = time.CLOCK_MONOTONIC
_clock_gettime: Any = numba.types.ExternalFunction("clock_gettime", numba.intc(numba.intc, numba.uintp))

U64 = np.uint64
ZERO, ONE = U64(0), U64(1)
WORD_BITS = 64


# parts of the words of `Groups`
LOST, LEFT, RANKS, SEEN, GROUPS = range(5)


class Groups(NamedTuple):
    """Holders that have the prompt up to the same granule: how far, and their slots as bits; the farthest are last.

    `bits`: words to work in (of those that do not go on, of those that do, of ranks, of what was seen), then those of
    each group.
    """

    reaches: Any
    bits: Any
    words: int


@kernel
def answer_query(
    data, filled, body_max, tokens_max, named_max, found, shapes, shape_texts, frames, places, tokens, keys,
    local_hashes, set_ids, runs, bits, out, counts, totals, plan, granule, stops_at_miss, words, slots, meta,
    masks, kinds, cards, slot_of_rank, texts, doubts, tails,
    numbers,
):  # fmt: skip
    """The request is the first `filled` bytes of `data`; its answer is written into `out`, from `found[ANSWER]` on.

    Up to `totals` it is always the same; `plan` and what follows is of the key space that queries with this plan ask
    (known_queries.py says what is what). Returns the size of the answer, or an outcome. Where there may be more to say
    of an answer without hits, it is left to the route.
    """
    began = _clock(found)
    outcome = _read_request(data, filled, body_max, found)
    if outcome != 0:
        return outcome
    count, is_binary = _read_prompt(data, filled, found, tokens, local_hashes)
    if count <= 0:
        return UNCLAIMED
    row, outcome = _find_shape(data, filled, plan, found, out, shapes, shape_texts)
    if row < 0:
        return outcome
    route = found[ROUTE]
    prompt_tokens = count * granule if route == SCORES_BY_HASH else count
    if prompt_tokens > tokens_max:
        return UNCLAIMED
    asked = _clock(found)
    pair = keys[len(keys) - 2 :]
    if route == SCORES_BY_HASH:
        _, found[RUNS] = look_up_hashes(count, slots, meta, stops_at_miss, local_hashes, keys, set_ids, runs, pair)
    else:
        seeds = shapes[row + FIRST_SEED], shapes[row + SEED]
        _, found[RUNS] = look_up_prompt(
            tokens, count // granule, granule, seeds[0], seeds[1], slots, meta, stops_at_miss, local_hashes, keys,
            set_ids, runs, pair,
        )  # fmt: skip
    groups = Groups(set_ids, bits, words)
    group_count = _judge(runs, found[RUNS], masks, kinds, groups)
    if group_count < 0:
        return group_count
    found[REACH] = np.int64(groups.reaches[group_count - 1]) if group_count > 0 else 0
    hits = _sort_hits(groups, group_count, granule, cards, slot_of_rank, runs)
    if hits == 0:
        outcome = _leave_to_the_route(prompt_tokens, tails, shapes, row, found)
        if outcome != 0:
            return outcome
    answered = _clock(found)
    seen = bits[SEEN * words : (SEEN + 1) * words]
    answer = Answer(out, frames, places, cards, texts, numbers, doubts, runs, hits, seen)
    end, causes = _write_answer(answer, route, tails, granule, prompt_tokens, named_max, is_binary)
    if end < 0:
        return UNCLAIMED
    found[ANSWER] = write_head(answer, end, is_binary)
    _count(counts, route, hits, causes)
    if route != SCORES_BY_HASH:
        _observe(counts, PROMPT_TOKENS, totals, LATENCY_BOUNDS, PROMPT_BOUNDS, PROMPT_TOTAL, np.float64(count))
    _observe(counts, INDEX_SECONDS, totals, 0, LATENCY_BOUNDS, INDEX_TOTAL, answered - asked)
    at = ROUTE_SECONDS + route * (LATENCY_BOUNDS + 1)
    _observe(counts, at, totals, 0, LATENCY_BOUNDS, ROUTE_TOTALS + route, _clock(found) - began)
    return end - found[ANSWER]


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
def _find_shape(data, filled, plan, found, key, shapes, shape_texts):
    """The first word of the shape's row if it has this plan, or -1 and the outcome. `key`: room for its text."""
    size = found[SHAPE_SIZE] = _write_shape(data, filled, found, key)
    if size < 0:
        return -1, UNCLAIMED
    row = _shape_row(key, size, shapes, shape_texts)
    if row < 0:
        return -1, UNKNOWN_SHAPE
    if shapes[row + SHAPE_PLAN] == NEVER:
        return -1, UNCLAIMED
    found[PLAN] = np.int64(shapes[row + SHAPE_PLAN])
    if found[PLAN] != plan:
        return -1, OTHER_PLAN
    return row, 0


@kernel
def _leave_to_the_route(prompt_tokens, tails, shapes, row, found):
    """0, or the outcome if there may be something to say of an answer without hits."""
    if prompt_tokens < tails[LEAST_TOKENS]:
        return UNCLAIMED
    names = shapes[row + KNOWN_NAMES]
    if names != U64(NO_NAMES) and names != U64(tails[NAMES_NUMBER]):
        found[ROW] = row
        return UNKNOWN_NAMES
    return 0


@kernel
def _shape_row(key, size, shapes, shape_texts):
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
    """Whose it is, target, content type, and the body before and after its array, with the sizes of all but the last
    before them. Returns its size; -1 if it is too long."""
    target = found[TARGET_STOP] - _TARGET_START
    kind = found[TYPE_STOP] - found[TYPE_START]
    before, after = found[ARRAY_START] - found[BODY], filled - found[ARRAY_STOP]
    if target + kind + before + after > SHAPE_BYTES_MAX - SHAPE_HEAD:
        return -1
    at = _write_size(key, 0, found[CALLERS])
    at = _write_size(key, at, target)
    at = _write_size(key, at, kind)
    at = _write_size(key, at, before)
    at = copy(key, at, data, _TARGET_START, found[TARGET_STOP])
    at = copy(key, at, data, found[TYPE_START], found[TYPE_STOP])
    at = copy(key, at, data, found[BODY], found[ARRAY_START])
    return copy(key, at, data, found[ARRAY_STOP], filled)


@kernel
def _write_size(out, at, size):
    out[at] = size & 0xFF
    out[at + 1] = size >> 8
    return at + 2


# ---------------------------------------------------------------------- the holders


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
        bits[LEFT * words + w] = held & kinds[w]
    count = 0
    reach = 0
    for r in range(run_count):
        count = _end_groups(groups, count, reach, masks, runs[2 * r])
        if count < 0 or not _is_any(bits, LEFT * words, words):
            return count
        reach += runs[2 * r + 1]
    return _end_group(groups, count, reach, LEFT) if run_count > 0 else 0


@kernel
def _end_groups(groups, count, reach, masks, set_id):
    """Those that are left, but not in this set, are a group if they had anything."""
    bits, words = groups.bits, groups.words
    for w in range(words):
        mask = masks[set_id * words + w]
        bits[LOST * words + w] = bits[LEFT * words + w] & ~mask
        bits[LEFT * words + w] &= mask
    if reach == 0 or not _is_any(bits, LOST * words, words):
        return count
    return _end_group(groups, count, reach, LOST)


@kernel
def _end_group(groups, count, reach, part):
    """One more group, of the slots in this part of the words; UNCLAIMED if there is no room for it."""
    bits, words = groups.bits, groups.words
    at = (GROUPS + count) * words
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
def _sort_hits(groups, group_count, granule, cards, slot_of_rank, hits):
    """Slots and tokens of all groups, the farthest first, and within one in the order of ranks. Returns how many."""
    bits, words = groups.bits, groups.words
    count = 0
    for group in range(group_count - 1, -1, -1):
        ranks = bits[RANKS * words : (RANKS + 1) * words]
        for w in range(words):
            ranks[w] = ZERO
        for w in range(words):
            word = bits[(GROUPS + group) * words + w]
            while word != ZERO:
                slot = w * WORD_BITS + np.int64(trailing_zeros(word))
                word &= word - ONE
                set_bit(ranks, cards[slot * CARD_FIELDS + RANK])
        for w in range(words):
            word = ranks[w]
            while word != ZERO:
                rank = w * WORD_BITS + np.int64(trailing_zeros(word))
                word &= word - ONE
                hits[HIT_FIELDS * count + HIT_SLOT] = slot_of_rank[rank]
                hits[HIT_FIELDS * count + HIT_TOKENS] = np.int64(groups.reaches[group]) * granule
                count += 1
    return count


@kernel
def _write_answer(answer, route, tails, granule, prompt_tokens, named_max, is_binary):
    """Where the body ends, or -1 if there is no room for it; and the causes of warnings, as bits."""
    if answer.hit_count == 0:
        end = write_nothing(answer, tails, prompt_tokens, is_binary) if route == NATIVE else write_scores(answer)
        return end, tails[TAIL_CAUSES]
    if route == NATIVE:
        end, doubts = write_hits(answer, granule, prompt_tokens, named_max, is_binary)
    else:
        doubts, _ = find_doubts(answer, named_max)
        end = write_scores(answer)
    return end, np.int64(COVERAGE if doubts > 0 else 0)


# ---------------------------------------------------------------------- the numbers


@kernel
def _count(counts, route, hits, causes):
    """`causes`: of its warnings, as bits."""
    counts[QUERIES + route] += 1
    counts[HITS if hits > 0 else WARNED if causes != 0 else MISSES] += 1
    for i in range(CAUSE_COUNT):
        counts[CAUSES + i] += causes >> i & 1


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
