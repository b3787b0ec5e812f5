"""Wrong input on every route of the document: a stable code, the field named, nothing changed.

The table is the document: a route that is added is asked the same, by the example that it gives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine_events import decoded, stored
from tests.unit.api.stand_ins import BODY_BYTES_MAX, World, empty_world, error_of

DOCUMENT: dict[str, Any] = empty_world().client.app.openapi()
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
JSON = "application/json"
VALUES: dict[str, Any] = {"object": {"wrong": 1}, "array": [None], "boolean": True, "number": 1.5, "string": "text"}
LATER_FORM = "/conductor/"  # has faults in a form of its own (test_rfc1403.py)
WRONG_BODIES = [b"", b"{", b"nonsense", b"\xff", b'{"', b"{]"]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def types_of(schema: dict[str, Any]) -> set[str]:
    """All that a value may be, by the names of JSON schema."""
    schema = resolved(schema)
    kinds = schema.get("type", [])
    types = {kinds} if isinstance(kinds, str) else set(kinds)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        types |= types_of(choice)
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        types |= {"string"} if all(isinstance(value, str) for value in values) else set(VALUES)
    return types


def wrong_values(schema: dict[str, Any]) -> list[Any]:
    """Of types that the field cannot have; none if it may be anything."""
    types = types_of(schema)
    return [value for kind, value in VALUES.items() if types and kind not in types]


def example_of(content: dict[str, Any]) -> dict[str, Any]:
    """A body that is right; every route has one in the document."""
    schema = resolved(content["schema"])
    examples = [example["value"] for example in content.get("examples", {}).values()]
    found = [content.get("example"), *examples, schema.get("example"), *schema.get("examples", ())]
    example = next((example for example in found if example is not None), None)
    assert example is not None, f"no example of a body: {content}"
    return copy.deepcopy(example)


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


ALL = [(method, path, operation) for method, path, operation in operations()]
WITH_BODY = [
    (m, p, o["requestBody"]["content"][JSON])
    for m, p, o in ALL
    if JSON in o.get("requestBody", {}).get("content", {}) and not p.startswith(LATER_FORM)
]
FIELDS = [
    (method, path, content, name, schema)
    for method, path, content in WITH_BODY
    for name, schema in resolved(content["schema"]).get("properties", {}).items()
]
PARAMETERS = [
    (method, path, parameter)
    for method, path, operation in ALL
    for parameter in operation.get("parameters", ())
    if parameter["in"] == "query" and "string" not in types_of(parameter["schema"])  # to those any text is right
]


def named(entry: Any) -> str:
    return entry if isinstance(entry, str) else entry.get("name", "") if isinstance(entry, dict) else ""


@pytest.fixture
def world() -> World:
    """One publisher that holds a block: something that could change."""
    world = empty_world()
    assert world.register(worker_id="w", replay_endpoint="tcp://127.0.0.1:5558", block_size=2).status_code == 201
    world.index.publishers()[0].apply(decoded(stored([7], None, [1, 2], 2)), 0, 0)
    return world


def concrete(path: str) -> str:
    return path.replace("{worker_id}", "w").replace("{content_key}", "0" * 16)


def state_of(world: World) -> object:
    publishers = world.client.get("/v1/publishers").json()
    return publishers, world.client.get("/v1/stats").json(), list(world.registry.resyncs)


def refused(world: World, method: str, path: str, **content: Any) -> tuple[int, str, str | None]:
    """How this was refused, without any effect."""
    before = state_of(world)
    answer = world.client.request(method, concrete(path), **content)
    assert answer.headers["content-type"] == JSON, answer.text
    refusal = error_of(answer)
    assert state_of(world) == before
    return refusal


@pytest.mark.parametrize(("method", "path", "content"), WITH_BODY, ids=named)
def test_a_body_that_is_no_json(world: World, method: str, path: str, content: Any) -> None:
    for body in WRONG_BODIES:
        status, code, _ = refused(world, method, path, content=body, headers={"content-type": JSON})
        assert (status, code) in {(400, "invalid_json"), (422, "missing_field")}, body
        assert body == b"" or code == "invalid_json"


@pytest.mark.parametrize(("method", "path", "content"), WITH_BODY, ids=named)
def test_a_body_of_another_type(world: World, method: str, path: str, content: Any) -> None:
    for body in (b"[]", b"1", b"null", b'"text"'):
        status, code, _ = refused(world, method, path, content=body, headers={"content-type": JSON})
        assert (status, code) in {(422, "invalid_value"), (422, "missing_field")}, body
    refusal = refused(world, method, path, content=b"a: 1", headers={"content-type": "application/yaml"})
    assert refusal == (415, "unsupported_media_type", None)


@pytest.mark.parametrize(("method", "path", "content", "name", "schema"), FIELDS, ids=named)
def test_a_field_of_a_wrong_type(world: World, method: str, path: str, content: Any, name: str, schema: Any) -> None:
    for value in wrong_values(schema):
        status, code, field = refused(world, method, path, json={**example_of(content), name: value})
        assert (status, code) == (422, "invalid_value"), value
        assert field is not None, value
        assert field.split("[")[0].split(".")[0] == name


@pytest.mark.parametrize(("method", "path", "content"), WITH_BODY, ids=named)
def test_a_field_that_is_required_and_missing(world: World, method: str, path: str, content: Any) -> None:
    for name in resolved(content["schema"]).get("required", ()):
        body = {key: value for key, value in example_of(content).items() if key != name}
        assert refused(world, method, path, json=body) == (422, "missing_field", name)


@pytest.mark.parametrize(("method", "path", "content"), WITH_BODY, ids=named)
def test_a_field_that_nobody_knows(world: World, method: str, path: str, content: Any) -> None:
    """Our own routes refuse it; those of others pass it over, and their documents say so."""
    is_closed = resolved(content["schema"]).get("additionalProperties") is False
    assert is_closed == path.startswith("/v1/"), "our own routes take no unknown field"
    if is_closed:
        body = {**example_of(content), "surprise": 1}
        assert refused(world, method, path, json=body) == (422, "unknown_field", "surprise")


@pytest.mark.parametrize(("method", "path", "content"), WITH_BODY, ids=named)
def test_a_body_that_is_too_large(world: World, method: str, path: str, content: Any) -> None:
    for body in (b" " * (BODY_BYTES_MAX + 1), b'{"model": "' + b"x" * BODY_BYTES_MAX):
        refusal = refused(world, method, path, content=body, headers={"content-type": JSON})
        assert refusal == (413, "body_too_large", None)


@pytest.mark.parametrize(("method", "path", "parameter"), PARAMETERS, ids=named)
def test_a_parameter_of_a_wrong_type(world: World, method: str, path: str, parameter: Any) -> None:
    others = DOCUMENT["paths"][path][method.lower()]["parameters"]
    required = {other["name"]: "m" for other in others if other["in"] == "query" and other["required"]}
    refusal = refused(world, method, path, params={**required, parameter["name"]: "1.5x"})
    assert refusal == (422, "invalid_value", parameter["name"])


@pytest.mark.parametrize("path", DOCUMENT["paths"])
def test_another_method(world: World, path: str) -> None:
    known = {method.upper() for method in DOCUMENT["paths"][path]}
    for method in set(METHODS) - known:
        before = state_of(world)
        answer = world.client.request(method, concrete(path))
        if answer.status_code == 404:
            continue  # it is the path of another route, too, of something that is not there
        assert error_of(answer) == (405, "method_not_allowed", None)
        assert set(answer.headers["allow"].split(", ")) == known
        assert state_of(world) == before
