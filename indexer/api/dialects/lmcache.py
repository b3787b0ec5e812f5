"""`POST /lookup` of LMCache's controller: which instance has how much of these tokens, and where.

A lookup there names no model: the only one of the tenant is meant. What instances hold is counted in whole blocks of
the engines, not in LMCache's chunks of 256 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field

from indexer.api.access import Caller
from indexer.api.dialects.dynamo_bodies import OptionalName
from indexer.api.dialects.openapi import request_of
from indexer.api.errors import ApiError
from indexer.api.formats import Format, TokenId, choose_format, count_tokens, json_format, too_long
from indexer.api.meters import MeasuredIndex
from indexer.api.ports import Services
from indexer.api.query_route import QueryRoute, describe_query
from indexer.api.schemas import errors
from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import PrefixQuery, PublisherHit

LOOKUP_PATH = "/lookup"
MODELS_NAMED_MAX = 5


class LookupBody(msgspec.Struct, kw_only=True):
    """Only `tokens` is known there. `tenant` empty: the default; `model` empty: the only one of the tenant."""

    tokens: list[TokenId]
    model: OptionalName = None
    tenant: OptionalName = None


LOOKUP_FORMAT: Format[LookupBody] = json_format(LookupBody, "tokens")


def lookup_route(services: Services, index: MeasuredIndex) -> QueryRoute:
    tokens_max = services.limits.prompt_tokens_max

    def lookup(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        chosen = choose_format(content_type, LOOKUP_FORMAT)
        fields = chosen.read(body)
        tenant = fields.tenant or "default"
        caller.require(tenant)
        if (count := count_tokens(fields.tokens)) > tokens_max:
            raise too_long("tokens", count, tokens_max)
        model = fields.model or the_only_model(services.index, tenant)
        hits = index.prefix_hits(PrefixQuery(model, fields.tokens, tenant)).hits if count else ()
        answer = {"event_id": f"Lookup{uuid4()}", "layout_info": layout_of(hits)}
        return chosen.content_type, chosen.encode(answer)

    return QueryRoute(LOOKUP_PATH, lookup, services.life)


def the_only_model(index: ContentIndex, tenant: str) -> str:
    """Raises ApiError: 404 if the tenant has none, 422 if it has several."""
    models = index.models(tenant)
    if not models:
        raise ApiError(404, "unknown_model", f"no publisher is registered for tenant {tenant!r}", "model")
    if len(models) > 1:
        named = ", ".join(map(repr, models[:MODELS_NAMED_MAX])) + (", ..." if len(models) > MODELS_NAMED_MAX else "")
        raise ApiError(422, "ambiguous_model", f"tenant {tenant!r} has several models, give one: {named}", "model")
    return models[0]


def layout_of(hits: Iterable[PublisherHit]) -> dict[str, tuple[str, int]]:
    """Instance -> the slowest tier that its longest match needs, and how long that is; the best of its ranks."""
    layout: dict[str, tuple[str, int]] = {}
    for hit in hits:
        longest = hit.resident_tokens
        if longest > layout.get(hit.worker_id, ("", 0))[1]:
            layout[hit.worker_id] = next(tier for tier, reach in hit.tiers.items() if reach == longest), longest
    return layout


class Lookup(BaseModel):
    event_id: str
    layout_info: dict[str, list[str | int]] = Field(
        description="Instance -> [tier, tokens]: the slowest tier that its longest match needs, and how long that is.",
        examples=[{"http://10.0.0.7:8000": ["CPU", 512]}],
    )


LOOKUP_OPENAPI: dict[str, Any] = {
    "summary": "Which instance has how much of these tokens? (LMCache)",
    "tags": ["dialects"],
    "responses": {200: {"model": Lookup}, **errors(400, 403, 404, 413, 415, 422, 503)},
    "openapi_extra": request_of(("lookup", LookupBody, {"tokens": list(range(1, 33))})),
}


def lookup_router() -> APIRouter:
    router = APIRouter()
    describe_query(router, LOOKUP_PATH, LOOKUP_OPENAPI)
    return router
