"""The table beside a dict, with keys that belong into the same slot or to the end of the array, while it grows and
shrinks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from indexer.index import table
from indexer.index.kernels import CAPACITY, OLD_CAPACITY
from indexer.index.table import VALUE_MAX, Table
from tests.index_invariants import check_table
from tests.sizes import examples, fewer

UNMIXED = pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # a key's upper half, multiplied by its inverse, is where it belongs


def placed(upper: int, lower: int) -> int:
    """A key that belongs to `upper / 2^32` of the array, whatever its size."""
    return (upper << 32 | lower) * UNMIXED % 2**64


KEYS: dict[str, Callable[[Random], int]] = {
    "random": lambda random: random.getrandbits(64),
    "few": lambda random: random.randrange(40),
    "counters": lambda random: random.randrange(600),
    "equal low bits": lambda random: random.randrange(400) << 40,
    "first slot": lambda random: placed(0, random.randrange(60)),
    "last slot": lambda random: placed(2**32 - 1, random.randrange(60)),
    "around the end": lambda random: placed(
        random.choice([0, 1, 2**31, 2**32 - 2**26, 2**32 - 1]), random.randrange(30)
    ),
    "extremes": lambda random: random.choice([0, 1, 2**63, 2**64 - 2, 2**64 - 1]),
}


class Pair:
    """A table and a dict."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.table = Table()
        self.model: dict[int, int] = {}
        self.kinds = random.sample(list(KEYS), k=random.randint(1, 4))
        self.mid_growth = self.mid_shrinking = 0
        self.walk = self.table.walk()
        self.seen: set[int] = set()
        self.stayed: set[int] = set()  # since the walk began

    def key(self) -> int:
        if self.model and self.random.random() < 0.3:
            return self.random.choice(list(self.model))
        return KEYS[self.random.choice(self.kinds)](self.random)

    def put(self) -> None:
        key, value = self.key(), self.random.choice([1, VALUE_MAX, self.random.randint(1, VALUE_MAX)])
        self.table.put(key, value)
        self.model[key] = value

    def remove(self) -> None:
        key = self.key()
        assert self.table.remove(key) == self.model.pop(key, 0)
        self.stayed.discard(key)

    def clear(self) -> None:
        self.table.clear()
        self.model.clear()
        self.stayed.clear()

    def go_on(self) -> None:
        """With a walk, and with the next one when it is over."""
        if self.walk:
            keys, values = self.walk.entries(self.random.choice([1, 5, 50]))
            assert all(self.model[key] == value for key, value in zip(keys.tolist(), values.tolist(), strict=True))
            self.seen.update(keys.tolist())
        else:
            assert self.seen >= self.stayed
            self.walk, self.seen, self.stayed = self.table.walk(), set(), set(self.model)

    def care(self) -> None:
        """What changes nothing."""
        match self.random.randrange(5):
            case 0:
                self.table.make_room(self.random.choice([0, 1, 300]))
            case 1:
                self.table.settle()
            case 2:
                self.table.tidy()
            case _:
                self.table.rest()

    def check(self) -> None:
        assert len(self.table) == len(self.model)
        old_capacity, capacity = self.table.meta[OLD_CAPACITY], self.table.meta[CAPACITY]
        if old_capacity:
            self.mid_growth += old_capacity < capacity
            self.mid_shrinking += old_capacity > capacity
            self.check_all()
        for _ in range(5):
            key = self.key()
            assert self.table.get(key) == self.model.get(key, 0)
            assert (key in self.table) == (key in self.model)

    def check_all(self) -> None:
        keys, values = self.table.items()
        assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == self.model
        assert set(self.table) == self.model.keys()
        assert all(self.table.get(key) == value for key, value in self.model.items())
        check_table(self.table)


def live_through(seed: int, steps: int = 400) -> Pair:
    random = Random(seed)
    pair = Pair(random)
    for i in range(steps):
        grows = i // 100 % 2 == 0
        roll = random.random()
        if roll < 0.03:
            pair.care()
        elif roll < 0.031:
            pair.clear()
        elif roll < (0.8 if grows else 0.25):
            pair.put()
        else:
            pair.remove()
        if roll < 0.2:
            pair.go_on()
        pair.check()
        if i % 50 == 0:
            pair.check_all()
    pair.check_all()
    return pair


def moves_bit_by_bit(smallest: int = 32) -> AbstractContextManager[object]:
    """From 16 slots on."""
    return patch.multiple(table, SMALLEST=smallest, SMALL=16, MAPPED=16)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 32]))
@examples(100)
def test_a_table_equals_a_dict_while_it_grows_and_shrinks_bit_by_bit(seed: int, smallest: int) -> None:
    with moves_bit_by_bit(smallest):
        live_through(seed)


@given(st.integers(0, 2**32))
@examples(50)
def test_a_table_equals_a_dict_that_grows_at_once(seed: int) -> None:
    live_through(seed)


def test_look_ups_happen_in_the_midst_of_growth() -> None:
    with moves_bit_by_bit():
        pairs = [live_through(seed) for seed in range(fewer(8))]
        assert sum(pair.mid_growth for pair in pairs) > 20
        assert sum(pair.mid_shrinking for pair in pairs) > 20
