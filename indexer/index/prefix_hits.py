"""One query: a prompt -> what each publisher of its scope would not compute again.

The prompt's content keys are derived once per granule in use and looked up once, by one kernel. Runs of granules that
the same holders have are folded. Publishers of the plain kind (one group of full attention, on the GPU) are then judged
all together, run by run; every other one that holds anything of the prompt by its own rules (reuse.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from operator import itemgetter
from threading import local
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from indexer.identity.chain import chain_seed, local_hashes, lookahead_key, salted_seed
from indexer.identity.extra_keys import from_query
from indexer.index.kernels import find_runs, look_up_hashes, look_up_prompt
from indexer.index.key_space import KeySpace
from indexer.index.publisher import PublisherIndex
from indexer.index.reuse import ReuseRules, Spec, hit_length
from indexer.index.scope import Scope
from indexer.index.table import I64
from indexer.index.tiers import CPU, GPU, tier_rank

if TYPE_CHECKING:
    from indexer.index.holder import Holder

UNKNOWN_WORKERS_NAMED_MAX = 100
NOT_COMPLETE_NAMED_MAX = 5
KNOWN_MAX = 4_096
SHARED_GRANULES_MAX = 65_536  # of buffers that are kept: 2.3 MB
FoundT = TypeVar("FoundT")
Run: TypeAlias = tuple[int, int]
"""A set of holders as a mask, and how many blocks in a row it has."""


class MultimodalItem(NamedTuple):
    """One multimodal item of a prompt: its identifier (the engines' multimodal hash), where it starts, its length."""

    identifier: str
    offset: int
    length: int


class PrefixQuery(msgspec.Struct, frozen=True, gc=False):
    """A prompt. `token_ids`: integers from 0 to below 2^63, or u32 little-endian bytes. `workers`: only these.

    `local_hashes`: instead of tokens, the local hash of each granule (whoever asks has hashed with our granule).
    """

    model: str
    token_ids: Sequence[int] | bytes
    tenant: str = "default"
    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    workers: frozenset[str] | None = None
    local_hashes: Sequence[int] | None = None


class PublisherHit(msgspec.Struct, gc=False):
    """`hit_tokens`: what the engine would skip; `resident_tokens`: the longest prefix held; `tiers`: cumulative.

    `coverage_at`: when coverage became so, in seconds since 1970; None = not known.
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


class QueryWarning(msgspec.Struct, gc=False):
    code: str
    message: str


class PrefixAnswer(msgspec.Struct, gc=False):
    """Best hits first, ties by worker and rank."""

    prompt_tokens: int
    hits: list[PublisherHit] = []
    warnings: list[QueryWarning] = []


def answer(query: PrefixQuery, scope: Scope | None, known_workers: set[str] | None) -> PrefixAnswer:
    """`known_workers`: all there are, if the query names some."""
    tokens = _token_buffer(query.token_ids)
    result = PrefixAnswer(len(tokens) // 4 if isinstance(tokens, bytes) else len(tokens))
    if query.workers and known_workers is not None:
        result.warnings.extend(_unknown_workers(query.workers - known_workers))
    if scope is None:
        message = f"no publisher of model {query.model!r} is registered for tenant {query.tenant!r}"
        result.warnings.append(QueryWarning("unknown_model", message))
        return result
    for space in scope.spaces.values():
        if len(space):  # one that everybody refined away from is empty
            result.hits += _Lookup(query, tokens, result.prompt_tokens, space).judge(scope)
    if len(scope.spaces) > 1:
        result.hits.sort(key=_best_first)
    if scope.not_complete:
        result.warnings.extend(_not_complete(query, scope, {(hit.worker_id, hit.dp_rank) for hit in result.hits}))
    return result


def _not_complete(query: PrefixQuery, scope: Scope, hits: set[tuple[str, int]]) -> Iterator[QueryWarning]:
    """Of publishers without a hit: they may hold more than is known. Those with one have their coverage in it.

    Cost: per hit, and per publisher that is below `complete` and not among `workers`.
    """
    workers = query.workers
    others = (key for key in scope.not_complete if key not in hits and (workers is None or key.worker_id in workers))
    if named := [f"{worker_id} rank {rank}" for worker_id, rank in islice(others, NOT_COMPLETE_NAMED_MAX)]:
        yield not_complete_warning(named, is_more=next(others, None) is not None)


def not_complete_warning(named: Sequence[str], *, is_more: bool) -> QueryWarning:
    more = " and more" if is_more else ""
    message = f"no hit, but perhaps not all is known: {', '.join(named)}{more}"
    return QueryWarning("coverage_below_complete", message)


def _best_first(hit: PublisherHit) -> tuple[int, int, str, int]:
    return -hit.hit_tokens, -hit.resident_tokens, hit.worker_id, hit.dp_rank


def _unknown_workers(unknown: frozenset[str]) -> Iterator[QueryWarning]:
    """The first ones by name, the rest by number."""
    for worker_id in sorted(unknown)[:UNKNOWN_WORKERS_NAMED_MAX]:
        yield QueryWarning("unknown_worker", f"no publisher of worker {worker_id!r} is registered")
    if (more := len(unknown) - UNKNOWN_WORKERS_NAMED_MAX) > 0:
        yield QueryWarning("unknown_worker", f"and of {more} more workers none is registered")


def _token_buffer(token_ids: Sequence[int] | bytes) -> bytes | array[int]:
    if isinstance(token_ids, bytes):
        return token_ids
    try:
        return array("I", token_ids).tobytes()
    except OverflowError:
        return array("Q", token_ids)


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
    """One prompt in one key space."""

    def __init__(self, query: PrefixQuery, tokens: bytes | array[int], count: int, space: KeySpace) -> None:
        self.query, self.tokens, self.count, self.space = query, tokens, count, space
        if query.local_hashes is not None:
            self.count = len(query.local_hashes) * space.granule
        granules = self.count // space.granule
        buffers = self._buffers = _buffers(granules)
        where = *space.table.arrays, not space.needs_whole_walk, buffers.local_hashes
        results = buffers.keys, buffers.set_ids, buffers.runs, buffers.pair
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
        self._lookahead: dict[int, _Sets] = {}

    def _local_hashes(self) -> list[int]:
        query, granule = self.query, self.space.granule
        seed = chain_seed(query.lora_name)
        items = from_query(((m.identifier, m.offset) for m in query.multimodal), granule)
        first_seed = salted_seed(seed, query.cache_salt)
        return local_hashes(self.tokens, granule, seed, first_seed=first_seed, items=items)

    def judge(self, scope: Scope) -> list[PublisherHit]:
        """A hit for every publisher of this space that holds anything that counts, best first."""
        plain, others = self._candidates(scope)
        hits = self._judge_plain(plain) if plain else []
        for publisher in others:
            if self._is_asked(publisher) and publisher.rules is not None:
                sets = self._sets(publisher.residents.lookahead_tokens)
                hit = _Judgement(publisher, publisher.rules, sets, self.space.granule, self.count).hit()
                if hit is not None:
                    hits.append(hit)
        if others:
            hits.sort(key=_best_first)
        return hits

    def _candidates(self, scope: Scope) -> tuple[int, dict[PublisherIndex, None]]:
        """Slots of plain holders with anything of the prompt, and the other publishers that may have a hit."""
        plain, others = self._known(self._plain.any_holder, _by_kind)
        if self.space.has_lookahead:  # what they hold is not found under plain keys
            more = (p for p in scope.publishers if p.residents.lookahead_tokens and p.space is self.space)
            others = {**others, **dict.fromkeys(more)}
        return plain, others

    def _judge_plain(self, plain: int) -> list[PublisherHit]:
        """What is held on the GPU from the start on is resident, and but for the last token it is the hit."""
        granule, workers = self.space.granule, self.query.workers
        limit = (self.count - 1) // granule * granule
        hits = []
        for reach, slots in reversed(self._plain.reaches(plain)):
            tokens = reach * granule
            hit, tiers = min(tokens, limit), {GPU: tokens, CPU: tokens}
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

    def _is_asked(self, publisher: PublisherIndex) -> bool:
        workers = self.query.workers
        return publisher.is_credited and (workers is None or publisher.registration.worker_id in workers)

    def _sets(self, lookahead: int) -> _Sets:
        if not lookahead:
            return self._plain
        sets = self._lookahead.get(lookahead)
        if sets is None:
            keys = np.array(self._lookahead_keys(lookahead), np.uint64)
            sets = self._lookahead[lookahead] = _Sets(self.space, self.space.look_up(keys))
        return sets

    def _lookahead_keys(self, lookahead: int) -> list[int]:
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


def _by_kind(space: KeySpace, slots: int) -> tuple[int, dict[PublisherIndex, None]]:
    """The slots of plain holders, and the publishers of the others; nobody asks for what is not verified."""
    plain = 0
    others: dict[PublisherIndex, None] = {}
    for holder in (holder for holder in _holders(space, slots) if holder.is_verified):
        publisher = cast("PublisherIndex", holder.owner)
        if publisher.plain_holder is holder:
            plain |= 1 << holder.slot
        else:
            others[publisher] = None
    return plain, others


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

    def runs(self, step: int) -> list[Run]:
        """(mask, blocks) of the blocks of `step` granules, up to the first block that nobody has."""
        runs = self._runs.get(step)
        if runs is None:
            every = self._granule_runs if step == 1 else self._find_runs(step)
            runs = self._runs[step] = list(takewhile(_is_held, every))
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


class _Judgement:
    """One publisher and one prompt."""

    def __init__(self, publisher: PublisherIndex, rules: ReuseRules, sets: _Sets, granule: int, count: int) -> None:
        self.publisher, self.rules, self.sets, self.granule, self.count = publisher, rules, sets, granule, count
        self.group_masks = self._group_masks(None)

    def hit(self) -> PublisherHit | None:
        if not any(mask & self.sets.any_holder for mask in self.group_masks.values()):
            return None
        tiers = self._tiers()
        resident = max(tiers.values(), default=0)
        hit = hit_length(self.rules, self._limit(), self._holds, self._contiguous)
        if not hit and not resident:
            return None
        registration, checkpoint = self.publisher.registration, self.publisher.checkpoint
        names = registration.worker_id, registration.dp_rank
        coverage, reason, at = self.publisher.trust
        return PublisherHit(*names, hit, resident, tiers, coverage, reason, at, checkpoint.sequence_number)

    def _limit(self) -> int:
        """At least one token is always computed; SGLang's pairs leave one less (a pair needs its second token)."""
        pairs = self.publisher.residents.lookahead_tokens and self.publisher.registration.engine == "sglang"
        return self.count - (2 if pairs else 1)

    def _group_masks(self, tiers: frozenset[str] | None) -> dict[int, int]:
        """Group -> the slots of its holders (on these tiers) that the engine can load from."""
        masks: dict[int, int] = {}
        for key, holder in self.publisher.residents.holders.items():
            if holder.is_credited and (tiers is None or holder.tier in tiers):
                masks[key.group] = masks.get(key.group, 0) | 1 << holder.slot
        return masks

    def _holds(self, spec: Spec, end: int) -> bool:
        j, rest = divmod(end, self.granule)
        if rest or not 0 < j <= self.sets.count:
            return False
        mask = self.sets.mask_at(j - 1)
        return all(mask & self.group_masks.get(group, 0) for group in spec.groups)

    def _contiguous(self, spec: Spec) -> int:
        return self._reach(spec, self.group_masks)

    def _reach(self, spec: Spec, group_masks: dict[int, int]) -> int:
        blocks = 0
        needed = [group_masks.get(group, 0) for group in spec.groups]
        for mask, length in self.sets.runs(spec.block_tokens // self.granule):
            if not all(mask & slots for slots in needed):
                break
            blocks += length
        return blocks * spec.block_tokens

    def _tiers(self) -> dict[str, int]:
        """Cumulative reach: how far the prefix is held on this tier and the faster ones; always of GPU and CPU."""
        tiers = {h.tier for h in self.publisher.residents.holders.values() if h.is_credited} | {GPU, CPU}
        full = [spec for spec in self.rules.specs if spec.is_full] or list(self.rules.specs)
        reach: dict[str, int] = {}
        so_far: frozenset[str] = frozenset()
        for tier in sorted(tiers, key=tier_rank):
            so_far |= {tier}
            masks = self.group_masks if len(so_far) == len(tiers) else self._group_masks(so_far)
            reach[tier] = min(self._reach(spec, masks) for spec in full)
        return reach
