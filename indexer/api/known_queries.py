"""Queries whose shape is known: answered by one kernel (query_kernels.py), which is told here what it does not know.

Purpose: a query says the same as the one before it, but for its tokens. Its shape (which route, and all that its body
says beside them, as bytes) is read once and leads to a plan: the key space that it asks. Of that the kernel is told
which holders are plain, and what answers say of each of them (a roster).

Invariants: a shape is remembered only if the route's own decoder takes it, and if it asks for nothing else than the
prompt of one model; a roster is forgotten with all else that queries found out about a key space (`KeySpace.known`).

If broken: see query_kernels.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from indexer.api import answer_kernels as a
from indexer.api import query_kernels as q
from indexer.api.answer_texts import Texts, frames_of, name_of, texts_of
from indexer.api.ports import ApiLimits, Life
from indexer.compiled import IS_COMPILED
from indexer.histogram import Observed
from indexer.identity.chain import chain_seed, salted_seed
from indexer.index.content_index import ContentIndex
from indexer.index.holder import Holder
from indexer.index.key_space import WORD_BITS, KeySpace
from indexer.index.prefix_hits import NOT_COMPLETE_NAMED_MAX
from indexer.index.publisher import PublisherIndex
from indexer.index.scope import Scope
from indexer.index.table import I64
from indexer.metrics import Metrics

REQUEST_BYTES_MAX = 256 * 1024
ANSWER_BYTES_MAX = 256 * 1024
GROUP_WORDS_MAX = 16_384
MASK_WORDS_MAX = 1_024  # 65,536 holders
SHAPES_MAX = q.SHAPE_ROWS // 2  # then all are forgotten
TRIES = 4
# one query in so many is tried where others are asked nearly always; tried in vain, a long one costs a third more
SKIPPED = 31
LUCK_MAX, LUCK_OF_AN_ANSWER = 64, 8


class Asked(NamedTuple):
    """What a shape asks for beside the tokens."""

    tenant: str
    model: str
    lora_name: str | None = None
    cache_salt: str | None = None


ReadShape = Callable[[str | None, bytes, bytes], Asked | None]
"""Content type, body before and after its array -> what is asked; None: the kernel shall not answer."""


class KnownQueries:
    """`readers`: of the kernel's routes, in their order."""

    def __init__(
        self, index: ContentIndex, life: Life, limits: ApiLimits, metrics: Metrics, readers: Sequence[ReadShape]
    ) -> None:
        self._index = index
        self._life = life
        self._readers = readers
        self._bounds = limits.body_bytes_max, limits.prompt_tokens_max, NOT_COMPLETE_NAMED_MAX
        self._tallies = _Tallies(metrics)
        self._found = np.zeros(q.FOUND_FIELDS, np.int64)
        self._shapes = _Shapes()
        self._plans: list[_Plan] = []
        self._plan_ids: dict[tuple[str, str], int] = {}
        self._plan = 0
        self._luck = LUCK_MAX
        self._skipped = 0
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._frames = _joined([b""] * a.FRAMES)
        numbers = REQUEST_BYTES_MAX + 2
        self._out = np.zeros(ANSWER_BYTES_MAX, np.uint8)
        self._answer = self._out.data
        self._scratch: tuple[Any, ...] = (
            np.empty(numbers, np.uint32),
            *(np.empty(numbers, np.uint64) for _ in ("keys", "local hashes")),
            np.empty(numbers, np.uint32),
            np.empty(2 * numbers, np.int64),
            np.empty(GROUP_WORDS_MAX, np.uint64),
        )

        self._collect()

    def _collect(self) -> None:
        """What the kernel takes at every call, put together anew where some of it is replaced."""
        shapes = self._shapes
        self._fixed = (
            *self._bounds,
            self._found,
            *(shapes.rows, shapes.texts),
            *self._frames,
            *self._scratch,
            self._out,
            *self._tallies.arrays,
        )

    def answer(self, data: Any, filled: int, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        """To the request that these bytes are, if they are one and its shape is known by now. None = find out
        otherwise. `headers`: come first in every answer. `data`: an array, or uncompiled a memoryview."""
        if not self._life.is_recovered or (not self._luck and self._is_skipped()):
            return None
        if headers is not self._headers:
            self._use_headers(headers)
        for _ in range(TRIES):
            outcome = self._ask(data, filled)
            if outcome > 0:
                self._luck = min(LUCK_MAX, self._luck + LUCK_OF_AN_ANSWER)
                start = self._found[q.ANSWER]
                return bytes(self._answer[start : start + outcome])
            if outcome == q.NOT_WHOLE:
                return None
            if not self._learn(outcome, data, filled):
                break
        self._luck = max(0, self._luck - 1)
        return None

    def _is_skipped(self) -> bool:
        self._skipped = (self._skipped + 1) % SKIPPED
        return self._skipped != 0

    def _ask(self, data: Any, filled: int) -> int:
        plan = self._plans[self._plan].arguments() if self._plans else None
        number = q.NO_PLAN if plan is None else self._plan
        arguments: tuple[Any, ...] = (data, filled, *self._fixed, number, *(plan or _NOTHING_HELD))
        outcome: int = q.answer_query(*arguments)
        return outcome

    def _learn(self, outcome: int, data: Any, filled: int) -> bool:
        """Whether it is worth asking again."""
        if outcome == q.UNKNOWN_SHAPE:
            return self._learn_shape(data, filled)
        if outcome == q.OTHER_PLAN:
            self._plan = int(self._found[q.PLAN])
            return self._plans[self._plan].arguments() is not None
        if outcome == q.UNKNOWN_SLOTS:
            return self._plans[self._plan].learn(self._scratch[4], int(self._found[q.RUNS]))
        return False

    def _learn_shape(self, data: Any, filled: int) -> bool:
        found = self._found
        text = bytes(self._answer[: found[q.SHAPE_SIZE]])
        kind = bytes(data[found[q.TYPE_START] : found[q.TYPE_STOP]]).decode("latin-1") or None
        before, after = data[found[q.BODY] : found[q.ARRAY_START]], data[found[q.ARRAY_STOP] : filled]
        asked = self._readers[found[q.ROUTE]](kind, bytes(before), bytes(after))
        if asked is None:
            self._remember(text, int(q.NEVER), 0, 0)
            return False
        if self._index.scope(asked.tenant, asked.model) is None:
            return False
        seed = chain_seed(asked.lora_name)
        self._remember(text, self._plan_of(asked.tenant, asked.model), salted_seed(seed, asked.cache_salt), seed)
        return True

    def _plan_of(self, tenant: str, model: str) -> int:
        plan = self._plan_ids.setdefault((tenant, model), len(self._plans))
        if plan == len(self._plans):
            self._plans.append(_Plan(self._index, tenant, model))
        return plan

    def _remember(self, text: bytes, plan: int, first_seed: int, seed: int) -> None:
        if self._shapes.is_full:
            self._shapes = _Shapes()
            names = [(p.tenant, p.model) for p in self._plans[plan : plan + 1]]
            self._plans, self._plan_ids, self._plan = [], {}, 0
            plan = self._plan_of(*names[0]) if names else plan
            self._collect()
        self._shapes.put(text, plan, first_seed, seed)

    def _use_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """They change once a second, with the date."""
        self._headers = headers
        self._frames = _joined(frames_of(headers))
        self._collect()
        assert self._frames[1][a.MSGPACK_TYPE + 1] < a.HEAD_ROOM - a.LENGTH_DIGITS


class _Shapes:
    """The kernel's hash table of shapes."""

    def __init__(self) -> None:
        self.rows = np.zeros(q.SHAPE_ROWS * q.SHAPE_WORDS, np.uint64)
        self.texts = np.zeros(SHAPES_MAX * q.SHAPE_BYTES_MAX // 4, np.uint8)
        self._count = self._text_bytes = 0

    @property
    def is_full(self) -> bool:
        return self._count == SHAPES_MAX or self._text_bytes + q.SHAPE_BYTES_MAX > len(self.texts)

    def put(self, text: bytes, plan: int, first_seed: int, seed: int) -> None:
        digest = xxh3_64_intdigest(text, 0)
        row = digest % q.SHAPE_ROWS
        while self.rows[row * q.SHAPE_WORDS + q.TEXT_SIZE]:
            row = (row + 1) % q.SHAPE_ROWS
        fields = digest, self._text_bytes, len(text), plan, first_seed, seed
        self.rows[row * q.SHAPE_WORDS : (row + 1) * q.SHAPE_WORDS] = fields
        self.texts[self._text_bytes : self._text_bytes + len(text)] = np.frombuffer(text, np.uint8)
        self._count += 1
        self._text_bytes += len(text)


class _Plan:
    """The key space that queries for one model ask, as long as there is one."""

    def __init__(self, index: ContentIndex, tenant: str, model: str) -> None:
        self._index = index
        self.tenant, self.model = tenant, model

    def arguments(self) -> tuple[Any, ...] | None:
        """What the kernel takes; None = it cannot answer now."""
        scope = self._index.scope(self.tenant, self.model)
        if scope is None:
            return None
        if not scope.spaces and not scope.not_complete:
            return _NOTHING_HELD
        if len(scope.spaces) != 1:
            return None
        (space,) = scope.spaces.values()
        if space.has_lookahead or space.words > MASK_WORDS_MAX:
            return None
        return (
            space.granule,
            not space.needs_whole_walk,
            space.words,
            *space.table.arrays,
            space.mask_words,
            *_roster(scope, space).arrays,
            scope.numbers.array,
        )

    def learn(self, runs: I64, count: int) -> bool:
        """Of the holders that have anything of the prompt: whether the kernel can judge them all from now on."""
        scope = self._index.scope(self.tenant, self.model)
        assert scope is not None
        (space,) = scope.spaces.values()
        held = 0
        for set_id in runs[: 2 * count : 2].tolist():
            held |= space.masks[set_id]
        return _roster(scope, space).learn(held)


class _Roster:
    """The holders of a key space, as far as queries have met them: which are plain, and their cards."""

    def __init__(self, scope: Scope, space: KeySpace) -> None:
        self._scope = scope
        self._space = space
        self._plain: dict[int, tuple[PublisherIndex, Texts]] = {}  # by slot
        self._passed_over = 0  # slots that nobody asks for
        self._others = 0
        self.write()

    def learn(self, slots: int) -> bool:
        if slots & self._others:
            return False
        for slot in _bits(slots & ~self._passed_over):
            if slot not in self._plain:
                self._meet(slot)
        self.write()
        return not slots & self._others

    def _meet(self, slot: int) -> None:
        holder = self._space.slots[slot]
        if not isinstance(holder, Holder) or not holder.is_verified:
            self._passed_over |= 1 << slot
            return
        publisher = cast("PublisherIndex", holder.owner)
        texts = texts_of(*publisher.registration.key, publisher.trust)
        if texts is None or publisher.plain_holder is not holder:
            self._others |= 1 << slot
        else:
            self._plain[slot] = publisher, texts

    def write(self) -> None:
        """Cost: 3 us a holder, and 1 us a publisher below `complete`."""
        self.changes = self._scope.not_complete_changes
        words = self._space.words
        kinds = [sum(1 << slot for slot in self._plain), self._passed_over]
        count = max(self._plain, default=0) + 1
        cards = np.zeros((count, a.CARD_FIELDS), np.int64)
        slots = sorted(self._plain, key=lambda slot: self._plain[slot][0].registration.key)
        slot_of_rank = np.zeros(count, np.int64)
        slot_of_rank[: len(slots)] = slots
        names = [text for key in self._scope.not_complete for text in name_of(key)]
        texts, places = _joined([text for slot in slots for text in self._plain[slot][1]] + names)
        if slots:
            card_places = places[: a.TEXT_COUNT * len(slots) + 1]
            cards[slots, : a.TEXTS] = self._card_numbers(slots)
            cards[slots, a.TEXTS :: 2] = card_places[:-1].reshape(-1, a.TEXT_COUNT)
            cards[slots, a.TEXTS + 1 :: 2] = card_places[1:].reshape(-1, a.TEXT_COUNT)
        self.arrays = (
            np.frombuffer(bytearray(b"".join(mask.to_bytes(8 * words, "little") for mask in kinds)), "<u8"),
            cards.reshape(-1),
            slot_of_rank,
            texts,
            self._doubts(places[a.TEXT_COUNT * len(slots) :]),
        )

    def _card_numbers(self, slots: list[int]) -> list[tuple[int, int, int, bool]]:
        """RANK, NUMBER_ROW, NAME and HAS_SIBLINGS of each."""
        publishers = [self._plain[slot][0] for slot in slots]
        workers = [publisher.registration.worker_id for publisher in publishers]
        ranks, first = Counter(workers), {worker: rank for rank, worker in reversed(list(enumerate(workers)))}
        return [
            (rank, publisher.number_row, first[worker], ranks[worker] > 1)
            for rank, (publisher, worker) in enumerate(zip(publishers, workers, strict=True))
        ]

    def _doubts(self, places: I64) -> I64:
        """Rows of the publishers below `complete`, in their order."""
        slots = {publisher.registration.key: slot for slot, (publisher, _) in self._plain.items()}
        doubts = np.zeros((len(places) // 2, a.DOUBT_FIELDS), np.int64)
        doubts[:, a.DOUBT_SLOT] = [slots.get(key, -1) for key in self._scope.not_complete]
        doubts[:, a.DOUBT_JSON], doubts[:, a.DOUBT_JSON + 1] = places[:-1:2], places[1::2]
        doubts[:, a.DOUBT_RAW], doubts[:, a.DOUBT_RAW + 1] = places[1:-1:2], places[2::2]
        return doubts.reshape(-1)


def _roster(scope: Scope, space: KeySpace) -> _Roster:
    roster: _Roster | None = space.known.get(_Roster)
    if roster is None:
        roster = space.known[_Roster] = _Roster(scope, space)
    elif roster.changes != scope.not_complete_changes:
        roster.write()
    return roster


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit.bit_length() - 1


def _joined(texts: list[bytes]) -> tuple[npt.NDArray[np.uint8], I64]:
    """All of them, and where each starts; the last number is where the last one stops."""
    sizes = np.fromiter((len(text) for text in texts), np.int64, len(texts))
    joined = np.frombuffer(bytearray(b"".join(texts) or b"\0"), np.uint8)
    return joined, np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def _nothing_held() -> tuple[Any, ...]:
    scope = Scope()
    space = scope.key_space(1)
    return 1, True, 1, *space.table.arrays, space.mask_words, *_Roster(scope, space).arrays, scope.numbers.array


_NOTHING_HELD = _nothing_held()


class _Tallies:
    """What the kernel counts, added to the metrics when they are read."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        latency, prompt = metrics.query_seconds.bounds, metrics.query_prompt_tokens.bounds
        assert (len(latency), len(prompt)) == (q.LATENCY_BOUNDS, q.PROMPT_BOUNDS)
        self._counts = np.zeros(q.COUNTS, np.int64)
        self._totals = np.zeros(q.TOTALS)
        self._totals[: q.ROUTE_TOTALS] = latency + prompt
        self.arrays = self._counts, self._totals
        metrics.registry.before_reading.append(self.settle)

    def settle(self) -> None:
        metrics, counts = self._metrics, self._counts
        for route, path in enumerate(q.PATHS):
            if counts[q.QUERIES + route]:
                metrics.http_requests.labels(path, "POST", 200).inc(int(counts[q.QUERIES + route]))
                at = q.ROUTE_SECONDS + route * (q.LATENCY_BOUNDS + 1)
                self._add(metrics.http_request_seconds.labels(path), at, q.ROUTE_TOTALS + route)
        self._add(metrics.query_seconds, q.INDEX_SECONDS, q.INDEX_TOTAL)
        self._add(metrics.query_prompt_tokens, q.PROMPT_TOKENS, q.PROMPT_TOTAL)
        for outcome, place in (("hit", q.HITS), ("warned", q.WARNED), ("miss", q.MISSES)):
            metrics.query_outcomes.labels(outcome).inc(int(counts[place]))
        counts[:] = 0
        self._totals[q.ROUTE_TOTALS :] = 0

    def _add(self, observed: Observed, first: int, total: int) -> None:
        counts = self._counts[first : first + len(observed.counts)]
        observed.add(counts.tolist(), float(self._totals[total]))


def compile_kernel() -> None:
    """So that no query waits for the compiler: half a minute the first time, then half a second from its cache."""
    queries = KnownQueries(ContentIndex(), _Recovered(), ApiLimits(1, 1, 1), Metrics(), [])
    queries.answer(as_input(bytearray(REQUEST_BYTES_MAX)), 0, [])


class _Recovered:
    is_recovered = True
    is_stopping = False

    def missing(self) -> list[str]:
        return []


def as_input(data: bytearray) -> Any:
    """What `KnownQueries.answer` takes."""
    return np.frombuffer(data, np.uint8) if IS_COMPILED else memoryview(data)


assert WORD_BITS == q.WORD_BITS
