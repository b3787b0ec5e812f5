"""Bodies of queries: JSON or msgpack, typed and bounded by msgspec, which names the faulty field.

A long array of integers is read apart (indexer/wire/query_tokens.py): as a list it would be one object per token.
Whatever that cannot read is decoded as a whole instead, so that every fault is found and worded by msgspec alone.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from indexer.api.errors import JSON, ApiError, is_json
from indexer.api.schemas import DP_RANK_MAX, NAME_LENGTH_MAX, TOKEN_ID_MAX
from indexer.wire.query_tokens import EMPTY_JSON_ARRAY, EMPTY_MSGPACK_ARRAY, split_json, split_msgpack

MSGPACK = "application/msgpack"
MSGPACK_TYPES = frozenset({MSGPACK, "application/x-msgpack"})
U32_BYTES, U64_BYTES = 4, 8
HEX_DIGITS = 16

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=DP_RANK_MAX)]
HexKey: TypeAlias = Annotated[str, msgspec.Meta(min_length=HEX_DIGITS, max_length=HEX_DIGITS)]
TokenIds: TypeAlias = list[TokenId] | bytes  # bytes: u32 little-endian

Parts: TypeAlias = tuple[bytes, bytes]
Split: TypeAlias = Callable[[bytes, bytes], Parts | None]
BodyT = TypeVar("BodyT", bound=msgspec.Struct)

encode_json = msgspec.json.Encoder().encode
encode_msgpack = msgspec.msgpack.Encoder().encode


class Format(Generic[BodyT]):
    """One format of the bodies of one query: how its fields are read, and how its answer is written."""

    def __init__(
        self,
        name: str,
        content_type: str,
        decode: Callable[[bytes], BodyT],
        encode: Callable[[Any], bytes],
        array: str,
        split: Split,
        empty: bytes,
    ) -> None:
        self.content_type = content_type.encode()
        self.encode = encode
        self._name = name
        self._decode = decode
        self._array = array
        self._array_name = array.encode()
        self._split = split
        self._empty = empty

    def read(self, body: bytes) -> BodyT:
        """The field `array` of what is read holds bytes, or a list where only msgspec can read it.

        Raises ApiError: 400 for a body that is not of its format, 422 for a value out of bounds.
        """
        fields = self.try_parts(self.split(body))
        return decode(self._name, self._decode, body) if fields is None else fields

    def split(self, body: bytes) -> Parts | None:
        """The array as bytes, and the rest; None: only msgspec can read it."""
        return self._split(body, self._array_name)

    def try_parts(self, parts: Parts | None) -> BodyT | None:
        """None: only `read` can tell whether the body is valid, and what is wrong with it."""
        if parts is None:
            return None
        try:
            fields = self._decode(parts[1])
        except (ValueError, RecursionError):  # all that msgspec raises
            return None
        setattr(fields, self._array, parts[0])
        return fields

    def read_around(self, before: bytes, after: bytes) -> BodyT | None:
        """The fields of a body, but for its array, from what is before and after that; None if it is not valid."""
        try:
            return self._decode(before + self._empty + after)
        except (ValueError, RecursionError):
            return None


def json_format(body: type[BodyT], array: str, split: Split = split_json) -> Format[BodyT]:
    return Format("JSON", JSON, msgspec.json.Decoder(body).decode, encode_json, array, split, EMPTY_JSON_ARRAY)


def msgpack_format(body: type[BodyT], array: str, split: Split = split_msgpack) -> Format[BodyT]:
    decode_body = msgspec.msgpack.Decoder(body).decode
    return Format("msgpack", MSGPACK, decode_body, encode_msgpack, array, split, EMPTY_MSGPACK_ARRAY)


def unsplit(_body: bytes, _name: bytes) -> None:
    """For bodies that msgspec shall read as a whole."""


def choose_format(
    content_type: str | None, as_json: Format[BodyT], as_msgpack: Format[BodyT] | None = None
) -> Format[BodyT]:
    """No content type at all means JSON. Raises ApiError 415 for anything else that is not known."""
    if content_type is None or content_type == JSON or is_json(content_type):
        return as_json
    if as_msgpack is not None and is_msgpack(content_type):
        return as_msgpack
    known = JSON if as_msgpack is None else f"{JSON} or {MSGPACK}"
    raise ApiError(415, "unsupported_media_type", f"content-type must be {known}, not {content_type}")


def is_msgpack(content_type: str | None) -> bool:
    return content_type is not None and content_type.partition(";")[0].strip().lower() in MSGPACK_TYPES


def check_json(content_type: str | None) -> None:
    """For bodies that are JSON only; none at all means JSON. Raises ApiError 415."""
    if content_type is not None and not is_json(content_type):
        raise ApiError(415, "unsupported_media_type", f"content-type must be {JSON}, not {content_type}")


def decode(name: str, read: Callable[[bytes], BodyT], body: bytes) -> BodyT:
    """Raises ApiError: 400 for a body that is not of its format, 422 for a value out of bounds."""
    try:
        return read(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"invalid_{name.lower()}", f"the body is not valid {name}: {error}") from None


def check_length(token_ids: TokenIds, prompt_tokens_max: int) -> int:
    """How many there are. Raises ApiError 422."""
    count = count_tokens(token_ids)
    if count == 0:
        raise ApiError(422, "empty_prompt", "token_ids must hold at least one token", "token_ids")
    if count > prompt_tokens_max:
        raise too_long("token_ids", count, prompt_tokens_max)
    return count


def count_tokens(token_ids: TokenIds) -> int:
    """Raises ApiError 422 for bytes that are no whole tokens."""
    if not isinstance(token_ids, bytes):
        return len(token_ids)
    count, rest = divmod(len(token_ids), U32_BYTES)
    if rest:
        message = f"token_ids as bin must be a multiple of {U32_BYTES} bytes long (u32 little-endian)"
        raise ApiError(422, "invalid_value", message, "token_ids")
    return count


def read_keys(field: str, keys: list[str] | bytes) -> array[int]:
    """64-bit keys or hashes, given as texts of 16 hexadecimal digits or as u64 little-endian bytes. Raises ApiError
    422. Cost: 20 ns a key."""
    if isinstance(keys, bytes):
        return read_bin_keys(field, keys)
    try:
        digits = bytes.fromhex("".join(keys))
    except ValueError:
        digits = b""
    if len(digits) != U64_BYTES * len(keys):  # fromhex takes spaces, too
        place = next(i for i, key in enumerate(keys) if not _HEX.fullmatch(key))
        message = f"{field}[{place}]: must be {HEX_DIGITS} hexadecimal digits"
        raise ApiError(422, "invalid_value", message, f"{field}[{place}]")
    return _keys_of(digits, is_big_endian=True)


def read_bin_keys(field: str, keys: bytes) -> array[int]:
    """The same of u64 little-endian bytes."""
    if len(keys) % U64_BYTES:
        message = f"{field} as bin must be a multiple of {U64_BYTES} bytes long (u64 little-endian)"
        raise ApiError(422, "invalid_value", message, field)
    return _keys_of(keys, is_big_endian=False)


def _keys_of(data: bytes, *, is_big_endian: bool) -> array[int]:
    keys = array("Q", data)
    if is_big_endian != (sys.byteorder == "big"):
        keys.byteswap()
    return keys


def hex_key(key: int | None) -> str | None:
    """16 hexadecimal digits: JSON clients would round the number."""
    return None if key is None else f"{key:016x}"


def too_long(field: str, count: int, prompt_tokens_max: int) -> ApiError:
    message = f"{field} holds {count} tokens; at most {prompt_tokens_max} are answered"
    return ApiError(422, "prompt_too_long", message, field)


_HEX = re.compile(f"[0-9a-fA-F]{{{HEX_DIGITS}}}")
_FAULT = re.compile(r"(?P<message>.*?)(?: - at `(?P<place>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


def _invalid(text: str) -> ApiError:
    """msgspec says ``Expected `int` >= 0 - at `$.token_ids[3]` ``: the place becomes `field`."""
    fault = _FAULT.fullmatch(text)
    assert fault is not None
    message, place = fault["message"], (fault["place"] or "$").removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.fullmatch(message):
        field = f"{place}.{unknown[1]}".removeprefix(".")
        return ApiError(422, "unknown_field", f"{field} is not a field of this request", field)
    if missing := _MISSING.fullmatch(message):
        field = f"{place}.{missing[1]}".removeprefix(".")
        return ApiError(422, "missing_field", f"{field} is required", field)
    reason = message.replace("`", "")
    return ApiError(422, "invalid_value", f"{place or 'the body'}: {reason[:1].lower()}{reason[1:]}", place or None)
