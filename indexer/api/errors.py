"""Every error leaves as `{"error": {"code", "message", "field"}}`, with a stable code; 4xx is the caller's fault."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from indexer.api.ports import Life
from indexer.errors import (
    IndexerError,
    NoReplayEndpoint,
    PastOutOfReach,
    PublisherConflict,
    PublisherLimit,
    StoreUnavailable,
)

log = structlog.get_logger(__name__)

JSON = "application/json"
_PARAMETER = re.compile(r"\{[^}]*\}")
CODES = {
    400: "invalid_json",  # of text that cannot even be decoded; the HTTP server has refusals of its own
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "body_too_large",
    415: "unsupported_media_type",
    422: "invalid_value",
    503: "unavailable",
}


class ApiError(HTTPException):
    """An answer with a 4xx or 5xx status. `field` is the path of the offending value, `token_ids[3]` for example."""

    def __init__(
        self, status: int, code: str, message: str, field: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.field = field

    def within(self, place: str) -> ApiError:
        """The same of a value that is part of another, `prompts[3]` for example; its message begins with its field."""
        return ApiError(self.status_code, self.code, f"{place}.{self.detail}", f"{place}.{self.field}")

    def response(self) -> Response:
        return error_response(self.status_code, self.code, self.detail, self.field, self.headers)


def error_response(
    status: int, code: str, message: str, field: str | None = None, headers: Any = None, content_type: str = JSON
) -> Response:
    body = {"error": {"code": code, "message": message, "field": field}}
    return Response(msgspec.json.encode(body), status, headers, content_type)


def fault_of(error: IndexerError) -> ApiError:
    """The answer to what a part behind the API refused."""
    match error:
        case PublisherConflict():
            return ApiError(409, "publisher_conflict", str(error), error.field)
        case NoReplayEndpoint():
            return ApiError(409, "no_replay_endpoint", str(error), "worker_id")
        case PublisherLimit():
            return ApiError(422, "too_many_publishers", str(error))
        case PastOutOfReach():
            return ApiError(422, "as_of_out_of_reach", str(error), "as_of")
        case StoreUnavailable():
            return ApiError(503, "store_unavailable", str(error), headers={"retry-after": "1"})
        case _:
            return ApiError(422, "refused_value", str(error))


def require_recovered(life: Life) -> None:
    """While the index is loaded an answer would be wrong without looking wrong: refuse. Raises ApiError 503."""
    if not life.is_recovered:
        missing = "; ".join(life.missing())
        raise ApiError(503, "not_ready", f"not ready yet: {missing}", headers={"retry-after": "1"})


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(IndexerError, _on_refusal)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    code = CODES.get(error.status_code, "error")
    message, headers = str(error.detail), error.headers
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path}; /openapi.json lists what there is"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed at {request.url.path}"
        methods = _documented_methods(request)
        headers = {"allow": ", ".join(methods)} if methods else headers
    return error_response(error.status_code, code, message, None, headers)


def _documented_methods(request: Request) -> list[str]:
    """Of the path's closest template: the router names only those of the first route that has this path."""
    paths: dict[str, Any] = request.app.openapi()["paths"]
    fitting = [path for path in paths if re.fullmatch(_PARAMETER.sub(".+", path), request.scope["path"])]
    closest = max(fitting, key=lambda path: len(_PARAMETER.sub("", path)), default=None)
    return [] if closest is None else sorted(method.upper() for method in paths[closest])


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """Of all faults the first is answered; a body that is not JSON at all is 400, one of another type 415."""
    assert isinstance(error, RequestValidationError)
    content_type = request.headers.get("content-type", JSON)
    if request.method in ("POST", "PUT", "PATCH") and not is_json(content_type):
        return error_response(415, "unsupported_media_type", f"content-type must be {JSON}, not {content_type}")
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        return error_response(400, "invalid_json", f"the body is not valid JSON: {fault['ctx']['error']}")
    field = field_path(fault["loc"][1:])
    return error_response(422, *_code_and_message(fault, field), field or None)


def _code_and_message(fault: dict[str, Any], field: str) -> tuple[str, str]:
    if fault["type"] == "missing":
        return "missing_field", f"{field or 'a JSON body'} is required"
    if fault["type"] == "extra_forbidden":
        return "unknown_field", f"{field} is not a field of this request"
    reason = str(fault["msg"]).removeprefix("Value error, ")
    return "invalid_value", f"{field or 'the body'}: {reason[:1].lower()}{reason[1:]}"


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, IndexerError)
    return fault_of(error).response()


def unexpected_error(path: str, method: str, error: Exception) -> Response:
    """Our bug: the caller learns no more than that, the log gets all of it."""
    log.error("request_failed", path=path, method=method, exc_info=error)
    return error_response(500, "internal_error", "the service failed to answer this request; its log says why")


def field_path(location: Sequence[str | int]) -> str:
    """`("multimodal", 0, "offset")` as `multimodal[0].offset`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == JSON or media_type.endswith("+json")
