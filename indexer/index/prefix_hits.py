"""One query: a prompt -> what each publisher of its scope would not compute again.

The prompt's content keys are derived once per granule in use, looked up once, and every publisher is then judged on
the masks by its own rules (reuse.py). Runs of granules that the same holders have are folded, so a publisher costs per
run and not per granule.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from indexer.identity.chain import chain_keys, chain_seed, local_hashes, lookahead_key, salted_seed
from indexer.identity.extra_keys import from_query
from indexer.index.key_space import KeySpace
from indexer.index.publisher import PublisherIndex
from indexer.index.reuse import ReuseRules, Spec, hit_length
from indexer.index.scope import Scope
from indexer.index.tiers import CPU, GPU, tier_rank

UNKNOWN_WORKERS_NAMED_MAX = 100


class MultimodalItem(NamedTuple):
    """One multimodal item of a prompt: its identifier (the engines' multimodal hash), where it starts, its length."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PrefixQuery:
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


class PublisherHit(NamedTuple):
    """`hit_tokens`: what the engine would skip; `resident_tokens`: the longest prefix held; `tiers`: cumulative."""

    worker_id: str
    dp_rank: int
    hit_tokens: int
    resident_tokens: int
    tiers: dict[str, int]
    coverage: str
    sequence_number: int | None


class QueryWarning(NamedTuple):
    code: str
    message: str


@dataclass(slots=True)
class PrefixAnswer:
    prompt_tokens: int
    hits: list[PublisherHit] = field(default_factory=list)
    warnings: list[QueryWarning] = field(default_factory=list)


def answer(query: PrefixQuery, scope: Scope | None, known_workers: set[str] | None) -> PrefixAnswer:
    """Best hits first, ties by worker and rank. `known_workers`: all there are, if the query names some."""
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
            _Lookup(query, tokens, result.prompt_tokens, space).judge(scope, result.hits)
    result.hits.sort(key=lambda hit: (-hit.hit_tokens, -hit.resident_tokens, hit.worker_id, hit.dp_rank))
    return result


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


class _Lookup:
    """One prompt in one key space."""

    def __init__(self, query: PrefixQuery, tokens: bytes | array[int], count: int, space: KeySpace) -> None:
        self.query, self.tokens, self.count, self.space = query, tokens, count, space
        if query.local_hashes is not None:
            self.count = len(query.local_hashes) * space.granule
        self.keys = chain_keys(None, self._local_hashes() if query.local_hashes is None else query.local_hashes)
        self._plain = self._look_up(self.keys)
        self._lookahead: dict[int, _Masks] = {}

    def _local_hashes(self) -> list[int]:
        query, granule = self.query, self.space.granule
        seed = chain_seed(query.lora_name)
        items = from_query(((m.identifier, m.offset) for m in query.multimodal), granule)
        first_seed = salted_seed(seed, query.cache_salt)
        return local_hashes(self.tokens, granule, seed, first_seed=first_seed, items=items)

    def judge(self, scope: Scope, hits: list[PublisherHit]) -> None:
        """Append a hit for every publisher of this space that holds anything that counts."""
        for publisher in scope.publishers:
            if publisher.granule != self.space.granule or publisher.rules is None:
                continue
            registration = publisher.registration
            if self.query.workers is not None and registration.worker_id not in self.query.workers:
                continue
            masks = self._masks(publisher.residents.lookahead_tokens)
            hit = _Judgement(publisher, publisher.rules, masks, self.space.granule, self.count).hit()
            if hit is not None:
                hits.append(hit)

    def _masks(self, lookahead: int) -> _Masks:
        if not lookahead:
            return self._plain
        masks = self._lookahead.get(lookahead)
        if masks is None:
            masks = self._lookahead[lookahead] = self._look_up(self._lookahead_keys(lookahead))
        return masks

    def _look_up(self, keys: list[int]) -> _Masks:
        masks = self.space.masks
        return _Masks([masks[set_id] for set_id in self.space.look_up(np.array(keys, np.uint64)).tolist()])

    def _lookahead_keys(self, lookahead: int) -> list[int]:
        """What is resident where hashes also cover the tokens after a block; only while those are in the prompt."""
        ids = self.tokens if isinstance(self.tokens, array) else array("I", self.tokens)
        granule = self.space.granule
        starts = from_query(((m.identifier, m.offset) for m in self.query.multimodal), 1)
        keys = []
        for j, key in enumerate(self.keys):
            end = (j + 1) * granule
            if end + lookahead > self.count:
                break
            items = b"".join(starts[i] for i in range(end, end + lookahead) if i in starts) if starts else b""
            keys.append(lookahead_key(key, ids[end : end + lookahead], items))
        return keys


class _Masks:
    """Holder masks of consecutive granules, and their runs of equal masks per block step."""

    __slots__ = ("_runs", "any_holder", "by_granule")

    def __init__(self, by_granule: list[int]) -> None:
        self.by_granule = by_granule
        self._runs: dict[int, list[tuple[int, int]]] = {}
        self.any_holder = 0
        for mask in set(by_granule):
            self.any_holder |= mask

    def runs(self, step: int) -> list[tuple[int, int]]:
        """(mask, blocks) of the blocks of `step` granules, up to the first block that nobody has."""
        runs = self._runs.get(step)
        if runs is None:
            runs = self._runs[step] = []
            previous, length = 0, 0
            for mask in self.by_granule[step - 1 :: step]:
                if mask == previous and length:
                    length += 1
                    continue
                if length:
                    runs.append((previous, length))
                previous, length = mask, 1
                if not mask:
                    length = 0
                    break
            if length:
                runs.append((previous, length))
        return runs


class _Judgement:
    """One publisher and one prompt."""

    def __init__(self, publisher: PublisherIndex, rules: ReuseRules, masks: _Masks, granule: int, count: int) -> None:
        self.publisher, self.rules, self.masks, self.granule, self.count = publisher, rules, masks, granule, count
        self.group_masks = self._group_masks(None)

    def hit(self) -> PublisherHit | None:
        if not any(mask & self.masks.any_holder for mask in self.group_masks.values()):
            return None
        tiers = self._tiers()
        resident = max(tiers.values(), default=0)
        hit = hit_length(self.rules, self._limit(), self._holds, self._contiguous)
        if not hit and not resident:
            return None
        registration, checkpoint = self.publisher.registration, self.publisher.checkpoint
        coverage = self.publisher.coverage.value
        key = (registration.worker_id, registration.dp_rank)
        return PublisherHit(*key, hit, resident, tiers, coverage, checkpoint.sequence_number)

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
        if rest or not 0 < j <= len(self.masks.by_granule):
            return False
        mask = self.masks.by_granule[j - 1]
        return all(mask & self.group_masks.get(group, 0) for group in spec.groups)

    def _contiguous(self, spec: Spec) -> int:
        return self._reach(spec, self.group_masks)

    def _reach(self, spec: Spec, group_masks: dict[int, int]) -> int:
        blocks = 0
        needed = [group_masks.get(group, 0) for group in spec.groups]
        for mask, length in self.masks.runs(spec.block_tokens // self.granule):
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
