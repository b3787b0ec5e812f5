"""The part of the OpenAPI document for the paths that several services have in common, and for those of one of them."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel

from indexer.api.dialects import dynamo_bodies as dynamo
from indexer.api.dialects import rfc1403_bodies as rfc1403
from indexer.api.dialects.dynamo_bodies import schema_of
from indexer.api.schemas import ErrorAnswer, errors

_TAGS = ["dialects"]
_LATER = {"model": rfc1403.LaterErrorAnswer}
MSGPACK = "application/msgpack"


def request_of(*bodies: tuple[str, type[msgspec.Struct], dict[str, Any]], msgpack: bool = False) -> dict[str, Any]:
    """One of these bodies, each with a name and an example."""
    schemas = [schema_of(body) for _, body, _ in bodies]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    examples = {name: {"value": example} for name, _, example in bodies}
    content: dict[str, Any] = {"application/json": {"schema": schema, "examples": examples}}
    if msgpack:
        content[MSGPACK] = {"schema": schemas[-1]}
    return {"requestBody": {"required": True, "content": content}}


def in_msgpack(model: type[BaseModel]) -> dict[str, Any]:
    """The content of an answer that may also be msgpack: then it is this model."""
    return {MSGPACK: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def _answers(model: Any, as_msgpack: type[BaseModel], **examples: dict[str, Any]) -> dict[str, Any]:
    as_json = {"application/json": {"examples": {name: {"value": e} for name, e in examples.items()}}}
    return {"model": model, "content": as_json | in_msgpack(as_msgpack)}


_EITHER_ERROR = {"model": rfc1403.LaterErrorAnswer | ErrorAnswer}


def _shared_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """In msgpack, or below the prefix, those of the later form, but for what is refused before anybody sees which."""
    return dict.fromkeys(statuses, _EITHER_ERROR)


def _query(
    summary: str,
    bodies: tuple[type[msgspec.Struct], type[msgspec.Struct]],
    examples: tuple[dict[str, Any], dict[str, Any]],
) -> dict[str, Any]:
    named = (("dynamo", bodies[0], examples[0]), ("rfc1403", bodies[1], examples[1]))
    answer = _answers(
        dynamo.Scores | dict[str, dict[str, rfc1403.TierMatch]] | rfc1403.LaterMatches,
        rfc1403.LaterMatches,
        dynamo=dynamo.SCORES_EXAMPLE,
        rfc1403=rfc1403.MATCH_EXAMPLE,
    )
    return {
        "summary": summary,
        "tags": _TAGS,
        "responses": {200: answer, **_shared_errors(400, 403, 404, 413, 415, 422, 503)},
        "openapi_extra": request_of(*named, msgpack=True),
    }


def _later_query(summary: str, body: type[msgspec.Struct], example: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "tags": _TAGS,
        "responses": {
            200: _answers(rfc1403.LaterMatches, rfc1403.LaterMatches),
            **dict.fromkeys((400, 415), _LATER),
            **_shared_errors(403, 503),
            **errors(413),
        },
        "openapi_extra": request_of(("query", body, example), msgpack=True),
    }


def _later_change(
    summary: str, told: Any, body: tuple[str, Any, Any], refusals: dict[int | str, Any]
) -> dict[str, Any]:
    return {
        "summary": summary,
        "tags": _TAGS,
        "responses": {200: _answers(told, told), **refusals},
        "openapi_extra": request_of(body, msgpack=True),
    }


QUERY_OPENAPI = _query(
    "How many tokens of this prompt does each instance hold?",
    (dynamo.QueryBody, rfc1403.JsonQueryBody),
    (dynamo.QUERY_EXAMPLE, rfc1403.QUERY_EXAMPLE),
)
HASH_QUERY_OPENAPI = _query(
    "The same by hashes: local ones of its blocks (Dynamo), standard ones (RFC #1403)",
    (dynamo.HashQueryBody, rfc1403.JsonHashQueryBody),
    (dynamo.HASH_QUERY_EXAMPLE, rfc1403.HASH_QUERY_EXAMPLE),
)
LATER_QUERY_OPENAPI = _later_query(
    "How many tokens of this prompt does each instance hold? (later form of RFC #1403)",
    rfc1403.JsonQueryBody,
    rfc1403.QUERY_EXAMPLE,
)
LATER_HASH_QUERY_OPENAPI = _later_query(
    "The same by standard hashes (later form of RFC #1403)", rfc1403.JsonHashQueryBody, rfc1403.HASH_QUERY_EXAMPLE
)
REGISTER_OPENAPI: dict[str, Any] = {
    "summary": "Follow an instance's event stream",
    "tags": _TAGS,
    "status_code": 201,
    "responses": {
        201: {"model": dynamo.StatusOk, "description": "Dynamo"},
        200: {
            **_answers(rfc1403.Registered, rfc1403.Registered),
            "description": "RFC #1403, also if it was registered with the same values",
        },
        **_shared_errors(400, 403, 409, 413, 415, 422, 503),
    },
    "openapi_extra": request_of(
        ("dynamo", dynamo.RegisterBody, dynamo.REGISTER_EXAMPLE),
        ("rfc1403", rfc1403.RegisterBody, rfc1403.REGISTER_EXAMPLE),
        msgpack=True,
    ),
}
UNREGISTER_OPENAPI: dict[str, Any] = {
    "summary": "Stop following an instance, or one rank of it",
    "tags": _TAGS,
    "responses": {
        200: _answers(
            dynamo.StatusOk | rfc1403.Unregistered,
            rfc1403.Unregistered,
            dynamo={"status": "ok"},
            rfc1403={"status": "unregistered successfully", "removed_instances": ["vllm-1|default|0"]},
        ),
        **_shared_errors(400, 403, 404, 413, 415, 422, 503),
    },
    "openapi_extra": request_of(
        ("dynamo", dynamo.UnregisterBody, dynamo.INSTANCE_EXAMPLE),
        ("rfc1403", rfc1403.UnregisterBody, rfc1403.UNREGISTER_EXAMPLE),
        msgpack=True,
    ),
}
LATER_REGISTER_OPENAPI = _later_change(
    "Follow an instance's event stream (later form of RFC #1403)",
    rfc1403.Registered,
    ("registration", rfc1403.RegisterBody, rfc1403.REGISTER_EXAMPLE),
    _shared_errors(400, 403, 413, 415, 422, 503),
)
LATER_UNREGISTER_OPENAPI = _later_change(
    "Stop following an instance, or one rank of it (later form of RFC #1403)",
    rfc1403.Unregistered,
    ("instance", rfc1403.UnregisterBody, rfc1403.UNREGISTER_EXAMPLE),
    _shared_errors(400, 403, 404, 413, 415, 422, 503),
)
SERVICES_OPENAPI: dict[str, Any] = {
    "summary": "Which streams are followed (RFC #1403)",
    "tags": _TAGS,
    "responses": {200: {"model": rfc1403.ServiceList}, **errors(503)},
}
GLOBAL_VIEW_OPENAPI: dict[str, Any] = {
    "summary": "Models, their instances and how many prefixes are held (RFC #1403)",
    "tags": _TAGS,
    "responses": {200: {"model": rfc1403.GlobalView}, **errors(503)},
}
LATER_SERVICES_OPENAPI = SERVICES_OPENAPI | {"responses": SERVICES_OPENAPI["responses"] | _shared_errors(503)}
LATER_GLOBAL_VIEW_OPENAPI = GLOBAL_VIEW_OPENAPI | {"responses": GLOBAL_VIEW_OPENAPI["responses"] | _shared_errors(503)}
