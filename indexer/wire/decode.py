"""Payload -> event batch, for every dialect; one bad event costs only itself.

A payload is a msgpack array `[ts, events, data_parallel_rank]` (two elements before 2025-06) or a map of the same
names; each event is a tagged array or a tagged map, mixed as it likes. The outer layer is read first with the events
left raw, then each event by itself: what cannot be read is counted by reason and left out. Events of other forms than
vLLM's are read by `dialects`; they may also come without an outer layer.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from indexer.wire.dialects.recognition import reader_of
from indexer.wire.errors import ForOthers, WireError
from indexer.wire.events import (
    Addressee,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ClearedArray,
    Event,
    RemovedArray,
    StoredArray,
    TierBlocksCleared,
    TierClearedArray,
    TokenIds,
    canonical_hash,
)

if TYPE_CHECKING:
    from indexer.wire.columns import BatchColumns

UNKNOWN_EVENT = "unknown_event"
ARRAY_FIELDS_KNOWN = 15  # tag included: up to `session_id`; what follows differs between forks, names decide there
TOKEN_ID_LIMIT = 1 << 63
GROUPS_MAX = 1_024
NAME_LENGTH_MAX = 128
NAMESPACE_LENGTH_MAX = 1_024  # of a LoRA name or a salt; no query may name a longer one
LOOKAHEAD_TOKENS_MAX = 64
BAD_EVENTS_MAX = 10_000
"""In one batch. Refusing an event costs microseconds, so a megabyte of garbage would hold everybody up for seconds."""


@dataclass(slots=True)
class EventBatch:
    """One message's events, in order. `bad_events` counts those that could not be read, by reason, `for_others` those
    of another model, tenant or rank.

    With `columns` (see columns.py) there are no `events`: all of them are simple, and good until the next is read.
    """

    timestamp: float
    events: list[Event]
    data_parallel_rank: int | None
    payload: bytes
    bad_events: Counter[str] = field(default_factory=Counter)
    columns: BatchColumns | None = None
    for_others: int = 0


class _BatchArray(msgspec.Struct, array_like=True, gc=False):
    ts: Any
    events: list[msgspec.Raw]
    data_parallel_rank: Any = None


class _BatchMap(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]
    ts: Any = 0.0
    data_parallel_rank: Any = None


_decode_batch_array = msgspec.msgpack.Decoder(_BatchArray).decode
_decode_batch_map = msgspec.msgpack.Decoder(_BatchMap).decode
_decode_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_event_map = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared | TierBlocksCleared).decode
_ARRAY_EVENT = StoredArray | RemovedArray | ClearedArray | TierClearedArray
_decode_event_array = msgspec.msgpack.Decoder(_ARRAY_EVENT).decode


def decode_batch(payload: bytes, addressee: Addressee | None = None) -> EventBatch:
    """Read one payload. Cost: about 2 us for a block of 16 tokens. `addressee`: events for others are left out.

    Raises WireError if the payload as a whole is not a batch: `truncated_batch` or `not_a_batch`; or if more of its
    events than BAD_EVENTS_MAX cannot be read: `too_many_bad_events`.
    """
    outer = _decode_outer(payload)
    batch = EventBatch(_timestamp(outer.ts), [], _rank(outer.data_parallel_rank), payload)
    for raw in outer.events:
        try:
            batch.events.append(decode_event(raw))
        except WireError as error:
            reason = _decode_foreign(raw, addressee, batch) if error.reason == UNKNOWN_EVENT else error.reason
            if reason is None:
                continue
            batch.bad_events[reason] += 1
            if batch.bad_events.total() > BAD_EVENTS_MAX:
                raise WireError("too_many_bad_events", f"more than {BAD_EVENTS_MAX} events cannot be read") from error
    return batch


def raw_events(payload: bytes) -> list[msgspec.Raw]:
    """The events of a payload, each as it was sent. Raises WireError as `decode_batch`."""
    return _decode_outer(payload).events


def _decode_foreign(raw: msgspec.Raw, addressee: Addressee | None, batch: EventBatch) -> str | None:
    """Add an event that is not of vLLM's form to the batch. Returns why it cannot be read, None if it can."""
    reader = reader_of(raw)
    if reader is None:
        return UNKNOWN_EVENT
    try:
        events = reader(raw, addressee)
        for event in events:
            _finish(event)
    except ForOthers:
        batch.for_others += 1
    except WireError as error:
        return error.reason
    except msgspec.ValidationError as error:
        return _reason(str(error))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return "malformed_event"
    else:
        batch.events.extend(events)
    return None


def decode_event(raw: bytes | msgspec.Raw) -> Event:
    """One event of vLLM's form. Raises WireError; reasons: see `_reason` and `_finish_stored`."""
    try:
        first = memoryview(raw)[0]
        event: Event = _decode_event_map(raw) if _is_map(first) else _decode_event_array(raw)
    except msgspec.ValidationError as error:
        event = _decode_long_array(raw, error)
    except (msgspec.DecodeError, ValueError, IndexError, RecursionError) as error:
        raise WireError("malformed_event", str(error)) from error
    if not isinstance(event, AllBlocksCleared) and event.group_idx is not None:
        _refuse_bad_group(event.group_idx)
    _finish(event)
    return event


def _finish(event: Event) -> None:
    if isinstance(event, BlockStored):
        _refuse_bad_names(event.medium, event.locality, event.ownership, event.kv_cache_spec_kind)
        _finish_stored(event)
    elif isinstance(event, BlockRemoved):
        _refuse_bad_names(event.medium, event.locality, event.ownership)
        event.block_hashes = _canonical_hashes(event.block_hashes)
    else:
        _refuse_bad_names(event.medium)


def _decode_outer(payload: bytes) -> _BatchArray | _BatchMap:
    if not payload:
        raise WireError("truncated_batch", "the payload is empty")
    try:
        return _decode_batch_map(payload) if _is_map(payload[0]) else _decode_batch_array(payload)
    except msgspec.ValidationError as error:
        return _BatchMap(_bare_events(payload, error))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError("truncated_batch", str(error)) from error


def _bare_events(payload: bytes, error: msgspec.ValidationError) -> list[msgspec.Raw]:
    """Of a payload that is one event of another form than vLLM's, or an array of such. Raises WireError."""
    try:
        events = [msgspec.Raw(payload)] if _is_map(payload[0]) else _decode_raws(payload)
    except (msgspec.DecodeError, ValueError, RecursionError):
        events = []
    if not events or reader_of(events[0]) is None:
        raise WireError("not_a_batch", str(error)) from error
    return events


def _is_map(first_byte: int) -> bool:
    return first_byte & 0xF0 == 0x80 or first_byte in (0xDE, 0xDF)


def _timestamp(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return 0.0
    return float(value)


def _rank(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _decode_long_array(raw: bytes | msgspec.Raw, error: msgspec.ValidationError) -> Event:
    """An array whose surplus elements mean something else than ours is read without them; anything else is refused."""
    try:
        elements = msgspec.msgpack.decode(raw)
        if isinstance(elements, list) and len(elements) > ARRAY_FIELDS_KNOWN:
            event: Event = msgspec.convert(elements[:ARRAY_FIELDS_KNOWN], _ARRAY_EVENT)
            return event
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError, RecursionError):
        pass  # the first error says more
    raise WireError(_reason(str(error)), str(error)) from error


def _reason(message: str) -> str:
    if "missing required field `type`" in message or message.startswith("Invalid value"):
        return UNKNOWN_EVENT
    if "missing required field" in message or "of at least length" in message:
        return "missing_field"
    return "wrong_type"


def _canonical_hashes(hashes: list[int | bytes]) -> list[int | bytes]:
    try:
        if not hashes or min(hashes) >= 0:  # type: ignore[operator]
            return hashes
    except TypeError:
        pass  # bytes, or a mixture
    return [canonical_hash(engine_hash) for engine_hash in hashes]


def _canonical_parent(engine_hash: int | bytes | None) -> int | bytes | None:
    return None if engine_hash is None else canonical_hash(engine_hash)


def _finish_stored(event: BlockStored) -> None:
    """Bring a store into its one form: canonical hashes, token buffers, fields of SGLang's inner map."""
    if isinstance(event.lora_name, dict):
        _take_inner_map(event, event.lora_name)
    for name in (event.lora_name, event.cache_salt):
        if name is not None and len(name) > NAMESPACE_LENGTH_MAX:
            raise WireError("bad_name", "a LoRA name or salt is too long")
    event.block_hashes = _canonical_hashes(event.block_hashes)
    event.parent_block_hash = _canonical_parent(event.parent_block_hash)
    event.skipped_parent_block_hash = _canonical_parent(event.skipped_parent_block_hash)
    if event.block_parent_hashes is not None:
        event.block_parent_hashes = [_canonical_parent(h) for h in event.block_parent_hashes]
    _refuse_out_of_range(event)
    if event.token_ids and isinstance(event.token_ids[0], list):
        _take_pairs(event)
    if event.lookahead_token_ids:
        _refuse_bad_lookahead(event.lookahead_token_ids)
    event.token_count = len(event.token_ids)
    event.tokens = pack_tokens(event.token_ids)
    event.token_ids = []
    event.skipped_tokens = pack_tokens(event.skipped_token_ids) if event.skipped_token_ids else b""


def _refuse_out_of_range(event: BlockStored) -> None:
    if not 0 <= event.block_size < 1 << 31:
        raise WireError("bad_block_size", f"block_size is {event.block_size}")
    if event.kv_cache_spec_sliding_window is not None and not 0 <= event.kv_cache_spec_sliding_window < 1 << 31:
        raise WireError("bad_window", f"kv_cache_spec_sliding_window is {event.kv_cache_spec_sliding_window}")


def _refuse_bad_lookahead(lookahead_token_ids: list[list[int]]) -> None:
    for tokens in lookahead_token_ids:
        if len(tokens) > LOOKAHEAD_TOKENS_MAX or not all(0 <= t < TOKEN_ID_LIMIT for t in tokens):
            raise WireError("bad_lookahead", "lookahead_token_ids holds too many ids, or an impossible one")


def _refuse_bad_group(group: int) -> None:
    if not 0 <= group < GROUPS_MAX:
        raise WireError("bad_group", f"group_idx is {group}")


def _refuse_bad_names(*names: str | None) -> None:
    """Medium, owner and kind become rows: they must be short, and text that a database can hold."""
    for text in names:
        if text is not None and (len(text) > NAME_LENGTH_MAX or "\0" in text):
            raise WireError("bad_name", "a medium, locality, owner or kind is too long, or not text")


def _take_inner_map(event: BlockStored, fields: dict[str, Any]) -> None:
    """SGLang 0.5.19's arrays carry a map `{"cache_salt": s}` where vLLM's have the LoRA name."""
    event.lora_name = None
    for name in ("cache_salt", "lora_name"):
        value = fields.get(name)
        if value is not None and not isinstance(value, str):
            raise WireError("wrong_type", f"{name} is not text")
        if value is not None:
            setattr(event, name, value)


def _take_pairs(event: BlockStored) -> None:
    """SGLang's EAGLE pages: tokens are pairs `[t, next]`; a page's last `next` is its lookahead."""
    pairs = event.token_ids
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise WireError("wrong_type", "token_ids mixes pairs and single ids")
    event.token_ids = [pair[0] for pair in pairs]  # type: ignore[index]
    if event.block_size > 0:
        last = range(event.block_size - 1, len(pairs), event.block_size)
        event.lookahead_token_ids = [[pairs[i][1]] for i in last]  # type: ignore[index]


def pack_tokens(token_ids: list[int | list[int]] | list[int]) -> TokenIds:
    """Token ids as u32 little-endian bytes; as an array of u64 if one does not fit. Raises WireError."""
    try:
        return array("I", token_ids).tobytes()  # type: ignore[type-var]
    except OverflowError:
        pass
    except TypeError as error:
        raise WireError("wrong_type", "token_ids mixes pairs and single ids") from error
    if not all(isinstance(token, int) for token in token_ids):
        raise WireError("wrong_type", "token_ids mixes pairs and single ids")
    if min(token_ids) < 0 or max(token_ids) >= TOKEN_ID_LIMIT:  # type: ignore[operator]
        raise WireError("token_out_of_range", "a token id is negative or not below 2^63")
    return array("Q", token_ids)  # type: ignore[arg-type]
