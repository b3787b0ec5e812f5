"""What is asked over gRPC: scores of pods (llm-d), and prefixes by the engines' own hashes (SGLang's indexer).

A fault is a status with a sentence: INVALID_ARGUMENT for what the caller did wrong, OUT_OF_RANGE for a prompt that is
too long, PERMISSION_DENIED for another's tenant, UNAVAILABLE until the index is recovered.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from indexer.api.access import ANYONE, Caller
from indexer.api.errors import ApiError
from indexer.api.meters import MeasuredIndex
from indexer.api.ports import Services
from indexer.api.rpc import messages
from indexer.index.columns import U64
from indexer.index.engine_prefix import matched_blocks
from indexer.index.prefix_query import PrefixQuery
from indexer.index.scores import Score, scores

WEIGHT_MAX = 1_000.0
HASHES_BETWEEN_TURNS = 100_000  # a millisecond; then others have the loop
STATUS_OF = {400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED}
STATUS_OF |= {403: grpc.StatusCode.PERMISSION_DENIED, 503: grpc.StatusCode.UNAVAILABLE}

CallerOf = Callable[[Mapping[str, str]], Caller]
"""The metadata of a call -> who asks. May raise ApiError 401."""


def anyone(_metadata: Mapping[str, str]) -> Caller:
    return ANYONE


def rpc_handlers(services: Services, caller_of: CallerOf = anyone) -> list[grpc.GenericRpcHandler]:
    asked = _Asked(services, caller_of)
    return [
        asked.handler(
            f"{messages.SCORES_PACKAGE}.IndexerService", "GetPodScores", asked.pod_scores, messages.GetPodScoresRequest
        ),
        asked.handler(
            f"{messages.PREFIX_PACKAGE}.KVIndexer",
            "MatchExternalKvPrefix",
            asked.match_prefix,
            messages.MatchExternalKvPrefixRequest,
        ),
    ]


class _Asked:
    def __init__(self, services: Services, caller_of: CallerOf) -> None:
        self._services = services
        self._index = services.index
        self._measured = MeasuredIndex(services.index, services.metrics)
        self._caller_of = caller_of

    def handler(
        self, service: str, method: str, answer: Callable[[Any, Any], Awaitable[Any]], message: Any
    ) -> grpc.GenericRpcHandler:
        """Nothing of a request is read before its caller is known."""

        async def call(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            try:
                caller = self._caller_of(_metadata(context))
                request = message.FromString(data)
                caller.require(request.tenant or "default")
            except DecodeError:
                await _refuse(context, "the request is not the message that this method takes")
            except ApiError as error:
                status = STATUS_OF.get(error.status_code, grpc.StatusCode.INVALID_ARGUMENT)
                await context.abort(status, f"{error.code}: {error.detail}")
            if not self._services.life.is_recovered or self._services.life.is_stopping:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "; ".join(self._services.life.missing()))
            told: bytes = (await answer(request, context)).SerializeToString()
            return told

        return grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(call)})

    async def pod_scores(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        tenant = request.tenant or "default"
        if not request.token_ids:
            said = "there is no tokenizer here: send token_ids, which are field 100 of the request"
            await _refuse(context, f"prompt: {said}" if request.prompt else f"token_ids: {said}")
        await self._check_length(context, "token_ids", len(request.token_ids))
        weights = {weight.tier.upper(): weight.weight for weight in request.tier_weights}
        if not all(0 <= weight <= WEIGHT_MAX for weight in weights.values()):
            await _refuse(context, f"tier_weights: must be from 0 to {WEIGHT_MAX:g}")
        query = PrefixQuery(
            request.model_name,
            array("I", request.token_ids).tobytes(),
            tenant,
            lora_name=request.lora_name or None,
            cache_salt=request.cache_salt or None,
            workers=frozenset(request.pod_identifiers) or None,
        )
        found = scores(self._index, self._measured.prefix_hits(query), query, weights)
        if found.warnings:
            codes = ",".join(sorted({warning.code for warning in found.warnings}))
            context.set_trailing_metadata((("warnings", codes),))
        return messages.GetPodScoresResponse(scores=_pod_scores(found.scores))

    async def match_prefix(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        tenant = request.tenant or "default"
        await self._check_length(context, "hashes", len(request.hashes))
        asked = request.hashes[: request.max_blocks] if request.max_blocks else request.hashes
        matched = await self._matched(tenant, request.model, np.array(asked, np.int64).view(np.uint64))
        in_order = sorted(matched.items(), key=lambda item: (-item[1], item[0]))
        best = in_order[0][1] if in_order else 0
        matches = [
            messages.ExternalKvPrefixMatch(worker_address=worker_id, matched_prefix_blocks=blocks, worker_id=worker_id)
            for worker_id, blocks in in_order
        ]
        return messages.MatchExternalKvPrefixResponse(
            matches=matches, best_prefix_blocks=best, blocks_read=min(best + 1, len(asked))
        )

    async def _matched(self, tenant: str, model: str, hashes: U64) -> dict[str, int]:
        """Worker -> blocks of the best of its ranks, if there are any. Each rank is looked at in one go."""
        matched: dict[str, int] = {}
        looked_at = 0
        for publisher in self._index.publishers():
            registration = publisher.registration
            if registration.tenant != tenant or model not in ("", registration.model) or registration.is_pool:
                continue
            if blocks := matched_blocks(publisher, hashes):
                matched[registration.worker_id] = max(blocks, matched.get(registration.worker_id, 0))
            looked_at += blocks + 100
            if looked_at > HASHES_BETWEEN_TURNS:
                looked_at = 0
                await asyncio.sleep(0)
        return matched

    async def _check_length(self, context: grpc.aio.ServicerContext, field: str, count: int) -> None:
        most = self._services.limits.prompt_tokens_max
        if count > most:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"{field}: {count} are too many; at most {most}")


async def _refuse(context: grpc.aio.ServicerContext, message: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
    raise AssertionError("abort raises")


def _pod_scores(found: Sequence[Score]) -> list[Any]:
    """Ranks are named where a worker has others than rank 0."""
    ranked = {score.worker_id for score in found if score.dp_rank}
    pods = []
    for score in found:
        pod = messages.PodScore(pod=score.worker_id, score=score.score)
        if score.worker_id in ranked:
            pod.data_parallel_rank = score.dp_rank
        pods.append(pod)
    return pods


def _metadata(context: grpc.aio.ServicerContext) -> Mapping[str, str]:
    """Of what is said twice nothing."""
    said = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
    counts = Counter(key for key, _ in said)
    return {key: value for key, value in said if counts[key] == 1}
