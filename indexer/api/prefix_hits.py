"""`POST /v1/prefix-hits`: how much of this prompt does each engine still hold? And `:batch`, for several prompts.

The one route that routers call thousands of times a second. It reads the raw body with msgspec, as JSON or msgpack, and
answers in the same format; the bounds of every field are in the types, so that a fault is found while decoding.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from fastapi import APIRouter

from indexer.api.access import Caller
from indexer.api.errors import ApiError
from indexer.api.formats import (
    Format,
    HexKey,
    Name,
    TokenId,
    check_length,
    choose_format,
    json_format,
    msgpack_format,
    read_keys,
    too_long,
    unsplit,
)
from indexer.api.known_queries import Asked
from indexer.api.meters import MeasuredIndex
from indexer.api.ports import Services
from indexer.api.prefix_hits_schemas import BATCH_OPENAPI, BATCH_PROMPTS_MAX
from indexer.api.query_kernels import PREFIX_HITS_PATH
from indexer.api.query_route import QueryRoute, describe_query
from indexer.api.schemas import BLOCK_SIZE_MAX, MULTIMODAL_MAX, PREFIX_HITS_OPENAPI, WORKERS_MAX
from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import SUMMARY, Detail, MultimodalItem, PrefixAnswer, PrefixQuery
from indexer.index.publisher import DEFAULT_GRANULE

BATCH_PATH = f"{PREFIX_HITS_PATH}:batch"
IN_HASHES = "lora_name", "cache_salt", "multimodal"
SHARED = (
    "model",
    "tenant",
    "lora_name",
    "cache_salt",
    "workers",
    "granule",
    "min_hit_tokens",
    "limit",
    "detail",
    "expected",
)

TokensT = TypeVar("TokensT")
KeysT = TypeVar("KeysT")


class MultimodalBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    identifier: Name
    offset: TokenId
    length: TokenId


class _Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What may be said of one prompt, or of all of a batch. Null means the default."""

    tenant: Name | None = None
    lora_name: Name | None = None
    cache_salt: Name | None = None
    workers: Annotated[list[Name], msgspec.Meta(max_length=WORKERS_MAX)] | None = None
    granule: Annotated[int, msgspec.Meta(gt=0, le=BLOCK_SIZE_MAX)] | None = None
    min_hit_tokens: TokenId | None = None
    limit: Annotated[int, msgspec.Meta(gt=0, le=WORKERS_MAX)] | None = None
    detail: bool | Detail | None = None
    expected: bool | None = None


class _Prompt(_Options, Generic[TokensT, KeysT], kw_only=True):
    """One of the first three says what the prompt is."""

    token_ids: TokensT | None = None
    local_hashes: KeysT | None = None
    content_keys: KeysT | None = None
    multimodal: Annotated[list[MultimodalBody], msgspec.Meta(max_length=MULTIMODAL_MAX)] | None = None


class Query(_Prompt[TokensT, KeysT], kw_only=True):
    model: Name


class BatchPrompt(_Prompt[TokensT, KeysT], kw_only=True):
    model: Name | None = None


class Batch(_Options, Generic[TokensT, KeysT], kw_only=True):
    """Prompts take from here what they do not say themselves."""

    prompts: Annotated[list[BatchPrompt[TokensT, KeysT]], msgspec.Meta(min_length=1, max_length=BATCH_PROMPTS_MAX)]
    model: Name | None = None


class BatchAnswer(msgspec.Struct):
    answers: list[PrefixAnswer]


# in msgpack tokens may also be one `bin` of u32 little-endian integers, and hashes one of u64
JSON_FORMAT: Format[Query[Any, Any]] = json_format(Query[list[TokenId], list[HexKey]], "token_ids")
MSGPACK_FORMAT: Format[Query[Any, Any]] = msgpack_format(
    Query[list[TokenId] | bytes, list[HexKey] | bytes], "token_ids"
)
JSON_BATCH: Format[Batch[Any, Any]] = json_format(Batch[list[TokenId], list[HexKey]], "prompts", unsplit)
MSGPACK_BATCH: Format[Batch[Any, Any]] = msgpack_format(
    Batch[list[TokenId] | bytes, list[HexKey] | bytes], "prompts", unsplit
)


def prefix_hits_routes(services: Services, index: MeasuredIndex) -> list[QueryRoute]:
    prompt_tokens_max = services.limits.prompt_tokens_max

    def answer_one(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        chosen = choose_format(content_type, JSON_FORMAT, MSGPACK_FORMAT)
        fields = chosen.read(body)
        caller.require(fields.tenant or "default")
        query, _ = read_query(fields, fields.model, services.index, prompt_tokens_max)
        return chosen.content_type, chosen.encode(index.prefix_hits(query))

    def answer_batch(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        chosen = choose_format(content_type, JSON_BATCH, MSGPACK_BATCH)
        batch = chosen.read(body)
        for place, prompt in enumerate(batch.prompts):
            caller.require(prompt.tenant or batch.tenant or "default", f"prompts[{place}].tenant")
        queries = read_batch(batch, services.index, prompt_tokens_max)
        return chosen.content_type, chosen.encode(BatchAnswer([index.prefix_hits(query) for query in queries]))

    return [
        QueryRoute(PREFIX_HITS_PATH, answer_one, services.life),
        QueryRoute(BATCH_PATH, answer_batch, services.life),
    ]


def read_shape(content_type: str | None, before: bytes, after: bytes) -> Asked | None:
    """See `known_queries.ReadShape`."""
    try:
        fields = choose_format(content_type, JSON_FORMAT, MSGPACK_FORMAT).read_around(before, after)
    except ApiError:
        return None
    if fields is None or fields.multimodal or fields.workers is not None or _is_hashed(fields):
        return None
    if fields.granule is not None or fields.min_hit_tokens or fields.limit is not None:
        return None
    if _detail(fields.detail) is not SUMMARY:
        return None
    return Asked(fields.tenant or "default", fields.model, fields.lora_name, fields.cache_salt)


def prefix_hits_router() -> APIRouter:
    router = APIRouter()
    describe_query(router, PREFIX_HITS_PATH, PREFIX_HITS_OPENAPI)
    describe_query(router, BATCH_PATH, BATCH_OPENAPI)
    return router


# ---------------------------------------------------------------------- bodies -> queries


def read_batch(batch: Batch[Any, Any], index: ContentIndex, tokens_max: int) -> list[PrefixQuery]:
    """All prompts together may be as long as one. Raises ApiError 422: one bad prompt refuses all."""
    queries: list[PrefixQuery] = []
    tokens = 0
    shared = {name: value for name in SHARED if (value := getattr(batch, name)) is not None}
    if batch.workers is not None:
        shared["workers"] = frozenset(batch.workers)  # once, not for each prompt
    for place, prompt in enumerate(batch.prompts):
        for name, value in shared.items():
            if getattr(prompt, name) is None:
                setattr(prompt, name, value)
        try:
            query, count = read_query(prompt, _model_of(prompt), index, tokens_max)
        except ApiError as error:
            raise error.within(f"prompts[{place}]") from None
        tokens += count
        if tokens > tokens_max:
            raise too_long("prompts", tokens, tokens_max)
        queries.append(query)
    return queries


def _model_of(prompt: BatchPrompt[Any, Any]) -> str:
    if prompt.model is None:
        raise ApiError(422, "missing_field", "model is required, here or for all prompts", "model")
    return prompt.model


def read_query(fields: _Prompt[Any, Any], model: str, index: ContentIndex, tokens_max: int) -> tuple[PrefixQuery, int]:
    """The query, and how many tokens its prompt has. Raises ApiError 422."""
    tenant = fields.tenant or "default"
    token_ids, local_hashes, content_keys = fields.token_ids, None, None
    if token_ids is None or fields.local_hashes is not None or fields.content_keys is not None:
        token_ids = b""
        local_hashes, content_keys, count = _read_hashes(fields, index, tenant, model, tokens_max)
    elif fields.granule is not None:
        message = "granule: only local_hashes and content_keys are hashed by one"
        raise ApiError(422, "conflicting_fields", message, "granule")
    else:
        count = check_length(token_ids, tokens_max)
    query = PrefixQuery(
        model,
        token_ids,
        tenant,
        fields.lora_name,
        fields.cache_salt,
        items_of(fields.multimodal) if fields.multimodal else (),
        None if fields.workers is None else frozenset(fields.workers),
        local_hashes,
        SUMMARY if fields.detail is None else _detail(fields.detail),
        content_keys,
        fields.granule,
        fields.min_hit_tokens or 0,
        fields.limit,
        bool(fields.expected),
    )
    return query, count


def _is_hashed(fields: _Prompt[Any, Any]) -> bool:
    return fields.local_hashes is not None or fields.content_keys is not None


def _read_hashes(
    fields: _Prompt[Any, Any], index: ContentIndex, tenant: str, model: str, tokens_max: int
) -> tuple[array[int] | None, array[int] | None, int]:
    """Local hashes, or content keys, and how many tokens they stand for. Raises ApiError 422."""
    given = [name for name in ("token_ids", "local_hashes", "content_keys") if getattr(fields, name) is not None]
    if not given:
        message = "token_ids, local_hashes or content_keys is required"
        raise ApiError(422, "missing_field", message, "token_ids")
    if len(given) > 1:
        message = f"{given[1]}: give one of token_ids, local_hashes and content_keys, not {given[0]} as well"
        raise ApiError(422, "conflicting_fields", message, given[1])
    (name,) = given
    granule = fields.granule or least_granule(index, tenant, model)
    keys = read_hashes(fields, name, granule, tokens_max)
    return (keys, None, len(keys) * granule) if name == "local_hashes" else (None, keys, len(keys) * granule)


def read_hashes(fields: Any, name: str, granule: int, tokens_max: int) -> array[int]:
    """A field that holds the hashes of granules; what is in them already must not be said. Raises ApiError 422."""
    for other in IN_HASHES:
        if getattr(fields, other):
            message = f"{other}: is in {name} already, so it must not be said"
            raise ApiError(422, "conflicting_fields", message, other)
    keys = read_keys(name, getattr(fields, name))
    if not keys:
        raise ApiError(422, "empty_prompt", f"{name} must hold at least one hash", name)
    if (count := len(keys) * granule) > tokens_max:
        raise too_long(name, count, tokens_max)
    return keys


def least_granule(index: ContentIndex, tenant: str, model: str) -> int:
    """Of those in use; as long as none is, what events would have to change."""
    scope = index.scope(tenant, model)
    return min(scope.spaces, default=DEFAULT_GRANULE) if scope is not None else DEFAULT_GRANULE


def _detail(detail: bool | Detail | None) -> Detail:
    """True and false are what older clients say."""
    if isinstance(detail, Detail):
        return detail
    return Detail.INTERVALS if detail else SUMMARY


def items_of(multimodal: list[MultimodalBody]) -> tuple[MultimodalItem, ...]:
    return tuple(MultimodalItem(m.identifier, m.offset, m.length) for m in multimodal)
