"""`GET /dump` of Dynamo's standalone indexer, as a stream: every block that is held, as events that would store it.

What Postgres has is dumped, in one transaction, so memory is bounded and nothing waits for it; what is not written yet
is written first. `event_id` is the number of the batch that the publisher's part is of: one cut for each of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from indexer.api.access import caller_of
from indexer.api.dialects.dynamo_fleet import instance_id_of
from indexer.api.errors import JSON, require_recovered
from indexer.api.formats import encode_json
from indexer.api.ports import Services
from indexer.api.schemas import errors
from indexer.index.state import StoredBlock, StoredCut
from indexer.index.tiers import CPU, GPU, STORAGE, Media, is_credited

STORAGE_TIERS = {GPU: b"device", CPU: b"host_pinned", STORAGE: b"disk"}
OTHER_TIER = b"external"
_EVENT = (
    b'{"worker_id":%b,"storage_tier":"%b","event":{"event_id":%b,"data":{"stored":{"parent_hash":%b,'
    b'"start_position":%d,"blocks":[{"block_hash":%d,"tokens_hash":%b}]}},"dp_rank":%d},"group_idx":%d}'
)


def dump_router(services: Services) -> APIRouter:
    router = APIRouter()
    media = Media(services.index.limits.media)

    @router.get("/dump", **DUMP_OPENAPI)
    async def dump(request: Request) -> Response:
        require_recovered(services.life)
        parts = services.dump(caller_of(request).tenants)
        first = await anext(parts, None)  # so that a database that is away is a 503 and not half an answer
        return StreamingResponse(write_dump(first, parts, media), media_type=JSON)

    return router


async def write_dump(
    first: StoredCut | list[StoredBlock] | None,
    parts: AsyncGenerator[StoredCut | list[StoredBlock], None],
    media: Media,
) -> AsyncIterator[bytes]:
    """One JSON object, piece by piece: for each model and group its events, and then whose they are and of when."""
    writer = _Writer(media)
    async with aclosing(parts):
        if first is not None:
            yield writer.write(first)
        async for part in parts:
            yield writer.write(part)
        yield writer.end()


class _Writer:
    """Says how a dump goes on; parts of one model and group follow each other."""

    def __init__(self, media: Media) -> None:
        self._cuts: list[StoredCut] = []  # of the group that is open
        self._has_events = False
        self._tier_of = media.tier_of

    def write(self, part: StoredCut | list[StoredBlock]) -> bytes:
        return self._begin(part) if isinstance(part, StoredCut) else self._events(part)

    def end(self) -> bytes:
        return (self._end_group() if self._cuts else b"{") + b"}"

    def _begin(self, cut: StoredCut) -> bytes:
        """A publisher of the group that is open, or the first one of another."""
        if self._cuts and _group_of(self._cuts[0]) == _group_of(cut):
            self._cuts.append(cut)
            return b""
        before = self._end_group() + b"," if self._cuts else b"{"
        self._cuts, self._has_events = [cut], False
        size = encode_json(_block_size(cut))
        return before + b'%b:{"block_size":%b,"events":[' % (encode_json(_group_of(cut)), size)

    def _end_group(self) -> bytes:
        return b'],"publishers":%b}' % encode_json([_describe_cut(cut) for cut in self._cuts])

    def _events(self, blocks: Iterable[StoredBlock]) -> bytes:
        cut = self._cuts[-1]
        worker_id, number = encode_json(instance_id_of(cut.registration.worker_id)), encode_json(cut.sequence_number)
        events = [
            _EVENT
            % (
                worker_id,
                STORAGE_TIERS.get(self._tier_of(block.medium), OTHER_TIER),
                number,
                b"null" if block.parent_key is None else b"%d" % block.parent_key,
                block.position // block.block_tokens,
                block.content_key,
                b"null" if block.local_hash is None else b"%d" % block.local_hash,
                cut.registration.dp_rank,
                block.group,
            )
            for block in blocks
            if is_credited(block.medium)
        ]
        before = b"," if self._has_events and events else b""
        self._has_events = self._has_events or bool(events)
        return before + b",".join(events)


def _group_of(cut: StoredCut) -> str:
    return f"{cut.registration.model}:{cut.registration.tenant}"


def _block_size(cut: StoredCut) -> int | None:
    return cut.granule or cut.registration.block_size


def _describe_cut(cut: StoredCut) -> dict[str, object]:
    return {
        "instance_id": instance_id_of(cut.registration.worker_id),
        "dp_rank": cut.registration.dp_rank,
        "block_size": _block_size(cut),
        "sequence_number": cut.sequence_number,
        "coverage": cut.coverage,
    }


class Cut(BaseModel):
    """Whose events there are, and of which batch: that of its `event_id`."""

    instance_id: int | str
    dp_rank: int
    block_size: int | None
    sequence_number: int | None
    coverage: str


class DumpedModel(BaseModel):
    block_size: int | None
    events: list[dict[str, Any]] = Field(
        description="One block each, parents first; hashes are content keys, tokens_hash the local one.",
        examples=[
            [
                {
                    "worker_id": 7,
                    "storage_tier": "device",
                    "event": {
                        "event_id": 41,
                        "data": {
                            "stored": {
                                "parent_hash": None,
                                "start_position": 0,
                                "blocks": [{"block_hash": 16863443419780771464, "tokens_hash": 16863443419780771464}],
                            }
                        },
                        "dp_rank": 0,
                    },
                    "group_idx": 0,
                }
            ]
        ],
    )
    publishers: list[Cut]


DUMP_OPENAPI: dict[str, Any] = {
    "summary": "Every block that is held, as a stream: one cut for each publisher (Dynamo)",
    "tags": ["dialects"],
    "responses": {
        200: {"model": dict[str, DumpedModel], "description": "By `model:routing_group`."},
        **errors(503),
    },
}
