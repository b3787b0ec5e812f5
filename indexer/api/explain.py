"""`POST /v1/explain`: why a publisher has the hit that it has. `GET /v1/journal`: what happened to it of late."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from indexer.api.access import caller_of
from indexer.api.errors import ApiError
from indexer.api.explain_schemas import EXPLAIN_OPENAPI, JournalPage
from indexer.api.formats import (
    Format,
    Name,
    Rank,
    TokenId,
    TokenIds,
    check_length,
    choose_format,
    hex_key,
    json_format,
    msgpack_format,
)
from indexer.api.ports import Services
from indexer.api.prefix_hits import MultimodalBody, items_of
from indexer.api.publishers import DpRank, answer, find_seen, seen
from indexer.api.schemas import MULTIMODAL_MAX, NAME_LENGTH_MAX, errors
from indexer.api.slices import in_slices
from indexer.index.journal import Entry
from indexer.index.journal_reading import Happening, read_page
from indexer.index.prefix_query import PrefixQuery
from indexer.index.state import EngineHash
from indexer.registration import PublisherKey

ENTRIES_MAX = 1_000
CLOCKS_APART_S = 60.0
BLOCKS_AT_ONCE = 500  # described between two chances for other work on the loop, or a few more; an entry is as dear


class PublisherBody(msgspec.Struct, forbid_unknown_fields=True):
    worker_id: Name
    dp_rank: Rank = 0


class MsgpackExplain(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The prompt as in `POST /v1/prefix-hits`. Null means the default."""

    model: Name
    token_ids: TokenIds
    worker_id: Name
    dp_rank: Rank | None = None
    compare_with: PublisherBody | None = None
    tenant: Name | None = None
    lora_name: Name | None = None
    cache_salt: Name | None = None
    multimodal: Annotated[list[MultimodalBody], msgspec.Meta(max_length=MULTIMODAL_MAX)] | None = None
    as_of: float | str | None = None


class JsonExplain(MsgpackExplain, kw_only=True):
    token_ids: list[TokenId]


JSON_FORMAT: Format[MsgpackExplain] = json_format(JsonExplain, "token_ids")
MSGPACK_FORMAT: Format[MsgpackExplain] = msgpack_format(MsgpackExplain, "token_ids")


def explain_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1")
    _add_explain(router, services)
    _add_journal(router, services)
    return router


def _add_explain(router: APIRouter, services: Services) -> None:
    @router.post("/explain", **EXPLAIN_OPENAPI)
    async def explain(request: Request) -> Response:
        chosen = choose_format(request.headers.get("content-type"), JSON_FORMAT, MSGPACK_FORMAT)
        fields = chosen.read(await request.body())
        caller = caller_of(request)
        caller.require(fields.tenant or "default")
        check_length(fields.token_ids, services.limits.prompt_tokens_max)
        wanted = [("worker_id", PublisherKey(fields.worker_id, fields.dp_rank or 0))]
        if (other := fields.compare_with) is not None:
            wanted.append(("compare_with.worker_id", PublisherKey(other.worker_id, other.dp_rank)))
        if fields.as_of is None:
            index = services.index
            found = [find_seen(services.registry, caller, *key, field).index for field, key in wanted]
        else:
            past = await services.past(read_time(fields.as_of), to_query(fields), [key for _, key in wanted])
            index = past.index
            found = [seen(caller, p, key, field) for p, (field, key) in zip(past.publishers, wanted, strict=True)]
        explanation = await in_slices(index.explain(to_query(fields), found))
        return Response(chosen.encode(explanation), media_type=chosen.content_type.decode())


def _add_journal(router: APIRouter, services: Services) -> None:
    run = secrets.token_hex(4)  # cursors of another run of the service mean nothing

    @router.get(
        "/journal",
        tags=["inspection"],
        summary="What happened to a publisher of late: its events, and what came by none, in order",
        responses={200: {"model": JournalPage}, **errors(403, 404, 422, 503)},
    )
    async def get_journal(
        request: Request,
        worker_id: Annotated[str, Query(min_length=1, max_length=NAME_LENGTH_MAX)],
        dp_rank: DpRank = 0,
        after: Annotated[str | None, Query(description="`next` of an earlier answer; without it, the oldest")] = None,
        limit: Annotated[int, Query(ge=1, le=ENTRIES_MAX, description="batches and other entries at most")] = 100,
    ) -> Response:
        publisher = find_seen(services.registry, caller_of(request), worker_id, dp_rank).index
        prefix = f"{run}-{publisher.registration.publisher_id}-"
        position = read_cursor(after, prefix)
        page = await in_slices(read_page(publisher, position or 0, limit))
        entries = await in_slices(entries_of(page.happenings))
        is_foreign = after is not None and position is None
        return answer(
            {
                "worker_id": worker_id,
                "dp_rank": dp_rank,
                "truncated_before": _truncation(page.dropped_last, is_foreign or not publisher.journal.bytes_max),
                "entries": entries,
                "next": f"{prefix}{page.next_position}",
                "is_last": page.next_position == publisher.journal.end,
            }
        )


def read_time(as_of: float | str) -> float:
    """Seconds since 1970, of those or of a time by ISO 8601, in UTC unless it says otherwise. Raises ApiError 422."""
    try:
        moment = datetime.fromtimestamp(as_of, UTC) if isinstance(as_of, float) else datetime.fromisoformat(as_of)
        at = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        datetime.fromtimestamp(at, UTC)  # the last microsecond of the year 9999 is rounded up
    except (ValueError, OverflowError, OSError) as error:
        message = "as_of: must be seconds since 1970, or a time like 2026-11-30T09:15:00Z"
        raise ApiError(422, "invalid_value", message, "as_of") from error
    if at > time.time() + CLOCKS_APART_S:
        raise ApiError(422, "invalid_value", "as_of: lies in the future", "as_of")
    return at


def to_query(fields: MsgpackExplain) -> PrefixQuery:
    return PrefixQuery(
        model=fields.model,
        token_ids=fields.token_ids,
        tenant=fields.tenant or "default",
        lora_name=fields.lora_name,
        cache_salt=fields.cache_salt,
        multimodal=items_of(fields.multimodal) if fields.multimodal else (),
    )


_CURSOR = re.compile(r"[0-9a-f]{8}-[0-9]{1,20}-([0-9]{1,18})")


def read_cursor(after: str | None, prefix: str) -> int | None:
    """The position that a cursor means; None without one, or if it is of another run or registration. Raises ApiError
    422."""
    cursor = None if after is None else _CURSOR.fullmatch(after)
    if after is not None and cursor is None:
        raise ApiError(422, "invalid_value", "after: must be `next` of an earlier answer", "after")
    return int(cursor[1]) if cursor is not None and cursor[0].startswith(prefix) else None


def _truncation(dropped: Entry | None, is_unknown: bool) -> dict[str, Any] | None:
    if dropped is not None:
        return {"sequence_number": dropped.sequence_number, "at": dropped.at}
    return {"sequence_number": None, "at": None} if is_unknown else None


def entries_of(happenings: Sequence[Happening]) -> Generator[None, None, list[msgspec.Raw]]:
    """As JSON, as what the generator returns; each of its steps takes a millisecond or two."""
    entries, done = [], 0
    for happening in happenings:
        hashes: list[str] = []
        content_keys: list[str | None] = []
        for first in range(0, max(1, len(happening.hashes)), BLOCKS_AT_ONCE):
            part = slice(first, first + BLOCKS_AT_ONCE)
            hashes += map(_hex_hash, happening.hashes[part])
            content_keys += map(hex_key, happening.keys[part])
            done += 1 + len(happening.hashes[part])
            if done >= BLOCKS_AT_ONCE:
                done = 0
                yield
        entries.append(msgspec.Raw(msgspec.json.encode(_describe(happening, hashes, content_keys))))
    return entries


def _describe(happening: Happening, hashes: Sequence[str], content_keys: Sequence[str | None]) -> dict[str, Any]:
    gap_first, gap_last = happening.gap or (None, None)
    return {
        "kind": happening.kind,
        "sequence_number": happening.sequence_number,
        "at": happening.at,
        "medium": happening.medium,
        "group": happening.group,
        "owner": happening.owner,
        "block_tokens": happening.block_tokens,
        "hashes": hashes,
        "content_keys": content_keys,
        "gap_first": gap_first,
        "gap_last": gap_last,
    }


def _hex_hash(engine_hash: EngineHash) -> str:
    return engine_hash.hex() if isinstance(engine_hash, bytes) else f"{engine_hash:016x}"
