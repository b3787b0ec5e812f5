"""What `POST /v1/explain` and `GET /v1/journal` read and answer, for the OpenAPI document; see schemas.py."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from indexer.api.schemas import DP_RANK, PREFIX_HITS_EXAMPLE, PREFIX_HITS_REQUEST, Count, HexKey, Span, errors, or_null

Rule: TypeAlias = Literal[
    "last_token",
    "whole_blocks",
    "missing_block",
    "partial_entry",
    "eagle_drop",
    "alignment",
    "window",
    "mamba_state",
    "chunked_local",
    "connector_loads",
    "connector_unsure",
    "pools",
]
Kind: TypeAlias = Literal[
    "stored",
    "removed",
    "cleared",
    "cleared_by_operator",
    "restart",
    "applied_again",
    "gap",
    "unreadable",
    "unverified_dropped",
    "expired",
    "evicted",
    "recovered",
]
State: TypeAlias = Literal["held", "remote", "unverified", "missing"]
Absent: TypeAlias = Literal["other_tenant", "other_model", "pool", "not_credited", "nothing_announced"]


class LastEvent(BaseModel):
    kind: Kind | Literal["never_seen", "not_in_journal"]
    sequence_number: int | None
    at: float | None = Field(description="When it was applied, in seconds since 1970.")
    medium: str | None


class BlockRange(BaseModel):
    """Blocks in a row, from token `start` to before `end`, of which the same holds."""

    start: Count
    end: Count
    state: State
    tiers: list[str] = Field(description="Where they lie, fastest first.")
    last_event: LastEvent | None = Field(description="The last thing that happened to them; null if they are held.")


class GroupBlocks(BaseModel):
    """What is held of the prompt in one KV-cache group of the engine."""

    group: int
    kind: str = Field(examples=["full_attention"])
    block_tokens: int
    window: int | None
    chunk_tokens: int | None
    drops: bool = Field(description="Whether it drops the last block of a hit (EAGLE).")
    ranges: list[BlockRange] = Field(description="All whole blocks of the prompt, at most 1,000 ranges.")
    ranges_left_out: Count


class RuleStep(BaseModel):
    """By this rule a candidate of `before` tokens became one of `after` tokens."""

    rule: Rule
    groups: list[int] = Field(description="The groups that follow it; none = all.")
    before: int
    after: int


class Miss(BaseModel):
    start: Count
    group: int
    state: State
    content_key: HexKey
    last_event: LastEvent | None


class JournalReach(BaseModel):
    is_whole: bool = Field(description="Whether it has all that ever happened, without a hole.")
    begins_at_number: int | None
    begins_at: float | None


class PublisherExplanation(BaseModel):
    worker_id: str
    dp_rank: int
    model: str = Field(description="That it is registered with.")
    tenant: str
    absent: Absent | None = Field(description="Why it is in no answer to this prompt, whatever it holds.")
    hit_tokens: int = Field(description="As POST /v1/prefix-hits answers; 0 if it has no hit.")
    resident_tokens: int
    tiers: dict[str, int]
    limited_by: RuleStep | None = Field(description="The step that took most.")
    steps: list[RuleStep] = Field(description="From the prompt's length to the hit.")
    first_miss: Miss | None = Field(description="Where the prefix ends that full attention needs; null = nowhere.")
    granule: int | None
    alignment: int | None = Field(description="Hits are multiples of it.")
    groups: list[GroupBlocks]
    spans: list[Span] = Field(description="Where the prefix lies, with what pools have.")
    pools: list[str]
    coverage: str
    coverage_reason: str
    coverage_at: float | None
    sequence_number: int | None
    orphans: Count = Field(description="Blocks whose content is unknown, as their parent is; never a hit.")
    unplaced: Count = Field(description="Blocks at an unknown position.")
    unverified: Count
    assumptions: list[str]
    journal: JournalReach


class Parting(BaseModel):
    """From token `start` on this one of two publishers holds what the other has not."""

    start: Count
    worker_id: str
    dp_rank: int


class Explanation(BaseModel):
    prompt_tokens: int
    publishers: list[PublisherExplanation] = Field(min_length=1, max_length=2)
    parting: Parting | None = Field(description="Null if there is one publisher, or both hold the same of the prompt.")


class JournalEntry(BaseModel):
    """One event, or what came by none. Of all that is held: without hashes."""

    kind: Kind
    sequence_number: int | None = Field(description="Its batch; of what came by none, the last batch before.")
    at: float | None = Field(description="When it was applied, in seconds since 1970.")
    medium: str | None = Field(description="Null = any.")
    group: int | None
    owner: str | None
    block_tokens: int | None
    hashes: list[str] = Field(description="The engine's, hexadecimal.", examples=[["00000000000000ab"]])
    content_keys: list[HexKey | None] = Field(description="What each hash means; null = not known.")
    gap_first: int | None = Field(description="The first missing number.")
    gap_last: int | None


class Truncation(BaseModel):
    """The last entry that is gone."""

    sequence_number: int | None
    at: float | None


class JournalPage(BaseModel):
    worker_id: str
    dp_rank: int
    truncated_before: Truncation | None = Field(
        description="Whether entries between `after`, or the beginning, and the first of these are gone."
    )
    entries: list[JournalEntry]
    next: str = Field(examples=["5f3a09c1-7-120"], description="What to give as `after` to read on.")
    is_last: bool = Field(description="Whether there is nothing more by now.")


_PROMPT = {
    name: PREFIX_HITS_REQUEST["properties"][name]
    for name in ("model", "token_ids", "tenant", "lora_name", "cache_salt", "multimodal")
}
_WORKER_ID = PREFIX_HITS_REQUEST["properties"]["model"]
_REQUEST: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["model", "token_ids", "worker_id"],
    "properties": {
        **_PROMPT,
        "worker_id": _WORKER_ID,
        "dp_rank": or_null(DP_RANK, 0),
        "compare_with": {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["worker_id"],
                    "properties": {"worker_id": _WORKER_ID, "dp_rank": {**DP_RANK, "default": 0}},
                },
                {"type": "null"},
            ],
            "default": None,
            "description": "A second publisher, to see where the two part.",
        },
        "as_of": {
            "anyOf": [{"type": "number"}, {"type": "string", "format": "date-time"}, {"type": "null"}],
            "default": None,
            "description": "What was known at that time, in seconds since 1970 or by ISO 8601: with `journal_rows_s`.",
        },
    },
}
EXPLAIN_OPENAPI: dict[str, Any] = {
    "summary": "Why does this engine hold so much of this prompt, and no more?",
    "tags": ["query"],
    "responses": {
        200: {
            "model": Explanation,
            "content": {"application/msgpack": {"schema": {"$ref": "#/components/schemas/Explanation"}}},
        },
        **errors(400, 403, 404, 413, 415, 422, 503),
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _REQUEST,
                    "example": {**PREFIX_HITS_EXAMPLE, "worker_id": "http://10.0.0.7:8000"},
                },
                "application/msgpack": {"schema": _REQUEST},
            },
        }
    },
}
