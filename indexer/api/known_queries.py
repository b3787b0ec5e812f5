"""Queries whose shape is known: answered by one kernel (query_kernels.py), which is told here what it does not know.

Purpose: a query says the same as the one before it, but for its tokens. Its shape (which route, and all that its body
says beside them, as bytes) is read once and leads to a plan: the key space that it asks. Of that the kernel is told
which holders are plain, and what answers say of each of them (a roster).

Invariants: a shape is remembered only if the route's own decoder takes it, and if it asks for nothing else than the
prompt of one model; shapes are told apart by the tenants that callers are bound to, so that nobody finds what another
one has asked for; a roster is forgotten with all else that queries found out about a key space (`KeySpace.known`).

If broken: see query_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from indexer.api import answer_kernels as a
from indexer.api import query_kernels as q
from indexer.api.access import ANYONE, Caller
from indexer.api.answer_texts import frames_of, joined
from indexer.api.meters import KernelTallies
from indexer.api.ports import ApiLimits, Life
from indexer.api.rosters import NOTHING_HELD, Plan
from indexer.compiled import IS_COMPILED
from indexer.identity.chain import chain_seed, salted_seed
from indexer.index.content_index import ContentIndex
from indexer.index.heat import Sample
from indexer.index.query_warnings import NAMED_MAX
from indexer.metrics import Metrics

REQUEST_BYTES_MAX = 256 * 1024
ANSWER_BYTES_MAX = 256 * 1024
GROUP_WORDS_MAX = 16_384
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
        self._bounds = limits.body_bytes_max, limits.prompt_tokens_max, NAMED_MAX
        self._tallies = KernelTallies(metrics)
        self._found = np.zeros(q.FOUND_FIELDS, np.int64)
        self._shapes = _Shapes()
        self._plans: list[Plan] = []
        self._plan_ids: dict[tuple[str, str], int] = {}
        self._plan = 0
        self._tenants: frozenset[str] | None = None  # of the caller, and the numbers of all that there were
        self._callers: dict[frozenset[str] | None, int] = {None: 0}
        self._luck = LUCK_MAX
        self._skipped = 0
        self._sample_every, self._unsampled = index.heat.every, 0
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._frames = joined([b""] * a.FRAMES)
        self._out = np.zeros(ANSWER_BYTES_MAX, np.uint8)
        self._answer = self._out.data
        numbers = REQUEST_BYTES_MAX + 2  # room for what the longest request says
        self._runs = np.empty(2 * numbers, np.int64)
        self._scratch = (
            np.empty(numbers, np.uint32),  # tokens
            np.empty(numbers, np.uint64),  # content keys
            np.empty(numbers, np.uint64),  # local hashes
            np.empty(numbers, np.uint32),  # set ids
            self._runs,
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

    def answer(
        self, data: Any, filled: int, headers: list[tuple[bytes, bytes]], caller: Caller = ANYONE
    ) -> bytes | None:
        """To the request that these bytes are, if they are one and its shape is known by now. None = find out
        otherwise. `headers`: come first in every answer. `data`: an array, or uncompiled a memoryview."""
        if not self._life.is_recovered or (not self._luck and self._is_skipped()):
            return None
        if caller.tenants is not self._tenants and not self._use_caller(caller):
            return None
        if headers is not self._headers:
            self._use_headers(headers)
        for _ in range(TRIES):
            outcome = self._ask(data, filled)
            if outcome > 0:
                if self._luck < LUCK_MAX:
                    self._luck = min(LUCK_MAX, self._luck + LUCK_OF_AN_ANSWER)
                self._unsampled += 1
                if self._unsampled == self._sample_every:
                    self._sample()
                start = self._found[q.ANSWER]
                return bytes(self._answer[start : start + outcome])
            if outcome == q.NOT_WHOLE:
                return None
            if not self._learn(outcome, data, filled, caller):
                break
        self._luck = max(0, self._luck - 1)
        return None

    def _sample(self) -> None:
        """The query that was just answered is noted: the keys of what anybody holds of it are still there."""
        self._unsampled = 0
        plan = self._plans[self._plan]
        keys = self._scratch[1][: self._found[q.REACH]].copy()
        self._index.heat.note(Sample(monotonic(), plan.tenant, plan.model, plan.granule, keys))

    def _is_skipped(self) -> bool:
        self._skipped = (self._skipped + 1) % SKIPPED
        return self._skipped != 0

    def _ask(self, data: Any, filled: int) -> int:
        plan = self._plans[self._plan].arguments() if self._plans else None
        number = q.NO_PLAN if plan is None else self._plan
        arguments: tuple[Any, ...] = (data, filled, *self._fixed, number, *(plan or NOTHING_HELD))
        outcome: int = q.answer_query(*arguments)
        return outcome

    def _learn(self, outcome: int, data: Any, filled: int, caller: Caller) -> bool:
        """Whether it is worth asking again."""
        if outcome == q.UNKNOWN_SHAPE:
            return self._learn_shape(data, filled, caller)
        if outcome == q.OTHER_PLAN:
            self._plan = int(self._found[q.PLAN])
            return self._plans[self._plan].arguments() is not None
        if outcome == q.UNKNOWN_NAMES:
            return self._learn_names()
        if outcome == q.UNKNOWN_SLOTS:
            return self._plans[self._plan].learn(self._runs, int(self._found[q.RUNS]))
        return False

    def _learn_shape(self, data: Any, filled: int, caller: Caller) -> bool:
        found = self._found
        text = bytes(self._answer[: found[q.SHAPE_SIZE]])
        kind = bytes(data[found[q.TYPE_START] : found[q.TYPE_STOP]]).decode("latin-1") or None
        before, after = data[found[q.BODY] : found[q.ARRAY_START]], data[found[q.ARRAY_STOP] : filled]
        asked = self._readers[found[q.ROUTE]](kind, bytes(before), bytes(after))
        if asked is None or not caller.sees(asked.tenant):
            self._remember(text, int(q.NEVER), 0, 0, None)
            return False
        if self._index.scope(asked.tenant, asked.model) is None:
            return False
        seed = chain_seed(asked.lora_name)
        first_seed = salted_seed(seed, asked.cache_salt)
        self._remember(text, self._plan_of(asked.tenant, asked.model), first_seed, seed, asked)
        return True

    def _learn_names(self) -> bool:
        """Of a shape whose adapter or salt had not been seen: whether both are now."""
        row = int(self._found[q.ROW])
        asked = self._shapes.apart[row]
        scope = self._index.scope(asked.tenant, asked.model)
        if scope is None or scope.names.lack(asked.lora_name, asked.cache_salt):
            return False
        self._shapes.rows[row + q.KNOWN_NAMES] = scope.names.number
        return True

    def _plan_of(self, tenant: str, model: str) -> int:
        plan = self._plan_ids.setdefault((tenant, model), len(self._plans))
        if plan == len(self._plans):
            self._plans.append(Plan(self._index, tenant, model))
        return plan

    def _remember(self, text: bytes, plan: int, first_seed: int, seed: int, asked: Asked | None) -> None:
        if self._shapes.is_full:
            self._shapes = _Shapes()
            names = [(p.tenant, p.model) for p in self._plans[plan : plan + 1]]
            self._plans, self._plan_ids, self._plan = [], {}, 0
            plan = self._plan_of(*names[0]) if names else plan
            self._collect()
        self._shapes.put(text, plan, first_seed, seed, asked)

    def _use_caller(self, caller: Caller) -> bool:
        """False: there have been too many kinds of them."""
        number = self._callers.get(caller.tenants, len(self._callers))
        if number == q.CALLERS_MAX:
            return False
        self._callers[caller.tenants] = number
        self._tenants, self._found[q.CALLERS] = caller.tenants, number
        return True

    def _use_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """They change once a second, with the date."""
        self._headers = headers
        self._frames = joined(frames_of(headers))
        self._collect()
        assert self._frames[1][a.MSGPACK_TYPE + 1] < a.HEAD_ROOM - a.LENGTH_DIGITS


class _Shapes:
    """The kernel's hash table of shapes."""

    def __init__(self) -> None:
        self.rows = np.zeros(q.SHAPE_ROWS * q.SHAPE_WORDS, np.uint64)
        self.texts = np.zeros(SHAPES_MAX * q.SHAPE_BYTES_MAX // 4, np.uint8)
        self.apart: dict[int, Asked] = {}  # by the first word of their row, those with an adapter or a salt
        self._count = self._text_bytes = 0

    @property
    def is_full(self) -> bool:
        return self._count == SHAPES_MAX or self._text_bytes + q.SHAPE_BYTES_MAX > len(self.texts)

    def put(self, text: bytes, plan: int, first_seed: int, seed: int, asked: Asked | None) -> None:
        digest = xxh3_64_intdigest(text, 0)
        row = digest % q.SHAPE_ROWS
        while self.rows[row * q.SHAPE_WORDS + q.TEXT_SIZE]:
            row = (row + 1) % q.SHAPE_ROWS
        names = q.NO_NAMES
        if asked is not None and (asked.lora_name or asked.cache_salt):
            names = q.UNSEEN_NAMES
            self.apart[row * q.SHAPE_WORDS] = asked
        fields = digest, self._text_bytes, len(text), plan, first_seed, seed, names
        self.rows[row * q.SHAPE_WORDS : (row + 1) * q.SHAPE_WORDS] = fields
        self.texts[self._text_bytes : self._text_bytes + len(text)] = np.frombuffer(text, np.uint8)
        self._count += 1
        self._text_bytes += len(text)


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
