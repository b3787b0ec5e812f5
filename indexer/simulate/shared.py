"""Caches of the public hash rule, and of a store that several engines may share: SGLang's tree with other habits.

* `StandardCache`: its digests are the sequence hashes of Mooncake's RFC #1403, XXH3-64 over granules of one page.
* `ObjectCache`: the same, a page an object, each announced by itself.
* `ChunkCache`: a store behind an engine that only ever announces what comes; nothing goes, as long as there is room.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from indexer.simulate.cache import Cleared, Mutation, Prompt, Removed, Stored
from indexer.simulate.tree import SglangCache

SEED = 1337
MASK_64 = (1 << 64) - 1


class StandardCache(SglangCache):
    """Salted prompts have digests of their own, but the rule has no word for salts."""

    def _digests(self, prompt: Prompt, token_ids: Sequence[int]) -> list[bytes]:
        size = self.page_size
        seed = (
            SEED if prompt.lora_name is None else SEED + xxhash.xxh3_64_intdigest(prompt.lora_name.encode()) & MASK_64
        )
        chain = b"" if prompt.cache_salt is None else xxhash.xxh3_64_digest(prompt.cache_salt.encode())
        digests = []
        for start in range(0, len(token_ids) // size * size, size):
            page = struct.pack(f"<{size}I", *token_ids[start : start + size])
            local = xxhash.xxh3_64_intdigest(page, seed).to_bytes(8, "little")
            chain = xxhash.xxh3_64_digest(chain + local, SEED)[::-1] if chain else local
            digests.append(chain[::-1])
        return digests


class ObjectCache(StandardCache):
    def take_mutations(self) -> list[Mutation]:
        return [single for mutation in super().take_mutations() for single in self._singles(mutation)]

    def _singles(self, mutation: Mutation) -> list[Mutation]:
        if isinstance(mutation, Removed):
            return [Removed(mutation.group, (digest,)) for digest in mutation.digests]
        if not isinstance(mutation, Stored):
            return [mutation]
        parents, size = [mutation.parent, *mutation.digests], self.page_size
        return [
            Stored(
                mutation.group,
                (digest,),
                parents[i],
                mutation.token_ids[i * size : (i + 1) * size],
                (None,),
                mutation.prompt,
            )
            for i, digest in enumerate(mutation.digests)
        ]


class ChunkCache(SglangCache):
    """A reset of the engine leaves it as it is. Without room left it takes no request."""

    def take_mutations(self) -> list[Mutation]:
        return [mutation for mutation in super().take_mutations() if not isinstance(mutation, Cleared)]

    @property
    def has_mutations(self) -> bool:
        return any(not isinstance(mutation, Cleared) for mutation in self._mutations)

    @property
    def available_pages(self) -> int:
        return self._free

    def reset(self) -> bool:
        return not self._running
