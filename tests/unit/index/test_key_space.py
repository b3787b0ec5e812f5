from __future__ import annotations

from collections import Counter, defaultdict
from random import Random

import numpy as np
import pytest

from indexer.index import key_space
from indexer.index.key_space import KeySpace


def spaces_and_slots(count: int) -> tuple[KeySpace, list[int]]:
    space = KeySpace(16)
    return space, [space.allocate(f"holder {i}") for i in range(count)]


def masks_of(space: KeySpace, *keys: int) -> list[int]:
    return [space.masks[set_id] for set_id in space.look_up(np.array(keys, np.uint64)).tolist()]


def add_run(space: KeySpace, slot: int, keys: list[int], first_end: int) -> list[int]:
    return space.add_run(slot, np.array(keys, np.uint64), np.arange(len(keys), dtype=np.int64) + first_end)


def test_a_key_is_held_until_its_last_holder_gives_it_up() -> None:
    space, (a, b) = spaces_and_slots(2)
    assert space.add(a, 7, 3)
    assert space.add(b, 7, 3)
    assert masks_of(space, 7, 8) == [0b11, 0]
    assert list(space.holders(7)) == ["holder 0", "holder 1"]
    space.remove(a, 7)
    assert (masks_of(space, 7), space.end_granules(7)) == ([0b10], 3)
    space.remove(b, 7)
    assert (len(space), space.end_granules(7), list(space.holders(7))) == (0, None, [])


def test_adding_twice_is_told_and_changes_nothing() -> None:
    space, (a,) = spaces_and_slots(1)
    assert space.add(a, 7, 3)
    assert not space.add(a, 7, 3)
    space.remove(a, 7)
    assert len(space) == 0


def test_giving_up_what_is_not_held_is_our_bug() -> None:
    space, (a, b) = spaces_and_slots(2)
    space.add(a, 7, 1)
    with pytest.raises(AssertionError):
        space.remove(b, 7)


def test_equal_sets_are_one_set() -> None:
    space, slots = spaces_and_slots(3)
    for key in range(500):
        for slot in slots if key % 2 else reversed(slots):
            space.add(slot, key, 1)
    assert len({mask for _, _, mask in space.entries()}) == 1
    assert len(space.masks) <= 8


def test_the_lowest_free_slot_is_given_again() -> None:
    space, slots = spaces_and_slots(3)
    space.release(slots[1])
    assert space.allocate("new") == slots[1]
    assert space.allocate("newer") == 3


def test_a_run_tells_which_keys_were_there() -> None:
    space, (a, b) = spaces_and_slots(2)
    space.add(a, 11, 4)
    space.add(b, 12, 6)
    assert add_run(space, a, [10, 11, 12], 5) == [11]
    assert [space.end_granules(key) for key in (10, 11, 12)] == [5, 4, 6]
    assert masks_of(space, 10, 11, 12) == [0b01, 0b01, 0b11]


@pytest.mark.parametrize("unused_sets_max", [0, 3, 4096])
@pytest.mark.parametrize("seed", range(6))
def test_random_changes_equal_a_dict_of_sets(monkeypatch: pytest.MonkeyPatch, seed: int, unused_sets_max: int) -> None:
    monkeypatch.setattr(key_space, "UNUSED_SETS_MAX", unused_sets_max)
    random = Random(seed)
    space, slots = spaces_and_slots(7)
    model: dict[int, set[int]] = defaultdict(set)
    for _ in range(1_500):
        slot, key = random.choice(slots), random.randrange(1, 40)
        roll = random.random()
        if roll < 0.4:
            assert space.add(slot, key, key) == (slot not in model[key])
            model[key].add(slot)
        elif roll < 0.5:
            keys = list(range(key, min(40, key + 5)))
            assert add_run(space, slot, keys, key) == [k for k in keys if slot in model[k]]
            for k in keys:
                model[k].add(slot)
        elif slot in model[key]:
            space.remove(slot, key)
            model[key].discard(slot)
        held = {k: sum(1 << s for s in holders) for k, holders in model.items() if holders}
        assert {k: mask for k, _, mask in space.entries()} == held
    assert all(k == end for k, end, _ in space.entries())
    uses = Counter(mask for _, _, mask in space.entries())
    assert [uses[mask] for mask in space.masks] == space.uses[: len(space.masks)].tolist()
    assert len(space.masks) <= 1 + len(set(held.values())) + 2 * unused_sets_max + 40 // 8 + 2


def test_sets_that_fell_out_of_use_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_space, "UNUSED_SETS_MAX", 16)
    space, slots = spaces_and_slots(12)
    random = Random(1)
    for _ in range(3_000):
        chosen = random.sample(slots, 5)
        for slot in chosen:
            space.add(slot, 1, 1)
        for slot in chosen:
            space.remove(slot, 1)
    assert len(space.masks) <= 2 * 16 + 3
    assert len(space) == 0
