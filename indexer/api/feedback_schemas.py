"""What routers tell, and what is answered: the source of the OpenAPI document for feedback.py."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from indexer.api.schemas import DP_RANK, PREFIX_HITS_REQUEST, Count, HexKey, errors, or_null

_PROMPT: dict[str, Any] = PREFIX_HITS_REQUEST["properties"]
_PROMPT_FIELDS = ("token_ids", "local_hashes", "tenant", "lora_name", "cache_salt", "multimodal")
_NAME = _PROMPT["model"]
_RANK = or_null(DP_RANK, 0)
_HEX_KEY = {"type": "string", "pattern": "^[0-9a-fA-F]{16}$"}
_TOKENS = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}


class Routed(BaseModel):
    hit_tokens: Count = Field(description="What the worker is predicted to skip, as real events prove: to hand back.")
    expected_blocks: Count = Field(description="Blocks of the prompt that are expected of the worker now.")
    expires_in_s: float = Field(description="For so long at most; 0 = none is.")
    content_key: HexKey | None = Field(description="Of the prompt's last whole block; null = it has none.")


class Observed(BaseModel):
    error_tokens: int = Field(description="Predicted less cached: above 0, the prediction was too high.")
    alarm: bool = Field(description="Whether too many of the publisher's last predictions were wrong.")


ROUTED_REQUEST: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["model", "worker_id"],
    "oneOf": [{"required": ["token_ids"]}, {"required": ["local_hashes"]}],
    "properties": {
        "model": _NAME,
        "worker_id": _NAME,
        "dp_rank": _RANK,
        **{name: _PROMPT[name] for name in _PROMPT_FIELDS},
        "ttl_s": {
            "anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 60}, {"type": "null"}],
            "default": None,
            "description": "Seconds for which the blocks are expected; null = the setting `expected_ttl_s`.",
        },
    },
}
OBSERVED_REQUEST: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["worker_id", "predicted_tokens", "cached_tokens"],
    "properties": {
        "worker_id": _NAME,
        "dp_rank": _RANK,
        "predicted_tokens": {**_TOKENS, "description": "The `hit_tokens` that the router was answered for the prompt."},
        "cached_tokens": {**_TOKENS, "description": "What the engine said it had cached of it."},
        "content_key": {
            "anyOf": [_HEX_KEY, {"type": "null"}],
            "default": None,
            "description": "Of the prefix; shown with the publisher's last wrong prediction.",
        },
    },
}
_WORKER = "http://10.0.0.7:8000"
ROUTED_EXAMPLE = {"model": "meta-llama/Llama-3.1-8B-Instruct", "worker_id": _WORKER, "token_ids": list(range(1, 33))}
OBSERVED_EXAMPLE = {"worker_id": _WORKER, "predicted_tokens": 512, "cached_tokens": 496}


def _openapi(summary: str, answer: type[BaseModel], request: dict[str, Any], example: object) -> dict[str, Any]:
    content = {"application/json": {"schema": request, "example": example}}
    return {
        "summary": summary,
        "tags": ["feedback"],
        "responses": {200: {"model": answer}, **errors(400, 403, 404, 413, 415, 422, 503)},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


ROUTED_OPENAPI = _openapi("This prompt is sent to that worker", Routed, ROUTED_REQUEST, ROUTED_EXAMPLE)
ROUTED_OPENAPI["openapi_extra"]["requestBody"]["content"]["application/msgpack"] = {"schema": ROUTED_REQUEST}
OBSERVED_OPENAPI = _openapi("So much of a prompt had that worker cached", Observed, OBSERVED_REQUEST, OBSERVED_EXAMPLE)
