"""The messages of indexer.proto and kv_indexer.proto, as classes.

Built from the tables below and not generated: generated code is bound to one version of protobuf, and this is shorter.
A test compiles the .proto files, and holds the tables against them. They are in a pool of their own, so that a client
with generated code can live in the same process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
STRING, UINT32, INT32 = _Field.TYPE_STRING, _Field.TYPE_UINT32, _Field.TYPE_INT32
DOUBLE, SFIXED64, MESSAGE = _Field.TYPE_DOUBLE, _Field.TYPE_SFIXED64, _Field.TYPE_MESSAGE


class F(NamedTuple):
    """A field. `message`: the name of its type, if that is one."""

    name: str
    number: int
    type: int
    is_repeated: bool = False
    is_optional: bool = False
    message: str = ""


SCORES_PACKAGE, PREFIX_PACKAGE = "indexer.v1", "kv_indexer.v1"
SCORES_MESSAGES: Mapping[str, Sequence[F]] = {
    "GetPodScoresRequest": [
        F("prompt", 1, STRING),
        F("model_name", 2, STRING),
        F("pod_identifiers", 3, STRING, is_repeated=True),
        F("token_ids", 100, UINT32, is_repeated=True),
        F("tenant", 101, STRING),
        F("lora_name", 102, STRING),
        F("cache_salt", 103, STRING),
        F("tier_weights", 104, MESSAGE, is_repeated=True, message="TierWeight"),
    ],
    "TierWeight": [F("tier", 1, STRING), F("weight", 2, DOUBLE)],
    "GetPodScoresResponse": [F("scores", 1, MESSAGE, is_repeated=True, message="PodScore")],
    "PodScore": [
        F("pod", 1, STRING),
        F("score", 2, DOUBLE),
        F("data_parallel_rank", 3, INT32, is_optional=True),
    ],
}
PREFIX_MESSAGES: Mapping[str, Sequence[F]] = {
    "MatchExternalKvPrefixRequest": [
        F("hashes", 1, SFIXED64, is_repeated=True),
        F("max_blocks", 2, UINT32),
        F("model", 100, STRING),
        F("tenant", 101, STRING),
    ],
    "MatchExternalKvPrefixResponse": [
        F("matches", 1, MESSAGE, is_repeated=True, message="ExternalKvPrefixMatch"),
        F("best_prefix_blocks", 2, UINT32),
        F("blocks_read", 3, UINT32),
    ],
    "ExternalKvPrefixMatch": [
        F("worker_address", 1, STRING),
        F("matched_prefix_blocks", 2, UINT32),
        F("worker_id", 3, STRING),
    ],
}


def describe_file(name: str, package: str, messages: Mapping[str, Sequence[F]]) -> descriptor_pb2.FileDescriptorProto:
    """What protoc would say of such a file, but for its services."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    for message_name, fields in messages.items():
        message = file.message_type.add(name=message_name)
        for field in fields:
            described = message.field.add(name=field.name, number=field.number, type=field.type)
            described.label = _Field.LABEL_REPEATED if field.is_repeated else _Field.LABEL_OPTIONAL
            if field.message:
                described.type_name = f".{package}.{field.message}"
            if field.is_optional:
                described.proto3_optional, described.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(describe_file("indexer.proto", SCORES_PACKAGE, SCORES_MESSAGES))
_pool.Add(describe_file("kv_indexer.proto", PREFIX_PACKAGE, PREFIX_MESSAGES))


def _class(package: str, name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{package}.{name}"))


GetPodScoresRequest = _class(SCORES_PACKAGE, "GetPodScoresRequest")
GetPodScoresResponse = _class(SCORES_PACKAGE, "GetPodScoresResponse")
PodScore = _class(SCORES_PACKAGE, "PodScore")
MatchExternalKvPrefixRequest = _class(PREFIX_PACKAGE, "MatchExternalKvPrefixRequest")
MatchExternalKvPrefixResponse = _class(PREFIX_PACKAGE, "MatchExternalKvPrefixResponse")
ExternalKvPrefixMatch = _class(PREFIX_PACKAGE, "ExternalKvPrefixMatch")
