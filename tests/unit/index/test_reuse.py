"""The engines' own rules, each on a layout drawn as a set of block ends."""

from __future__ import annotations

from indexer.index.groups import Groups
from indexer.index.reuse import ReuseRules, Spec, hit_length, rules_of

Layout = dict[Spec, set[int]]


def full(block: int = 16, *groups: int) -> Spec:
    return Spec("full_attention", block, None, None, groups or (0,))


def window(tokens: int, block: int = 16) -> Spec:
    return Spec("sliding_window", block, tokens, None, (1,))


def mamba(block: int = 16) -> Spec:
    return Spec("mamba", block, None, None, (2,))


def ends(*blocks: int, block: int = 16) -> set[int]:
    """Ends of these blocks."""
    return {(b + 1) * block for b in blocks}


def hit(layout: Layout, tokens: int, alignment: int = 16, hash_tokens: int = 16) -> int:
    def contiguous(spec: Spec) -> int:
        end = 0
        while end + spec.block_tokens in layout[spec]:
            end += spec.block_tokens
        return end

    specs = sorted(layout, key=lambda spec: not spec.is_full)
    rules = ReuseRules(tuple(specs), alignment, hash_tokens)
    return hit_length(rules, tokens - 1, lambda spec, end: end in layout[spec], contiguous)


def test_full_attention_needs_every_block_from_the_start() -> None:
    assert hit({full(): ends(0, 1, 3)}, 100) == 32
    assert hit({full(): ends(1, 2, 3)}, 100) == 0


def test_the_last_token_is_always_computed() -> None:
    assert hit({full(): ends(0, 1)}, 32) == 16
    assert hit({full(): ends(0, 1)}, 33) == 32
    assert hit({full(): ends(0)}, 1) == 0


def test_a_window_needs_its_last_blocks_only() -> None:
    assert hit({window(32): ends(5, 6)}, 200) == 7 * 16
    assert hit({window(33): ends(5, 6)}, 200) == 7 * 16
    assert hit({window(34): ends(5, 6)}, 200) == 0


def test_the_right_most_long_enough_run_of_a_window_counts() -> None:
    assert hit({window(33): ends(1, 2, 5, 8, 9)}, 200) == 160
    assert hit({window(33): ends(1, 2, 5, 8, 9)}, 160) == 48  # the last block is past the limit


def test_a_shorter_run_counts_where_it_touches_the_start() -> None:
    assert hit({window(100): ends(0, 1, 2)}, 200) == 48
    assert hit({window(100): ends(1, 2)}, 200) == 0


def test_a_window_of_one_token_is_content_with_one_block() -> None:
    assert hit({window(1): ends(4)}, 200) == 80


def test_a_window_run_may_only_end_on_the_alignment() -> None:
    layout = {full(64): ends(0, 1, block=64), window(24): {48, 64, 96, 112}}
    assert hit(layout, 200, alignment=64) == 64
    assert hit({**layout, window(24): {96, 112, 128}}, 200, alignment=64) == 128


def test_a_short_window_run_at_the_start_is_cut_to_the_alignment() -> None:
    assert hit({window(200): ends(0, 1, 2, 3, 4)}, 200, alignment=64) == 64


def test_mamba_needs_one_state_at_the_very_end() -> None:
    assert hit({mamba(): ends(3, 7)}, 200) == 128
    assert hit({mamba(): ends(3, 7)}, 128) == 64


def test_a_mamba_state_off_the_alignment_does_not_count() -> None:
    assert hit({full(64): ends(0, 1, block=64), mamba(64): {96, 64}}, 200, alignment=64) == 64


def test_all_groups_agree_on_one_length() -> None:
    layout = {full(): ends(*range(10)), window(32): ends(0, 1, 6, 7), mamba(): ends(3, 7)}
    assert hit(layout, 161) == 128


def test_the_answer_is_not_the_least_of_the_groups_answers() -> None:
    assert hit({full(): ends(*range(8)), mamba(): ends(9)}, 200) == 0
    assert hit({full(): ends(*range(8)), window(32): ends(0, 9, 8)}, 200) == 16


def test_groups_are_asked_again_until_none_shrinks_the_answer() -> None:
    layout = {full(): ends(*range(10)), window(32): ends(2, 3, 8, 9), mamba(): ends(3, 8)}
    assert hit(layout, 200) == 64


def test_fine_grained_hits_reach_into_the_next_block() -> None:
    layout = {full(64): {64, 80, 96}, mamba(64): {96, 64}}
    assert hit(layout, 200, alignment=16) == 96
    assert hit(layout, 96, alignment=16) == 64
    assert hit({**layout, full(64): {64, 96}}, 200, alignment=16) == 96
    assert hit({**layout, full(64): {64, 80}}, 200, alignment=16) == 64


def test_a_partial_entry_more_than_one_block_ahead_does_not_count() -> None:
    assert hit({full(64): {64, 144}, mamba(64): {144, 64}}, 200, alignment=16) == 64


def test_chunked_local_attention_without_its_chunk_asks_for_every_block() -> None:
    spec = Spec("chunked_local_attention", 16, None, None, (0,))
    assert hit({spec: ends(0, 1, 3)}, 200) == 32


def test_chunked_local_attention_takes_earlier_chunks_for_granted() -> None:
    spec = Spec("chunked_local_attention", 16, None, 64, (0,))
    assert hit({spec: ends(8)}, 150) == 144
    assert hit({spec: set()}, 150) == 128


def test_full_attention_is_asked_first_and_equal_groups_together() -> None:
    groups = Groups()
    groups.learn(0, "mamba", None, 16)
    groups.learn(1, "full_attention", None, 16)
    groups.learn(2, "full_attention", None, 16)
    groups.learn(3, "chunked_local_attention", None, 16)
    specs = rules_of(groups, {3: 64}).specs
    assert [spec.groups for spec in specs] == [(1, 2), (0,), (3,)]
    assert specs[2].chunk_tokens == 64
