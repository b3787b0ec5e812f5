"""`POST /v1/prefix-hits`: how much of this prompt does each engine still hold?

The one route that routers call thousands of times a second. It reads the raw body with msgspec, as JSON or msgpack, and
answers in the same format; the bounds of every field are in the types, so that a fault is found while decoding.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter

from indexer.api.access import Caller
from indexer.api.errors import ApiError
from indexer.api.formats import (
    Format,
    Name,
    TokenId,
    TokenIds,
    check_length,
    choose_format,
    json_format,
    msgpack_format,
)
from indexer.api.known_queries import Asked
from indexer.api.meters import MeasuredIndex
from indexer.api.ports import Services
from indexer.api.query_kernels import PREFIX_HITS_PATH
from indexer.api.query_route import QueryRoute, describe_query
from indexer.api.schemas import MULTIMODAL_MAX, PREFIX_HITS_OPENAPI, WORKERS_MAX
from indexer.index.prefix_hits import MultimodalItem, PrefixQuery


class MultimodalBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    identifier: Name
    offset: TokenId
    length: TokenId


class MsgpackQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """In msgpack the tokens may also be one `bin` of u32 little-endian integers. Null means the default."""

    model: Name
    token_ids: TokenIds
    tenant: Name | None = None
    lora_name: Name | None = None
    cache_salt: Name | None = None
    multimodal: Annotated[list[MultimodalBody], msgspec.Meta(max_length=MULTIMODAL_MAX)] | None = None
    workers: Annotated[list[Name], msgspec.Meta(max_length=WORKERS_MAX)] | None = None
    detail: bool | None = None


class JsonQuery(MsgpackQuery, kw_only=True):
    token_ids: list[TokenId]


JSON_FORMAT: Format[MsgpackQuery] = json_format(JsonQuery, "token_ids")
MSGPACK_FORMAT: Format[MsgpackQuery] = msgpack_format(MsgpackQuery, "token_ids")


def prefix_hits_route(services: Services, index: MeasuredIndex) -> QueryRoute:
    prompt_tokens_max = services.limits.prompt_tokens_max

    def answer(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        chosen = choose_format(content_type, JSON_FORMAT, MSGPACK_FORMAT)
        fields = chosen.read(body)
        caller.require(fields.tenant or "default")
        check_length(fields.token_ids, prompt_tokens_max)
        return chosen.content_type, chosen.encode(index.prefix_hits(to_query(fields)))

    return QueryRoute(PREFIX_HITS_PATH, answer, services.life)


def read_shape(content_type: str | None, before: bytes, after: bytes) -> Asked | None:
    """See `known_queries.ReadShape`."""
    try:
        fields = choose_format(content_type, JSON_FORMAT, MSGPACK_FORMAT).read_around(before, after)
    except ApiError:
        return None
    if fields is None or fields.multimodal or fields.workers is not None or fields.detail:
        return None
    return Asked(fields.tenant or "default", fields.model, fields.lora_name, fields.cache_salt)


def prefix_hits_router() -> APIRouter:
    router = APIRouter()
    describe_query(router, PREFIX_HITS_PATH, PREFIX_HITS_OPENAPI)
    return router


def to_query(fields: MsgpackQuery) -> PrefixQuery:
    return PrefixQuery(
        model=fields.model,
        token_ids=fields.token_ids,
        tenant=fields.tenant or "default",
        lora_name=fields.lora_name,
        cache_salt=fields.cache_salt,
        multimodal=items_of(fields.multimodal) if fields.multimodal else (),
        workers=None if fields.workers is None else frozenset(fields.workers),
        detail=bool(fields.detail),
    )


def items_of(multimodal: list[MultimodalBody]) -> tuple[MultimodalItem, ...]:
    return tuple(MultimodalItem(m.identifier, m.offset, m.length) for m in multimodal)
