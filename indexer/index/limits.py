"""Bounds of the index. Settings fill them in; what happens at each is said where it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds per publisher; at each of them the oldest go, counted. `links_stored_max`: links kept across a restart of
    the service; `tail_bytes_max`: see tail.py; `media`: see tiers.py; `block_tokens_min`: see groups.py. Of expected
    blocks, also in all; at these bounds no more are taken. `heat_...`: of all publishers together, see heat.py."""

    ghosts_max: int = 8_192
    orphans_max: int = 8_192
    unplaced_max: int = 8_192
    sparse_runs_max: int = 1_024
    links_max: int = 65_536
    links_stored_max: int = 4_096
    tail_bytes_max: int = 512 * 1024
    journal_bytes_max: int = 1024 * 1024
    journals_bytes_max: int = 64 * 1024 * 1024
    holders_max: int = 256
    unverified_max: int = 1_000_000
    expected_blocks_max: int = 8_192
    expected_blocks_total_max: int = 65_536
    heat_sample_every: int = 64
    heat_keys_max: int = 500_000
    block_tokens_min: int = 1
    media: Mapping[str, str] = field(default_factory=dict)
