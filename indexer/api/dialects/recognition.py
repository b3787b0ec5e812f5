"""Whose words a request speaks, where several services share a path: told by the fields that only one of them has.

| path | Dynamo's indexer | RFC #1403 |
|---|---|---|
| `/query`, `/query_by_hash` | `model_name` | `model` |
| `/register`, `/unregister` | `model_name` | `modelname`, or an `instance_id` that is text |

What has fields of both is Dynamo's, and so is what has none: its faults are worded in our envelope.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

QUOTE = b'"'


class _Members(msgspec.Struct):
    """Members of a request by which it is told, of any value. Whatever else there is costs a nanosecond a byte."""

    model_name: msgspec.Raw | UnsetType = UNSET
    model: msgspec.Raw | UnsetType = UNSET
    modelname: msgspec.Raw | UnsetType = UNSET
    instance_id: msgspec.Raw | UnsetType = UNSET


_read_members = msgspec.json.Decoder(_Members).decode


def is_rfc1403_query(body: bytes) -> bool:
    members = _members(body)
    return members.model_name is UNSET and members.model is not UNSET


def is_rfc1403_registration(body: bytes) -> bool:
    """Also of one that is to end."""
    members = _members(body)
    if members.model_name is not UNSET:
        return False
    is_text = members.instance_id is not UNSET and bytes(members.instance_id).lstrip().startswith(QUOTE)
    return members.modelname is not UNSET or is_text


def _members(body: bytes) -> _Members:
    try:
        return _read_members(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Members()
