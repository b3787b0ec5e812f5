"""What Dynamo's standalone indexer reads and answers, as msgspec bodies, and their part of the OpenAPI document.

Fields that we do not know are passed over, as there: routers of other versions send more.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from pydantic import BaseModel, Field

from indexer.api.dialects.hashes import BlockHash
from indexer.api.formats import Name, Rank, TokenId
from indexer.api.schemas import BLOCK_SIZE_MAX, NAME_LENGTH_MAX, errors

# msgspec takes no bounds beyond 63 bits: this one is checked when it is read
InstanceId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, description="u64")]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$(?!\n)")]
OptionalText: TypeAlias = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$(?!\n)")] | None
OptionalName: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] | None
BlockSize: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=BLOCK_SIZE_MAX)]


class _Scoped(msgspec.Struct, kw_only=True):
    """Which model, of whom: `routing_group` and `tenant_id` are two names of our tenant. Empty means the default."""

    model_name: Name
    routing_group: OptionalName = None
    tenant_id: OptionalName = None

    @property
    def tenant(self) -> str:
        return self.routing_group or self.tenant_id or "default"


class RegisterBody(_Scoped, kw_only=True):
    """What is kept is bounded more narrowly than what is only asked for."""

    model_name: Text
    routing_group: OptionalText = None
    tenant_id: OptionalText = None
    instance_id: InstanceId
    endpoint: Text
    block_size: BlockSize
    dp_rank: Rank | None = 0
    replay_endpoint: OptionalText = None
    additional_salt: OptionalText = None


class UnregisterBody(_Scoped, kw_only=True):
    """Without a rank all ranks of the instance."""

    instance_id: InstanceId
    dp_rank: Rank | None = None


class QueryBody(_Scoped, kw_only=True):
    token_ids: list[TokenId]
    lora_name: OptionalName = None
    cache_salt: OptionalName = None


class HashQueryBody(_Scoped, kw_only=True):
    """`block_hashes`: the local hash of each block of the prompt, as a number of either sign or 16 hexadecimal digits;
    adapter and salt are in them already."""

    block_hashes: list[BlockHash]


def schema_of(body: type[msgspec.Struct]) -> dict[str, Any]:
    schema: dict[str, Any] = msgspec.json.schema(body)["$defs"][body.__name__]
    return schema


class PeerBody(msgspec.Struct):
    url: Text


class InstanceBody(msgspec.Struct, gc=False):
    longest_matched: int
    gpu: int
    dp: dict[int, int]
    cpu: int
    disk: int


class ScoresBody(msgspec.Struct):
    scores: dict[str, dict[int, int]]
    frequencies: list[int]
    instances: dict[str, InstanceBody]


class InstanceMatch(BaseModel):
    """Tokens of the prompt that one instance holds, the best of its ranks; each tier includes the faster ones."""

    longest_matched: int
    gpu: int
    dp: dict[str, int] = Field(description="Longest match of each rank.")
    cpu: int
    disk: int


class Scores(BaseModel):
    scores: dict[str, dict[str, int]] = Field(
        description="Instance -> rank -> tokens held; those with none are absent."
    )
    frequencies: list[int] = Field(description="Always empty.")
    instances: dict[str, InstanceMatch]


class StatusOk(BaseModel):
    status: str = Field(examples=["ok"])


class Listener(BaseModel):
    endpoint: str
    status: str = Field(examples=["active"], description="pending, active or failed")
    last_error: str = Field("", description="Absent if there was none.")


class Worker(BaseModel):
    """An instance with its ranks, by their number."""

    instance_id: int | str = Field(description="A u64; the worker_id as it is, if that is no number.")
    source: str = Field(examples=["zmq"])
    status: str = Field(examples=["active"], description="failed or pending if one of its ranks is, else active")
    model_name: str
    routing_group: str
    block_size: int | None = Field(description="Null as long as nobody has told.")
    endpoints: dict[str, str]
    listeners: dict[str, Listener]


_TAGS = ["dialects"]
_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
INSTANCE_EXAMPLE = {"instance_id": 7587886463951276811, "model_name": _MODEL, "routing_group": "default", "dp_rank": 0}
SCORES_EXAMPLE = {
    "scores": {"7587886463951276811": {"0": 32}},
    "frequencies": [],
    "instances": {"7587886463951276811": {"longest_matched": 32, "gpu": 16, "dp": {"0": 32}, "cpu": 32, "disk": 32}},
}
QUERY_EXAMPLE = {"model_name": _MODEL, "token_ids": list(range(1, 33)), "lora_name": None, "cache_salt": None}
HASH_QUERY_EXAMPLE = {"model_name": _MODEL, "block_hashes": [-6143519083398298434, 4722366482869645213]}
REGISTER_EXAMPLE = {
    **INSTANCE_EXAMPLE,
    "endpoint": "tcp://10.0.0.7:5557",
    "replay_endpoint": "tcp://10.0.0.7:5558",
    "block_size": 16,
}
HEALTH_OPENAPI: dict[str, Any] = {
    "summary": "Queries are answered",
    "tags": _TAGS,
    "responses": {200: {"model": StatusOk}, **errors(503)},
}
WORKERS_OPENAPI: dict[str, Any] = {
    "summary": "Registered instances and how following them goes (Dynamo)",
    "tags": _TAGS,
    "responses": {200: {"model": list[Worker]}, **errors(403, 422, 503)},
}
PEERS_OPENAPI: dict[str, Any] = {
    "summary": "None: replicas find each other in the database (Dynamo)",
    "tags": _TAGS,
    "responses": {200: {"model": list[str], "content": {"application/json": {"example": []}}}, **errors(503)},
}
_PEER_JSON = {"schema": schema_of(PeerBody), "example": {"url": "http://10.0.0.6:8090"}}
_PEER = {"requestBody": {"required": True, "content": {"application/json": _PEER_JSON}}}
REGISTER_PEER_OPENAPI: dict[str, Any] = {
    "summary": "Refused: replicas share a database instead (Dynamo)",
    "tags": _TAGS,
    "status_code": 422,
    "responses": errors(400, 413, 415, 422, 503),
    "openapi_extra": _PEER,
}
DEREGISTER_PEER_OPENAPI: dict[str, Any] = {
    "summary": "No peer is known (Dynamo)",
    "tags": _TAGS,
    "status_code": 404,
    "responses": errors(400, 404, 413, 415, 422, 503),
    "openapi_extra": _PEER,
}
