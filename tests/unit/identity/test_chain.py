"""Identity scheme 1, against the numbers of docs/identity.md and against a second, naive writing of it."""

from __future__ import annotations

import struct
from array import array

import pytest
from xxhash import xxh3_64_intdigest

from indexer.identity.chain import (
    SCHEME,
    block_local_hash,
    chain_keys,
    chain_seed,
    identifier_bytes,
    local_hashes,
    lookahead_key,
    salted_seed,
)

SEED = 1337


def u32(token_ids: list[int] | range) -> bytes:
    return array("I", token_ids).tobytes()


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def test_the_scheme_is_number_one() -> None:
    assert SCHEME == 1


def test_check_values_of_a_plain_prompt() -> None:
    locals_ = local_hashes(u32(range(1, 33)), 16, chain_seed(None))
    assert locals_ == [16863443419780771464, 2287610619914608821]
    assert chain_keys(None, locals_) == [16863443419780771464, 12466389667045779788]


def test_check_values_with_a_lora_adapter() -> None:
    locals_ = local_hashes(u32(range(1, 33)), 16, chain_seed("my-lora"))
    assert locals_ == [4148081000444450790, 2866551892415683476]


def test_check_value_of_a_granule_of_64() -> None:
    assert local_hashes(u32(range(100, 164)), 64, chain_seed(None)) == [8113873337580740840]


def test_the_root_key_is_its_local_hash_and_each_key_chains_the_next() -> None:
    locals_ = local_hashes(u32(range(64)), 16, SEED)
    keys = chain_keys(None, locals_)
    assert keys[0] == locals_[0]
    for j in range(1, 4):
        assert keys[j] == xxh3_64_intdigest(u64(keys[j - 1], locals_[j]), SEED)


def test_a_chain_goes_on_from_any_key() -> None:
    locals_ = local_hashes(u32(range(64)), 16, SEED)
    keys = chain_keys(None, locals_)
    assert chain_keys(keys[1], locals_[2:]) == keys[2:]


def test_an_unfinished_granule_has_no_hash() -> None:
    assert len(local_hashes(u32(range(47)), 16, SEED)) == 2
    assert local_hashes(u32(range(15)), 16, SEED) == []
    assert local_hashes(b"", 16, SEED) == []


def test_no_adapter_and_an_empty_name_are_the_base_model() -> None:
    assert chain_seed(None) == chain_seed("") == SEED
    assert chain_seed("a") == (SEED + xxh3_64_intdigest(b"a", 0)) % 2**64


def test_the_seed_wraps_at_64_bits() -> None:
    seeds = [chain_seed(f"adapter-{i}") for i in range(64)] + [salted_seed(2**64 - 1, f"salt-{i}") for i in range(64)]
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert salted_seed(2**64 - 1, "s") == (2**64 - 1 + xxh3_64_intdigest(b"s", 1)) % 2**64


def test_the_salt_changes_only_granule_0() -> None:
    plain = local_hashes(u32(range(48)), 16, SEED)
    salted = local_hashes(u32(range(48)), 16, SEED, first_seed=salted_seed(SEED, "s"))
    assert salted[0] == xxh3_64_intdigest(u32(range(16)), SEED + xxh3_64_intdigest(b"s", 1) & 2**64 - 1)
    assert salted[0] != plain[0]
    assert salted[1:] == plain[1:]
    assert not set(chain_keys(None, salted)) & set(chain_keys(None, plain))


def test_no_salt_and_an_empty_salt_are_none() -> None:
    assert salted_seed(SEED, None) == salted_seed(SEED, "") == SEED


def test_an_item_is_hashed_after_its_granules_tokens() -> None:
    item = identifier_bytes("image")
    assert item == u64(xxh3_64_intdigest(b"image", 0))
    hashes = local_hashes(u32(range(48)), 16, SEED, items={1: item})
    plain = local_hashes(u32(range(48)), 16, SEED)
    assert hashes == [plain[0], xxh3_64_intdigest(u32(range(16, 32)) + item, SEED), plain[2]]


def test_a_salted_granule_0_with_an_item_has_both() -> None:
    item, seed = identifier_bytes("image"), salted_seed(SEED, "s")
    (only,) = local_hashes(u32(range(16)), 16, SEED, first_seed=seed, items={0: item})
    assert only == xxh3_64_intdigest(u32(range(16)) + item, seed)


def test_items_past_the_last_whole_granule_do_not_matter() -> None:
    assert local_hashes(u32(range(20)), 16, SEED, items={1: b"x" * 8}) == local_hashes(u32(range(16)), 16, SEED)


def test_names_that_are_no_utf8_have_an_identity_too() -> None:
    assert chain_seed("\ud800") != chain_seed("\ud801")
    assert identifier_bytes("\ud800") != identifier_bytes("\ud801")
    assert salted_seed(SEED, "\ud800") != salted_seed(SEED, "\ud801")


@pytest.mark.parametrize("wide_at", [0, 7, 15])
def test_a_granule_with_a_wide_id_is_hashed_with_all_its_tokens_as_u64(wide_at: int) -> None:
    ids = list(range(48))
    ids[16 + wide_at] = 2**62 + 5
    item = identifier_bytes("image")
    hashes = local_hashes(array("Q", ids), 16, SEED, first_seed=99, items={0: item, 1: item})
    assert hashes == [
        xxh3_64_intdigest(u32(range(16)) + item, 99),
        xxh3_64_intdigest(u64(*ids[16:32]) + item, SEED),
        xxh3_64_intdigest(u32(range(32, 48)), SEED),
    ]


def test_narrow_ids_hash_alike_in_a_wide_buffer() -> None:
    ids = list(range(40))
    assert local_hashes(array("Q", ids), 16, SEED) == local_hashes(u32(ids), 16, SEED)


def test_the_local_hash_of_a_block_of_one_granule_is_that_granules() -> None:
    assert block_local_hash([5]) == 5


def test_the_local_hash_of_a_larger_block_is_the_hash_of_its_granules() -> None:
    assert block_local_hash([5, 6, 7]) == xxh3_64_intdigest(u64(5, 6, 7), SEED)


def test_a_lookahead_key_covers_the_key_the_tokens_and_the_items_that_start_in_them() -> None:
    assert lookahead_key(9, [7, 8]) == xxh3_64_intdigest(u64(9) + u32([7, 8]), SEED)
    assert lookahead_key(9, [7], b"12345678") == xxh3_64_intdigest(u64(9) + u32([7]) + b"12345678", SEED)
    assert lookahead_key(9, [7, 2**40]) == xxh3_64_intdigest(u64(9, 7, 2**40), SEED)
    assert lookahead_key(9, []) == xxh3_64_intdigest(u64(9), SEED)
