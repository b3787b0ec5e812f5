"""What engines publish, built by hand: events as maps or arrays, batches as bytes, and an engine that sends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import MultimodalItem, PrefixQuery, PublisherHit
from indexer.index.publisher import ApplyOutcome, PublisherIndex, addressee_of
from indexer.registration import Registration
from indexer.wire.columns import PayloadReader, read_batch
from indexer.wire.decode import EventBatch, decode_batch
from indexer.wire.events import Event

MODEL = "m"
READER = PayloadReader()
G = 16
Fields = dict[str, Any]


def stored(
    hashes: Sequence[Any],
    parent: Any = None,
    tokens: Sequence[Any] = (),
    block_size: int = G,
    medium: str | None = "GPU",
    **fields: Any,
) -> Fields:
    """A BlockStored as vLLM >= 0.24 sends it."""
    event: Fields = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }
    return event | fields


def removed(hashes: Sequence[Any], medium: str | None = "GPU", **fields: Any) -> Fields:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium} | fields


def cleared(**fields: Any) -> Fields:
    return {"type": "AllBlocksCleared"} | fields


def payload(*events: Any, ts: Any = 1.5, rank: Any = 0) -> bytes:
    """A batch of these events, in the order given."""
    return msgspec.msgpack.encode([ts, list(events), rank])


def decoded(*events: Any) -> EventBatch:
    return decode_batch(payload(*events))


def decoded_one(event: Any) -> Event:
    """The one event, which must be readable."""
    batch = decoded(event)
    assert not batch.bad_events, batch.bad_events
    (only,) = batch.events
    return only


def numbers(first: int, count: int) -> list[int]:
    """`count` token ids that occur nowhere else."""
    return list(range(first, first + count))


class Engine:
    """One publisher of an index, fed with events through the same bytes as a real one."""

    def __init__(
        self,
        index: ContentIndex,
        worker_id: str = "w0",
        *,
        dp_rank: int = 0,
        engine: str = "vllm",
        options: Mapping[str, object] | None = None,
        block_size: int | None = None,
        serves: Sequence[str] | None = None,
        is_pool: bool = False,
    ) -> None:
        self.index = index
        self.sequence_number = 0
        registration = Registration(
            worker_id,
            dp_rank,
            MODEL,
            "tcp://127.0.0.1:5557",
            engine=engine,
            block_size=block_size,
            options=dict(options or {}) | ({"pool": serves} if is_pool else {}),
            publisher_id=len(index.publishers()) + 1,
        )
        self.publisher: PublisherIndex = index.add_publisher(registration)

    def send(self, *events: Any) -> ApplyOutcome:
        """One batch."""
        batch = read_batch(payload(*events), READER, addressee_of(self.publisher.registration))
        outcome = self.publisher.apply(batch, self.sequence_number, 0)
        self.sequence_number += 1
        return outcome

    def restart(self) -> None:
        self.publisher.restart()
        self.sequence_number = 0

    def hit(
        self,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Iterable[tuple[str, int, int]] = (),
    ) -> PublisherHit | None:
        """What the index answers for this engine."""
        items = tuple(MultimodalItem(*item) for item in multimodal)
        query = PrefixQuery(MODEL, tokens, lora_name=lora_name, cache_salt=cache_salt, multimodal=items)
        key = self.publisher.registration.key
        return next((h for h in self.index.prefix_hits(query).hits if (h.worker_id, h.dp_rank) == key), None)

    def resident(self, tokens: Sequence[int], **query: Any) -> int:
        hit = self.hit(tokens, **query)
        return hit.resident_tokens if hit else 0

    def hit_tokens(self, tokens: Sequence[int], **query: Any) -> int:
        hit = self.hit(tokens, **query)
        return hit.hit_tokens if hit else 0

    def references(self) -> dict[tuple[str, int, str, Any], int]:
        """(medium, group, owner, engine hash) -> reference count of every residency."""
        return {(*holder, engine_hash): count for holder, engine_hash, _, count in self.publisher.residencies()}
