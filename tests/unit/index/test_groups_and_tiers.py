from __future__ import annotations

import pytest

from indexer.index.groups import MAMBA, SIZES_MAX, Group, Groups
from indexer.index.tiers import Media, canonical_medium, is_credited, tier_rank


def learned(*groups: tuple[int, str | None, int | None, int]) -> Groups:
    result = Groups()
    for group in groups:
        result.learn(*group)
    return result


def test_a_group_is_as_large_as_its_largest_block() -> None:
    groups = learned((0, MAMBA, None, 16), (0, MAMBA, None, 64))
    assert groups.by_index[0].block_tokens == 64
    assert [state.sizes for state in groups.states()] == [(16, 64)]


def test_a_kind_learned_later_replaces_unknown_and_nil_does_not() -> None:
    groups = learned((0, None, None, 16))
    assert groups.by_index[0].kind == "unknown"
    groups.learn(0, "sliding_window", 40, 16)
    groups.learn(0, None, None, 16)
    assert (groups.by_index[0].kind, groups.by_index[0].window) == ("sliding_window", 40)


def test_the_version_changes_only_when_something_was_learned() -> None:
    groups = learned((0, "full_attention", None, 16))
    version = groups.version
    groups.learn(0, "full_attention", None, 16)
    assert groups.version == version
    groups.learn(0, "full_attention", None, 32)
    assert groups.version > version


def test_sizes_of_one_group_are_bounded() -> None:
    groups = learned(*((0, None, None, size) for size in range(1, 1000)))
    assert len(groups.by_index[0].sizes) == SIZES_MAX
    assert groups.ignored_sizes == 999 - SIZES_MAX


@pytest.mark.parametrize(("window", "block", "blocks"), [(1, 16, 0), (2, 16, 1), (17, 16, 1), (18, 16, 2), (64, 16, 4)])
def test_a_window_needs_the_blocks_of_its_last_w_minus_1_tokens(window: int, block: int, blocks: int) -> None:
    assert Group("sliding_window", window, {block}).window_blocks == blocks


@pytest.mark.parametrize(
    ("groups", "alignment"),
    [
        ([(0, None, None, 16)], 16),
        ([(0, "full_attention", None, 64), (1, "sliding_window", 24, 16)], 64),
        ([(0, "full_attention", None, 48), (1, "sliding_window", 24, 32)], 96),
        ([(0, "full_attention", None, 64), (1, MAMBA, None, 64)], 64),
        ([(0, "full_attention", None, 64), (1, MAMBA, None, 64), (1, MAMBA, None, 16)], 16),
        ([(0, "full_attention", None, 64), (1, MAMBA, None, 64), (2, "sliding_window", 24, 16)], 16),
        ([(0, "full_attention", None, 16), (1, MAMBA, None, 64), (2, "sliding_window", 24, 32)], 64),
        ([(0, MAMBA, None, 64), (0, MAMBA, None, 16)], 64),
    ],
)
def test_hits_end_on_the_alignment(groups: list[tuple[int, str | None, int | None, int]], alignment: int) -> None:
    assert learned(*groups).alignment == alignment


def test_groups_survive_the_store() -> None:
    groups = learned((1, "sliding_window", 24, 16), (0, MAMBA, None, 64), (0, MAMBA, None, 16))
    restored = Groups()
    restored.restore(groups.states())
    assert restored.states() == groups.states()
    assert restored.alignment == groups.alignment


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, "GPU"),
        ("gpu", "GPU"),
        (" GPU ", "GPU"),
        ("cpu", "CPU"),
        ("CPU_PINNED", "CPU"),
        ("CPU_TIER1", "CPU"),
        ("DISK", "STORAGE"),
        ("FS", "STORAGE"),
        ("OBJ", "STORAGE"),
        ("storage", "STORAGE"),
        ("external", "EXTERNAL"),
        ("NVMe", "STORAGE"),
        ("XYZ", "XYZ"),
        ("", "UNNAMED"),
    ],
)
def test_a_medium_belongs_to_a_tier(medium: str | None, tier: str) -> None:
    assert Media().tier_of(canonical_medium(medium, None)) == tier


def test_what_another_machine_holds_is_not_credited() -> None:
    assert not is_credited(canonical_medium("STORAGE", "REMOTE"))
    assert not is_credited(canonical_medium(None, "remote"))
    assert is_credited(canonical_medium("STORAGE", "LOCAL"))


def test_tiers_are_sorted_by_speed_and_unknown_ones_come_last() -> None:
    in_order = ["GPU", "CPU", "STORAGE", "EXTERNAL", "ABC", "XYZ"]
    assert sorted(["XYZ", "STORAGE", "EXTERNAL", "ABC", "GPU", "CPU"], key=tier_rank) == in_order


def test_the_table_of_media_can_be_extended() -> None:
    media = Media({"lustre": "STORAGE", "DISK": "cold", "XPU": "GPU"})
    mine = [media.tier_of(medium) for medium in ("LUSTRE", "DISK", "XPU", "FS", "OTHER")]
    assert mine == ["STORAGE", "COLD", "GPU", "STORAGE", "OTHER"]
    assert Media().tier_of("LUSTRE") == "LUSTRE"
