"""What the routes read and answer, with limits and examples: the source of the OpenAPI document.

Requests of the registration route are validated by `RegistrationBody`. Answers are built as plain values and encoded by
msgspec; their models here describe them, and a test holds every answer against its model.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from indexer.registration import POOL_OPTION

Engine: TypeAlias = Literal["auto", "vllm", "sglang", "trtllm", "lmcache", "mooncake", "rfc1527"]
SERVES_MAX = 10_000
OPTIONS_BYTES_MAX = 2_048
NAME_LENGTH_MAX = 1_024
DP_RANK_MAX = 65_535
BLOCK_SIZE_MAX = 1_048_576
MULTIMODAL_MAX = 10_000
WORKERS_MAX = 100_000
TOKEN_ID_MAX = 2**63 - 1
TIER_EXAMPLE = {"GPU": 512, "CPU": 1024}


def _no_control_characters(text: str) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ValueError("must not contain control characters")
    return text


Text = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_no_control_characters)]
HexKey = Annotated[str, Field(pattern="^[0-9a-f]{16}$", examples=["ad00a3dbbbe5f2d4"])]
Count = Annotated[int, Field(ge=0)]
GroupIndex = Annotated[int, Field(ge=0, lt=1024)]


class NoRemovals(BaseModel):
    """For sources that never say what they remove. Give one bound at least."""

    model_config = ConfigDict(strict=True, extra="forbid")

    expire_after_s: float | None = Field(
        None, gt=0, le=315_360_000, description="A block counts for so long after its last store."
    )
    blocks_max: int | None = Field(None, gt=0, description="Only so many blocks count, those that were stored last.")

    @model_validator(mode="after")
    def _is_bounded(self) -> NoRemovals:
        if self.expire_after_s is None and self.blocks_max is None:
            raise ValueError("expire_after_s or blocks_max is required")
        return self


class EngineHash(BaseModel):
    """How a vLLM engine hashes blocks, so that hashes that no event explains can be found in prompts."""

    model_config = ConfigDict(strict=True, extra="forbid")

    algorithm: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = Field(
        description="Its --prefix-caching-hash-algo."
    )
    seed: str | None = Field(
        None,
        max_length=256,
        validate_default=True,
        description="Its PYTHONHASHSEED; null = none is set, for sha256 and sha256_cbor of vLLM 0.29 and later only.",
    )

    @field_validator("seed")
    @classmethod
    def _needs_seed(cls, seed: str | None, info: ValidationInfo) -> str | None:
        if seed is None and str(info.data.get("algorithm")).startswith("xxhash"):
            raise ValueError("is required: without one, engines take another random one at each start")
        return seed


class Options(BaseModel):
    """What no event says of an engine. Options of other names are kept and shown."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    eagle: bool | None = Field(
        None,
        description="Whether it drops the last block of every hit, as vLLM with EAGLE or MTP does where its hashes do"
        " not look ahead (before 0.33, or with a KV connector).",
    )
    eagle_groups: list[GroupIndex] = Field(
        default_factory=list,
        max_length=1024,
        validate_default=True,
        description="The KV-cache groups with draft layers, if only some have any: only they drop a block.",
    )
    attention_chunk_size: dict[Annotated[str, Field(pattern="^[0-9]{1,4}$")], Annotated[int, Field(gt=0)]] = Field(
        default_factory=dict, description="Tokens per chunk of groups with chunked local attention, by group."
    )
    blocks_per_chunk: int = Field(
        1, gt=0, le=1_024, description="Blocks per chunk of an offloading connector whose events do not say it."
    )
    clear_scope: Literal["device", "all"] | None = Field(
        None,
        description="What a clear that names no medium empties; null = device for engines that have shown an offloading"
        " connector, all for others.",
    )
    counting: Literal["count", "set"] = Field(
        "count", description="set = a source that repeats itself: a block stored twice is gone after one removal."
    )
    no_removals: NoRemovals | None = None
    lora_aliases: dict[Text, Text] = Field(
        default_factory=dict, description="The engine's name of an adapter: the name that prompts have for it."
    )
    engine_hash: EngineHash | None = None

    @field_validator("eagle_groups")
    @classmethod
    def _fit_eagle(cls, groups: list[int], info: ValidationInfo) -> list[int]:
        if groups and info.data.get("eagle") is False:
            raise ValueError("contradicts eagle = false")
        return groups


class RegistrationBody(BaseModel):
    """One engine's event stream. Fields that are null take their default."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "worker_id": "http://10.0.0.7:8000",
                    "dp_rank": 0,
                    "model": "meta-llama/Llama-3.1-8B-Instruct",
                    "endpoint": "tcp://10.0.0.7:5557",
                    "replay_endpoint": "tcp://10.0.0.7:5558",
                    "engine": "vllm",
                }
            ]
        },
    )

    worker_id: Text = Field(description="The engine as the router knows it, usually its URL. Opaque.")
    dp_rank: int = Field(0, ge=0, le=DP_RANK_MAX, description="Data-parallel rank; each rank has its own stream.")
    model: Text = Field(description="Nothing matches across models.")
    endpoint: Text = Field(description="Where the engine publishes, as tcp://host:port or ipc:///path.")
    replay_endpoint: Text | None = Field(None, description="Where the engine answers replay requests, if it does.")
    tenant: Text = Field("default", description="Nothing matches across tenants.")
    engine: Engine = Field(
        "auto",
        description="What publishes; auto = its events tell (docs/engines.md). Every dialect of the wire is read,"
        " whatever is said here; it decides what a clear empties, and which events tell content.",
    )
    block_size: int | None = Field(
        None,
        gt=0,
        le=BLOCK_SIZE_MAX,
        description="Tokens per block, if it is to be fixed; null = learned from the events.",
    )
    kind: Literal["engine", "pool"] = Field(
        "engine", description="A pool owns blocks for the workers that it serves, and is no routing target."
    )
    serves: list[Text] | None = Field(
        None, max_length=SERVES_MAX, description="The worker_ids that a pool serves; null = all of the model."
    )
    options: Options = Field(
        default_factory=Options,
        description="What no event says.",
        examples=[{"eagle": True, "blocks_per_chunk": 4}],
    )

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, body: Any) -> Any:
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if value is not None}
        return body

    @field_validator("options", mode="before")
    @classmethod
    def _can_be_kept(cls, options: object) -> object:
        text = json.dumps(options, ensure_ascii=False, allow_nan=False)
        if len(text.encode(errors="replace")) > OPTIONS_BYTES_MAX:
            raise ValueError(f"must not be longer than {OPTIONS_BYTES_MAX} bytes")
        if "\\u0000" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("must hold neither NUL characters nor halves of surrogate pairs")
        if isinstance(options, dict) and POOL_OPTION in options:
            raise ValueError(f"must not have {POOL_OPTION!r}: say kind and serves")
        return options


class ErrorDetail(BaseModel):
    code: str = Field(
        examples=["invalid_value"], description="Stable (docs/api.md lists them); branch on it, not on the message."
    )
    message: str
    field: str | None = Field(examples=["token_ids[3]"])


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class Group(BaseModel):
    """What has been learned of one KV-cache group of the engine."""

    group: int
    kind: str = Field(examples=["full_attention"])
    block_tokens: int | None
    window: int | None
    sizes: list[int]


class Counts(BaseModel):
    """Residencies and what could not be placed, and everything that went wrong, since the service started."""

    residencies: Count
    by_medium: dict[str, Count]
    orphans: Count
    ghosts: Count
    unplaced: Count
    unverified: Count = Field(description="From before a gap that was not repaired: not credited until proven.")
    gaps: Count
    missing_batches: Count
    batches_applied: Count
    bad_events: dict[str, Count]
    index: dict[str, Count] = Field(description="What became of events, by name.")
    stream: dict[str, Count] = Field(description="What the follower did, by name.")


class Replay(BaseModel):
    """How a publisher's replay endpoint does. Times in seconds since 1970."""

    state: str = Field(
        examples=["idle"],
        description="idle, waiting_for_turn, running, cooling_down (it failed) or distrusted (foreign)",
    )
    asked_from: int | None = Field(description="First number of the last request.")
    brought: Count = Field(description="Batches that the last replay brought.")
    last_end: str | None = Field(examples=["marker"], description="Why it was over; docs/operations.md lists them.")
    last_end_at: float | None
    next_try_at: float | None = Field(description="When a paused endpoint may be asked again.")


class PredictionCounts(BaseModel):
    """Observations by what the prediction was."""

    too_low: Count
    exact: Count
    too_high: Count


class WrongPrediction(BaseModel):
    predicted_tokens: Count
    cached_tokens: Count
    content_key: HexKey | None
    at: float


class PublisherPredictions(BaseModel):
    """What routers were answered, beside what the engine then reported (`/v1/observed`)."""

    alarm: bool = Field(description="Whether too many of the last ones were wrong; docs/operations.md says what to do.")
    alarm_at: float | None = Field(description="When that changed last, in seconds since 1970.")
    wrong_share: float = Field(description="Of the last ones.")
    last: PredictionCounts = Field(description="Those that the alarm looks at.")
    ever: PredictionCounts
    last_wrong: WrongPrediction | None


class Publisher(BaseModel):
    worker_id: str
    dp_rank: int
    model: str
    tenant: str
    engine: str = Field(description="As registered.")
    dialect: str | None = Field(
        examples=["vllm"], description="The engine as registered, or as its events have told; null = not known yet."
    )
    endpoint: str
    replay_endpoint: str | None
    block_size: int | None
    kind: str = Field(examples=["engine"], description="engine or pool")
    serves: list[str] | None = Field(description="The workers that a pool serves; null = all of the model.")
    options: dict[str, JsonValue]
    state: str = Field(examples=["connected"], description="connecting, connected, replaying, disconnected or failed")
    last_error: str | None
    coverage: str = Field(examples=["complete"], description="complete, since, degraded, recovering or disconnected")
    coverage_reason: str = Field(examples=["from_start"], description="Why; docs/operations.md lists them.")
    coverage_at: float | None = Field(description="When it became so, in seconds since 1970; null = not known.")
    credited: bool = Field(description="Whether it counts in answers; not after it was disconnected for long.")
    since: int | None = Field(description="The first batch known; null = all from the engine's start on.")
    assumptions: list[str] = Field(
        examples=[["eagle_off"]],
        description="What is assumed because neither events nor options say it; docs/operations.md lists them.",
    )
    replay: Replay | None = Field(description="Null without a replay endpoint.")
    sequence_number: int | None = Field(description="The last batch applied; null before the first.")
    generation: int
    granule: int | None = Field(description="Tokens per step of its chain; null before the first block.")
    groups: list[Group]
    counts: Counts
    predictions: PublisherPredictions | None = Field(description="Null before the first observation.")
    last_event_age_s: float | None = Field(description="Seconds since the last batch arrived.")


class PublisherList(BaseModel):
    publishers: list[Publisher]


class Removed(BaseModel):
    removed: int = Field(ge=1, description="How many publishers (ranks) were removed.")


class Affected(BaseModel):
    publishers: int = Field(ge=1, description="How many publishers (ranks) it was done to.")


class Holder(BaseModel):
    worker_id: str
    dp_rank: int
    tenant: str
    model: str
    medium: str
    group: int
    owner: str = Field(description="Who stored it there; empty = the engine itself.")
    reference_count: int
    end_tokens: int = Field(description="Length of the prefix that the key stands for, in tokens.")
    parent_key: HexKey | None
    local_hash: HexKey | None
    position: int | None = Field(description="Index of the block's first token in its prompt.")
    block_tokens: int | None


class Block(BaseModel):
    """A block by its content key. The fields of the block itself are null until the store has it.

    Of more than 1,000 holders, parent, local hash and position are given for the first 1,000.
    """

    content_key: HexKey
    parent_key: HexKey | None = Field(description="Key of the prefix before the block; null at the root.")
    local_hash: HexKey | None
    position: int | None
    block_tokens: int | None
    holders: list[Holder]


class Span(BaseModel):
    """Part of a prefix, from token `start` to before `end`."""

    start: Count
    end: Count
    tier: str = Field(description="The fastest one that it is held on.")
    worker_id: str = Field(description="Who holds it: the worker itself, or a pool that serves it.")


class GroupReach(BaseModel):
    group: int
    kind: str
    window: int | None
    block_tokens: int
    held_tokens: int = Field(description="Longest prefix after which this group alone would let the engine go on.")


class Hit(BaseModel):
    worker_id: str
    dp_rank: int
    hit_tokens: int = Field(description="What the engine itself would skip for a fresh request.")
    resident_tokens: int = Field(description="Longest prefix whose blocks it holds, on any medium.")
    tiers: dict[str, int] = Field(description="Reach in tokens per tier, cumulative.", examples=[TIER_EXAMPLE])
    coverage: str
    coverage_reason: str
    coverage_at: float | None
    sequence_number: int | None
    pools: list[str] = Field([], description="Pools whose blocks extend the reach; absent without any.")
    spans: list[Span] = Field([], description="Where the prefix lies, in order; `detail` = intervals.")
    tier_tokens: dict[str, int] = Field(
        {}, description="Of `resident_tokens`, how many lie on each tier, the fastest counts; `detail` = tiers."
    )
    groups: list[GroupReach] = Field([], description="How far each KV-cache group is held; `detail` = groups.")
    expected_tokens: int = Field(
        0, description="Tokens more that it would skip with the blocks that are expected of it; absent without any."
    )


class QueryWarning(BaseModel):
    code: str
    message: str


class PrefixHits(BaseModel):
    prompt_tokens: int
    hits: list[Hit] = Field(description="Best first; only publishers with any tokens, be they expected.")
    warnings: list[QueryWarning]


class Difference(BaseModel):
    """One thing that memory and store do not agree on; null = one of them does not have it."""

    worker_id: str
    dp_rank: int
    kind: str = Field(examples=["residency"], description="publisher, checkpoint, residency or ghost")
    where: str
    in_memory: str | None
    in_store: str | None


class Audit(BaseModel):
    """Rows in Postgres against the index in memory, after a flush."""

    is_equal: bool
    publishers: Count
    publishers_of_others: Count = Field(description="Not compared: another replica writes them.")
    residencies_in_memory: Count
    residencies_in_store: Count
    ghosts_in_memory: Count
    ghosts_in_store: Count
    differences_total: Count
    differences: list[Difference] = Field(description="The first of them.")


class PublisherTotals(BaseModel):
    worker_id: str
    dp_rank: int
    residencies: Count
    residencies_by_medium: dict[str, Count]
    orphans: Count
    ghosts: Count
    unplaced: Count


class ModelTotals(BaseModel):
    tenant: str
    model: str
    granules: list[int] = Field(description="Token steps of the chains in use.")
    content_keys: Count
    residencies: Count
    residencies_by_medium: dict[str, Count]
    publishers: list[PublisherTotals]


class Stats(BaseModel):
    models: list[ModelTotals]


class Alive(BaseModel):
    status: Literal["alive"]
    version: str


class Ready(BaseModel):
    ready: bool
    missing: list[str] = Field(examples=[["publishers in their first replay: 2"]])


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorAnswer} for status in statuses}


_TOKEN_IDS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 1_000_000,
    "items": {"type": "integer", "minimum": 0, "maximum": TOKEN_ID_MAX},
    "description": "The whole prompt. In msgpack also one bin of unsigned 32-bit little-endian integers.",
}
_NAME = {"type": "string", "minLength": 1, "maxLength": NAME_LENGTH_MAX}
DP_RANK = {"type": "integer", "minimum": 0, "maximum": DP_RANK_MAX}
_POSITION = {"type": "integer", "minimum": 0, "maximum": TOKEN_ID_MAX}
_ITEM = {
    "type": "object",
    "additionalProperties": False,
    "required": ["identifier", "offset", "length"],
    "properties": {"identifier": _NAME, "offset": _POSITION, "length": _POSITION},
}


def or_null(schema: dict[str, Any], default: object = None) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}], "default": default}


def _hashes(what: str) -> dict[str, Any]:
    hashes = {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": "^[0-9a-fA-F]{16}$"}}
    description = f"Instead of token_ids, {what}. In msgpack also one bin of unsigned 64-bit little-endian integers."
    return {**or_null(hashes), "description": description}


PREFIX_HITS_REQUEST: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["model"],
    "oneOf": [{"required": [name]} for name in ("token_ids", "local_hashes", "content_keys")],
    "properties": {
        "model": _NAME,
        "token_ids": or_null(_TOKEN_IDS),
        "local_hashes": _hashes("the local hash of each granule of the prompt"),
        "content_keys": _hashes("the content key at the end of each granule of the prompt"),
        "granule": {
            **or_null({"type": "integer", "minimum": 1, "maximum": BLOCK_SIZE_MAX}),
            "description": "Tokens per hash; null = as the model has it (`GET /v1/models`). Only with hashes.",
        },
        "tenant": or_null(_NAME, "default"),
        "lora_name": or_null(_NAME),
        "cache_salt": or_null(_NAME),
        "multimodal": {
            **or_null({"type": "array", "maxItems": MULTIMODAL_MAX, "items": _ITEM}, []),
            "description": "Images and the like, by the engine's own identifier, with absolute offsets in the prompt.",
        },
        "workers": {
            **or_null({"type": "array", "maxItems": WORKERS_MAX, "items": _NAME}),
            "description": "Answer only for these worker_ids; unknown ones are named in `warnings`.",
        },
        "detail": {
            "anyOf": [
                {"type": "string", "enum": ["summary", "tiers", "groups", "intervals"]},
                {"type": "boolean"},
                {"type": "null"},
            ],
            "default": "summary",
            "description": "What hits say beside: `tiers` adds tier_tokens, `groups` groups, `intervals` spans."
            " True = intervals, false = summary.",
        },
        "min_hit_tokens": {
            **or_null(_POSITION, 0),
            "description": "Leave out hits with fewer hit_tokens.",
        },
        "limit": {
            **or_null({"type": "integer", "minimum": 1, "maximum": WORKERS_MAX}),
            "description": "So many hits at most, the best.",
        },
        "expected": {
            "anyOf": [{"type": "boolean"}, {"type": "null"}],
            "default": False,
            "description": "Count `expected_tokens` into `hit_tokens`, and so into the order of hits.",
        },
    },
}
PREFIX_HITS_EXAMPLE = {"model": "meta-llama/Llama-3.1-8B-Instruct", "token_ids": list(range(1, 33))}
_IMAGE_EXAMPLE = {
    "model": "Qwen/Qwen2.5-VL-7B-Instruct",
    "token_ids": [1, 2, 3, 151655, 151655, 4],
    "lora_name": "my-lora",
    "cache_salt": "tenant-7",
    "multimodal": [{"identifier": "4f1a0c", "offset": 3, "length": 2}],
    "workers": ["http://10.0.0.7:8000"],
}
_ANSWER_EXAMPLE = {
    "prompt_tokens": 32,
    "hits": [
        {
            "worker_id": "http://10.0.0.7:8000",
            "dp_rank": 0,
            "hit_tokens": 16,
            "resident_tokens": 32,
            "tiers": {"GPU": 16, "CPU": 32},
            "coverage": "complete",
            "coverage_reason": "from_start",
            "coverage_at": 1785312000.25,
            "sequence_number": 1041,
        }
    ],
    "warnings": [],
}
PREFIX_HITS_OPENAPI: dict[str, Any] = {
    "summary": "How much of this prompt does each engine still hold?",
    "tags": ["query"],
    "responses": {
        200: {
            "model": PrefixHits,
            "content": {
                "application/json": {"example": _ANSWER_EXAMPLE},
                "application/msgpack": {"schema": {"$ref": "#/components/schemas/PrefixHits"}},
            },
        },
        **errors(400, 413, 415, 422, 503),
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": PREFIX_HITS_REQUEST,
                    "examples": {
                        "plain": {"summary": "A text prompt", "value": PREFIX_HITS_EXAMPLE},
                        "everything": {"summary": "With an adapter, a salt and an image", "value": _IMAGE_EXAMPLE},
                    },
                },
                "application/msgpack": {"schema": PREFIX_HITS_REQUEST},
            },
        }
    },
}
