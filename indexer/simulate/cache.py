"""What a simulated KV cache is: prompts in, mutations out.

A cache holds the keys and values of recent prompts in blocks. Requests are admitted (reusing what is cached), advanced
(computing the tokens that are known but not computed yet) and finished (their blocks become evictable). Whatever
becomes or ceases to be reusable is noted as a mutation, in the true order; `encode` gives mutations the form of one
engine version.
Pure: no sockets, no clock, no chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

ExtraKey: TypeAlias = str | tuple[str, int]
"""What sets a block apart beside its tokens: a LoRA name, a salt, or an image and its offset relative to the block."""


class Image(NamedTuple):
    """A multimodal item: `length` placeholder tokens of a prompt, from `offset` on."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a request and all else that decides which cached blocks it may reuse.

    `session_id` decides nothing: engines only pass it on.
    """

    token_ids: tuple[int, ...]
    lora_name: str | None = None
    cache_salt: str | None = None
    images: tuple[Image, ...] = ()
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks became reusable. `parent` is the digest of the block before the first, None at the root."""

    group: int
    digests: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...]
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Removed:
    """One copy of each of these blocks was evicted."""

    group: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is reusable any more."""


Mutation: TypeAlias = Stored | Removed | Cleared


@dataclass(slots=True, eq=False)
class Request:
    """A running request. `token_ids` are known (prompt and generated), the first `computed` of them are computed.

    `digests` name the full blocks, of which the first `stored` are reusable by others. `tables` are the physical blocks
    per group (vLLM), `private_blocks` the number of blocks that only this request knows (SGLang).
    """

    prompt: Prompt
    token_ids: list[int]
    digests: list[bytes]
    computed: int = 0
    stored: int = 0
    tables: list[list[int]] = field(default_factory=list)
    private_blocks: int = 0

    @property
    def is_caught_up(self) -> bool:
        return self.computed == len(self.token_ids)


class Cache(Protocol):
    """One engine's cache, empty when made."""

    @property
    def has_mutations(self) -> bool:
        """Whether anything happened since `take_mutations`."""

    def admit(self, prompt: Prompt) -> Request | None:
        """Start a request: reuse what is cached, compute the first tokens. None if there is no room for its prompt."""

    def advance(self, request: Request) -> bool:
        """Compute tokens that are known but not computed. False, and nothing done, if there is no room."""

    def finish(self, request: Request) -> None:
        """End the request; its blocks stay reusable until they are evicted."""

    def lookup(self, prompt: Prompt) -> int:
        """How many tokens of the prompt a fresh request would not compute. Changes nothing."""

    def reset(self) -> bool:
        """Forget everything. Refused (False) while requests run."""

    def take_mutations(self) -> list[Mutation]:
        """What happened since the last call."""
