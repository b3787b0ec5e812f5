"""Events of other dialects than vLLM's, damaged and nonsensical: only WireError, and nothing else of a batch lost."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from indexer.index.content_index import ContentIndex
from indexer.wire.columns import read_batch
from indexer.wire.dialects.recognition import Recogniser
from indexer.wire.errors import WireError
from tests.engine_events import MODEL, READER, Engine, G, numbers, payload, stored
from tests.index_invariants import check_index
from tests.property.test_anything_is_survived import SMALL, anything, check_queries
from tests.sizes import examples

TOKENS = numbers(1, 64)
HASHES: list[Any] = [0, 1, 2, 3, -1, 2**63, 2**64 - 1, b"x" * 32, b"8 bytes!"]
STANDARD_FIELDS = [
    "event_type",
    "event_id",
    "timestamp",
    "model_name",
    "block_size",
    "additional_salt",
    "lora_name",
    "tenant_id",
    "backend_id",
    "medium",
    "dp_rank",
    "seq_hashes",
    "base_block_idx",
    "parent_hash",
    "token_ids",
    "object_key",
]
DICTIONARY_FIELDS = ["type", "parent_hash", "blocks", "block_hashes", "block_hash", "cache_level"]


class Nonsense:
    """Well-formed events that make little sense together."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def standard(self) -> dict[str, Any]:
        random = self.random
        hashes = random.sample(HASHES, k=random.randint(0, 4))
        event = {
            "event_type": random.choice(["stored"] * 4 + ["removed", "removed", "cleared", "moved"]),
            "block_size": random.choice([G, G, G, 8, 32, 0, -1, 2**31]),
            "seq_hashes": hashes,
            "token_ids": random.choice([None, [], TOKENS[: len(hashes) * G], TOKENS[:7], [2**33] * G]),
            "base_block_idx": random.choice([None, 0, 0, 1, 5, -1, 2**40]),
            "parent_hash": random.choice([None, *HASHES]),
            "object_key": random.choice([None, None, None, "a", "b"]),
            "additional_salt": random.choice([None, "", "s"]),
            "medium": random.choice([None, "GPU", "cpu", "disk"]),
            "backend_id": random.choice([None, "w0", "b", 7]),
            "model_name": random.choice([None, MODEL, "other"]),
        }
        return {name: value for name, value in event.items() if random.random() < 0.9}

    def dictionary(self) -> dict[str, Any]:
        random = self.random
        level = random.choice([0, 0, 1, 2, -1])
        data = random.choice(
            [
                {"type": "stored", "parent_hash": random.choice([None, *HASHES]), "blocks": self.blocks()},
                {"type": "stored", "parent_hash": random.choice([None, *HASHES]), "blocks": self.blocks()},
                {"type": "removed", "block_hashes": random.sample(HASHES, k=2)},
                {
                    "type": "updated",
                    "block_hash": random.choice(HASHES),
                    "cache_level": {"old_value": 0, "new_value": level},
                },
                {"type": "created", "num_blocks_per_cache_level": [1, 2]},
            ]
        )
        return {"event_id": 1, "data": data, "window_size": random.choice([None, None, 64, 2**20, -1])}

    def blocks(self) -> list[dict[str, Any]]:
        random = self.random
        return [
            {
                "type": "stored_block",
                "block_hash": engine_hash,
                "tokens": [{"token_id": t, "token_extra_id": random.choice([0] * 60 + [1])} for t in TOKENS[:size]],
                "cache_level": random.choice([0, 0, 0, 1, 3]),
                "lora_id": random.choice([None] * 9 + [1]),
            }
            for engine_hash in random.choices(HASHES, k=random.randint(0, 3))
            for size in [random.choice([G, G, G, 8, 7, 0])]
        ]

    def event(self) -> dict[str, Any]:
        return self.standard() if self.random.random() < 0.5 else self.dictionary()


def apply(data: bytes) -> None:
    try:
        batch = read_batch(data, READER)
    except WireError:
        return
    index = ContentIndex(SMALL)
    Engine(index, engine="auto").publisher.apply(batch, 0, 0)
    check_index(index)


@given(st.integers(0, 2**32))
@examples(300)
def test_a_life_of_nonsense_is_survived(seed: int) -> None:
    random = Random(seed)
    index, nonsense = ContentIndex(SMALL), Nonsense(random)
    engines = [
        Engine(index, f"w{i}", engine=random.choice(["auto", "rfc1527", "trtllm", "mooncake"])) for i in range(2)
    ]
    for _ in range(12):
        random.choice(engines).send(*(nonsense.event() for _ in range(random.randint(1, 4))))
        check_index(index)
    check_queries(index)


@given(
    st.integers(0, 2**32),
    st.dictionaries(st.sampled_from(STANDARD_FIELDS), anything, max_size=3),
    st.dictionaries(st.sampled_from(DICTIONARY_FIELDS), anything, max_size=2),
)
@examples(500)
def test_random_fields_cost_only_their_own_event(seed: int, some: dict[str, Any], others: dict[str, Any]) -> None:
    nonsense = Nonsense(Random(seed))
    dictionary = nonsense.dictionary()
    dictionary["data"] |= others
    batch = read_batch(
        payload(stored([1], None, TOKENS[:G]), nonsense.standard() | some, dictionary, stored([2])), READER
    )
    assert [event.block_hashes for event in (batch.events[0], batch.events[-1])] == [[1], [2]]
    apply(batch.payload)


@given(st.integers(0, 2**32))
@examples(600)
def test_damaged_batches(seed: int) -> None:
    random = Random(seed)
    nonsense = Nonsense(random)
    events = [nonsense.event() for _ in range(2)]
    data = bytearray(payload(*events) if random.random() < 0.5 else msgspec.msgpack.encode(events))
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data))
        match random.randrange(3):
            case 0:
                data[at] = random.randrange(256)
            case 1:
                del data[at : at + random.randint(1, 9)]
            case _:
                data[at:at] = random.randbytes(random.randint(1, 9))
        if not data:
            return
    apply(bytes(data))


@given(anything)
@examples(300)
def test_no_event_surprises_the_recogniser(event: Any) -> None:
    recogniser = Recogniser()
    recogniser.look(
        [msgspec.msgpack.encode(event), msgspec.msgpack.encode(["BlockStored", event, event, event, event])]
    )
    recogniser.look([msgspec.msgpack.encode({"type": "BlockStored", "block_hashes": event, "token_ids": event})])
    recogniser.look([msgspec.msgpack.encode({"data": event}), msgspec.msgpack.encode({"event_type": event})])
    assert recogniser.dialect in (None, "vllm", "sglang", "trtllm", "rfc1527")
