"""One query: a prompt -> what each publisher would not compute again, publisher by publisher and block by block."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from indexer.identity.chain import chain_keys, chain_seed, local_hashes, lookahead_key, salted_seed
from indexer.identity.extra_keys import from_query
from indexer.index.groups import CHUNKED_LOCAL, MAMBA
from indexer.index.prefix_query import PrefixQuery, PublisherHit
from indexer.index.publisher import PublisherIndex
from indexer.index.reuse import ReuseRules, Spec, hit_length
from indexer.index.scope import Scope
from indexer.index.state import Coverage
from indexer.index.tiers import CPU, GPU, tier_rank

Tokens = Sequence[int]


def hits_of(query: PrefixQuery, scope: Scope) -> list[PublisherHit]:
    """Best first."""
    assert not isinstance(query.token_ids, bytes)
    hits = []
    for publisher in scope.publishers:
        if query.workers is None or publisher.registration.worker_id in query.workers:
            hit = _hit_of(query, query.token_ids, publisher)
            if hit is not None:
                hits.append(hit)
    return sorted(hits, key=lambda hit: (-hit.hit_tokens, -hit.resident_tokens, hit.worker_id, hit.dp_rank))


def _hit_of(query: PrefixQuery, tokens: Tokens, publisher: PublisherIndex) -> PublisherHit | None:
    rules, granule, space = publisher.reuse.rules, publisher.granule, publisher.space
    if rules is None or granule is None or space is None:
        return None
    masks = space.look_up(_keys(query, tokens, granule, publisher.residents.lookahead_tokens))
    holders = [holder for holder in publisher.residents.holders.values() if holder.is_credited]

    def has_block(spec: Spec, end: int, tiers: set[str]) -> bool:
        """Whether every group of the spec has the block that ends there on one of these tiers."""
        if end % granule or not 0 < end <= len(masks) * granule:
            return False
        mask = masks[end // granule - 1]
        groups = {h.key.group for h in holders if h.tier in tiers and mask >> h.slot & 1}
        return groups.issuperset(spec.groups)

    def reach(spec: Spec, tiers: set[str]) -> int:
        end = 0
        while has_block(spec, end + spec.block_tokens, tiers):
            end += spec.block_tokens
        return end

    every_tier = {holder.tier for holder in holders} | {GPU, CPU}
    ordered = sorted(every_tier, key=tier_rank)
    full = [spec for spec in rules.specs if spec.is_full] or list(rules.specs)
    reaches = {tier: min(reach(spec, set(ordered[: i + 1])) for spec in full) for i, tier in enumerate(ordered)}
    has_connector = publisher.connector.is_shown
    own_tiers = {GPU} if has_connector else every_tier
    is_pairs = publisher.residents.lookahead_tokens and publisher.registration.engine == "sglang"
    limit = len(tokens) - (2 if is_pairs else 1)
    hit = hit_length(
        rules, limit, lambda spec, end: has_block(spec, end, own_tiers), lambda spec: reach(spec, own_tiers)
    )
    if has_connector and every_tier - {GPU}:
        per_chunk = publisher.connector.blocks_per_chunk

        def has_chunk(spec: Spec, group: int, end: int) -> bool:
            return has_block(replace(spec, groups=(group,)), end, every_tier - {GPU})

        local = hit
        loaded = _with_loads(rules, per_chunk, local, len(tokens), has_chunk)
        if publisher.checkpoint.coverage is not Coverage.COMPLETE:
            loaded -= (per_chunk - 1) * max(spec.block_tokens for spec in rules.specs)
        hit = max(local, min(loaded, len(tokens) - 1))
    resident = max(reaches.values())
    is_found = any(mask >> holder.slot & 1 for mask in masks for holder in holders)
    if not (is_found or rules.takes_for_granted) or not (hit or resident):
        return None
    names = publisher.registration.key
    return PublisherHit(*names, hit, resident, reaches, *publisher.trust, publisher.checkpoint.sequence_number)


def _with_loads(
    rules: ReuseRules, per_chunk: int, local: int, prompt: int, has_chunk: Callable[[Spec, int, int], bool]
) -> int:
    """Shorten the prompt until every group has what it needs of it, in chunks from the one in which `local` ends on."""
    if any(spec.kind == CHUNKED_LOCAL for spec in rules.specs):
        return local
    groups = [(spec, group) for spec in rules.specs for group in spec.groups]
    length = prompt - (not all(spec.is_full for spec, _ in groups))
    for spec, _ in groups:
        if spec.kind == MAMBA:
            length -= length % spec.block_tokens
    before, looked_up = None, groups
    while length != before:
        before = length
        for spec, group in looked_up:
            size = spec.block_tokens * per_chunk
            length = min(length, prompt - prompt % size)
            first, last = local // size, -(-length // size)
            there = [has_chunk(spec, group, (i + 1) * size) for i in range(first, min(last, prompt // size))]
            if spec.is_full:
                agreed = there.index(False) if False in there else len(there)
            else:
                window = 1 if spec.kind == MAMBA else -(-(spec.window or 1) // size)
                agreed = next((i for i in range(len(there), 0, -1) if all(there[max(0, i - window) : i])), 0)
            length = min(length, (first + agreed) * size)
            if length - local < size:
                return local
        looked_up = [(spec, group) for spec, group in groups if not spec.is_full]
    return length


def _keys(query: PrefixQuery, tokens: Tokens, granule: int, lookahead: int) -> list[int]:
    """What has to be resident, granule by granule."""
    seed = chain_seed(query.lora_name)
    places = [(item.identifier, item.offset) for item in query.multimodal]
    buffer = array("Q", tokens) if any(t >= 1 << 32 for t in tokens) else array("I", tokens).tobytes()
    first_seed = salted_seed(seed, query.cache_salt)
    locals_ = local_hashes(buffer, granule, seed, first_seed=first_seed, items=from_query(places, granule))
    keys = chain_keys(None, locals_)
    if not lookahead:
        return keys
    starts = from_query(places, 1)
    ends = range(granule, len(tokens) - lookahead + 1, granule)
    items = [b"".join(starts[i] for i in range(end, end + lookahead) if i in starts) for end in ends]
    return [
        lookahead_key(key, tokens[end : end + lookahead], item)
        for key, end, item in zip(keys, ends, items, strict=False)
    ]
