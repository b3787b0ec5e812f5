"""What is answered about a fleet: the source of the OpenAPI document for fleet.py."""

from __future__ import annotations

from pydantic import BaseModel, Field

from indexer.api.schemas import Count, HexKey


class PrefixHolder(BaseModel):
    worker_id: str
    dp_rank: int
    tiers: list[str]


class HotPrefix(BaseModel):
    content_key: HexKey = Field(description="Of the prefix; `/v1/blocks/{content_key}` says more.")
    tokens: Count = Field(description="Length of the prefix.")
    queries: float = Field(description="How many asked for it, an estimate: the older, the less they count.")
    share: float = Field(ge=0, le=1, description="Of all queries of the model.")
    copies: Count = Field(description="Publishers that hold the block at its end.")
    holders: list[PrefixHolder] = Field(description="The first 100 of them.")


class HotPrefixes(BaseModel):
    tenant: str
    model: str
    samples: Count = Field(description="Queries that the estimates rest on.")
    queries: float = Field(description="How many these stand for now.")
    prefixes: list[HotPrefix] = Field(description="Most queries first; each where queries end or part.")


class DrainImpact(BaseModel):
    """Blocks count once, whatever groups and media they are in. Those of queries are estimates from a sample."""

    tenant: str
    model: str
    dp_ranks: list[int]
    held_blocks: Count
    held_tokens: Count
    only_here_blocks: Count = Field(description="Those that no other worker, and no pool of others, holds.")
    only_here_tokens: Count
    queried_tokens: float = Field(ge=0, description="Tokens that recent queries found held by anybody.")
    queried_only_here_tokens: float = Field(ge=0, description="Those of them that only this worker holds.")
    queried_share: float = Field(ge=0, le=1)


class DrainImpacts(BaseModel):
    worker_id: str
    models: list[DrainImpact]
