"""What no event says of an engine: the `options` of its registration, read once.

The API refuses options that do not fit. A registration that an older version saved may still hold some under names that
had no meaning then: those count as not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Positive: TypeAlias = Annotated[int, Meta(gt=0)]


class NoRemovals(msgspec.Struct, frozen=True):
    """A source that never says what it removes: a block counts for so long after its last store, and the newest so many
    count. One of the two is given at least."""

    expire_after_s: Annotated[float, Meta(gt=0)] | None = None
    blocks_max: Positive | None = None


class EngineHash(msgspec.Struct, frozen=True):
    """How the engine makes its block hashes. `seed`: what its first parent hash is made of (PYTHONHASHSEED)."""

    algorithm: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
    seed: str | None = None


class EngineOptions(msgspec.Struct, frozen=True):
    """`eagle` None: nobody said. `attention_chunk_size`: tokens, by group. `lora_aliases`: the engine's name of an
    adapter -> the name that prompts have."""

    eagle: bool | None = None
    eagle_groups: frozenset[int] = frozenset()
    attention_chunk_size: dict[int, Positive] = {}
    counting: Literal["count", "set"] = "count"
    no_removals: NoRemovals | None = None
    lora_aliases: dict[str, str] = {}
    engine_hash: EngineHash | None = None

    @property
    def is_eagle(self) -> bool:
        """Groups with draft layers say it as well."""
        return bool(self.eagle_groups) if self.eagle is None else self.eagle

    @property
    def counts_as_set(self) -> bool:
        """Whether a further store of a block adds no reference: a source that repeats itself, or removes nothing."""
        return self.counting == "set" or self.no_removals is not None

    def content_adapter(self, lora_name: str | None) -> str | None:
        """The name that prompts have for the adapter that the engine calls so."""
        return lora_name if lora_name is None else self.lora_aliases.get(lora_name, lora_name)

    def engine_adapter(self, lora_name: str | None) -> str | None:
        """The engine's (first) name for an adapter of prompts."""
        return next((name for name, alias in self.lora_aliases.items() if alias == lora_name), lora_name)


def read_options(options: Mapping[str, object]) -> EngineOptions:
    """The options that have a meaning here and a value that fits; the others are left out."""
    fitting = {}
    for field in msgspec.structs.fields(EngineOptions):
        if field.name in options:
            try:
                fitting[field.name] = msgspec.convert(options[field.name], field.type, str_keys=True)
            except msgspec.ValidationError:
                continue
    return EngineOptions(**fitting)
