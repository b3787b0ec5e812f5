"""A body is split only where msgspec would have read the same; all else is left to msgspec."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from indexer.wire.query_tokens import compile_kernels, split_json, split_json_hashes, split_msgpack

NAME = b"token_ids"


def u32(*token_ids: int) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def u64(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *(h % 2**64 for h in hashes))


def array_body(array: str) -> bytes:
    return b'{"model": "m", "token_ids": %s, "tenant": "t"}' % array.encode()


# ---------------------------------------------------------------------- JSON: what is split


def test_tokens_become_bytes_and_the_array_an_empty_one() -> None:
    body = b'{"model":"m","token_ids":[1,20,4294967295],"tenant":null}'
    assert split_json(body, NAME) == (u32(1, 20, 2**32 - 1), b'{"model":"m","token_ids":[],"tenant":null}')


@pytest.mark.parametrize("digits", range(1, 11))
def test_numbers_of_any_length_are_read(digits: int) -> None:
    smallest, largest = 10 ** (digits - 1), min(10**digits, 2**32) - 1
    tokens = split_json(array_body(f"[{smallest},{largest},{smallest}]"), NAME)
    assert tokens == (u32(smallest, largest, smallest), array_body("[]"))


@pytest.mark.parametrize("tail", range(12))
def test_numbers_are_read_alike_near_the_end_of_the_body(tail: int) -> None:
    body = b'{"token_ids":[1234567]' + b" " * tail + b"}"
    assert split_json(body, NAME) == (u32(1234567), b'{"token_ids":[]' + b" " * tail + b"}")


def test_an_empty_array_has_no_tokens() -> None:
    assert split_json(array_body("[]"), NAME) == (b"", array_body("[]"))
    assert split_json(array_body("[ \n]"), NAME) == (b"", array_body("[]"))


def test_space_may_be_anywhere() -> None:
    body = b' \r\n\t{ \t"token_ids"\n:\r[ 1\t,\n2 , 3\r] \t, "a" : 1 } \r\n\t'
    assert split_json(body, NAME) == (u32(1, 2, 3), b' \r\n\t{ \t"token_ids"\n:\r[] \t, "a" : 1 } \r\n\t')


def test_the_same_name_within_other_values_is_not_the_member() -> None:
    body = b'{"a":{"token_ids":[1]},"b":[{"token_ids":[2]}],"c":"token_ids","token_ids":[3],"d":{"token_ids":4}}'
    assert split_json(body, NAME) == (u32(3), body.replace(b"[3]", b"[]"))


def test_strings_may_hold_quotes_brackets_and_the_name() -> None:
    body = rb'{"a":"\"token_ids\":[1],}]\\","b":"\\\"","token_ids":[5],"c":"\u0022}{[\\"}'
    assert split_json(body, NAME) == (u32(5), body.replace(b"[5]", b"[]"))


def test_other_names_that_look_alike_are_not_the_member() -> None:
    body = b'{"token_id":[1],"token_ids_":[2],"Token_ids":[3],"":[4],"token_ids":[5]}'
    assert split_json(body, NAME) == (u32(5), body.replace(b"[5]", b"[]"))


def test_what_follows_the_object_is_left_for_msgspec_to_refuse() -> None:
    for tail in (b"}", b",{}", b" {}"):
        split = split_json(b'{"token_ids":[1]}' + tail, NAME)
        assert split is None or split[1] == b'{"token_ids":[]}' + tail


# ---------------------------------------------------------------------- JSON: what is left to msgspec

NO_ARRAYS_OF_TOKENS = [
    "1",
    "null",
    '"[1]"',
    "{}",
    "",
    "[1,]",
    "[,1]",
    "[,]",
    "[1,,2]",
    "[1 2]",
    "[1\v,2]",
    "[1\0]",
    "[[1]]",
    "[1,[2]]",
    "[null]",
    '["1"]',
    "[true]",
    "[1,2",
    "[1}",
    "[-1]",
    "[-0]",
    "[+1]",
    "[1.0]",
    "[1.]",
    "[.5]",
    "[1e3]",
    "[1E3]",
    "[00]",
    "[01]",
    "[0000000001]",
    "[0x1]",
    "[1_000]",
    "[4294967296]",
    "[9999999999]",
    "[10000000000]",
    "[18446744073709551617]",
    f"[{2**64 + 1}{0:0>300}]",
    "[\N{FULLWIDTH DIGIT ONE}]",
    "[NaN]",
]


@pytest.mark.parametrize("array", NO_ARRAYS_OF_TOKENS)
def test_any_other_array_is_left_to_msgspec(array: str) -> None:
    assert split_json(array_body(array), NAME) is None
    assert split_json(array_body(array.replace("[", "[7,")), NAME) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"}",
        b"]}",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b'"token_ids":[1]}',
        b'[{"token_ids":[1]}]',
        b'{"a":{"token_ids":[1]}}',
        b'{"token_ids"}',
        b'{"token_ids":}',
        b'{"token_ids":[}',
        b'{"token_ids":[1]',
        b'{"token_ids":[1],',
        b'{"token_ids":[1],"a":"}',
        b'{"token_ids":[1],"a":"\\"}',
        b'{"token_ids":[1],"a":"\\',
        b'{"token_ids":[1],"a":[}',
        b'\xef\xbb\xbf{"token_ids":[1]}',
    ],
)
def test_a_body_without_the_array_or_without_its_end_is_left_to_msgspec(body: bytes) -> None:
    assert split_json(body, NAME) is None


def test_a_name_given_twice_is_left_to_msgspec() -> None:
    assert split_json(b'{"token_ids":[1],"token_ids":[2]}', NAME) is None
    assert split_json(b'{"token_ids":[1],"token_ids":null}', NAME) is None
    assert split_json(b'{"token_ids":null,"token_ids":[2]}', NAME) is None


def test_a_key_with_an_escape_is_left_to_msgspec_for_it_may_spell_the_name() -> None:
    escaped = rb'"tok\u0065n_ids":[1]'
    assert msgspec.json.decode(b"{" + escaped + b"}") == {"token_ids": [1]}
    assert split_json(b"{" + escaped + b"}", NAME) is None
    assert split_json(b'{"token_ids":[1],' + escaped + b"}", NAME) is None
    assert split_json(b"{" + escaped + b',"token_ids":[1]}', NAME) is None


@pytest.mark.parametrize("opened", [b"[", b'{"a":', b'[{"token_ids":['])
def test_deep_nesting_takes_no_stack(opened: bytes) -> None:
    assert split_json(b'{"token_ids":[1],"a":' + opened * 20_000 + b"}", NAME) is None
    assert split_json(b'{"a":' + opened * 20_000 + b"}", NAME) is None


# ---------------------------------------------------------------------- JSON hashes


def test_hashes_may_be_signed_or_unsigned_and_become_64_bits() -> None:
    hashes = [0, 1, -1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, -(2**63) + 1, 10**18, 10**19, -(10**18)]
    assert split_json_hashes(msgspec.json.encode({"h": hashes}), b"h") == (u64(*hashes), b'{"h":[]}')
    assert split_json_hashes(b'{"h":[ -1 , 2 ]}', b"h") == (u64(-1, 2), b'{"h":[]}')
    assert split_json_hashes(b'{"h":[]}', b"h") == (b"", b'{"h":[]}')


@pytest.mark.parametrize("digits", range(1, 20))
@pytest.mark.parametrize("tail", [b"", b" " * 20])
def test_hashes_of_any_length_are_read(digits: int, tail: bytes) -> None:
    hashes = [10**digits - 1, 10 ** (digits - 1), -(10 ** (digits - 1))]
    body = msgspec.json.encode({"h": hashes}) + tail
    assert split_json_hashes(body, b"h") == (u64(*hashes), b'{"h":[]}' + tail)


@pytest.mark.parametrize(
    "number",
    [
        str(2**64),
        str(2**64 + 10),
        "99999999999999999999",
        "184467440737095516150",
        str(-(2**63) - 1),
        str(-(2**64) + 1),
        "-0",
        "-",
        "--1",
        "-01",
        "01",
        "00000000000000000001",
        "000000000000000000000001",
        "1.0",
        "-1e2",
        "- 1",
    ],
)
def test_any_other_number_is_no_hash(number: str) -> None:
    for array in (f"[{number}]", f"[1,{number}]", f"[{number},1]"):
        assert split_json_hashes(b'{"h":%s}' % array.encode(), b"h") is None


# ---------------------------------------------------------------------- msgpack


def msgpack_body(array: bytes) -> bytes:
    return b"\x83\xa5model\xa1m\xa9token_ids" + array + b"\xa1t\xc0"


def test_msgpack_tokens_become_bytes_and_the_array_an_empty_one() -> None:
    tokens = [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1]
    split = split_msgpack(msgpack_body(msgspec.msgpack.encode(tokens)), NAME)
    assert split == (u32(*tokens), msgpack_body(b"\x90"))


@pytest.mark.parametrize("count", [0, 15, 16, 65_535, 65_536])
def test_arrays_of_any_header_are_read(count: int) -> None:
    body = msgpack_body(msgspec.msgpack.encode([9] * count))
    assert split_msgpack(body, NAME) == (u32(9) * count, msgpack_body(b"\x90"))


def test_longer_encodings_than_needed_are_read() -> None:
    array = (
        b"\x97\xcc\x01\xcd\0\x02\xce\0\0\0\x03\xcf\0\0\0\0\xff\xff\xff\xff\xd0\x7f\xd2\0\0\0\x05\xd3\0\0\0\0\x80\0\0\0"
    )
    assert split_msgpack(msgpack_body(array), NAME) == (u32(1, 2, 3, 2**32 - 1, 127, 5, 2**31), msgpack_body(b"\x90"))
    long_headers = b"\xdf\0\0\0\1\xdb\0\0\0\x09token_ids\xdd\0\0\0\1\7"
    assert split_msgpack(long_headers, NAME) == (u32(7), b"\xdf\0\0\0\1\xdb\0\0\0\x09token_ids\x90")


OTHER_VALUES: list[Any] = [
    None,
    True,
    -7,
    2**64 - 1,
    -(2**63),
    1.5,
    b"",
    b"x" * 300,
    b"x" * 70_000,
    "y" * 31,
    "y" * 200,
    "y" * 300,
    "y" * 70_000,
    [[1, [2, {}]], {"token_ids": [1]}],
    list(range(70_000)),
    {str(i): i for i in range(300)},
    {str(i): i for i in range(70_000)},
    *(msgspec.msgpack.Ext(5, b"x" * size) for size in (1, 2, 3, 4, 8, 16, 17, 300, 70_000)),
]


@pytest.mark.parametrize("value", OTHER_VALUES, ids=lambda value: f"{type(value).__name__}")
def test_any_other_member_is_stepped_over(value: Any) -> None:
    members = {"a": value, "token_ids": [1], "b": value}
    split = split_msgpack(msgspec.msgpack.encode(members), NAME)
    assert split == (u32(1), msgspec.msgpack.encode({**members, "token_ids": []}))


def test_float_32_is_stepped_over() -> None:
    assert split_msgpack(b"\x82\xa1a\xca\0\0\0\0\xa9token_ids\x91\1", NAME) is not None


@pytest.mark.parametrize(
    "array",
    [
        b"\x91\xff",
        b"\x91\xe0",
        b"\x91\xd0\x80",
        b"\x91\xd1\xff\xff",
        b"\x91\xd2\x80\0\0\0",
        b"\x91\xd3\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x91\xcf\0\0\0\1\0\0\0\0",
        b"\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x91\xca\0\0\0\0",
        b"\x91\xc0",
        b"\x91\xa11",
        b"\x91\x91\1",
        b"\x91\xc1",
        b"\xc4\4\1\0\0\0",
        b"\xa1\1",
        b"\x81\1\1",
        b"\xc0",
        b"\xd9\1a",
        b"\xde\0\0",
    ],
)
def test_any_other_msgpack_value_is_left_to_msgspec(array: bytes) -> None:
    assert split_msgpack(msgpack_body(array), NAME) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80",
        b"\x90",
        b"\x82\xa9token_ids\x91\1\xa9token_ids\x91\2",
        b"\x82\xa9token_ids\x91\1\xd9\x09token_ids\x91\2",
        b"\x82\xa9token_ids\x91\1\xc4\x09token_ids\x91\2",
        b"\x82\xa9token_ids\x91\1\5\x91\2",
        b"\x81\xa1a\x81\xa9token_ids\x91\1",
        b"\x82\xa9token_ids\x91\1\xa1a\xc1",
        b"\xdf\xff\xff\xff\xff\xa9token_ids\x91\1",
        b"\x81\xa9token_ids\xdd\xff\xff\xff\xff\1\1\1",
        b"\x82\xa9token_ids\x91\1\xa1a\xdd\xff\xff\xff\xff\1\1\1",
        b"\x82\xa9token_ids\x91\1\xa1a\xc6\xff\xff\xff\xff\1\1\1",
    ],
)
def test_other_maps_are_left_to_msgspec(body: bytes) -> None:
    assert split_msgpack(body, NAME) is None


def test_a_map_cut_short_is_left_to_msgspec() -> None:
    members = {"a": [1.5, {"x": 2**40}, "text", b"bytes"], "token_ids": [1, 200, 3000, 70_000], "b": "y" * 40}
    body = msgspec.msgpack.encode(members)
    assert split_msgpack(body, NAME) is not None
    assert [cut for cut in range(len(body)) if split_msgpack(body[:cut], NAME) is not None] == []


@pytest.mark.parametrize("opened", [b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_deep_msgpack_takes_no_stack(opened: bytes) -> None:
    assert split_msgpack(b"\x82\xa9token_ids\x91\1\xa1a" + opened * 20_000, NAME) is None


# ----------------------------------------------------------------------


def test_compiling_in_advance_needs_no_body() -> None:
    compile_kernels()
