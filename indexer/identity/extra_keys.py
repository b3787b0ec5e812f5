"""LoRA names, salts and multimodal items: the engines' form and the query's form -> one canonical form.

Engines publish, per emitted block, `nil` or a list: the LoRA name, `[identifier, offset]` of each multimodal item that
overlaps the block (offset relative to the block, negative if the item began earlier), the cache salt (only in the
block that starts at token 0), a prompt-embeds digest (bytes). Versions before 2026-03-20 publish bare identifiers.
In the canonical form the LoRA name is in the chain's seed, the salt in the seed of granule 0, and an item is folded
once: into the granule where it starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from indexer.identity.chain import identifier_bytes
from indexer.wire.errors import WireError

Folded: TypeAlias = "defaultdict[int, bytearray]"
"""Identifiers by granule or block; grown in place, since an event may name any number in one."""


@dataclass(slots=True)
class ExtraKeys:
    """Canonical extra keys of a run of tokens: bytes per granule (counted from the run's start), and the salt.

    `lookahead`: bytes per block of the items that start right after it, in its lookahead tokens.
    `carried`: identifiers without offset in the run's last block, for telling what is new in the next one.
    """

    items: dict[int, bytes] = field(default_factory=dict)
    cache_salt: str | None = None
    lookahead: dict[int, bytes] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()


NO_EXTRA_KEYS = ExtraKeys()


def from_event(
    extra_keys: Sequence[Any] | None,
    *,
    lora_name: str | None,
    block_tokens: int,
    granule: int,
    at_root: bool,
    carried: frozenset[str] = frozenset(),
) -> ExtraKeys:
    """Extra keys of a run of blocks as an engine publishes them.

    `at_root`: the run starts at token 0. `carried`: bare identifiers in the block before the run. Raises WireError.
    """
    if not extra_keys or not any(extra_keys):
        return NO_EXTRA_KEYS
    result = ExtraKeys()
    items: Folded = defaultdict(bytearray)
    lookahead: Folded = defaultdict(bytearray)
    for i, keys in enumerate(extra_keys):
        entries = () if keys is None else keys
        if not isinstance(entries, list | tuple):
            raise WireError("bad_extra_keys", f"extra_keys[{i}] is not a list")
        bare = _bare(entries, lora_name)
        if at_root and i == 0 and bare and not _carried_on(bare[-1], extra_keys, lora_name):
            result.cache_salt = bare.pop()
        first_granule = i * block_tokens // granule
        for identifier in bare:
            if identifier not in carried:
                items[first_granule] += identifier_bytes(identifier)
        carried = frozenset(bare)
        _fold_located(items, lookahead, entries, i, block_tokens, granule)
    result.items, result.lookahead, result.carried = _frozen(items), _frozen(lookahead), carried
    return result


def _bare(entries: Iterable[Any], lora_name: str | None) -> list[str]:
    """The texts of a block's extra keys but for the adapter's name, which stands first."""
    bare = [entry for entry in entries if isinstance(entry, str)]
    return bare[1:] if lora_name and bare and bare[0] == lora_name else bare


def _carried_on(text: str, extra_keys: Sequence[Any], lora_name: str | None) -> bool:
    """A salt is only ever in block 0: a bare text that block 1 has too is an old version's multimodal identifier."""
    return len(extra_keys) > 1 and isinstance(extra_keys[1], list | tuple) and text in _bare(extra_keys[1], lora_name)


def _fold_located(
    items: Folded, lookahead: Folded, entries: Iterable[Any], block: int, block_tokens: int, granule: int
) -> None:
    for entry in entries:
        if isinstance(entry, str):
            continue
        if isinstance(entry, bytes):
            items[block * block_tokens // granule] += identifier_bytes(entry)
            continue
        identifier, offset = _located(entry)
        if offset >= block_tokens:
            lookahead[block] += identifier_bytes(identifier)
        elif offset >= 0:
            items[(block * block_tokens + offset) // granule] += identifier_bytes(identifier)


def _located(entry: Any) -> tuple[str, int]:
    if isinstance(entry, list | tuple) and len(entry) == 2:
        identifier, offset = entry
        if isinstance(identifier, str) and isinstance(offset, int):
            return identifier, offset
    raise WireError("bad_extra_keys", "an extra key is neither text, bytes nor [identifier, offset]")


def from_query(items: Iterable[tuple[str, int]], granule: int) -> dict[int, bytes]:
    """Bytes per granule of a prompt's multimodal items `(identifier, absolute offset)`."""
    folded: Folded = defaultdict(bytearray)
    for identifier, offset in sorted(items, key=lambda item: item[1]):
        folded[offset // granule] += identifier_bytes(identifier)
    return _frozen(folded)


def _frozen(folded: Folded) -> dict[int, bytes]:
    return {place: bytes(data) for place, data in folded.items()}
