"""Questions of an operator or a researcher: what is this block, what is held in all, do rows and memory agree?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from indexer.api.access import caller_of
from indexer.api.errors import ApiError
from indexer.api.formats import HEX_DIGITS, hex_key
from indexer.api.ports import Services
from indexer.api.publishers import answer
from indexer.api.schemas import Audit, Block, Stats, errors

_BLOCK_FIELDS = ("parent_key", "local_hash", "position", "block_tokens")


def inspect_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["inspection"])

    @router.get(
        "/blocks/{content_key}",
        summary="One block by its content key: where it belongs and who holds it",
        description="The key is hexadecimal if it begins with 0x, has 16 digits or contains a letter, else decimal.",
        responses={200: {"model": Block}, **errors(404, 422, 503)},
    )
    async def get_block(request: Request, content_key: str) -> Response:
        key = parse_content_key(content_key)
        tenants = caller_of(request).tenants
        holders = [dict(holder._asdict()) for holder in services.index.block(key, tenants)]
        # for a caller with tenants not even the time tells of rows of others
        rows = await services.blocks(key, tenants) if holders or tenants is None else []
        if not holders and not rows:
            raise ApiError(404, "unknown_block", f"nobody holds a block {hex_key(key)}", "content_key")
        return answer(describe_block(key, holders, rows))

    @router.get(
        "/stats",
        summary="What is held, per model, medium and publisher",
        responses={200: {"model": Stats}, **errors(503)},
    )
    async def get_stats(request: Request) -> Response:
        return answer(services.index.stats(caller_of(request).tenants))

    @router.get(
        "/audit",
        summary="Flush, then compare the rows in Postgres with the index in memory",
        responses={200: {"model": Audit}, **errors(503)},
    )
    async def get_audit() -> Response:
        return answer(await services.audit())

    return router


def parse_content_key(text: str) -> int:
    """Hexadecimal with 0x, with exactly 16 digits (as we print keys) or with a letter; else decimal."""
    digits = text.lower().removeprefix("0x")
    is_hex = text[:2].lower() == "0x" or len(digits) == HEX_DIGITS or any(c in "abcdef" for c in digits)
    allowed = "0123456789abcdef" if is_hex else "0123456789"
    key = int(digits, 16 if is_hex else 10) if digits and len(digits) <= 32 and set(digits) <= set(allowed) else None
    if key is None or key >= 2**64:
        message = f"{text[:64]!r} is not a content key: 16 hexadecimal digits, or a decimal number below 2^64"
        raise ApiError(422, "invalid_value", message, "content_key")
    return key


def describe_block(key: int, holders: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Holders are those in memory; the rows of the store add parent, local hash and position.

    The same prefix may end blocks of different sizes: the block's own fields are those of the first holder, and every
    holder carries its own.
    """
    stored = {_holder_of(row): row for row in rows}
    described = [{**holder, **_block_fields(stored.get(_holder_of(holder), {}))} for holder in holders]
    described.sort(key=_holder_of)
    first = next((h for h in described if h["local_hash"] is not None), None) or _block_fields(rows[0] if rows else {})
    return {"content_key": hex_key(key), **{name: first[name] for name in _BLOCK_FIELDS}, "holders": described}


def _holder_of(holder: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(holder[name] for name in ("worker_id", "dp_rank", "medium", "group", "owner"))


def _block_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "parent_key": hex_key(row.get("parent_key")),
        "local_hash": hex_key(row.get("local_hash")),
        "position": row.get("position"),
        "block_tokens": row.get("block_tokens"),
    }
