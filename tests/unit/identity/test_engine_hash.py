"""Hashes as vLLM makes them. Values of whole blocks were published by real engines (0.33.0, and 0.23.0 for bare extra
keys), those of CBOR are from its specification."""

from __future__ import annotations

import pickle
from base64 import b64decode

import pytest
from xxhash import xxh3_128_digest

from indexer.identity.engine_hash import (
    ALGORITHMS,
    DEFAULT_SEED,
    Algorithm,
    BlockItem,
    block_digests,
    extra_keys,
    first_parent,
    items_by_block,
)

SHA256, SHA256_CBOR = ALGORITHMS["sha256"], ALGORITHMS["sha256_cbor"]
PLAIN = [1944, 2208, 1320, 1902, 349, 2558, 890, 1198, 2729, 67, 2458, 1301, 69, 2359, 335, 1581]
PLAIN += [2563, 621, 1541, 2976, 2865, 561, 2379, 1190, 2898, 1399, 1008, 1493, 63, 1332, 852, 2639]
SALTED = [118, 2164, 2282, 2863, 2311, 259, 1132, 1432, 11, 699, 2370, 2605, 2851, 2533, 1628, 115]
SALTED += [221, 105, 2483, 2690, 263, 726, 485, 2556, 2738, 1180, 13, 1878, 1630, 1846, 1461, 894]
IMAGE = [1606, 940, 148] + 29 * [49999]
MIXED = [2019, 2177, 535, 2146, 1145, 1846, 499, 629, 201, 1080, 1598, 1758, 1084, 1504, 646, 2110]
MIXED += [790, 1522, 130, 2244, 1154, 2117, 452, 321, 36, 2113, 1348, 2430, 85, 2357, 49999, 49999]


def published(digests: list[bytes]) -> list[int]:
    return [int.from_bytes(digest[-8:], "big") for digest in digests]


def test_the_first_parent_is_the_digest_of_the_seed() -> None:
    assert first_parent(SHA256, DEFAULT_SEED) == b64decode("BmseiYfgJxOOmHAcRhKJKTeJNfm2zRVJEFrmtPDXEZg=")
    assert first_parent(SHA256_CBOR, DEFAULT_SEED) == b64decode("m9lqSFrYTv2vty7kih16abzq0PjwQzFzlBsna5WB7vA=")
    assert first_parent(ALGORITHMS["xxhash"], "7") == xxh3_128_digest(pickle.dumps("7", 5))
    assert first_parent(ALGORITHMS["xxhash_cbor"], "7") == xxh3_128_digest(b"\x617")


def test_blocks_of_a_plain_prompt() -> None:
    parent = first_parent(SHA256, DEFAULT_SEED)
    digests = block_digests(SHA256, parent, [*PLAIN, 5], 16, {})
    assert published(digests) == [8562424848068238873, 6639386584828833622]
    assert block_digests(SHA256, digests[0], PLAIN[16:], 16, {}) == digests[1:]


def test_a_salt_is_in_the_first_block() -> None:
    extra = {0: extra_keys((), None, "tenant-2", is_tagged=True)}
    digests = block_digests(SHA256, first_parent(SHA256, DEFAULT_SEED), SALTED, 16, extra)
    assert published(digests) == [10964647752910706812, 14197235173427981335]


def test_an_item_is_in_every_block_that_it_lies_in() -> None:
    items = items_by_block([("img-bbbb-40", 3, 40)], 16, 2)
    assert items == {0: [BlockItem("img-bbbb-40", 3)], 1: [BlockItem("img-bbbb-40", -13)]}
    extra = {block: extra_keys(of_block, None, None, is_tagged=True) for block, of_block in items.items()}
    assert block_digests(SHA256_CBOR, first_parent(SHA256_CBOR, DEFAULT_SEED), IMAGE, 16, extra) == [
        b"\xa9q\xcb)\xce]\xfd\xa5:\xaf_\x95\xfb\x8eW\xa9\xdf\xff\xbd\r\xcak\x8d}=\xb8\xa3K\x03\xa8\xa2\xe1",
        b".\x05#f\xf2\xc5\xbe7\x14G\x8c\xe1\xf0\xec\xf7\xca>\x10\x8a\x84\x03\xe3I\xa2\x95\xcc\xa3fs\x85l\xe6",
    ]


def test_extra_keys_of_older_engines_are_bare() -> None:
    parent = b64decode("YnLM1zOaYajTxBfoIRkoFZmV4eHrG58N1kTr75/iURE=")
    extra = {
        0: extra_keys((), None, "tenant-2", is_tagged=False),
        1: extra_keys([BlockItem("img-cccc-16", 14)], None, None, is_tagged=False),
    }
    assert block_digests(SHA256_CBOR, parent, MIXED, 16, extra) == [
        b"\xc8\xe4g\xbbd\ni/\xf2Y\xe6\x8b\xf9\x19\xa2\xa9S\x9a4R\x98\xe6B\x02\xa9lp\xda\x0b\xe9R\x90",
        b"\xab\xed\x97e5N\x99|j\x8d{\x8aQ\xf0\xfcx\x82\xbd\xb4\x08~4\x07\xef\xa4[\xf8\xcb\xd7d\xe2i",
    ]


def test_an_adapter_comes_first_in_the_bare_form() -> None:
    tokens = [1606, 940, 148, 1106, 1716, 1354, 882, 1045, 1046, 2307, 964, 1426, 2634, 1992, 1015, 1096]
    parent = b64decode("JJvyEWnYlpnmPd0Fmd4dqTHwbyWU6bna8SUCew4JoQY=")
    extra = {0: extra_keys((), "adapter-a", None, is_tagged=False)}
    assert block_digests(SHA256_CBOR, parent, tokens, 16, extra) == [
        b"~\x0f$\xb0\x7fwQp4\x1aMX\x9aG\xb6\x06\xd9\x9d\xf9L\xfe\xf5\xed\xf7\x8b\\\x95h\x8d\x91\x0c\x07"
    ]
    assert extra_keys([BlockItem("i", 1)], "a", "s", is_tagged=False) == ("a", ("i", 1), "s")
    assert extra_keys((), None, None, is_tagged=False) is None


def test_lookahead_tokens_and_the_items_in_them_are_hashed_with_a_block() -> None:
    tokens = [1090, 104, 1192, 86, 1442, 783, 388, 1002, 1961, 2990, 49999, 49999, 49999, 49999, 1442, 2721] + 17 * [
        49999
    ]
    items = items_by_block([("img-bbbb-4", 10, 4), ("img-bbbb-16", 16, 16), ("img-bbbb-4", 32, 4)], 16, 2, 1)
    assert items == {
        0: [BlockItem("img-bbbb-4", 10), BlockItem("img-bbbb-16", 16)],
        1: [BlockItem("img-bbbb-16", 0), BlockItem("img-bbbb-4", 16)],
    }
    extra = {
        0: (extra_keys(items[0], None, "tenant-1", is_tagged=True), 49999),
        1: (extra_keys(items[1], None, None, is_tagged=True), 49999),
    }
    digests = block_digests(SHA256, first_parent(SHA256, DEFAULT_SEED), tokens, 16, extra)
    assert published(digests) == [1845796178964124409, 16850810544255515432]


def test_items_are_walked_once_however_many_there_are() -> None:
    items = [(f"i{i}", i, 1) for i in range(10_000)]
    found = items_by_block(items, 16, 625)
    assert sum(map(len, found.values())) == 10_000
    assert found[624][-1] == BlockItem("i9999", 15)
    endless = [(f"i{i}", 0, 10**9) for i in range(10_000)]
    assert sum(map(len, items_by_block(endless, 16, 625).values())) == 625


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (256, "190100"),
        (65_535, "19ffff"),
        (65_536, "1a00010000"),
        (4_294_967_295, "1affffffff"),
    ],
)
def test_numbers_have_their_shortest_form_in_cbor(number: int, encoded: str) -> None:
    unhashed = Algorithm(bytes, is_cbor=True)
    assert block_digests(unhashed, b"p", [number, 1], 2, {})[0].hex() == "83" + "4170" + "82" + encoded + "01" + "f6"


def test_extra_keys_in_cbor() -> None:
    unhashed = Algorithm(bytes, is_cbor=True)
    extra = {0: (("mm", "id", -13), ("cache_salt", "é" * 12), None, b"\x01")}
    mm, salt = "83626d6d6269642c", "826a63616368655f73616c74" + "7818" + "c3a9" * 12
    expected = "83" + "4170" + "8101" + "84" + mm + salt + "f6" + "4101"
    assert block_digests(unhashed, b"p", [1], 1, extra)[0].hex() == expected


@pytest.mark.parametrize("count", [24, 256])
def test_long_blocks_have_long_heads_in_cbor(count: int) -> None:
    unhashed = Algorithm(bytes, is_cbor=True)
    head = "9818" if count == 24 else "990100"
    assert block_digests(unhashed, b"p", [7] * count, count, {})[0].hex() == "834170" + head + "07" * count + "f6"


@pytest.mark.parametrize("name", ["xxhash", "xxhash_cbor"])
def test_xxhash_digests_have_128_bits(name: str) -> None:
    algorithm = ALGORITHMS[name]
    parent = first_parent(algorithm, "0")
    (digest,) = block_digests(algorithm, parent, [1, 2], 2, {})
    data = b"\x83\x50" + parent + b"\x82\x01\x02\xf6" if algorithm.is_cbor else pickle.dumps((parent, (1, 2), None), 5)
    assert digest == xxh3_128_digest(data)
    assert len(digest) == 16
