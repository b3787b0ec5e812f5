"""`POST /v1/prefix-hits`: how much of this prompt does each engine still hold?

The one route that routers call thousands of times a second. It reads the raw body with msgspec, as JSON or msgpack, and
answers in the same format; the bounds of every field are in the types, so that a fault is found while decoding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Annotated, Any, TypeAlias

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from indexer.api.errors import JSON, ApiError, is_json, require_recovered
from indexer.api.ports import Services
from indexer.api.schemas import MULTIMODAL_MAX, NAME_LENGTH_MAX, PREFIX_HITS_OPENAPI, TOKEN_ID_MAX, WORKERS_MAX
from indexer.index.prefix_hits import MultimodalItem, PrefixAnswer, PrefixQuery

MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack"})
U32_BYTES = 4

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]


class MultimodalBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    identifier: Name
    offset: Tokens
    length: Tokens


class _Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields besides the tokens; null means the default."""

    model: Name
    tenant: Name | None = None
    lora_name: Name | None = None
    cache_salt: Name | None = None
    multimodal: Annotated[list[MultimodalBody], msgspec.Meta(max_length=MULTIMODAL_MAX)] | None = None
    workers: Annotated[list[Name], msgspec.Meta(max_length=WORKERS_MAX)] | None = None


class JsonQuery(_Options, kw_only=True):
    token_ids: list[TokenId]


class MsgpackQuery(_Options, kw_only=True):
    """In msgpack the tokens may also be one `bin` of unsigned 32-bit little-endian integers."""

    token_ids: list[TokenId] | bytes


class HitBody(msgspec.Struct, gc=False):
    worker_id: str
    dp_rank: int
    hit_tokens: int
    resident_tokens: int
    tiers: dict[str, int]
    coverage: str
    sequence_number: int | None


class WarningBody(msgspec.Struct, gc=False):
    code: str
    message: str


class AnswerBody(msgspec.Struct, gc=False):
    prompt_tokens: int
    hits: list[HitBody]
    warnings: list[WarningBody]


class Codec:
    """One body format: its content type, how a query is read and how an answer is written."""

    def __init__(
        self,
        content_type: str,
        decode: Callable[[bytes], JsonQuery] | Callable[[bytes], MsgpackQuery],
        encode: Callable[[Any], bytes],
    ) -> None:
        self.content_type = content_type
        self.decode = decode
        self.encode = encode


JSON_CODEC = Codec(JSON, msgspec.json.Decoder(JsonQuery).decode, msgspec.json.Encoder().encode)
MSGPACK_CODEC = Codec(
    "application/msgpack", msgspec.msgpack.Decoder(MsgpackQuery).decode, msgspec.msgpack.Encoder().encode
)


class RawRoute(APIRoute):
    """Described in the OpenAPI document like any other route, but called with nothing in between: a third faster."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def prefix_hits_router(services: Services) -> APIRouter:
    router = APIRouter(route_class=RawRoute)

    async def prefix_hits(request: Request) -> Response:
        require_recovered(services.life)
        codec = choose_codec(request.headers.get("content-type"))
        query = read_query(codec, await request.body(), services.limits.prompt_tokens_max)
        started = perf_counter()
        answer = services.index.prefix_hits(query)
        _measure(services, answer, perf_counter() - started)
        return Response(codec.encode(to_body(answer)), media_type=codec.content_type)

    router.add_api_route("/v1/prefix-hits", prefix_hits, methods=["POST"], **PREFIX_HITS_OPENAPI)
    return router


def choose_codec(content_type: str | None) -> Codec:
    """No content type at all means JSON. Raises ApiError 415 for anything else that is not known."""
    if content_type is None or is_json(content_type):
        return JSON_CODEC
    if content_type.partition(";")[0].strip().lower() in MSGPACK_TYPES:
        return MSGPACK_CODEC
    message = f"content-type must be {JSON} or {MSGPACK_CODEC.content_type}, not {content_type}"
    raise ApiError(415, "unsupported_media_type", message)


def read_query(codec: Codec, body: bytes, prompt_tokens_max: int) -> PrefixQuery:
    """Raises ApiError: 400 for a body that is not of its format, 422 for a value out of bounds."""
    try:
        fields = codec.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        name = "JSON" if codec is JSON_CODEC else "msgpack"
        raise ApiError(400, f"invalid_{name.lower()}", f"the body is not valid {name}: {error}") from None
    check_length(fields.token_ids, prompt_tokens_max)
    return PrefixQuery(
        model=fields.model,
        token_ids=fields.token_ids,
        tenant=fields.tenant or "default",
        lora_name=fields.lora_name,
        cache_salt=fields.cache_salt,
        multimodal=tuple(MultimodalItem(m.identifier, m.offset, m.length) for m in fields.multimodal or ()),
        workers=None if fields.workers is None else frozenset(fields.workers),
    )


def check_length(token_ids: list[int] | bytes, prompt_tokens_max: int) -> None:
    count = len(token_ids)
    if isinstance(token_ids, bytes):
        count, rest = divmod(count, U32_BYTES)
        if rest:
            message = f"token_ids as bin must be a multiple of {U32_BYTES} bytes long (u32 little-endian)"
            raise ApiError(422, "invalid_value", message, "token_ids")
    if count == 0:
        raise ApiError(422, "empty_prompt", "token_ids must hold at least one token", "token_ids")
    if count > prompt_tokens_max:
        message = f"token_ids holds {count} tokens; at most {prompt_tokens_max} are answered"
        raise ApiError(422, "prompt_too_long", message, "token_ids")


def to_body(answer: PrefixAnswer) -> AnswerBody:
    return AnswerBody(
        answer.prompt_tokens,
        [HitBody(*hit) for hit in answer.hits],
        [WarningBody(*warning) for warning in answer.warnings],
    )


_FAULT = re.compile(r"(?P<message>.*?)(?: - at `(?P<place>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


def _invalid(text: str) -> ApiError:
    """msgspec says ``Expected `int` >= 0 - at `$.token_ids[3]` ``: the place becomes `field`."""
    fault = _FAULT.fullmatch(text)
    assert fault is not None
    message, place = fault["message"], (fault["place"] or "$").removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.fullmatch(message):
        field = f"{place}.{unknown[1]}".removeprefix(".")
        return ApiError(422, "unknown_field", f"{field} is not a field of this request", field)
    if missing := _MISSING.fullmatch(message):
        field = f"{place}.{missing[1]}".removeprefix(".")
        return ApiError(422, "missing_field", f"{field} is required", field)
    reason = message.replace("`", "")
    return ApiError(422, "invalid_value", f"{place or 'the body'}: {reason[:1].lower()}{reason[1:]}", place or None)


def _measure(services: Services, answer: PrefixAnswer, seconds: float) -> None:
    metrics = services.metrics
    metrics.query_seconds.observe(seconds)
    metrics.query_prompt_tokens.observe(answer.prompt_tokens)
    outcome = "hit" if answer.hits else "warned" if answer.warnings else "miss"
    metrics.query_outcomes.labels(outcome).inc()
