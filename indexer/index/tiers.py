"""Media in the engines' words -> tiers in an order of speed.

An unknown medium is a tier of its own below the known ones, never GPU. Blocks that another machine holds
(`locality = REMOTE`) are recorded, but not credited: the engine cannot load them as its own.
"""

from __future__ import annotations

from functools import lru_cache

GPU = "GPU"
CPU = "CPU"
STORAGE = "STORAGE"
TIER_ORDER = (GPU, CPU, STORAGE)
REMOTE_SUFFIX = "@REMOTE"

_TIER_BY_MEDIUM = {
    **dict.fromkeys(("GPU", "HBM", "DEVICE"), GPU),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2", "HOST", "DRAM"), CPU),
    **dict.fromkeys(("STORAGE", "DISK", "FS", "OBJ", "NVME", "SSD", "FILE"), STORAGE),
}


@lru_cache(maxsize=1024)  # asked several times per event, always for the same few
def canonical_medium(medium: str | None, locality: str | None) -> str:
    """The medium in capitals; absent means GPU; of another machine: marked as such."""
    name = GPU if medium is None else medium.strip().upper() or "UNNAMED"
    return name + REMOTE_SUFFIX if locality is not None and locality.upper() == "REMOTE" else name


def is_credited(medium: str) -> bool:
    """Whether the engine can load what lies there."""
    return not medium.endswith(REMOTE_SUFFIX)


def tier_of(medium: str) -> str:
    """The tier of a canonical medium; an unknown one is its own."""
    return _TIER_BY_MEDIUM.get(medium, medium)


def tier_rank(tier: str) -> tuple[int, str]:
    """Sorts tiers: GPU, CPU, STORAGE, then the others by name."""
    return (TIER_ORDER.index(tier) if tier in TIER_ORDER else len(TIER_ORDER), tier)
