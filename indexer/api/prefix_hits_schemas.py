"""What the document says of queries beyond one prompt of tokens: prompts by hashes, batches, details, models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from indexer.api.schemas import PREFIX_HITS_EXAMPLE, PREFIX_HITS_REQUEST, Count, PrefixHits, errors

BATCH_PROMPTS_MAX = 128


class PrefixHitsBatch(BaseModel):
    answers: list[PrefixHits] = Field(description="One for each prompt, in the order of the prompts.")


class ModelGroup(BaseModel):
    """A KV-cache group as some of the publishers have shown it."""

    group: int
    kind: str = Field(examples=["full_attention"])
    window: int | None
    sizes: list[int] = Field(description="Of its blocks, in tokens.")
    publishers: Count = Field(description="How many have shown it so.")


class ModelPublisher(BaseModel):
    worker_id: str
    dp_rank: int
    state: str
    coverage: str


class ModelPublishers(BaseModel):
    count: Count
    states: dict[str, Count] = Field(examples=[{"connected": 2}])
    coverages: dict[str, Count] = Field(examples=[{"complete": 1, "since": 1}])
    keys: list[ModelPublisher]


class ModelSummary(BaseModel):
    tenant: str
    model: str
    granules: list[int] = Field(description="Token steps of the chains in use: prompts given by hashes are hashed so.")
    block_sizes: list[int]
    groups: list[ModelGroup]
    adapters: list[str] = Field(description="Those that events have named since the service started.")
    adapters_complete: bool = Field(description="False: there were more than are kept.")
    publishers: ModelPublishers


class ModelList(BaseModel):
    models: list[ModelSummary]


_FIELDS: dict[str, Any] = PREFIX_HITS_REQUEST["properties"]
_OF_A_PROMPT = "token_ids", "local_hashes", "content_keys", "multimodal"
BATCH_REQUEST: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["prompts"],
    "properties": {
        **{name: schema for name, schema in _FIELDS.items() if name not in _OF_A_PROMPT},
        "prompts": {
            "type": "array",
            "minItems": 1,
            "maxItems": BATCH_PROMPTS_MAX,
            "items": {**PREFIX_HITS_REQUEST, "required": []},
            "description": "Each as in a single query; what it does not say is taken from the fields beside.",
        },
    },
}
_EXAMPLE = {
    "model": PREFIX_HITS_EXAMPLE["model"],
    "limit": 2,
    "prompts": [{"token_ids": list(range(1, 33))}, {"content_keys": ["ea06fc71a5ee6e88", "ad01835a37dd294c"]}],
}
BATCH_OPENAPI: dict[str, Any] = {
    "summary": "The same for several prompts",
    "description": "A fault in one prompt refuses the whole batch. All prompts together may be as long as one.",
    "tags": ["query"],
    "responses": {
        200: {
            "model": PrefixHitsBatch,
            "content": {"application/msgpack": {"schema": {"$ref": "#/components/schemas/PrefixHitsBatch"}}},
        },
        **errors(400, 413, 415, 422, 503),
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": BATCH_REQUEST, "example": _EXAMPLE},
                "application/msgpack": {"schema": BATCH_REQUEST},
            },
        }
    },
}
