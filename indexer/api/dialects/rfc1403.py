"""Queries of Mooncake RFC #1403 (KV-store indexer API), and of the later form of the service that it was written for.

Its instances are our workers, its tenants ours. Answers are in whole blocks of the size that the request names,
whatever the engines' blocks are. What the later form is, and which requests get it: later_form.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from indexer.api.access import Caller
from indexer.api.dialects.hashes import read_hashes
from indexer.api.dialects.rfc1403_bodies import (
    Asked,
    HashQueryBody,
    InstanceBody,
    JsonHashQueryBody,
    JsonQueryBody,
    LaterBody,
    LaterInstanceBody,
    QueryBody,
    RankBody,
)
from indexer.api.errors import ApiError
from indexer.api.formats import (
    Format,
    Parts,
    choose_format,
    count_tokens,
    json_format,
    msgpack_format,
    too_long,
    unsplit,
)
from indexer.api.meters import MeasuredIndex
from indexer.api.ports import Services
from indexer.index.prefix_query import PrefixQuery, PublisherHit
from indexer.index.scope import Scope
from indexer.index.tiers import CPU, GPU
from indexer.wire.query_tokens import split_json_hashes

JSON_QUERY: Format[QueryBody] = json_format(JsonQueryBody, "token_ids")
MSGPACK_QUERY: Format[QueryBody] = msgpack_format(QueryBody, "token_ids")
JSON_HASHES: Format[HashQueryBody] = json_format(JsonHashQueryBody, "seq_hashes", split_json_hashes)
JSON_OLD_HASHES: Format[HashQueryBody] = json_format(JsonHashQueryBody, "block_hash", split_json_hashes)
MSGPACK_HASHES: Format[HashQueryBody] = msgpack_format(HashQueryBody, "seq_hashes", unsplit)


# ---------------------------------------------------------------------- queries


class Rfc1403Queries:
    """Each query takes a body, its content type, who asks, and whether the later form is spoken, and returns content
    type and body of the answer. Raises ApiError."""

    def __init__(self, services: Services, index: MeasuredIndex) -> None:
        self._index = services.index
        self._measured = index
        self._tokens_max = services.limits.prompt_tokens_max

    def by_tokens(
        self, body: bytes, content_type: str | None, caller: Caller, is_later: bool, parts: Parts | None = None
    ) -> tuple[bytes, bytes]:
        """`parts`: the body, if it is JSON that was split already."""
        chosen = choose_format(content_type, JSON_QUERY, MSGPACK_QUERY)
        fields = chosen.try_parts(parts) or chosen.read(body)
        caller.require(fields.tenant, "tenant_id")
        if (count := count_tokens(fields.token_ids)) > self._tokens_max:
            raise too_long("token_ids", count, self._tokens_max)
        query = PrefixQuery(
            fields.model,
            fields.token_ids,
            fields.tenant,
            lora_name=adapter_of(fields),
            cache_salt=fields.cache_salt or None,
            workers=_workers(fields),
        )
        return self._answer(chosen, fields, query, is_later)

    def by_hashes(self, body: bytes, content_type: str | None, caller: Caller, is_later: bool) -> tuple[bytes, bytes]:
        """The hashes have adapter and salt in them."""
        chosen = choose_format(content_type, JSON_HASHES, MSGPACK_HASHES)
        fields = chosen.try_parts(chosen.split(body))
        if fields is None and chosen is JSON_HASHES:
            fields = JSON_OLD_HASHES.try_parts(JSON_OLD_HASHES.split(body))
        if fields is None:
            fields = chosen.read(body)
        caller.require(fields.tenant, "tenant_id")
        keys = _keys_of(fields)
        if (count := len(keys) * fields.block_size) > self._tokens_max:
            raise too_long("seq_hashes", count, self._tokens_max)
        self._check_block_size(fields)
        query = PrefixQuery(
            fields.model,
            b"",
            fields.tenant,
            workers=_workers(fields),
            content_keys=keys,
            granule=fields.block_size,
        )
        return self._answer(chosen, fields, query, is_later)

    def _check_block_size(self, fields: HashQueryBody) -> None:
        """Hashes of blocks of another size match nothing: say so. Raises ApiError 422."""
        scope = self._index.scope(fields.tenant, fields.model)
        if scope is not None and scope.spaces and fields.block_size not in scope.spaces:
            known = ", ".join(map(str, sorted(scope.spaces)))
            message = f"block_size: model {fields.model!r} is hashed in blocks of {known} tokens"
            raise ApiError(422, "invalid_value", message, "block_size")

    def _answer(self, chosen: Format[Any], fields: Asked, query: PrefixQuery, is_later: bool) -> tuple[bytes, bytes]:
        scope = self._index.scope(fields.tenant, fields.model)
        hits = self._measured.prefix_hits(query).hits
        ranks = _Ranks(scope, query.workers, hits, fields.block_size)
        answer = LaterBody(later_instances(ranks)) if is_later else {fields.tenant: instances(ranks)}
        return chosen.content_type, chosen.encode(answer)


def _workers(fields: Asked) -> frozenset[str] | None:
    return frozenset((fields.instance_id,)) if fields.instance_id else None


def adapter_of(fields: Asked) -> str | None:
    """`lora_id` once was a number: 0 and below is the base model; others are known by name only. Raises ApiError."""
    lora_id = fields.lora_id
    if lora_id is None or lora_id == "":
        return fields.lora_name or None
    if fields.lora_name:
        raise ApiError(422, "invalid_value", "lora_id: give lora_name or lora_id, not both", "lora_id")
    if isinstance(lora_id, str):
        return lora_id
    if lora_id > 0:
        raise ApiError(422, "invalid_value", "lora_id: adapters are known by name here, give lora_name", "lora_id")
    return None


def _keys_of(fields: HashQueryBody) -> array[int]:
    """Raises ApiError 422."""
    new, old = fields.seq_hashes, fields.block_hash
    if new is not None and old is not None:
        raise ApiError(422, "invalid_value", "block_hash: give seq_hashes or block_hash, not both", "block_hash")
    field, hashes = ("seq_hashes", new) if new is not None else ("block_hash", old)
    if hashes is None:
        raise ApiError(422, "missing_field", "seq_hashes is required", "seq_hashes")
    return read_hashes(field, hashes)


# ---------------------------------------------------------------------- answers


class _Ranks:
    """Every instance that is asked for, with each of its ranks: how far it has the prompt on the GPU, with the CPU,
    with all tiers. In whole blocks. Cost: 1 us a publisher of the model."""

    def __init__(
        self, scope: Scope | None, workers: frozenset[str] | None, hits: Iterable[PublisherHit], block_tokens: int
    ) -> None:
        self.instances: dict[str, dict[str, RankBody]] = {}
        for publisher in scope.publishers if scope else ():
            worker_id, dp_rank = publisher.registration.key
            if not publisher.is_pool and (workers is None or worker_id in workers):
                self.instances.setdefault(worker_id, {})[str(dp_rank)] = RankBody(0, 0, 0)
        for hit in hits:
            reaches = (hit.tiers[GPU], hit.tiers[CPU], hit.resident_tokens)
            whole = (reach // block_tokens * block_tokens for reach in reaches)
            self.instances[hit.worker_id][str(hit.dp_rank)] = RankBody(*whole)

    def __iter__(self) -> Iterator[tuple[str, dict[str, RankBody]]]:
        return iter(self.instances.items())


def instances(ranks: _Ranks) -> dict[str, InstanceBody]:
    """A tier that adds nothing to the faster ones is 0."""
    found = {}
    for instance, by_rank in ranks:
        best = _best(by_rank)
        cpu = best.cpu if best.cpu > best.gpu else 0
        disk = best.disk if best.disk > best.cpu else 0
        reached = {rank: match.disk for rank, match in by_rank.items()}
        found[instance] = InstanceBody(best.disk, best.gpu, cpu, disk, reached)
    return found


def later_instances(ranks: _Ranks) -> dict[str, LaterInstanceBody]:
    found = {}
    for instance, by_rank in ranks:
        best = _best(by_rank)
        reached = {rank: match.disk for rank, match in by_rank.items()}
        found[instance] = LaterInstanceBody(best.disk, reached, by_rank, best.gpu, best.cpu, best.disk)
    return found


def _best(by_rank: dict[str, RankBody]) -> RankBody:
    ranks = by_rank.values()
    return RankBody(max(r.gpu for r in ranks), max(r.cpu for r in ranks), max(r.disk for r in ranks))
