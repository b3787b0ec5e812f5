"""What routers tell: `POST /v1/routed` (this prompt goes to that worker), `POST /v1/observed` (so much it had cached).

Both are told as often as queries are asked, so they are answered as queries are (query_route.py).
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import structlog
from fastapi import APIRouter

from indexer.api.access import Caller
from indexer.api.errors import JSON, ApiError
from indexer.api.feedback_schemas import OBSERVED_OPENAPI, ROUTED_OPENAPI
from indexer.api.formats import (
    Format,
    HexKey,
    Name,
    Rank,
    TokenId,
    TokenIds,
    check_json,
    check_length,
    choose_format,
    decode,
    encode_json,
    hex_key,
    json_format,
    msgpack_format,
    read_keys,
)
from indexer.api.ports import FollowedPublisher, Services
from indexer.api.prefix_hits import MultimodalBody, items_of, least_granule, read_hashes
from indexer.api.publishers import find_seen, unknown_publisher
from indexer.api.query_route import QueryRoute, describe_query
from indexer.api.schemas import MULTIMODAL_MAX
from indexer.index.content_index import ContentIndex
from indexer.index.predictions import PredictionLimits, Predictions
from indexer.index.prefix_query import PrefixQuery

log = structlog.get_logger(__name__)

ROUTED_PATH, OBSERVED_PATH = "/v1/routed", "/v1/observed"
TTL_MAX_S = 60.0


class RoutedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, by tokens or by the local hashes of its granules (in msgpack also as u64 little-endian), and where it
    goes. Null means the default."""

    model: Name
    worker_id: Name
    dp_rank: Rank | None = None
    token_ids: TokenIds | None = None
    local_hashes: list[HexKey] | bytes | None = None
    tenant: Name | None = None
    lora_name: Name | None = None
    cache_salt: Name | None = None
    multimodal: Annotated[list[MultimodalBody], msgspec.Meta(max_length=MULTIMODAL_MAX)] | None = None
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=TTL_MAX_S)] | None = None


class JsonRoutedBody(RoutedBody, kw_only=True):
    token_ids: list[TokenId] | None = None
    local_hashes: list[HexKey] | None = None


class ObservedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    worker_id: Name
    dp_rank: Rank | None = None
    predicted_tokens: TokenId
    cached_tokens: TokenId
    content_key: HexKey | None = None


ROUTED_JSON: Format[RoutedBody] = json_format(JsonRoutedBody, "token_ids")
ROUTED_MSGPACK: Format[RoutedBody] = msgpack_format(RoutedBody, "token_ids")

_read_observed = msgspec.json.Decoder(ObservedBody).decode


def feedback_routes(services: Services) -> list[QueryRoute]:
    index, registry, limits = services.index, services.registry, services.limits
    services.metrics.expected_blocks.set_function(lambda: index.expected_room.taken)
    note_routed = services.metrics.routed_prompts.inc
    prediction_limits = PredictionLimits(
        limits.prediction_window_max, limits.prediction_count_min, limits.prediction_wrong_share_max
    )

    def routed(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        chosen = choose_format(content_type, ROUTED_JSON, ROUTED_MSGPACK)
        fields = chosen.read(body)
        caller.require(fields.tenant or "default")
        query = to_query(fields, index, limits.prompt_tokens_max)
        followed = find_seen(registry, caller, fields.worker_id, fields.dp_rank or 0)
        registration = followed.registration
        if (registration.tenant, registration.model) != (query.tenant, query.model):
            raise unknown_publisher(fields.worker_id, fields.dp_rank or 0)
        if registration.is_pool:
            raise ApiError(422, "invalid_value", "worker_id: a pool is no routing target", "worker_id")
        ttl_s = fields.ttl_s or limits.expected_ttl_s
        now = time.monotonic()
        hit_tokens = index.predict(followed.index, query)
        expectation = index.expect(followed.index, query, now + ttl_s)
        note_routed()
        told = {
            "hit_tokens": hit_tokens,
            "expected_blocks": expectation.blocks,
            "expires_in_s": ttl_s if expectation.blocks else 0,
            "content_key": hex_key(expectation.content_key),
        }
        return chosen.content_type, chosen.encode(told)

    def observed(body: bytes, content_type: str | None, caller: Caller) -> tuple[bytes, bytes]:
        check_json(content_type)
        fields = decode("JSON", _read_observed, body)
        followed = find_seen(registry, caller, fields.worker_id, fields.dp_rank or 0)
        predictions = followed.index.predictions
        if predictions is None:
            predictions = followed.index.predictions = Predictions(prediction_limits)
        key = None if fields.content_key is None else read_keys("content_key", [fields.content_key])[0]
        if predictions.note(fields.predicted_tokens, fields.cached_tokens, key, time.time()):
            _log_alarm(followed, predictions)
        error = fields.predicted_tokens - fields.cached_tokens
        return JSON.encode(), encode_json({"error_tokens": error, "alarm": predictions.is_alarmed})

    return [QueryRoute(ROUTED_PATH, routed, services.life), QueryRoute(OBSERVED_PATH, observed, services.life)]


def feedback_router() -> APIRouter:
    router = APIRouter()
    describe_query(router, ROUTED_PATH, ROUTED_OPENAPI)
    describe_query(router, OBSERVED_PATH, OBSERVED_OPENAPI)
    return router


def to_query(fields: RoutedBody, index: ContentIndex, tokens_max: int) -> PrefixQuery:
    """Raises ApiError 422 for no prompt, two, or one that is too long."""
    tenant = fields.tenant or "default"
    if fields.token_ids is None and fields.local_hashes is None:
        raise ApiError(422, "missing_field", "token_ids (or local_hashes) is required", "token_ids")
    if fields.token_ids is not None and fields.local_hashes is not None:
        raise ApiError(422, "conflicting_fields", "local_hashes: give these or token_ids, not both", "local_hashes")
    hashes = None
    if fields.token_ids is None:
        hashes = read_hashes(fields, "local_hashes", least_granule(index, tenant, fields.model), tokens_max)
    else:
        check_length(fields.token_ids, tokens_max)
    return PrefixQuery(
        model=fields.model,
        token_ids=fields.token_ids or b"",
        tenant=tenant,
        lora_name=fields.lora_name,
        cache_salt=fields.cache_salt,
        multimodal=items_of(fields.multimodal) if fields.multimodal else (),
        local_hashes=hashes,
    )


def _log_alarm(followed: FollowedPublisher, predictions: Predictions) -> None:
    facts: dict[str, Any] = {
        **followed.registration.key._asdict(),
        "wrong_share": round(predictions.wrong_share, 3),
        "observations": predictions.count,
    }
    if predictions.is_alarmed:
        log.warning("prediction_alarm_raised", **facts)
    else:
        log.info("prediction_alarm_ended", **facts)
