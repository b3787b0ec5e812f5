"""The later form of the service that RFC #1403 was written for: what is otherwise there, and who speaks it.

Its requests have the same fields, so nothing in them tells the two apart: it is spoken by whoever sends msgpack, which
only the later form knows, or uses the paths below PREFIX. Answers have `instances` on top (rfc1403.py), and faults are
here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.responses import Response

from indexer.api.dialects.rfc1403_bodies import LaterError
from indexer.api.errors import JSON, ApiError, fault_of
from indexer.api.formats import is_msgpack
from indexer.errors import IndexerError

PREFIX = "/conductor"


@contextmanager
def faults_in_form(is_later: bool) -> Iterator[None]:
    try:
        yield
    except (ApiError, IndexerError) as error:
        if not is_later:
            raise
        raise LaterFault(error if isinstance(error, ApiError) else fault_of(error)) from None


def later_if_msgpack(fault: ApiError, content_type: str | None) -> ApiError:
    return LaterFault(fault) if is_msgpack(content_type) else fault


def always_later(fault: ApiError, _: str | None) -> ApiError:
    return LaterFault(fault)


class LaterFault(ApiError):
    """The same fault in the words of the later form: what the caller did wrong is 400, with reason, field and index."""

    def __init__(self, fault: ApiError) -> None:
        status = 400 if fault.status_code in (400, 409, 422) else fault.status_code
        super().__init__(status, fault.code, fault.detail, fault.field)
        self.headers = fault.headers

    def response(self) -> Response:
        field, index = _place(self.field)
        body = LaterError(self.detail, _reason(self.code, self.detail), field, index)
        return Response(msgspec.json.encode(body), self.status_code, self.headers, JSON)


_REASONS = {
    "missing_field": "missing",
    "invalid_endpoint": "invalid_value",
    "prompt_too_long": "out_of_range",
    "publisher_conflict": "invalid_registration",
}
_PLACE = re.compile(r"(?P<field>[^\[]+)\[(?P<index>[0-9]+)\]")
_IS_OUT_OF_RANGE = re.compile("expected `?int`? [<>]|must fit into")


def _reason(code: str, message: str) -> str:
    if code != "invalid_value":
        return _REASONS.get(code, code)
    if _IS_OUT_OF_RANGE.search(message):
        return "out_of_range"
    return "invalid_type" if ", got " in message else code


def _place(field: str | None) -> tuple[str | None, int | None]:
    place = _PLACE.fullmatch(field or "")
    return (place["field"], int(place["index"])) if place else (field, None)
