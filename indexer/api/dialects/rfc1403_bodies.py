"""What RFC #1403 and the later form of its service read and answer, as msgspec bodies, and their part of the OpenAPI
document.

Fields that we do not know are passed over: routers of other versions send more.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from pydantic import BaseModel, Field

from indexer.api.dialects.dynamo_bodies import BlockSize, OptionalName, OptionalText, Text
from indexer.api.dialects.hashes import BlockHash
from indexer.api.formats import Name, Rank, TokenId, TokenIds
from indexer.api.schemas import NAME_LENGTH_MAX

LoraId: TypeAlias = int | Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] | None


class _Scoped(msgspec.Struct, kw_only=True):
    """Empty and null mean the default."""

    tenant_id: OptionalName = None

    @property
    def tenant(self) -> str:
        return self.tenant_id or "default"


class Asked(_Scoped, kw_only=True):
    """`instance_id`: answer for this one only. `lora_id`: the old name of `lora_name`."""

    model: Name
    block_size: BlockSize
    lora_name: OptionalName = None
    lora_id: LoraId = None
    instance_id: OptionalName = None
    cache_salt: OptionalName = None


class QueryBody(Asked, kw_only=True):
    """In msgpack the tokens may also be one `bin` of u32 little-endian integers."""

    token_ids: TokenIds


class JsonQueryBody(QueryBody, kw_only=True):
    token_ids: list[TokenId]


class HashQueryBody(Asked, kw_only=True):
    """`seq_hashes`: the standard hash at the end of each block; `block_hash`: its old name. One of both. In msgpack the
    hashes may also be one `bin` of u64 little-endian integers."""

    seq_hashes: list[BlockHash] | bytes | None = None
    block_hash: list[BlockHash] | bytes | None = None


class JsonHashQueryBody(HashQueryBody, kw_only=True):
    seq_hashes: list[BlockHash] | None = None
    block_hash: list[BlockHash] | None = None


class RegisterBody(_Scoped, kw_only=True):
    """What is kept is bounded more narrowly than what is only asked for."""

    endpoint: Text
    type: Text
    modelname: Text
    instance_id: Text
    block_size: BlockSize
    dp_rank: Rank
    tenant_id: OptionalText = None
    replay_endpoint: OptionalText = None
    lora_name: OptionalText = None
    additionalsalt: OptionalText = None
    additional_salt: OptionalText = None


class UnregisterBody(_Scoped, kw_only=True):
    """Without a rank all ranks of the instance; without a model, whichever it serves."""

    instance_id: Name
    modelname: OptionalName = None
    dp_rank: Rank | None = None


class InstanceBody(msgspec.Struct, rename={"gpu": "GPU", "cpu": "CPU", "disk": "DISK", "ranks": "DP"}):
    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    ranks: dict[str, int]


class RankBody(msgspec.Struct):
    gpu: int
    cpu: int
    disk: int


class LaterInstanceBody(msgspec.Struct, rename={"ranks": "dp"}):
    """The later form: cumulative tiers, also of each rank."""

    longest_matched: int
    ranks: dict[str, int]
    rank_matches: dict[str, RankBody]
    gpu: int
    cpu: int
    disk: int


class LaterBody(msgspec.Struct):
    instances: dict[str, LaterInstanceBody]


class LaterError(msgspec.Struct, omit_defaults=True):
    """`index`: the place in the array `field`."""

    error: str
    reason: str
    field: str | None = None
    index: int | None = None


# ---------------------------------------------------------------------- models of the OpenAPI document


class TierMatch(BaseModel):
    """Tokens of the prompt that one instance holds, in whole blocks of the size that was asked for."""

    longest_matched: int
    GPU: int
    CPU: int = Field(description="Reach with CPU and GPU; 0 if the CPU adds nothing.")
    DISK: int = Field(description="Reach with all tiers; 0 if the slower ones add nothing.")
    DP: dict[str, int] = Field(description="Longest match of each rank.")


class RankMatch(BaseModel):
    gpu: int
    cpu: int
    disk: int


class LaterMatch(BaseModel):
    longest_matched: int
    dp: dict[str, int] = Field(description="Longest match of each rank.")
    rank_matches: dict[str, RankMatch] = Field(description="Reach of each rank; a tier includes the faster ones.")
    gpu: int
    cpu: int
    disk: int


class LaterMatches(BaseModel):
    instances: dict[str, LaterMatch]


class LaterErrorAnswer(BaseModel):
    error: str
    reason: str = Field(examples=["out_of_range"])
    field: str | None = None
    index: int | None = Field(None, description="Place in the array `field`.")


class Registered(BaseModel):
    status: str = Field(examples=["registered successfully"])
    instance_id: str


class Unregistered(BaseModel):
    status: str = Field(examples=["unregistered successfully"])
    removed_instances: list[str] = Field(examples=[["vllm-1|default|0"]])


class Service(BaseModel):
    Endpoint: str
    ReplayEndpoint: str
    Type: str
    ModelName: str
    LoraName: str
    TenantID: str
    InstanceID: str
    BlockSize: int | None
    DPRank: int
    AdditionalSalt: str


class ServiceList(BaseModel):
    count: int
    services: list[Service]


class Context(BaseModel):
    """A model, in blocks of one size."""

    model_name: str
    lora_name: str = Field(description="Always empty: adapters are told apart by the hashes.")
    block_size: int | None
    tenant_id: str
    prefix_count: int
    instances: dict[str, list[int]] = Field(description="Instance -> its ranks.")


class GlobalView(BaseModel):
    context_count: int
    contexts: list[Context]


_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
_QUERIED = {"model": _MODEL, "block_size": 16, "tenant_id": "default", "instance_id": None}
QUERY_EXAMPLE = {**_QUERIED, "token_ids": list(range(1, 33))}
HASH_QUERY_EXAMPLE = {**_QUERIED, "seq_hashes": [16863443419780771464, 12466389667045779788]}
MATCH_EXAMPLE = {
    "default": {"vllm-1": {"longest_matched": 256, "GPU": 128, "CPU": 256, "DISK": 0, "DP": {"0": 128, "1": 256}}}
}
REGISTER_EXAMPLE: dict[str, Any] = {
    "endpoint": "tcp://10.0.0.7:5557",
    "replay_endpoint": "tcp://10.0.0.7:5558",
    "type": "vLLM",
    "modelname": _MODEL,
    "instance_id": "vllm-1",
    "block_size": 16,
    "dp_rank": 0,
}
UNREGISTER_EXAMPLE = {"instance_id": "vllm-1", "modelname": _MODEL, "dp_rank": 0}
