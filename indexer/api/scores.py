"""`POST /v1/scores`: one number per worker, as llm-d's scorer answers, for routers that want no more."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field

from indexer.api.access import Caller
from indexer.api.dialects.openapi import in_msgpack, request_of
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
from indexer.api.meters import MeasuredIndex
from indexer.api.ports import Services
from indexer.api.query_route import QueryRoute, describe_query
from indexer.api.schemas import WORKERS_MAX, QueryWarning, errors
from indexer.index.prefix_query import PrefixQuery
from indexer.index.scores import Score, scores

SCORES_PATH = "/v1/scores"
TIERS_MAX = 64

Weight = Annotated[float, msgspec.Meta(ge=0, le=1_000)]
Weights = Annotated[dict[Name, Weight], msgspec.Meta(max_length=TIERS_MAX)]


class ScoresBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`pods`: score these workers only. `tier_weights`: by tier, of any case, beside the usual ones or instead of them.
    In msgpack the tokens may also be one `bin` of u32 little-endian integers."""

    model: Name
    token_ids: TokenIds
    tenant: Name | None = None
    lora_name: Name | None = None
    cache_salt: Name | None = None
    pods: Annotated[list[Name], msgspec.Meta(max_length=WORKERS_MAX)] | None = None
    tier_weights: Weights | None = None


class JsonScoresBody(ScoresBody, kw_only=True):
    token_ids: list[TokenId]


JSON_FORMAT: Format[ScoresBody] = json_format(JsonScoresBody, "token_ids")
MSGPACK_FORMAT: Format[ScoresBody] = msgpack_format(ScoresBody, "token_ids")


def scores_route(services: Services, index: MeasuredIndex) -> QueryRoute:
    def answer(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        chosen = choose_format(content_type, JSON_FORMAT, MSGPACK_FORMAT)
        fields = chosen.read(body)
        caller.require(fields.tenant or "default")
        check_length(fields.token_ids, services.limits.prompt_tokens_max)
        query = PrefixQuery(
            fields.model,
            fields.token_ids,
            fields.tenant or "default",
            lora_name=fields.lora_name,
            cache_salt=fields.cache_salt,
            workers=None if fields.pods is None else frozenset(fields.pods),
        )
        weights = {tier.upper(): weight for tier, weight in (fields.tier_weights or {}).items()}
        found = scores(services.index, index.prefix_hits(query), query, weights)
        of_pods = {"block_tokens": found.block_tokens, "scores": best_of_ranks(found.scores)}
        return chosen.content_type, chosen.encode({**of_pods, "warnings": found.warnings})

    return QueryRoute(SCORES_PATH, answer, services.life)


def best_of_ranks(found: list[Score]) -> dict[str, float]:
    """Best first."""
    best: dict[str, float] = {}
    for score in found:
        best.setdefault(score.worker_id, score.score)
    return best


class PodScores(BaseModel):
    block_tokens: int = Field(description="Tokens of the blocks that are counted: the finest granule of the model.")
    scores: dict[str, float] = Field(
        description="Worker -> the sum of its blocks' weights, of its best rank; best first, those with 0 are absent.",
        examples=[{"10.0.0.7:8000": 12.0, "10.0.0.8:8000": 4.6}],
    )
    warnings: list[QueryWarning]


SCORES_OPENAPI: dict[str, Any] = {
    "summary": "One number per worker: the blocks of this prompt that it holds, by the tier that they are on",
    "tags": ["query"],
    "responses": {200: {"model": PodScores, "content": in_msgpack(PodScores)}, **errors(400, 403, 413, 415, 422, 503)},
    "openapi_extra": request_of(
        (
            "scores",
            JsonScoresBody,
            {
                "model": "meta-llama/Llama-3.1-8B-Instruct",
                "token_ids": list(range(1, 33)),
                "pods": ["10.0.0.7:8000", "10.0.0.8:8000"],
                "tier_weights": {"GPU": 1.0, "CPU": 0.8},
            },
        ),
        msgpack=True,
    ),
}


def scores_router() -> APIRouter:
    router = APIRouter()
    describe_query(router, SCORES_PATH, SCORES_OPENAPI)
    return router
