"""Splitting a body never changes what it says: beside msgspec reading the whole, over random and damaged bodies."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.wire.query_tokens import split_json, split_json_hashes, split_msgpack
from tests.sizes import examples

NAME = "token_ids"
Split = Callable[[bytes, bytes], tuple[bytes, bytes] | None]
Decode = Callable[[bytes], Any]


class Query(msgspec.Struct):
    """Unknown members are skipped without being decoded, and what is skipped is checked less."""

    token_ids: list[int]
    model: str | None = None


json_readers: list[Decode] = [msgspec.json.Decoder().decode, msgspec.json.Decoder(Query).decode]
msgpack_readers: list[Decode] = [
    msgspec.msgpack.Decoder(ext_hook=lambda code, data: (code, bytes(data))).decode,
    msgspec.msgpack.Decoder(Query).decode,
]
REFUSED = "refused"


def read(decode: Decode, body: bytes) -> Any:
    """What msgspec makes of a body, in a form in which NaN equals itself."""
    try:
        read = decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return REFUSED
    return msgspec.structs.asdict(read) if isinstance(read, Query) else read


def ordered(packed: bytes, code: str) -> list[int]:
    numbers = array(code, packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def check(split: Split, readers: list[Decode], body: bytes, code: str = "I") -> bool:
    """The rest with the integers put back is the whole; where one is refused, so is the other. Whether it was split."""
    claimed = split(body, NAME.encode())
    if claimed is None:
        return False
    packed, rest = claimed
    for decode in readers:
        whole, left = read(decode, body), read(decode, rest)
        if whole is REFUSED or left is REFUSED:
            assert whole is left, (whole, left)
            continue
        assert left[NAME] == []
        left[NAME] = ordered(packed, code)
        if code == "Q":
            whole[NAME] = [number % 2**64 for number in whole[NAME]]
        assert list(left) == list(whole)
        assert repr(left) == repr(whole)
    return True


# ---------------------------------------------------------------------- bodies

tokens = st.lists(st.integers(0, 300) | st.integers(0, 2**32 - 1), max_size=20)
hashes = st.lists(st.integers(-(2**63), 2**64 - 1) | st.integers(-20, 20), max_size=12)
names = st.sampled_from(["model", "a", "", NAME, "token_id", "tokén_ids", '"', "\\", "]}"]) | st.text(max_size=3)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | names
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
spaces = st.text(" \t\r\n", max_size=2) | st.just("")


@st.composite
def members(draw: st.DrawFn, integers: st.SearchStrategy[list[int]]) -> dict[str, Any]:
    others = draw(st.dictionaries(names.filter(NAME.__ne__), values, max_size=4))
    order = draw(st.permutations([*others, NAME]))
    return {name: draw(integers) if name == NAME else others[name] for name in order}


@st.composite
def spaced_json(draw: st.DrawFn, integers: st.SearchStrategy[list[int]]) -> bytes:
    """Space wherever it may be, and text escaped or not."""
    is_ascii = draw(st.booleans())

    def text_of(value: Any) -> str:
        before, after = draw(spaces), draw(spaces)
        if isinstance(value, dict):
            text = ",".join(f"{text_of(name)}:{text_of(inner)}" for name, inner in value.items())
            return f"{before}{{{text}}}{after}"
        if isinstance(value, list):
            return f"{before}[{','.join(map(text_of, value))}]{after}"
        return f"{before}{json.dumps(value, ensure_ascii=is_ascii)}{after}"

    return text_of(draw(members(integers))).encode("utf-8", "replace")


STRUCTURAL = [bytes([byte]) for byte in b'{}[],:"\\ \n-+.eE0179tu\0\x1f\x7f\x80\xc1\xff']
PIECES = [
    *STRUCTURAL,
    b'"token_ids":[1],',
    b',"token_ids":[2]',
    rb'"tok\u0065n_ids":[3],',
    b"\xa9token_ids\x91\1",
    b"\xed\xa0\x80",
]


DAMAGES = 20  # of each body: drawing a body takes far longer than checking it


def damaged(body: bytes, random: Random) -> bytes:
    """One to three times, some bytes put in, changed, taken out or, seldom, cut off."""
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(body))
        piece = random.choice([b"", *PIECES, random.randbytes(1)])
        replaced = random.choice([0, 0, 1, 1, 2, len(piece), random.choice([0, len(body)])])
        body = body[:at] + piece + body[at + replaced :]
    return body


def check_damaged(split: Split, readers: list[Decode], body: bytes, random: Random, code: str = "I") -> None:
    for _ in range(DAMAGES):
        check(split, readers, damaged(body, random), code)


randoms = st.integers(0, 2**32).map(Random)

# ---------------------------------------------------------------------- JSON


@given(spaced_json(tokens))
@examples(100)
def test_json_is_split_where_no_key_has_an_escape(body: bytes) -> None:
    has_escapes = any(json.dumps(key) != f'"{key}"' for key in msgspec.json.decode(body))
    assert check(split_json, json_readers, body) or has_escapes


@pytest.mark.parametrize(
    "body",
    [
        b'{"token_ids":[1],"a":"\\u"}',
        b'{"token_ids":[1],"a":"\\x"}',
        b'{"token_ids":[1],"a":"\\u12"}',
        b'{"token_ids":[1],"a":"\xff"}',
        b'{"token_ids":[1],"a":"\n"}',
        b'{"token_ids":[1],"\xff":1}',
        b'{"token_ids":[1]}}',
        b'{"token_ids":[1]]',
        b'{"token_ids":[1],}',
        b'{"a" "token_ids":[1]}',
        b'{"a":1 "token_ids":[1]}',
        b'{"a":"token_ids":[1]}',
        b'{"a":],"token_ids":[1]}',
        b'{"a":[},"token_ids":[1]}',
        b'{,"token_ids":[1]}',
    ],
)
def test_invalid_json_is_refused_split_and_whole(body: bytes) -> None:
    check(split_json, json_readers, body)


@given(spaced_json(tokens), randoms)
@examples(100)
def test_damaged_json_says_the_same_split_and_whole(body: bytes, random: Random) -> None:
    check_damaged(split_json, json_readers, body, random)


@given(spaced_json(hashes), randoms)
@examples(100)
def test_json_hashes_say_the_same_split_and_whole(body: bytes, random: Random) -> None:
    check(split_json_hashes, json_readers, body, "Q")
    check_damaged(split_json_hashes, json_readers, body, random, "Q")


@given(st.binary(max_size=60) | st.text('{}[]:,"\\token_ids 01', max_size=60).map(str.encode))
@examples(200)
def test_random_bytes_say_the_same_split_and_whole(body: bytes) -> None:
    check(split_json, json_readers, body)
    check(split_json_hashes, json_readers, body, "Q")
    check(split_msgpack, msgpack_readers, body)


def long_json(random: Random) -> bytes:
    """Long enough that two readers share it, which may meet before, in or beyond the array's end."""
    separators = random.choice([[","], [", "], [" ,"], [",", ", "], [", ", ",  ", "\n, "]])
    most = random.choice([9, 300, 128_000, 9_999_999, 2**32 - 1])
    numbers = [str(random.randint(0, most)) for _ in range(random.randint(1, 200))]
    array = numbers[0] + "".join(random.choice(separators) + number for number in numbers[1:])
    after = random.choice(["", '"a":"%s",' % ("1, 2," * random.randint(0, 200))])
    before = random.choice(["", '"b":[%s],' % ("1," * random.randint(0, 200) + "1")])
    fields = random.choice(['{%s%s"token_ids":[%s]}', '{%s"token_ids":[%s],%s"model":"m"}'])
    parts = (before, after, array) if fields.endswith("[%s]}") else (before, array, after)
    return (fields % parts).encode()


@given(randoms)
@examples(100)
def test_a_long_array_is_split_and_damaged_says_the_same_split_and_whole(random: Random) -> None:
    body = long_json(random)
    assert check(split_json, json_readers, body)
    check_damaged(split_json, json_readers, body, random)


# ---------------------------------------------------------------------- msgpack


@given(members(tokens), randoms)
@examples(100)
def test_msgpack_is_split_and_damaged_says_the_same_split_and_whole(fields: dict[str, Any], random: Random) -> None:
    body = msgspec.msgpack.encode(fields)
    assert check(split_msgpack, msgpack_readers, body)
    check_damaged(split_msgpack, msgpack_readers, body, random)
