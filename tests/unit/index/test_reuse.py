"""The engines' own rules, each on a layout drawn as a set of block ends."""

from __future__ import annotations

from indexer.index.groups import Groups
from indexer.index.options import EngineOptions
from indexer.index.reuse import ReuseRules, Spec, hit_length, rules_of

Layout = dict[Spec, set[int]]


def full(block: int = 16, *groups: int, drops: bool = False) -> Spec:
    return Spec("full_attention", block, None, None, groups or (0,), drops)


def window(tokens: int, block: int = 16, *, drops: bool = False) -> Spec:
    return Spec("sliding_window", block, tokens, None, (1,), drops)


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
    specs = rules_of(groups, EngineOptions(attention_chunk_size={3: 64}), drops=False).specs
    assert [spec.groups for spec in specs] == [(1, 2), (0,), (3,)]
    assert specs[2].chunk_tokens == 64


def test_a_chunk_that_is_not_whole_blocks_is_granted_up_to_its_last_whole_block() -> None:
    spec = Spec("chunked_local_attention", 16, None, 40, (0,))
    assert hit({spec: set()}, 150) == 112
    assert hit({spec: {128}}, 150) == 128


def test_chunked_local_attention_alone_takes_for_granted_but_not_beside_another_kind() -> None:
    chunked = Spec("chunked_local_attention", 16, None, 64, (0,))
    assert ReuseRules((chunked,), 16, 16).takes_for_granted
    assert not ReuseRules((full(), chunked), 16, 16).takes_for_granted
    assert not ReuseRules((Spec("chunked_local_attention", 16, None, None, (0,)),), 16, 16).takes_for_granted


# ---------------------------------------------------------------------- the block that is dropped for EAGLE


def test_a_group_alone_drops_the_last_block_of_its_hit() -> None:
    layout = {full(drops=True): ends(0, 1, 2, 3)}
    assert hit(layout, 100) == 48
    assert hit(layout, 64) == 32  # the fourth block does not count, and the third is dropped
    assert hit({full(drops=True): ends(0)}, 100) == 0
    assert hit({full(drops=True): set()}, 100) == 0


def test_groups_that_drop_look_one_block_beyond_and_land_on_one_length() -> None:
    blocks = {full(drops=True): ends(*range(6))}
    assert hit({**blocks, window(32, drops=True): {64, 80, 96}}, 200) == 80
    assert hit({**blocks, window(32, drops=True): {80, 96}}, 200) == 0  # one block more than the window is needed
    assert hit({**blocks, window(32, drops=True): {32, 48, 64, 80}}, 200) == 64


def test_they_look_no_further_than_the_last_hash() -> None:
    layout = {full(drops=True): ends(*range(6)), window(32, drops=True): {48, 64, 80, 96}}
    assert hit(layout, 96) == 80  # all six blocks of the prompt are hashed, though only five could be a hit
    assert hit(layout, 95) == 64


def test_a_short_run_at_the_start_drops_a_block_too() -> None:
    blocks = {full(drops=True): ends(*range(6))}
    assert hit({**blocks, window(200, drops=True): {16, 32, 48}}, 200) == 32
    assert hit({**blocks, window(200, drops=True): {16}}, 200) == 0


def test_beside_full_attention_alone_a_group_is_looked_up_once() -> None:
    """Looked up again, a window of one token would ask for a block where the hit ends, which it did not need before."""
    layout = {full(drops=True): ends(*range(6)), window(1, drops=True): {64}}
    assert hit(layout, 200) == 48
    assert hit({**layout, mamba(): {48}}, 200) == 0
    assert hit({full(): ends(0, 1, 2), window(1, drops=True): {64}, mamba(): {48}}, 64) == 0


def test_mamba_drops_nothing() -> None:
    assert hit({full(drops=True): ends(*range(6)), mamba(): {64, 80}}, 200) == 80
    assert hit({full(drops=True): ends(*range(6)), mamba(): {64, 96}}, 200) == 64


def test_a_group_drops_again_once_another_has_shrunk_the_candidate() -> None:
    layout = {full(drops=True): ends(*range(10)), window(17, drops=True): {48, 64, 112, 128, 144}, mamba(): {48, 96}}
    assert hit(layout, 200) == 48  # the window lands on 128, Mamba on 96, the window on 48 with its block at 64
    assert hit({**layout, mamba(): {112, 96}}, 200) == 112


def test_with_unequal_blocks_a_window_ends_one_block_past_the_alignment() -> None:
    blocks = {full(64, drops=True): {64, 128}}
    assert hit({**blocks, window(24, drops=True): {48, 64, 80}}, 200, alignment=64) == 64
    assert hit({**blocks, window(24, drops=True): {32, 48, 64}}, 200, alignment=64) == 0
    assert (
        hit({**blocks, window(24, drops=True): {112, 128, 144}}, 200, alignment=64) == 0
    )  # full attention has one block


def test_a_fine_grained_full_group_drops_one_hash_unit() -> None:
    layout = {full(64, drops=True): {64, 80, 96}, mamba(64): {64, 80, 96}}
    assert hit(layout, 200, alignment=16) == 80
    assert hit({**layout, full(64, drops=True): {64}}, 200, alignment=16) == 0  # Mamba has nothing at 48
    assert hit({**layout, full(64, drops=True): {64}, mamba(64): {48}}, 200, alignment=16) == 48


def groups_of(*kinds: str) -> Groups:
    groups = Groups()
    for i, kind in enumerate(kinds):
        groups.learn(i, kind, 64 if kind == "sliding_window" else None, 16)
    return groups


def dropping(groups: Groups, *drafting: int) -> set[tuple[int, ...]]:
    options = EngineOptions(eagle=True, eagle_groups=frozenset(drafting))
    return {spec.groups for spec in rules_of(groups, options, drops=True).specs if spec.drops}


def test_all_groups_drop_but_mamba_unless_some_are_said_to_hold_draft_layers() -> None:
    groups = groups_of("full_attention", "sliding_window", "mamba", "full_attention")
    assert dropping(groups) == {(0, 3), (1,)}
    assert dropping(groups, 1) == {(1,)}
    assert dropping(groups, 3) == {(0, 3)}  # groups of one spec are looked up together
    assert dropping(groups, 2) == set()
