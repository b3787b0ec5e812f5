"""Media in the engines' words -> tiers in an order of speed.

An unknown medium is a tier of its own below the known ones, never GPU. Blocks that another machine holds
(`locality = REMOTE`) are recorded, but not credited: the engine cannot load them as its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

GPU = "GPU"
CPU = "CPU"
STORAGE = "STORAGE"
EXTERNAL = "EXTERNAL"
TIER_ORDER = (GPU, CPU, STORAGE, EXTERNAL)
REMOTE_SUFFIX = "@REMOTE"

_TIER_BY_MEDIUM = {
    **dict.fromkeys(("GPU", "HBM", "DEVICE"), GPU),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2", "HOST", "DRAM"), CPU),
    **dict.fromkeys(("STORAGE", "DISK", "FS", "OBJ", "NVME", "SSD", "FILE"), STORAGE),
    EXTERNAL: EXTERNAL,
}


class Media:
    """The table of media. `more`: what it has beside the usual ones, or otherwise; case does not matter."""

    __slots__ = ("_tiers",)

    def __init__(self, more: Mapping[str, str] | None = None) -> None:
        added = {canonical_medium(medium, None): tier.strip().upper() for medium, tier in (more or {}).items()}
        self._tiers = _TIER_BY_MEDIUM | added if added else _TIER_BY_MEDIUM

    def tier_of(self, medium: str) -> str:
        """The tier of a canonical medium; an unknown one is its own."""
        return self._tiers.get(medium, medium)


@lru_cache(maxsize=1024)  # asked several times per event, always for the same few
def canonical_medium(medium: str | None, locality: str | None) -> str:
    """The medium in capitals; absent means GPU; of another machine: marked as such."""
    name = GPU if medium is None else medium.strip().upper() or "UNNAMED"
    return name + REMOTE_SUFFIX if locality is not None and locality.upper() == "REMOTE" else name


def is_credited(medium: str) -> bool:
    """Whether the engine can load what lies there."""
    return not medium.endswith(REMOTE_SUFFIX)


def tier_rank(tier: str) -> tuple[int, str]:
    """Sorts tiers: GPU, CPU, STORAGE, EXTERNAL, then the others by name."""
    return (TIER_ORDER.index(tier) if tier in TIER_ORDER else len(TIER_ORDER), tier)
