"""The standard event maps of Mooncake's RFC #1527, which engines and the Mooncake store master publish.

Fields: `event_type` (stored, removed, cleared), `model_name`, `tenant_id`, `dp_rank`, `backend_id`, `medium`,
`block_size`, `lora_name`, `additional_salt`; a stored event also has `seq_hashes`, and `base_block_idx`, `parent_hash`
or both, and `token_ids` unless its hashes are standard. The store master sends one event per object, with its
`object_key`: an object is removed by that, so it is its engine hash here, whatever else is told, and it counts once.

Blocks that lie nobody knows where, or whose prompt has an additional salt, are taken by their hash alone.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from indexer.wire.errors import ForOthers, WireError
from indexer.wire.events import (
    REPEATED,
    Addressee,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    StandardStored,
    canonical_hash,
)

POSITION_MAX = 1 << 31  # tokens
OBJECT = b"object_key:"  # in front of keys, so that none is as short as a hash of 64 bits

OPTIONAL_TEXTS = ("model_name", "tenant_id", "backend_id", "medium", "lora_name", "object_key")  # empty: not said


class _Fields(msgspec.Struct, gc=False):
    event_type: str
    model_name: str | None = None
    tenant_id: str | None = None
    dp_rank: int | None = None
    backend_id: str | int | None = None
    medium: str | None = None
    block_size: int | None = None
    lora_name: str | None = None
    additional_salt: Any = None
    seq_hashes: list[int | bytes] | None = None
    base_block_idx: int | None = None
    parent_hash: int | bytes | UnsetType | None = UNSET
    token_ids: list[int | list[int]] | None = None
    object_key: str | None = None


_decode = msgspec.msgpack.Decoder(_Fields).decode


def read(raw: bytes | msgspec.Raw, addressee: Addressee | None) -> list[Event]:
    """See `Reader`. Reasons: `unknown_event`, `missing_field`, `no_hashes`, `bad_block_size`, `bad_position`."""
    fields = _decode(raw)
    for name in OPTIONAL_TEXTS:
        if getattr(fields, name) == "":
            setattr(fields, name, None)
    if addressee is not None and not addressee.is_meant(fields.model_name, fields.tenant_id, fields.dp_rank):
        raise ForOthers
    if fields.event_type == "stored":
        return [_stored(fields, _owner(fields, addressee))]
    if fields.event_type == "removed":
        hashes = _names(fields)
        return [BlockRemoved(block_hashes=hashes, medium=fields.medium, ownership=_owner(fields, addressee))]
    if fields.event_type == "cleared":
        return [AllBlocksCleared(medium=fields.medium)]
    raise WireError("unknown_event", f"event_type is {fields.event_type[:32]!r}")


def _owner(fields: _Fields, addressee: Addressee | None) -> str | None:
    """A backend is who owns blocks; if it is the worker itself, that needs no name."""
    owner = None if fields.backend_id is None else str(fields.backend_id)
    return None if addressee is not None and owner == addressee.worker_id else owner


def _names(fields: _Fields) -> list[int | bytes]:
    """What the blocks are called, when they come and when they go."""
    if fields.object_key is not None:
        return [OBJECT + fields.object_key.encode()]
    if fields.seq_hashes is None:
        raise WireError("no_hashes", "there are neither seq_hashes nor an object_key")
    return fields.seq_hashes


def _stored(fields: _Fields, owner: str | None) -> BlockStored:
    names = _names(fields)
    if fields.token_ids:
        stored = _with_tokens(fields, names, owner)
    elif fields.seq_hashes:
        stored = _with_standard_hashes(fields, names, owner)
    else:
        raise WireError("no_hashes", "an object is stored of which nothing is told but its key")
    if fields.object_key is not None:
        stored.origin = REPEATED
    return stored


def _with_tokens(fields: _Fields, names: list[int | bytes], owner: str | None) -> BlockStored:
    """Its content is told by its tokens; an object is one block of them all."""
    size = len(fields.token_ids or ()) if fields.object_key is not None else _block_size(fields)
    stored = BlockStored(block_hashes=names, token_ids=[], block_size=size, medium=fields.medium, ownership=owner)
    parent = fields.parent_hash if isinstance(fields.parent_hash, int | bytes) else None
    is_placed = _first_block(fields) == 0 or parent is not None
    if fields.additional_salt or not is_placed:
        stored.block_size = 0  # by hash
    else:
        stored.token_ids, stored.parent_block_hash = fields.token_ids or [], parent
        stored.lora_name = fields.lora_name
    return stored


def _with_standard_hashes(fields: _Fields, names: list[int | bytes], owner: str | None) -> BlockStored:
    """Its hashes are content keys: adapter and prefix are in them already. An object is what its last hash says."""
    seq_hashes = fields.seq_hashes or []
    size, first_block = _block_size(fields), _first_block(fields)
    blocks = len(seq_hashes)
    if first_block is not None and (first_block + blocks) * size > POSITION_MAX:
        raise WireError("bad_position", f"base_block_idx is {first_block}")
    stored = StandardStored(
        block_hashes=names,
        token_ids=[],
        block_size=size if fields.object_key is None else size * blocks,
        medium=fields.medium,
        ownership=owner,
    )
    keys = [canonical_hash(h) for h in (seq_hashes if fields.object_key is None else seq_hashes[-1:])]
    narrow = [key for key in keys if isinstance(key, int)]
    if not fields.additional_salt and len(narrow) == len(keys):
        parent = canonical_hash(fields.parent_hash) if isinstance(fields.parent_hash, int | bytes) else None
        stored.content_keys, stored.hash_tokens = narrow, size
        stored.start_tokens = None if first_block is None else first_block * size
        stored.start_key = parent if isinstance(parent, int) else None
    return stored


def _block_size(fields: _Fields) -> int:
    if fields.block_size is None:
        raise WireError("missing_field", "block_size is missing")
    if not 0 < fields.block_size < POSITION_MAX:
        raise WireError("bad_block_size", f"block_size is {fields.block_size}")
    return fields.block_size


def _first_block(fields: _Fields) -> int | None:
    """Which block of its prompt the first one is; None: only the parent tells, or nothing."""
    index = fields.base_block_idx
    if index is None:
        return 0 if fields.parent_hash is None else None
    if index < 0 or (index == 0 and isinstance(fields.parent_hash, int | bytes)):
        raise WireError("bad_position", f"base_block_idx is {index}, or contradicts parent_hash")
    return index
