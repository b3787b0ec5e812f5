"""What a query asks about a prompt, and what its answer says: values that readers, index and writers share.

Every field of a hit costs each hit of an answer, so what only some queries ask for is unset, or in `DetailedHit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from indexer.index.key_space import KeySpace

U32_BYTES = 4


class Detail(StrEnum):
    """What hits say beside the summary. Publishers are judged one by one for it."""

    SUMMARY = "summary"
    TIERS = "tiers"  # on which tier how much of the prefix lies
    GROUPS = "groups"  # how far each KV-cache group would let the engine go
    INTERVALS = "intervals"  # where each part of the prefix lies, and who holds it


SUMMARY = Detail.SUMMARY


class MultimodalItem(NamedTuple):
    """One multimodal item of a prompt: its identifier (the engines' multimodal hash), where it starts, its length."""

    identifier: str
    offset: int
    length: int


class PrefixQuery(msgspec.Struct, frozen=True, gc=False):
    """A prompt. `token_ids`: integers from 0 to below 2^63, or u32 little-endian bytes. `workers`: only these.

    Instead of tokens `local_hashes`, the local hash of each granule, or `content_keys`, the chain's key at the end of
    each: adapter, salt and items are in them. `granule`: by which they were hashed, and who has another one has none of
    them; None = by the model's. `limit`: so many hits at most, the best; `min_hit_tokens`: only those with so many.
    `expected`: of blocks that routers expect (expected.py) hits say nothing (None), say how many tokens they would add
    (False), or count them (True).
    """

    model: str
    token_ids: Sequence[int] | bytes = b""
    tenant: str = "default"
    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    workers: frozenset[str] | None = None
    local_hashes: Sequence[int] | None = None
    detail: Detail = SUMMARY
    content_keys: Sequence[int] | None = None
    granule: int | None = None
    min_hit_tokens: int = 0
    limit: int | None = None
    expected: bool | None = None

    @property
    def is_hashed(self) -> bool:
        """Whether the prompt is given by hashes, not by tokens."""
        return self.local_hashes is not None or self.content_keys is not None

    def asks(self, space: KeySpace) -> bool:
        return self.granule is None or self.granule == space.granule

    @property
    def hash_count(self) -> int:
        return len(self.content_keys if self.local_hashes is None else self.local_hashes)  # type: ignore[arg-type]

    @property
    def token_count(self) -> int:
        return len(self.token_ids) // U32_BYTES if isinstance(self.token_ids, bytes) else len(self.token_ids)

    def beginning(self, tokens: int) -> PrefixQuery:
        """The same of its first tokens, of a prompt that is given by tokens."""
        bytes_each = U32_BYTES if isinstance(self.token_ids, bytes) else 1
        return msgspec.structs.replace(self, token_ids=self.token_ids[: tokens * bytes_each])


class Span(msgspec.Struct, gc=False):
    """A part of a prompt, from token `start` to before `end`, the fastest tier that it is held on, and by whom: the
    worker itself, or a pool that serves it."""

    start: int
    end: int
    tier: str
    worker_id: str


class GroupReach(msgspec.Struct, gc=False):
    """One KV-cache group. `held_tokens`: the longest prefix after which it would let the engine go on, if all others
    did: of full attention every block, of a window those that it reaches back to, of Mamba a state. In tokens."""

    group: int
    kind: str
    window: int | None
    block_tokens: int
    held_tokens: int


class PublisherHit(msgspec.Struct, gc=False):
    """`hit_tokens`: what the engine would skip; `resident_tokens`: the longest prefix held; `tiers`: cumulative.

    `coverage_at`: when coverage became so, in seconds since 1970; None = not known. `pools`: those whose blocks extend
    the reach; `spans`: where the prefix lies, if that was asked.
    """

    worker_id: str
    dp_rank: int
    hit_tokens: int
    resident_tokens: int
    tiers: dict[str, int]
    coverage: str
    coverage_reason: str
    coverage_at: float | None
    sequence_number: int | None
    pools: list[str] | msgspec.UnsetType = msgspec.UNSET
    spans: list[Span] | msgspec.UnsetType = msgspec.UNSET


class DetailedHit(PublisherHit, gc=False):
    """What only some hits have; every field costs each hit of an answer.

    `tier_tokens`, `groups`: see `Detail`. `expected_tokens`: how many tokens more the engine would skip if it had the
    blocks that are expected of it; in `hit_tokens` only if the query wants them counted.
    """

    tier_tokens: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    groups: list[GroupReach] | msgspec.UnsetType = msgspec.UNSET
    expected_tokens: int | msgspec.UnsetType = msgspec.UNSET


class QueryWarning(msgspec.Struct, gc=False):
    """`code`: see query_warnings.py."""

    code: str
    message: str


class PrefixAnswer(msgspec.Struct, gc=False):
    """Best hits first, ties by worker and rank."""

    prompt_tokens: int
    hits: list[PublisherHit] = []
    warnings: list[QueryWarning] = []
