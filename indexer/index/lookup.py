"""One prompt in one key space: its content keys, who has them, and a hit for everybody who has any.

Keys are derived and looked up once, by one kernel. Publishers of the plain kind (one group of full attention, on the
GPU) are then judged all together, run by run; every other one that holds anything of the prompt by its own rules
(judgement.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from threading import local
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from indexer.identity.chain import chain_seed, local_hashes, lookahead_key, salted_seed
from indexer.identity.extra_keys import from_query
from indexer.index.columns import U64
from indexer.index.engine_hashes import Hashing, Prompt, hashing_of, waiting_blocks
from indexer.index.holder_sets import HolderSets, read_runs
from indexer.index.judgement import NOTHING_MATCHED, Judgement, Matched
from indexer.index.kernels import look_up_hashes, look_up_prompt
from indexer.index.key_space import KeySpace
from indexer.index.pools import PoolHolding, PoolSpan, holdings_for
from indexer.index.prefix_query import SUMMARY, Detail, PrefixQuery, PublisherHit
from indexer.index.publisher import PublisherIndex
from indexer.index.reuse import ReuseRules
from indexer.index.scope import Scope
from indexer.index.state import EngineHash
from indexer.index.tiers import CPU, GPU

if TYPE_CHECKING:
    from indexer.index.holder import Holder

KNOWN_MAX = 4_096
SHARED_GRANULES_MAX = 65_536  # of buffers that are kept: 2.3 MB
FoundT = TypeVar("FoundT")


def prompt_keys(query: PrefixQuery, granule: int) -> tuple[U64, int]:
    """The content keys of a prompt's granules, until the next look-up, and its length in tokens."""
    lookup = Lookup(query, token_buffer(query.token_ids), query.token_count, KeySpace(granule), to_the_end=True)
    return lookup.keys, lookup.count


def prompt_keys_ahead(query: PrefixQuery, granule: int, lookahead: int) -> U64:
    """The content keys of a prompt, as whose hashes cover so many tokens after a block would hold them."""
    lookup = Lookup(query, token_buffer(query.token_ids), query.token_count, KeySpace(granule), to_the_end=True)
    return np.array(lookup.lookahead_keys(lookahead), np.uint64) if lookahead else lookup.keys.copy()


def best_first(hit: PublisherHit) -> tuple[int, int, str, int]:
    return -hit.hit_tokens, -hit.resident_tokens, hit.worker_id, hit.dp_rank


def token_buffer(token_ids: Sequence[int] | bytes) -> bytes | array[int]:
    if isinstance(token_ids, bytes):
        return token_ids
    try:
        return array("I", token_ids).tobytes()
    except OverflowError:
        return array("Q", token_ids)


def is_asked_for(query: PrefixQuery, publisher: PublisherIndex) -> bool:
    return publisher.is_credited and (query.workers is None or publisher.registration.worker_id in query.workers)


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


class Lookup:
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
        self._lookahead: dict[int, HolderSets] = {}
        self._ends: dict[tuple[Hashing, frozenset[int], str | None], dict[EngineHash, int]] = {}
        if query.content_keys is not None:
            buffers.keys[:granules] = query.content_keys
            self._plain = HolderSets(space, space.look_up(buffers.keys[:granules]))
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
        self._plain = HolderSets(space, buffers.set_ids[:seen], read_runs(space, buffers.runs, runs))

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
            if (
                is_asked_for(self.query, publisher)
                and not publisher.is_pool
                and (rules := publisher.reuse.rules) is not None
            ):
                serving = holdings_for(publisher.registration.worker_id, holdings)
                hit = self.judgement(scope, publisher, rules, serving).hit()
                if hit is not None:
                    hits.append(hit)
        if dropping or others:
            hits.sort(key=best_first)
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

    def _sets(self, lookahead: int) -> HolderSets:
        if not lookahead:
            return self._plain
        sets = self._lookahead.get(lookahead)
        if sets is None:
            keys = np.array(self.lookahead_keys(lookahead), np.uint64)
            sets = self._lookahead[lookahead] = HolderSets(self.space, self.space.look_up(keys))
        return sets

    def _matched(self, scope: Scope, publisher: PublisherIndex) -> Matched:
        """Groups that have a block ending at this token, though no event says so: its hash does."""
        hashing = hashing_of(publisher)
        if hashing is None or not isinstance(self.tokens, bytes) or not self.tokens:
            return NOTHING_MATCHED
        units = publisher.groups.hash_units
        lora_name = publisher.options.engine_adapter(self.query.lora_name)
        ends = self._ends.get((hashing, units, lora_name))
        if ends is None:
            ends = scope.engine_hashes.ends(self._prompt(lora_name), hashing, units)
            self._ends[hashing, units, lora_name] = ends
        return waiting_blocks(publisher, ends)

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
        elif publisher.reuse.drops(holder.key.group):
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
