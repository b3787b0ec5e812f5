"""How values are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.store.tables import hash_from_bytes, hash_to_bytes, to_signed, to_unsigned


@pytest.mark.parametrize(
    ("unsigned", "signed"),
    [(0, 0), (2**53 + 1, 2**53 + 1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)],
)
def test_unsigned_numbers_are_kept_in_twos_complement(unsigned: int, signed: int) -> None:
    assert to_signed(unsigned) == signed
    assert to_unsigned(signed) == unsigned


@given(st.integers(0, 2**64 - 1))
def test_every_unsigned_number_comes_back(unsigned: int) -> None:
    assert -(2**63) <= to_signed(unsigned) < 2**63
    assert to_unsigned(to_signed(unsigned)) == unsigned


@given(st.integers(0, 2**64 - 1) | st.binary(max_size=64).filter(lambda b: len(b) != 8))
def test_every_engine_hash_comes_back(engine_hash: int | bytes) -> None:
    assert hash_from_bytes(hash_to_bytes(engine_hash)) == engine_hash
