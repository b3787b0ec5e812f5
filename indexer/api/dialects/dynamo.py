"""The API of Dynamo's standalone indexer: a router written for it works against this service unchanged.

Its instances are our workers by the decimal text of their number, its routing groups our tenants; whatever was
registered natively is answered too. Scores are tokens held (`resident_tokens`), not lowered to what an engine would
skip. Faults are in our envelope, with the statuses that its routers expect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from indexer.api.access import Caller
from indexer.api.dialects.dynamo_bodies import (
    HEALTH_OPENAPI,
    HashQueryBody,
    InstanceBody,
    QueryBody,
    RegisterBody,
    ScoresBody,
    UnregisterBody,
)
from indexer.api.dialects.hashes import U64_MAX, out_of_range, read_hashes
from indexer.api.errors import ApiError, require_recovered
from indexer.api.formats import (
    BodyT,
    Format,
    check_json,
    choose_format,
    count_tokens,
    decode,
    encode_json,
    json_format,
    too_long,
)
from indexer.api.known_queries import Asked
from indexer.api.meters import MeasuredIndex
from indexer.api.ports import Life, Services
from indexer.api.publishers import answer, checked_endpoint, register_for, unknown_publisher
from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import PrefixQuery, PublisherHit
from indexer.index.scope import Scope
from indexer.index.tiers import CPU, GPU
from indexer.registration import Registration
from indexer.wire.query_tokens import split_json_hashes

QUERY_FORMAT: Format[QueryBody] = json_format(QueryBody, "token_ids")
HASH_QUERY_FORMAT: Format[HashQueryBody] = json_format(HashQueryBody, "block_hashes", split_json_hashes)

_read_register = msgspec.json.Decoder(RegisterBody).decode
_read_unregister = msgspec.json.Decoder(UnregisterBody).decode
OK = {"status": "ok"}
HEALTH_WAIT_S = 5.0
_INSTANCE = b'{"longest_matched":%d,"gpu":%d,"dp":{"%d":%d},"cpu":%d,"disk":%d}'  # `InstanceBody` of one rank
NAMES_MAX = 4_096  # instances whose names are kept as JSON
HEALTH_POLL_S = 0.05


# ---------------------------------------------------------------------- queries


class DynamoQueries:
    """Each query takes its fields and who asks, and returns the body of the answer. Raises ApiError."""

    def __init__(self, services: Services, index: MeasuredIndex) -> None:
        self._index = services.index
        self._measured = index
        self._tokens_max = services.limits.prompt_tokens_max

    def by_tokens(self, fields: QueryBody, caller: Caller) -> bytes:
        caller.require(fields.tenant, "routing_group")
        _scope_of(self._index, fields)
        if (count := count_tokens(fields.token_ids)) > self._tokens_max:
            raise too_long("token_ids", count, self._tokens_max)
        return encode_scores(self._measured.prefix_hits(_token_query(fields)).hits if count else ())

    def by_hashes(self, fields: HashQueryBody, caller: Caller) -> bytes:
        caller.require(fields.tenant, "routing_group")
        scope = _scope_of(self._index, fields)
        hashes = read_hashes("block_hashes", fields.block_hashes)
        if (count := len(hashes) * min(scope.spaces, default=1)) > self._tokens_max:
            raise too_long("block_hashes", count, self._tokens_max)
        query = PrefixQuery(fields.model_name, b"", fields.tenant, local_hashes=hashes)
        return encode_scores(self._measured.prefix_hits(query).hits if hashes else ())


def read_token_shape(content_type: str | None, before: bytes, after: bytes) -> Asked | None:
    """See `known_queries.ReadShape`."""
    fields = _read_around(QUERY_FORMAT, content_type, before, after)
    return None if fields is None else Asked(fields.tenant, fields.model_name, fields.lora_name, fields.cache_salt)


def read_hash_shape(content_type: str | None, before: bytes, after: bytes) -> Asked | None:
    fields = _read_around(HASH_QUERY_FORMAT, content_type, before, after)
    return None if fields is None else Asked(fields.tenant, fields.model_name)


def _read_around(as_json: Format[BodyT], content_type: str | None, before: bytes, after: bytes) -> BodyT | None:
    try:
        return choose_format(content_type, as_json).read_around(before, after)
    except ApiError:
        return None


def _token_query(fields: QueryBody) -> PrefixQuery:
    return PrefixQuery(
        fields.model_name,
        fields.token_ids,
        fields.tenant,
        lora_name=fields.lora_name or None,
        cache_salt=fields.cache_salt or None,
    )


def _scope_of(index: ContentIndex, fields: QueryBody | HashQueryBody) -> Scope:
    """Raises ApiError 404."""
    scope = index.scope(fields.tenant, fields.model_name)
    if scope is None:
        message = f"no publisher of model {fields.model_name!r} is registered for {fields.tenant!r}"
        raise ApiError(404, "unknown_model", message, "model_name")
    return scope


def encode_scores(hits: Sequence[PublisherHit]) -> bytes:
    """`scores_of` as JSON. If every instance has one rank, which is usual, piece by piece: hits of equal reach differ
    in nothing but their instance. Cost: 0.2 us a hit, otherwise 1 us."""
    scores, instances = [], []
    names = set()
    tiers, rank, score, instance = None, 0, b"", b""
    for hit in hits:
        if not hit.resident_tokens:
            continue
        if hit.tiers is not tiers or hit.dp_rank != rank:
            tiers, rank, longest = hit.tiers, hit.dp_rank, hit.resident_tokens
            reach = longest, tiers[GPU], rank, longest, tiers[CPU], max(tiers.values())
            score, instance = b'{"%d":%d}' % (rank, longest), _INSTANCE % reach
        name = _encode_name(hit.worker_id)
        names.add(name)
        scores.append(name + score)
        instances.append(name + instance)
    if len(names) < len(scores):
        return encode_json(scores_of(hits))
    return b'{"scores":{%b},"frequencies":[],"instances":{%b}}' % (b",".join(scores), b",".join(instances))


@lru_cache(maxsize=NAMES_MAX)
def _encode_name(worker_id: str) -> bytes:
    return encode_json(worker_id) + b":"


def scores_of(hits: Iterable[PublisherHit]) -> ScoresBody:
    """One entry per instance with the best of its ranks. Cost: less than 1 us a hit, encoded."""
    scores: dict[str, dict[int, int]] = {}
    instances: dict[str, InstanceBody] = {}
    for hit in hits:
        longest, tiers = hit.resident_tokens, hit.tiers
        if not longest:
            continue
        gpu, cpu, disk = tiers[GPU], tiers[CPU], max(tiers.values())
        known = instances.get(hit.worker_id)
        if known is None:
            ranks = scores[hit.worker_id] = {hit.dp_rank: longest}
            instances[hit.worker_id] = InstanceBody(longest, gpu, ranks, cpu, disk)
            continue
        known.dp[hit.dp_rank] = longest
        known.longest_matched = max(known.longest_matched, longest)
        known.gpu, known.cpu, known.disk = max(known.gpu, gpu), max(known.cpu, cpu), max(known.disk, disk)
    return ScoresBody(scores, [], instances)


# ---------------------------------------------------------------------- registration


class DynamoRegistry:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def register(self, body: bytes, content_type: str | None, caller: Caller) -> None:
        check_json(content_type)
        fields = decode("JSON", _read_register, body)
        caller.require(fields.tenant, "routing_group")
        registration = to_registration(self._services, fields)
        _check_block_size(self._services.index, registration)
        _, is_created = await register_for(caller, self._services.registry, registration, "instance_id")
        if not is_created:
            message = f"instance {registration.worker_id} rank {registration.dp_rank} is registered already"
            raise ApiError(409, "publisher_conflict", message, "instance_id")

    async def unregister(self, body: bytes, content_type: str | None, caller: Caller) -> None:
        check_json(content_type)
        fields = decode("JSON", _read_unregister, body)
        caller.require(fields.tenant, "routing_group")
        removed = 0
        for rank in _ranks(self._services.index, fields):
            removed += await self._services.registry.unregister(str(fields.instance_id), rank, caller.sees)
        if not removed:
            raise unknown_publisher(str(fields.instance_id), fields.dp_rank)


def health_router(life: Life) -> APIRouter:
    router = APIRouter()

    @router.get("/health", **HEALTH_OPENAPI)
    async def health() -> Response:
        await _recovered(life)
        return answer(OK)

    return router


async def _recovered(life: Life) -> None:
    """Wait a while: who asks here asks again at once, as that server opens its port only when it is ready. Raises
    ApiError 503."""
    deadline = time.monotonic() + HEALTH_WAIT_S
    while not life.is_recovered and not life.is_stopping and time.monotonic() < deadline:  # noqa: ASYNC110 - rare
        await asyncio.sleep(HEALTH_POLL_S)
    require_recovered(life)


def to_registration(services: Services, fields: RegisterBody) -> Registration:
    """Raises ApiError 400 for an endpoint, 422 for what we cannot follow."""
    if fields.instance_id > U64_MAX:
        raise out_of_range("instance_id")
    if fields.additional_salt:
        raise ApiError(422, "invalid_value", "additional_salt is not supported", "additional_salt")
    replay = fields.replay_endpoint
    return Registration(
        worker_id=str(fields.instance_id),
        dp_rank=fields.dp_rank or 0,
        model=fields.model_name,
        endpoint=checked_endpoint("endpoint", fields.endpoint, services.normalise_endpoint, 400),
        replay_endpoint=checked_endpoint("replay_endpoint", replay, services.normalise_endpoint, 400)
        if replay
        else None,
        tenant=fields.tenant,
        block_size=fields.block_size,
    )


def _check_block_size(index: ContentIndex, registration: Registration) -> None:
    """All instances of a model have one block size there. Raises ApiError 409."""
    scope = index.scope(registration.tenant, registration.model)
    for known in {publisher.registration.block_size for publisher in scope.publishers} if scope else ():
        if known not in (None, registration.block_size):
            message = f"model {registration.model!r} is registered with the block size {known}"
            raise ApiError(409, "publisher_conflict", message, "block_size")


def _ranks(index: ContentIndex, fields: UnregisterBody) -> list[int]:
    """The ranks of this instance that are registered for this model, or the one that is asked for."""
    scope = index.scope(fields.tenant, fields.model_name)
    keys = [publisher.registration.key for publisher in scope.publishers] if scope else []
    worker_id = str(fields.instance_id)
    return [key.dp_rank for key in keys if key.worker_id == worker_id and fields.dp_rank in (None, key.dp_rank)]
