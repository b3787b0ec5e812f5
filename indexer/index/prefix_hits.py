"""One query: a prompt -> what each publisher of its scope would not compute again.

The prompt's content keys are derived once per granule in use and looked up once, by one kernel. Runs of granules that
the same holders have are folded. Publishers of the plain kind (one group of full attention, on the GPU) are then judged
all together, run by run; every other one that holds anything of the prompt by its own rules (reuse.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial, reduce
from itertools import takewhile
from math import lcm
from operator import attrgetter, itemgetter
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from indexer.identity.chain import chain_seed, local_hashes, lookahead_key, salted_seed
from indexer.identity.extra_keys import from_query
from indexer.index.columns import U64
from indexer.index.engine_hashes import Hashing, Prompt
from indexer.index.expected import ExpectedBlocks
from indexer.index.groups import MAMBA, UNKNOWN
from indexer.index.intervals import Intervals, common, reach, united, without
from indexer.index.kernels import find_runs, look_up_hashes, look_up_prompt
from indexer.index.key_space import KeySpace
from indexer.index.offloading import ChunkedGroup, chunked_groups, length_with_loads
from indexer.index.pools import PooledTier, PoolHolding, PoolSpan, blocks_from, pooled_tiers
from indexer.index.publisher import PublisherIndex
from indexer.index.query_warnings import (
    QueryWarning,
    assumed,
    has_more_to_say,
    not_complete,
    of_no_hits,
    unknown_granule,
)
from indexer.index.reuse import ReuseRules, Rule, Spec, Trace, hit_length
from indexer.index.scope import Scope
from indexer.index.state import Coverage, EngineHash
from indexer.index.table import I64
from indexer.index.tiers import CPU, GPU, tier_rank

if TYPE_CHECKING:
    from indexer.index.holder import Holder

KNOWN_MAX = 4_096
U32_BYTES = 4
SHARED_GRANULES_MAX = 65_536  # of buffers that are kept: 2.3 MB
ON_DEVICE = frozenset({GPU})
Matched: TypeAlias = Mapping[int, set[tuple[int, str]]]
"""End -> group and tier of the blocks that end there, though no event says so: their hashes do."""
NOTHING_MATCHED: Matched = {}
FoundT = TypeVar("FoundT")
Run: TypeAlias = tuple[int, int]
"""A set of holders as a mask, and how many blocks in a row it has."""


class Detail(StrEnum):
    """What hits say beside the summary. Publishers are judged one by one for it."""

    SUMMARY = "summary"
    TIERS = "tiers"  # on which tier how much of the prefix lies
    GROUPS = "groups"  # how far each KV-cache group would let the engine go
    INTERVALS = "intervals"  # where each part of the prefix lies, and who holds it


SUMMARY = Detail.SUMMARY


class MultimodalItem(NamedTuple):
    """One multimodal item of a prompt: its identifier (the engines' multimodal hash), where it starts, its length."""

    identifier: str
    offset: int
    length: int


class PrefixQuery(msgspec.Struct, frozen=True, gc=False):
    """A prompt. `token_ids`: integers from 0 to below 2^63, or u32 little-endian bytes. `workers`: only these.

    Instead of tokens `local_hashes`, the local hash of each granule, or `content_keys`, the chain's key at the end of
    each: adapter, salt and items are in them. `granule`: by which they were hashed, and who has another one has none of
    them; None = by the model's. `limit`: so many hits at most, the best; `min_hit_tokens`: only those with so many.
    `expected`: of blocks that routers expect (expected.py) hits say nothing (None), say how many tokens they would add
    (False), or count them (True).
    """

    model: str
    token_ids: Sequence[int] | bytes = b""
    tenant: str = "default"
    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    workers: frozenset[str] | None = None
    local_hashes: Sequence[int] | None = None
    detail: Detail = SUMMARY
    content_keys: Sequence[int] | None = None
    granule: int | None = None
    min_hit_tokens: int = 0
    limit: int | None = None
    expected: bool | None = None

    @property
    def is_hashed(self) -> bool:
        """Whether the prompt is given by hashes, not by tokens."""
        return self.local_hashes is not None or self.content_keys is not None

    def asks(self, space: KeySpace) -> bool:
        return self.granule is None or self.granule == space.granule

    @property
    def hash_count(self) -> int:
        return len(self.content_keys if self.local_hashes is None else self.local_hashes)  # type: ignore[arg-type]

    @property
    def token_count(self) -> int:
        return len(self.token_ids) // U32_BYTES if isinstance(self.token_ids, bytes) else len(self.token_ids)

    def beginning(self, tokens: int) -> PrefixQuery:
        """The same of its first tokens, of a prompt that is given by tokens."""
        bytes_each = U32_BYTES if isinstance(self.token_ids, bytes) else 1
        return msgspec.structs.replace(self, token_ids=self.token_ids[: tokens * bytes_each])


class Span(msgspec.Struct, gc=False):
    """A part of a prompt, from token `start` to before `end`, the fastest tier that it is held on, and by whom: the
    worker itself, or a pool that serves it."""

    start: int
    end: int
    tier: str
    worker_id: str


class GroupReach(msgspec.Struct, gc=False):
    """One KV-cache group. `held_tokens`: the longest prefix after which it would let the engine go on, if all others
    did: of full attention every block, of a window those that it reaches back to, of Mamba a state. In tokens."""

    group: int
    kind: str
    window: int | None
    block_tokens: int
    held_tokens: int


class PublisherHit(msgspec.Struct, gc=False):
    """`hit_tokens`: what the engine would skip; `resident_tokens`: the longest prefix held; `tiers`: cumulative.

    `coverage_at`: when coverage became so, in seconds since 1970; None = not known. `pools`: those whose blocks extend
    the reach; `spans`: where the prefix lies, if that was asked.
    """

    worker_id: str
    dp_rank: int
    hit_tokens: int
    resident_tokens: int
    tiers: dict[str, int]
    coverage: str
    coverage_reason: str
    coverage_at: float | None
    sequence_number: int | None
    pools: list[str] | msgspec.UnsetType = msgspec.UNSET
    spans: list[Span] | msgspec.UnsetType = msgspec.UNSET


class DetailedHit(PublisherHit, gc=False):
    """What only some hits have; every field costs each hit of an answer.

    `tier_tokens`, `groups`: see `Detail`. `expected_tokens`: how many tokens more the engine would skip if it had the
    blocks that are expected of it; in `hit_tokens` only if the query wants them counted.
    """

    tier_tokens: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    groups: list[GroupReach] | msgspec.UnsetType = msgspec.UNSET
    expected_tokens: int | msgspec.UnsetType = msgspec.UNSET


class PrefixAnswer(msgspec.Struct, gc=False):
    """Best hits first, ties by worker and rank."""

    prompt_tokens: int
    hits: list[PublisherHit] = []
    warnings: list[QueryWarning] = []


def answer(query: PrefixQuery, scope: Scope, now: float = 0.0) -> PrefixAnswer:
    """`now`: as told to `ExpectedBlocks`."""
    tokens = _token_buffer(query.token_ids)
    result = PrefixAnswer(len(tokens) // U32_BYTES if isinstance(tokens, bytes) else len(tokens))
    is_hashed = query.is_hashed
    if is_hashed:
        _begin_with_hashes(query, scope, result)
    holdings = list(_pool_holdings(query, tokens, result.prompt_tokens, scope)) if scope.pools else []
    for space in scope.spaces.values() if query.granule is None else _of_granule(query.granule, scope):
        if len(space) or scope.asked_always or holdings:  # one that everybody refined away from is empty
            lookup = _Lookup(query, tokens, result.prompt_tokens, space)
            hits = lookup.judge(scope, holdings)
            if is_hashed and hits:  # the hashes are of this space
                result.prompt_tokens = lookup.count
            result.hits += hits
    if holdings:
        result.hits += _served_without_blocks(query, result.prompt_tokens, scope, holdings)
    if len(scope.spaces) > 1 or holdings:
        result.hits.sort(key=_best_first)
    has_hits = bool(result.hits)
    found = {(hit.worker_id, hit.dp_rank) for hit in result.hits} if scope.not_complete else set()
    if scope.expected is not None and query.expected is not None:
        _add_expected(query, scope.expected, result.hits, now)
    if not has_hits and (is_hashed or has_more_to_say(query, result.prompt_tokens, scope)):
        result.warnings.extend(of_no_hits(query, result.prompt_tokens, scope, partial(_has_hits, scope=scope)))
    if query.min_hit_tokens or query.limit is not None:
        result.hits = _best(query, result.hits)
    if scope.assumptions or scope.not_complete:
        result.warnings.extend(_of_trust(query, scope, result.hits, found))
    return result


def _of_trust(
    query: PrefixQuery, scope: Scope, hits: list[PublisherHit], found: set[tuple[str, int]]
) -> Iterator[QueryWarning]:
    """What hits rest on, and who may hold more than is known. `found`: all that have a hit, also one left out."""
    yield from assumed(scope, hits)
    if scope.not_complete:
        yield from not_complete(query, scope, found)


def _of_granule(granule: int, scope: Scope) -> list[KeySpace]:
    return [scope.spaces[granule]] if granule in scope.spaces else []


def _best(query: PrefixQuery, hits: list[PublisherHit]) -> list[PublisherHit]:
    return [hit for hit in hits if hit.hit_tokens >= query.min_hit_tokens][: query.limit]


def _begin_with_hashes(query: PrefixQuery, scope: Scope, result: PrefixAnswer) -> None:
    result.prompt_tokens = prompt_tokens(query, scope.spaces)
    if query.granule is not None and query.granule not in scope.spaces:
        result.warnings.append(unknown_granule(query.granule, scope.spaces))


def prompt_tokens(query: PrefixQuery, granules: Iterable[int]) -> int:
    """Of hashes those of whole granules; 0 if their size is not known. `granules`: those in use."""
    if query.is_hashed:
        return query.hash_count * (query.granule or min(granules, default=0))
    return query.token_count


def _has_hits(query: PrefixQuery, scope: Scope) -> bool:
    """From what engines hold themselves."""
    tokens = _token_buffer(query.token_ids)
    return any(_Lookup(query, tokens, query.token_count, space).judge(scope, []) for space in scope.spaces.values())


def _pool_holdings(query: PrefixQuery, tokens: bytes | array[int], count: int, scope: Scope) -> Iterator[PoolHolding]:
    """What each pool has of the prompt, if anything. Cost: a further look-up per granule of pools."""
    spaces = {pool.space for pool in scope.pools if pool.space is not None and len(pool.space)}
    for space in filter(query.asks, spaces):
        lookup = _Lookup(query, tokens, count, space)
        for pool, serves in scope.pools.items():
            if pool.space is space and pool.is_credited:
                rules = pool.rules_of_a_pool
                if spans := lookup.spans_of(pool, rules):
                    yield PoolHolding(pool.registration.worker_id, serves, rules.alignment, spans)


def _served_without_blocks(
    query: PrefixQuery, count: int, scope: Scope, holdings: list[PoolHolding]
) -> Iterator[PublisherHit]:
    """Workers that have not published a block yet: nothing is known of them but what pools have for them."""
    for publisher in scope.publishers:
        if publisher.space is None and not publisher.is_pool and _is_asked(query, publisher):
            serving = _serving(publisher, holdings)
            hit = _without_blocks(query, count, publisher, serving).hit() if serving else None
            if hit is not None:
                yield hit


def _without_blocks(query: PrefixQuery, count: int, publisher: PublisherIndex, serving: list[PoolHolding]) -> Judgement:
    block = max(holding.block_tokens for holding in serving)
    rules = ReuseRules((Spec(UNKNOWN, block, None, None, (0,)),), block, block)
    sets = _Sets(KeySpace(block), np.empty(0, np.uint32), [])
    where = publisher, rules, sets, block, count
    return Judgement(*where, NOTHING_MATCHED, serving, query.detail)


class Judged(NamedTuple):
    """One publisher and one prompt. `judgement`: None if nothing at all is known of it. `keys`: the content key of
    every granule. `is_asked`: whether it is in answers, if it has a hit."""

    judgement: Judgement | None
    keys: U64
    is_asked: bool


NOT_JUDGED = Judged(None, np.empty(0, np.uint64), is_asked=False)


def judge_one(query: PrefixQuery, scope: Scope, publisher: PublisherIndex) -> Judged:
    """As `answer` judges it; only that the prompt is looked up to its end, whoever has it."""
    tokens, count = _token_buffer(query.token_ids), query.token_count
    is_asked = _is_asked(query, publisher) and not publisher.is_pool
    holdings = list(_pool_holdings(query, tokens, count, scope)) if scope.pools and not publisher.is_pool else []
    serving = _serving(publisher, holdings)
    if publisher.space is None or publisher.rules is None:
        judgement = _without_blocks(query, count, publisher, serving) if serving else None
        return Judged(judgement, NOT_JUDGED.keys, is_asked)
    lookup = _Lookup(query, tokens, count, publisher.space, to_the_end=True)
    judgement = lookup.judgement(scope, publisher, publisher.rules, serving)
    return Judged(judgement, lookup.keys.copy(), is_asked)


def _serving(publisher: PublisherIndex, holdings: list[PoolHolding]) -> list[PoolHolding]:
    return [holding for holding in holdings if holding.does_serve(publisher.registration.worker_id)]


def _is_asked(query: PrefixQuery, publisher: PublisherIndex) -> bool:
    return publisher.is_credited and (query.workers is None or publisher.registration.worker_id in query.workers)


def _add_expected(query: PrefixQuery, expected: ExpectedBlocks, hits: list[PublisherHit], now: float) -> None:
    """Into the hits, with further ones for publishers that have nothing yet."""
    by_key = {(hit.worker_id, hit.dp_rank): hit for hit in hits}
    asked = expected.granules if query.granule is None else expected.granules & {query.granule}
    for granule in asked:
        keys, count = prompt_keys(query, granule)
        for publisher, length in expected.deepest(granule, keys, now).items():
            key = publisher.registration.key
            hit = by_key.get(key) or _nothing_held(publisher, query.detail)
            more = _expected_hit(publisher, granule, length, count) - hit.hit_tokens
            if more > 0 and _is_asked(query, publisher):
                by_key[key] = _with_expected(hit, more, is_counted=bool(query.expected))
    hits[:] = sorted(by_key.values(), key=_best_first)


def _nothing_held(publisher: PublisherIndex, detail: Detail) -> DetailedHit:
    tiers = {GPU: 0, CPU: 0}
    worker_id, dp_rank = publisher.registration.key
    number = publisher.checkpoint.sequence_number
    hit = DetailedHit(worker_id, dp_rank, 0, 0, tiers, *publisher.trust, number)
    if detail is Detail.INTERVALS:
        hit.spans = []
    elif detail is Detail.GROUPS:
        hit.groups = []
    elif detail is Detail.TIERS:
        hit.tier_tokens = tiers.copy()
    return hit


def _with_expected(hit: PublisherHit, tokens: int, *, is_counted: bool) -> DetailedHit:
    fields = {name: getattr(hit, name) for name in hit.__struct_fields__}
    fields["hit_tokens"] += tokens if is_counted else 0
    return DetailedHit(**{**fields, "expected_tokens": tokens})


def _expected_hit(publisher: PublisherIndex, granule: int, granules: int, count: int) -> int:
    """What the engine would skip of a prompt of `count` tokens if it had so much of it. Its rules hold, as far as they
    concern the end of a hit."""
    block = block_of_hits(publisher, granule)
    last = count - (2 if publisher.leaves_one_token_more else 1)
    return max(0, min(granules * granule, last // block * block) - (block if publisher.drops_blocks else 0))


def block_of_hits(publisher: PublisherIndex, granule: int) -> int:
    """Of what hits of this publisher are multiples, in tokens; the granule, as long as nothing is known."""
    rules = publisher.rules
    return granule if rules is None else lcm(granule, rules.alignment)


def prompt_keys(query: PrefixQuery, granule: int) -> tuple[U64, int]:
    """The content keys of a prompt's granules, until the next look-up, and its length in tokens."""
    lookup = _Lookup(query, _token_buffer(query.token_ids), query.token_count, KeySpace(granule), to_the_end=True)
    return lookup.keys, lookup.count


def _best_first(hit: PublisherHit) -> tuple[int, int, str, int]:
    return -hit.hit_tokens, -hit.resident_tokens, hit.worker_id, hit.dp_rank


def _token_buffer(token_ids: Sequence[int] | bytes) -> bytes | array[int]:
    if isinstance(token_ids, bytes):
        return token_ids
    try:
        return array("I", token_ids).tobytes()
    except OverflowError:
        return array("Q", token_ids)


def prompt_keys_ahead(query: PrefixQuery, granule: int, lookahead: int) -> U64:
    """The content keys of a prompt, as whose hashes cover so many tokens after a block would hold them."""
    lookup = _Lookup(query, _token_buffer(query.token_ids), query.token_count, KeySpace(granule), to_the_end=True)
    return np.array(lookup.lookahead_keys(lookahead), np.uint64) if lookahead else lookup.keys.copy()


class _Buffers:
    """What one look-up works in: content keys, local hashes and set ids of `granules` granules, and their runs."""

    __slots__ = ("granules", "keys", "local_hashes", "pair", "runs", "set_ids")

    def __init__(self, granules: int) -> None:
        self.granules = granules
        self.keys, self.local_hashes = np.empty(granules, np.uint64), np.empty(granules, np.uint64)
        self.set_ids, self.runs = np.empty(granules, np.uint32), np.empty(2 * granules, np.int64)
        self.pair = np.empty(2, np.uint64)


_shared_buffers = local()  # by thread; within one, look-ups take turns


def _buffers(granules: int) -> _Buffers:
    """As many granules as that or more. What is in them lasts until the next call."""
    buffers: _Buffers | None = getattr(_shared_buffers, "buffers", None)
    if granules > SHARED_GRANULES_MAX:
        return _Buffers(granules)
    if buffers is None or granules > buffers.granules:
        buffers = _shared_buffers.buffers = _Buffers(min(SHARED_GRANULES_MAX, max(512, 2 * granules)))
    return buffers


class _Lookup:
    """One prompt in one key space. `to_the_end`: also where nothing counts behind a granule that nobody has."""

    def __init__(
        self,
        query: PrefixQuery,
        tokens: bytes | array[int],
        count: int,
        space: KeySpace,
        *,
        to_the_end: bool = False,
    ) -> None:
        self.query, self.tokens, self.count, self.space = query, tokens, count, space
        if query.local_hashes is not None:
            self.count = len(query.local_hashes) * space.granule
        elif query.content_keys is not None:
            self.count = len(query.content_keys) * space.granule
        granules = self.count // space.granule
        buffers = self._buffers = _buffers(granules)
        where = *space.table.arrays, not (space.needs_whole_walk or to_the_end), buffers.local_hashes
        results = buffers.keys, buffers.set_ids, buffers.runs, buffers.pair
        self._lookahead: dict[int, _Sets] = {}
        self._ends: dict[tuple[Hashing, frozenset[int], str | None], dict[EngineHash, int]] = {}
        if query.content_keys is not None:
            buffers.keys[:granules] = query.content_keys
            self._plain = _Sets(space, space.look_up(buffers.keys[:granules]))
            return
        if query.local_hashes is None and isinstance(tokens, bytes) and not query.multimodal:
            seed = chain_seed(query.lora_name)
            seeds = np.uint64(salted_seed(seed, query.cache_salt)), np.uint64(seed)
            ids = np.frombuffer(tokens, np.uint32)
            seen, runs = look_up_prompt(ids, granules, space.granule, *seeds, *where, *results)
        else:
            hashes = self._local_hashes() if query.local_hashes is None else query.local_hashes
            buffers.local_hashes[:granules] = hashes
            seen, runs = look_up_hashes(granules, *where, *results)
        self._plain = _Sets(space, buffers.set_ids[:seen], _read_runs(space, buffers.runs, runs))

    @property
    def keys(self) -> U64:
        """Of all granules, if the whole prompt was walked; until the next look-up."""
        return self._buffers.keys[: self.count // self.space.granule]

    def _local_hashes(self) -> list[int]:
        query, granule = self.query, self.space.granule
        seed = chain_seed(query.lora_name)
        items = from_query(((m.identifier, m.offset) for m in query.multimodal), granule)
        first_seed = salted_seed(seed, query.cache_salt)
        return local_hashes(self.tokens, granule, seed, first_seed=first_seed, items=items)

    def judge(self, scope: Scope, holdings: list[PoolHolding]) -> list[PublisherHit]:
        """A hit for every publisher of this space that holds anything that counts, or a pool for it; best first."""
        plain, dropping, others = self._candidates(scope)
        if self.query.detail is not SUMMARY and (plain or dropping):
            others = {**others, **{p: None for p, _, _ in self._known(plain | dropping, _by_name)}}
            plain = dropping = 0
        if holdings:
            served = (
                p for p in scope.publishers if p.space is self.space and scope.is_served(p.registration.worker_id)
            )
            others = {**others, **dict.fromkeys(served)}
        hits = self._judge_plain(plain, 0) if plain else []
        if dropping:
            hits += self._judge_plain(dropping, self.space.granule)
        for publisher in others:
            if _is_asked(self.query, publisher) and publisher.rules is not None and not publisher.is_pool:
                hit = self.judgement(scope, publisher, publisher.rules, _serving(publisher, holdings)).hit()
                if hit is not None:
                    hits.append(hit)
        if dropping or others:
            hits.sort(key=_best_first)
        return hits

    def judgement(
        self, scope: Scope, publisher: PublisherIndex, rules: ReuseRules, serving: list[PoolHolding]
    ) -> Judgement:
        where = publisher, rules, self._sets(publisher.residents.lookahead_tokens), self.space.granule, self.count
        matched = self._matched(scope, publisher)
        return Judgement(*where, matched, serving, self.query.detail)

    def spans_of(self, pool: PublisherIndex, rules: ReuseRules) -> list[PoolSpan]:
        """What a pool has of the prompt, each block on its fastest tier."""
        where = pool, rules, self._sets(0), self.space.granule, self.count
        judgement = Judgement(*where, NOTHING_MATCHED, [], Detail.INTERVALS)
        return [PoolSpan(span.start, span.end, span.tier) for span in judgement.spans()]

    def _candidates(self, scope: Scope) -> tuple[int, int, dict[PublisherIndex, None]]:
        """Slots of plain holders with anything of the prompt, of those that drop a block, and the other publishers that
        may have a hit."""
        plain, dropping, others = self._known(self._plain.any_holder, _by_kind)
        if scope.asked_always:
            others = {**others, **{p: None for p in scope.asked_always if p.space is self.space}}
        return plain, dropping, others

    def _judge_plain(self, plain: int, dropped: int) -> list[PublisherHit]:
        """What is held on the GPU from the start on is resident, and but for the last token, and the tokens that are
        dropped, it is the hit."""
        granule, workers = self.space.granule, self.query.workers
        limit = (self.count - 1) // granule * granule
        hits = []
        for granules, slots in reversed(self._plain.reaches(plain)):
            tokens = granules * granule
            hit, tiers = max(0, min(tokens, limit) - dropped), {GPU: tokens, CPU: tokens}
            for publisher, worker_id, dp_rank in self._known(slots, _by_name):
                if workers is None or worker_id in workers:
                    number = publisher.checkpoint.sequence_number
                    hits.append(PublisherHit(worker_id, dp_rank, hit, tokens, tiers, *publisher.trust, number))
        return hits

    def _known(self, slots: int, find: Callable[[KeySpace, int], FoundT]) -> FoundT:
        """What `find` says of these slots. Few sets of slots are asked for, always the same; see `KeySpace.known`."""
        known = self.space.known
        found: FoundT | None = known.get((find, slots))
        if found is None:
            if len(known) >= KNOWN_MAX:
                known.clear()
            found = known[find, slots] = find(self.space, slots)
        return found

    def _sets(self, lookahead: int) -> _Sets:
        if not lookahead:
            return self._plain
        sets = self._lookahead.get(lookahead)
        if sets is None:
            keys = np.array(self.lookahead_keys(lookahead), np.uint64)
            sets = self._lookahead[lookahead] = _Sets(self.space, self.space.look_up(keys))
        return sets

    def _matched(self, scope: Scope, publisher: PublisherIndex) -> Matched:
        """Groups that have a block ending at this token, though no event says so: its hash does."""
        hashing = publisher.hashing
        if hashing is None or not isinstance(self.tokens, bytes) or not self.tokens:
            return NOTHING_MATCHED
        units = publisher.groups.hash_units
        lora_name = publisher.options.engine_adapter(self.query.lora_name)
        ends = self._ends.get((hashing, units, lora_name))
        if ends is None:
            ends = scope.engine_hashes.ends(self._prompt(lora_name), hashing, units)
            self._ends[hashing, units, lora_name] = ends
        return publisher.waiting_blocks(ends)

    def _prompt(self, lora_name: str | None) -> Prompt:
        query, granule = self.query, self.space.granule
        items = sorted(query.multimodal, key=itemgetter(1))
        keys = self._buffers.keys[: self.count // granule]
        return Prompt(array("I", self.tokens), items, lora_name, query.cache_salt, granule, keys)

    def lookahead_keys(self, lookahead: int) -> list[int]:
        """What is resident where hashes also cover the tokens after a block; only while those are in the prompt."""
        ids = self.tokens if isinstance(self.tokens, array) else array("I", self.tokens)
        granule = self.space.granule
        starts = from_query(((m.identifier, m.offset) for m in self.query.multimodal), 1)
        keys = []
        for j, key in enumerate(self._buffers.keys[: self.count // granule].tolist()):
            end = (j + 1) * granule
            if end + lookahead > min(self.count, len(ids)):
                break
            items = b"".join(starts[i] for i in range(end, end + lookahead) if i in starts) if starts else b""
            keys.append(lookahead_key(key, ids[end : end + lookahead], items))
        return keys


def _by_kind(space: KeySpace, slots: int) -> tuple[int, int, dict[PublisherIndex, None]]:
    """The slots of plain holders, those of them that drop a block apart, and the publishers of the others; nobody asks
    for what is not verified."""
    plain = dropping = 0
    others: dict[PublisherIndex, None] = {}
    for holder in (holder for holder in _holders(space, slots) if holder.is_verified):
        publisher = cast("PublisherIndex", holder.owner)
        if publisher.plain_holder is not holder:
            others[publisher] = None
        elif publisher.drops(holder.key.group):
            dropping |= 1 << holder.slot
        else:
            plain |= 1 << holder.slot
    return plain, dropping, others


def _by_name(space: KeySpace, slots: int) -> list[tuple[PublisherIndex, str, int]]:
    """The publishers of these slots with worker and rank, in their order."""
    publishers = [cast("PublisherIndex", holder.owner) for holder in _holders(space, slots)]
    return sorted(((p, *p.registration.key) for p in publishers), key=itemgetter(1, 2))


def _holders(space: KeySpace, slots: int) -> Iterator[Holder]:
    while slots:
        bit = slots & -slots
        slots ^= bit
        yield cast("Holder", space.slots[bit.bit_length() - 1])


class _Sets:
    """The sets of holders of consecutive granules, and their runs of equal sets per block step.

    Masks may have retired slots, too; nobody asks for those.
    """

    __slots__ = ("_granule_runs", "_ids", "_runs", "_space", "any_holder")

    def __init__(self, space: KeySpace, set_ids: npt.NDArray[np.uint32], runs: list[Run] | None = None) -> None:
        self._ids = set_ids
        self._space = space
        self._runs: dict[int, list[Run]] = {}
        self.any_holder = 0
        self._granule_runs = self._find_runs(1) if runs is None else runs
        for mask, _ in self._granule_runs:
            self.any_holder |= mask
        self.any_holder &= ~space.retired

    @property
    def count(self) -> int:
        return len(self._ids)

    def mask_at(self, granule: int) -> int:
        """The holders of the prefix that ends with this granule."""
        return self._space.masks[int(self._ids[granule])]

    def all_runs(self, step: int) -> list[Run]:
        """(mask, blocks) of all blocks of `step` granules, also of those that nobody has."""
        return self._granule_runs if step == 1 else self._find_runs(step)

    def runs(self, step: int) -> list[Run]:
        """(mask, blocks) of the blocks of `step` granules, up to the first block that nobody has."""
        runs = self._runs.get(step)
        if runs is None:
            runs = self._runs[step] = list(takewhile(_is_held, self.all_runs(step)))
        return runs

    def reaches(self, slots: int) -> list[Run]:
        """(granules, slots): how far holders have every granule from the first on, if they have that; ascending."""
        reaches, so_far = [], 0
        for mask, granules in self._granule_runs:
            lost = slots & ~mask
            if lost and so_far:
                reaches.append((so_far, lost))
            slots &= mask
            if not slots:
                return reaches
            so_far += granules
        if so_far:
            reaches.append((so_far, slots))
        return reaches

    def _find_runs(self, step: int) -> list[Run]:
        found = np.empty(2 * self.count, np.int64)
        return _read_runs(self._space, found, find_runs(self._ids, self.count, step, found))


def _read_runs(space: KeySpace, found: I64, count: int) -> list[Run]:
    """What the kernel `find_runs` found."""
    numbers = iter(found[: 2 * count].tolist())
    masks = space.masks
    return [(masks[set_id], blocks) for set_id, blocks in zip(numbers, numbers, strict=True)]


def _is_held(run: Run) -> bool:
    return run[0] != 0


class Judgement:
    """One publisher and one prompt. `holdings`: what pools have for it."""

    def __init__(
        self,
        publisher: PublisherIndex,
        rules: ReuseRules,
        sets: _Sets,
        granule: int,
        count: int,
        matched: Matched,
        holdings: list[PoolHolding],
        detail: Detail,
    ) -> None:
        self.publisher, self.rules, self.sets, self.granule, self.count = publisher, rules, sets, granule, count
        self.matched = matched
        self.detail = detail
        self.trace: Trace | None = None
        self.pooled = pooled_tiers(holdings)
        self.group_masks = self._group_masks(None)

    def hit(self) -> PublisherHit | None:
        is_found = any(mask & self.sets.any_holder for mask in self.group_masks.values())
        if not (is_found or self.pooled or self.matched or self.rules.takes_for_granted):
            return None
        spans = self.spans() if self.pooled or self.detail in (Detail.TIERS, Detail.INTERVALS) else []
        tiers = self._tiers(spans) if spans else self._own_tiers()
        resident = max(tiers.values(), default=0)
        hit = self._hit_tokens()
        if not hit and not resident:
            return None
        registration, checkpoint = self.publisher.registration, self.publisher.checkpoint
        names = registration.worker_id, registration.dp_rank
        coverage, reason, at = self.publisher.trust
        leading = [span for span in spans if span.end <= resident]
        said = *names, hit, resident, tiers, coverage, reason, at, checkpoint.sequence_number
        answer = self._detailed(said, leading)
        if pools := sorted({span.worker_id for span in leading if span.worker_id != registration.worker_id}):
            answer.pools = pools
        return answer

    def _detailed(self, said: tuple[Any, ...], leading: list[Span]) -> PublisherHit:
        """The hit of which this is said, with what is asked beside. `leading`: spans of its prefix."""
        if self.detail in (Detail.SUMMARY, Detail.INTERVALS):
            hit = PublisherHit(*said)
            if self.detail is Detail.INTERVALS:
                hit.spans = leading
            return hit
        detailed = DetailedHit(*said)
        if self.detail is Detail.GROUPS:
            detailed.groups = self._group_reaches()
        else:
            detailed.tier_tokens = dict.fromkeys(self._tier_names(), 0)
            for span in leading:
                detailed.tier_tokens[span.tier] += span.end - span.start
        return detailed

    def _group_reaches(self) -> list[GroupReach]:
        """Each group as if it were the only one, and nothing were computed again."""
        found = []
        for spec in self.rules.specs:
            alignment = min(self.rules.alignment, spec.block_tokens)
            for group in spec.groups:
                alone = ReuseRules((replace(spec, groups=(group,), drops=False),), alignment, self.rules.hash_tokens)
                held = self._length(alone, self.count, None, self.pooled)
                found.append(GroupReach(group, spec.kind, spec.window, spec.block_tokens, held))
        return sorted(found, key=attrgetter("group"))

    def explained(self) -> Trace:
        """How `hit_tokens` of the hit comes about."""
        trace = self.trace = Trace(self.count)
        trace.note(Rule.LAST_TOKEN, self._limit())
        self._hit_tokens()
        self.trace = None
        return trace

    @property
    def held(self) -> Intervals:
        """What every group of full attention has on any tier, or pools for it."""
        return self._held(self.group_masks, self.pooled)

    def spans(self) -> list[Span]:
        """Every part of the prompt that is held, on the fastest tier that it takes, if possible by the worker."""
        own = self.publisher.registration.worker_id
        found: list[Span] = []
        so_far: frozenset[str] = frozenset()
        pooled: list[PooledTier] = []
        before: Intervals = []
        for tier in self._tier_names():
            so_far |= {tier}
            masks = self._group_masks(so_far)
            for source in (None, *(p for p in self.pooled if p.tier == tier)):
                if source is not None:
                    pooled.append(source)
                now = self._held(masks, pooled)
                worker_id = own if source is None else source.holding.worker_id
                found += (Span(start, end, tier, worker_id) for start, end in without(now, before))
                before = now
        return sorted(found, key=_start_of)

    def _held(self, group_masks: dict[int, int], pooled: list[PooledTier]) -> Intervals:
        """What every group of full attention has, or pools for it."""
        held = [self._blocks(spec, group_masks, pooled) for spec in self.full_specs]
        return reduce(common, held)

    def _blocks(self, spec: Spec, group_masks: dict[int, int], pooled: list[PooledTier]) -> Intervals:
        block, first = spec.block_tokens, 0
        needed = [group_masks.get(group, 0) for group in spec.groups]
        found = [] if spec.kind == MAMBA else blocks_from(pooled, block)
        for mask, length in self.sets.all_runs(block // self.granule):
            if all(mask & slots for slots in needed):
                found.append((first * block, (first + length) * block))
            first += length
        return united(found)

    def _hit_tokens(self) -> int:
        """What the engine would skip. What pools have is taken for its own, but no connector goes on from there."""
        hit = self._hit_without_pools()
        if not self.pooled:
            return hit
        with_pools = self._length_on(ON_DEVICE if self.publisher.connector.is_shown else None, self.pooled)
        if self.trace is not None:
            self.trace.note(Rule.POOLS, max(hit, with_pools))
        return max(hit, with_pools)

    def _hit_without_pools(self) -> int:
        """A connector loads on top of what the engine has itself; all others have one cache."""
        connector, rules = self.publisher.connector, self.rules
        if not connector.is_shown:
            return self._length_on(None, trace=self.trace)
        local = self._length_on(ON_DEVICE, trace=self.trace)
        slower_tiers = frozenset(h.tier for h in self.publisher.residents.holders.values()) - ON_DEVICE
        slower = self._group_masks(slower_tiers)
        groups = chunked_groups(rules, connector.blocks_per_chunk, connector.draft_groups) if slower else None
        if groups is None:
            return local
        align = lcm(*(spec.block_tokens for spec in rules.specs if spec.kind == MAMBA))

        def holds_chunk(group: ChunkedGroup, end: int) -> bool:
            is_held = bool(self._mask_at(end) & slower.get(group.group, 0))
            return is_held or group.group in self._matched_at(end, slower_tiers)

        is_known = self.publisher.checkpoint.coverage is Coverage.COMPLETE
        unsure = 0 if is_known else max(g.chunk_tokens - g.chunk_tokens // connector.blocks_per_chunk for g in groups)
        where = groups, local, self.count, align, holds_chunk
        loaded = length_with_loads(*where, unsure=unsure)
        if self.trace is not None:
            self.trace.note(Rule.CONNECTOR_LOADS, length_with_loads(*where))
            self.trace.note(Rule.CONNECTOR_UNSURE, loaded)
        return loaded

    def _length_on(
        self, tiers: frozenset[str] | None, pooled: list[PooledTier] | None = None, trace: Trace | None = None
    ) -> int:
        """The engine's own rule over what it has (on these tiers), and what pools have."""
        return self._length(self.rules, self._limit(), tiers, pooled, trace)

    def _length(
        self,
        rules: ReuseRules,
        limit: int,
        tiers: frozenset[str] | None,
        pooled: list[PooledTier] | None,
        trace: Trace | None = None,
    ) -> int:
        group_masks = self.group_masks if tiers is None else self._group_masks(tiers)
        from_pools = {spec: self._blocks(spec, {}, pooled) for spec in rules.specs} if pooled else {}

        def holds(spec: Spec, end: int) -> bool:
            mask, matched = self._mask_at(end), self._matched_at(end, tiers)
            if all(mask & group_masks.get(group, 0) or group in matched for group in spec.groups):
                return True
            block = (end - 1) // spec.block_tokens * spec.block_tokens
            return any(start <= block and end <= stop for start, stop in from_pools.get(spec, ()))

        def contiguous(spec: Spec) -> int:
            if pooled:
                return reach(self._blocks(spec, group_masks, pooled))
            length = self._reach(spec, group_masks)
            while self.matched and holds(spec, length + spec.block_tokens):
                length += spec.block_tokens
            return length

        return hit_length(rules, limit, holds, contiguous, trace)

    def _matched_at(self, end: int, tiers: frozenset[str] | None) -> set[int]:
        """The groups that have a block ending there (on these tiers), as its hash says."""
        return {group for group, tier in self.matched.get(end, ()) if tiers is None or tier in tiers}

    def _mask_at(self, end: int) -> int:
        """The holders of the prefix of so many tokens."""
        j, rest = divmod(end, self.granule)
        return 0 if rest or not 0 < j <= self.sets.count else self.sets.mask_at(j - 1)

    def _limit(self) -> int:
        """At least one token is always computed; SGLang's pairs leave one more (a pair needs its second token)."""
        return self.count - (2 if self.publisher.leaves_one_token_more else 1)

    def _group_masks(self, tiers: frozenset[str] | None) -> dict[int, int]:
        """Group -> the slots of its holders (on these tiers) that the engine can load from."""
        masks: dict[int, int] = {}
        for key, holder in self.publisher.residents.holders.items():
            if holder.is_credited and (tiers is None or holder.tier in tiers):
                masks[key.group] = masks.get(key.group, 0) | 1 << holder.slot
        return masks

    def _reach(self, spec: Spec, group_masks: dict[int, int]) -> int:
        blocks = 0
        needed = [group_masks.get(group, 0) for group in spec.groups]
        for mask, length in self.sets.runs(spec.block_tokens // self.granule):
            if not all(mask & slots for slots in needed):
                break
            blocks += length
        return blocks * spec.block_tokens

    @property
    def full_specs(self) -> list[Spec]:
        """Those of full attention; without any, all."""
        return [spec for spec in self.rules.specs if spec.is_full] or list(self.rules.specs)

    def _tier_names(self) -> list[str]:
        """Of all holders, always GPU and CPU; fastest first."""
        own = {h.tier for h in self.publisher.residents.holders.values() if h.is_credited}
        return sorted({*own, *(pooled.tier for pooled in self.pooled), GPU, CPU}, key=tier_rank)

    def _tiers(self, spans: list[Span]) -> dict[str, int]:
        """Cumulative reach: how far the prefix is held on this tier and the faster ones."""
        ranks = {tier: rank for rank, tier in enumerate(self._tier_names())}
        return {
            tier: reach(united((s.start, s.end) for s in spans if ranks[s.tier] <= rank))
            for tier, rank in ranks.items()
        }

    def _own_tiers(self) -> dict[str, int]:
        """The same without pools, where nobody asks for spans."""
        tiers = self._tier_names()
        reaches: dict[str, int] = {}
        so_far: frozenset[str] = frozenset()
        for tier in tiers:
            so_far |= {tier}
            masks = self.group_masks if len(so_far) == len(tiers) else self._group_masks(so_far)
            reaches[tier] = min(self._reach(spec, masks) for spec in self.full_specs)
        return reaches


def _start_of(span: Span) -> int:
    return span.start
