"""What is asked, as method, target and body: the calls that both clients make. Pure; a wrong argument raises here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote

import msgspec

from indexer.client.answers import PrefixHits, read_prefix_hits
from indexer.client.prompts import LocalHashes, TokenIds, local_hashes, pack_hashes, pack_tokens

JSON, MSGPACK = "application/json", "application/msgpack"
Detail: TypeAlias = Literal["summary", "tiers", "groups", "intervals"]
T = TypeVar("T")

_encode_msgpack = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode


class Request(NamedTuple, Generic[T]):
    """`read` makes an answer of the body; may raise ValueError, for one that is not what was asked for."""

    method: str
    target: str
    content_type: str
    body: bytes
    read: Callable[[bytes], T]


class Prompt(TypedDict, total=False):
    """What decides, beside tokens, which blocks a prompt may reuse; and what is asked of it."""

    tenant: str | None
    lora_name: str | None
    cache_salt: str | None
    multimodal: Iterable[tuple[str, int, int]]
    workers: Iterable[str] | None
    min_hit_tokens: int | None
    limit: int | None
    detail: Detail | bool | None
    expected: bool | None


class Registration(TypedDict, total=False):
    """The optional fields of `POST /v1/publishers` (docs/api.md); left out or None = the service's default."""

    dp_rank: int
    replay_endpoint: str | None
    tenant: str | None
    engine: str | None
    block_size: int | None
    kind: Literal["engine", "pool"] | None
    serves: Sequence[str] | None
    options: dict[str, Any] | None


def prefix_hits(
    model: str,
    token_ids: TokenIds | None,
    hashes: LocalHashes | None,
    granule: int | None,
    *,
    tenant: str | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    multimodal: Iterable[tuple[str, int, int]] = (),
    workers: Iterable[str] | None = None,
    min_hit_tokens: int | None = None,
    limit: int | None = None,
    detail: Detail | bool | None = None,
    expected: bool | None = None,
) -> Request[PrefixHits]:
    """With `granule` tokens are hashed here, adapter, salt and items with them, and only the hashes travel.

    The body has its fields in one order and none that is not needed: the service then knows its shape. Raises
    TypeError and ValueError.
    """
    if (token_ids is None) == (hashes is None):
        raise TypeError("give either token_ids or local_hashes")
    optional = {"tenant": tenant, "lora_name": lora_name, "cache_salt": cache_salt}
    _check_texts(model=model, **{name: text for name, text in optional.items() if text is not None})
    if isinstance(workers, str):
        raise TypeError("workers must be several worker_ids, not one text")
    body: dict[str, object] = {"model": model}
    if token_ids is not None and granule is None:
        packed = pack_tokens(token_ids)
        body["token_ids"] = packed.tolist() if isinstance(packed, array) else packed
        body["lora_name"], body["cache_salt"] = lora_name or None, cache_salt or None
        body["multimodal"] = _items(multimodal) or None
    else:
        if token_ids is not None:
            assert granule is not None
            extras: dict[str, Any] = {"lora_name": lora_name, "cache_salt": cache_salt, "multimodal": multimodal}
            hashes = local_hashes(token_ids, granule, **extras)
        elif lora_name or cache_salt or multimodal:
            raise TypeError("adapter, salt and multimodal items are in local_hashes already")
        assert hashes is not None
        body["local_hashes"], body["granule"] = pack_hashes(hashes), granule
    body["tenant"] = tenant
    body["workers"] = None if workers is None else list(workers)
    body["min_hit_tokens"], body["limit"], body["detail"] = min_hit_tokens, limit, detail or None
    body["expected"] = expected or None
    named = {name: value for name, value in body.items() if value is not None}
    return Request("POST", "/v1/prefix-hits", MSGPACK, _encode_msgpack(named), read_prefix_hits)


def register(worker_id: str, model: str, endpoint: str, **fields: Any) -> Request[bytes]:
    """Raises TypeError, also for a field that no registration has."""
    if unknown := fields.keys() - Registration.__annotations__.keys():
        raise TypeError(f"a registration has no field {min(unknown)!r}")
    _check_texts(worker_id=worker_id, model=model, endpoint=endpoint)
    body = {"worker_id": worker_id, "model": model, "endpoint": endpoint, **fields}
    return call("POST", "/v1/publishers", {name: value for name, value in body.items() if value is not None})


def unregister(worker_id: str, dp_rank: int | None) -> Request[bytes]:
    _check_texts(worker_id=worker_id)
    rank = "" if dp_rank is None else f"?dp_rank={int(dp_rank)}"
    return call("DELETE", f"/v1/publishers/{quote(worker_id, safe='')}{rank}")


def ready() -> Request[bytes]:
    return call("GET", "/readyz")


def call(method: str, path: str, body: object = None) -> Request[bytes]:
    """Any route, with a body in JSON. Raises ValueError and TypeError."""
    if not (method.isascii() and method.isalpha() and path.startswith("/")):
        raise ValueError(f"{method} {path} is no request: a method, and a path that begins with a slash")
    if any(not "!" <= character <= "~" for character in path):
        raise ValueError("a path is of visible ASCII: percent-encode it")
    return Request(method.upper(), path, JSON, b"" if body is None else _encode_json(body), bytes)


def _items(multimodal: Iterable[tuple[str, int, int]]) -> list[dict[str, object]]:
    return [{"identifier": identifier, "offset": offset, "length": length} for identifier, offset, length in multimodal]


def _check_texts(**texts: object) -> None:
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} must be text, not {type(text).__name__}")
