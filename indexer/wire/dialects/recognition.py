"""Which dialect an event is of, by its fields: who reads it, and what an engine turns out to be that nobody named.

Events of vLLM's form are read by `wire.decode` whoever sent them; those of TensorRT-LLM's dictionaries and of RFC #1527
have a reader each. SGLang's events differ from vLLM's in what is always there and in that half of its hashes are
negative. What sends vLLM's form itself (TensorRT-LLM's push path, LMCache's connector) is taken for vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec

from indexer.wire.dialects import standard, trtllm
from indexer.wire.events import Addressee, Event

Reader: TypeAlias = Callable[[bytes | msgspec.Raw, Addressee | None], list[Event]]
"""From one event's msgpack to events of ours, whose `token_ids` and hashes are still as they were sent. Raises
msgspec's errors for another layout, WireError for what makes no sense in it, and ForOthers. No events: it says nothing
about blocks."""

VLLM, SGLANG, TRTLLM, MOONCAKE, STANDARD = "vllm", "sglang", "trtllm", "mooncake", "rfc1527"

EVENTS_LOOKED_AT = 16  # of a batch
HASHES_LOOKED_AT = 64  # none negative: they are no signed ones
_VLLM_FIELDS = frozenset(
    {"extra_keys", "group_idx", "kv_cache_spec_kind", "locality", "ownership", "lookahead_token_ids"}
)
_SGLANG_ELEMENTS, _LORA_ELEMENT = 7, 7  # with the tag: arrays end before the LoRA name, where a map may stand


class _Marks(msgspec.Struct, gc=False):
    event_type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode_marks = msgspec.msgpack.Decoder(_Marks).decode


def reader_of(raw: bytes | msgspec.Raw) -> Reader | None:
    """Who reads an event that is not of vLLM's form; None: nobody knows it."""
    try:
        marks = _decode_marks(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if marks.event_type is not msgspec.UNSET:
        return standard.read
    return None if marks.data is msgspec.UNSET else trtllm.read


class Recogniser:
    """The dialect of one publisher: as it was said to be, or None until its events have told. What is found stays."""

    def __init__(self, dialect: str | None = None) -> None:
        self.dialect = dialect
        self._hashes = 0

    def look(self, events: Iterable[bytes | msgspec.Raw]) -> None:
        """At the events of one batch, the first EVENTS_LOOKED_AT. Cost: 1 us per 100 bytes."""
        for raw, _ in zip(events, range(EVENTS_LOOKED_AT), strict=False):
            if self.dialect is not None:
                return
            try:
                event = msgspec.msgpack.decode(raw)
            except (msgspec.DecodeError, ValueError, RecursionError):
                continue
            self.dialect = self._dialect_of(event)

    def _dialect_of(self, event: Any) -> str | None:
        if isinstance(event, dict):
            if "event_type" in event:
                return _of_standard(event)
            return TRTLLM if "data" in event else _of_map(event) or self._of_hashes(event.get("block_hashes"))
        if isinstance(event, list) and len(event) > 1:
            return _of_array(event) or self._of_hashes(event[1])
        return None

    def _of_hashes(self, hashes: Any) -> str | None:
        """SGLang's are signed, vLLM's are not, or bytes."""
        for engine_hash in hashes if isinstance(hashes, list) else ():
            if isinstance(engine_hash, bytes):
                return VLLM
            if isinstance(engine_hash, int) and engine_hash < 0:
                return SGLANG
            self._hashes += 1
        return VLLM if self._hashes >= HASHES_LOOKED_AT else None


def _of_standard(event: dict[Any, Any]) -> str | None:
    """The Mooncake store master's name an object, but for clears."""
    if event["event_type"] == "cleared":
        return None
    return MOONCAKE if event.get("object_key") is not None else STANDARD


def _of_map(event: dict[Any, Any]) -> str | None:
    """vLLM names every field without a default, SGLang's LoRA name is there only if there is one."""
    if not _VLLM_FIELDS.isdisjoint(event):
        return VLLM
    if event.get("type") != "BlockStored":
        return None
    if "cache_salt" in event or _has_pairs(event.get("token_ids")):
        return SGLANG
    if "lora_name" not in event:
        return SGLANG if "lora_id" in event else None
    return VLLM if event["lora_name"] is None else None


def _of_array(event: list[Any]) -> str | None:
    if event[0] != "BlockStored" or len(event) < 5:
        return None
    if _has_pairs(event[3]) or (len(event) > _LORA_ELEMENT and isinstance(event[_LORA_ELEMENT], dict)):
        return SGLANG
    return VLLM if len(event) > _SGLANG_ELEMENTS else None


def _has_pairs(token_ids: Any) -> bool:
    return isinstance(token_ids, list) and bool(token_ids) and isinstance(token_ids[0], list)
