from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.index.intervals import Intervals, common, reach, united, whole_blocks, without
from tests.sizes import examples

SOME = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def tokens(intervals: Intervals) -> set[int]:
    return {token for start, end in intervals for token in range(start, end)}


def check(intervals: Intervals) -> None:
    edges = [edge for interval in intervals for edge in interval]
    assert edges == sorted(set(edges)), "ascending, none empty, none touching"


@given(SOME, SOME)
@examples(200)
def test_they_are_sets_of_tokens(some: Intervals, others: Intervals) -> None:
    one, other = united(some), united(others)
    assert tokens(one) == tokens(some)
    assert tokens(common(one, other)) == tokens(one) & tokens(other)
    assert tokens(without(one, other)) == tokens(one) - tokens(other)
    for result in (one, common(one, other), without(one, other)):
        check(result)
    assert reach(one) == next(i for i in range(40) if i not in tokens(one))


@pytest.mark.parametrize(
    ("intervals", "blocks"),
    [([(0, 40)], [(0, 32)]), ([(8, 40)], [(16, 32)]), ([(8, 24)], []), ([(16, 32), (60, 100)], [(16, 32), (64, 96)])],
)
def test_only_whole_blocks_count(intervals: Intervals, blocks: Intervals) -> None:
    assert whole_blocks(intervals, 16) == blocks
