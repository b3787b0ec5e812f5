"""Decoding raises nothing but its own error, and applying what it decoded raises nothing at all."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from random import Random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from indexer.index.prefix_query import PrefixQuery
from indexer.registration import PublisherKey
from indexer.wire.columns import PayloadReader, read_batch
from indexer.wire.errors import WireError
from tests.conformance.player import captures
from tests.engine_events import MODEL, Engine, payload
from tests.index_invariants import check_index
from tests.sizes import examples
from tests.store_stand_in import DictStore

SMALL = IndexLimits(
    ghosts_max=12,
    orphans_max=9,
    unplaced_max=9,
    sparse_runs_max=4,
    links_max=24,
    links_stored_max=24,
    tail_bytes_max=3_000,
    holders_max=12,
)
ROOMY = IndexLimits()
READER = PayloadReader()

# ---------------------------------------------------------------------- bytes

small_ints = st.integers(-(2**63), 2**64 - 1)
anything = st.recursive(
    st.none() | st.booleans() | small_ints | st.floats() | st.text(max_size=5) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | small_ints, inner, max_size=4),
    max_leaves=12,
)


def decode_and_apply(data: bytes) -> None:
    try:
        batch = read_batch(data, READER)
    except WireError:
        return
    index = ContentIndex(SMALL)
    engine = Engine(index)
    engine.publisher.apply(batch, 0, 0)
    check_index(index)


@given(st.binary(max_size=200))
@examples(300)
def test_random_bytes(data: bytes) -> None:
    decode_and_apply(data)


@given(anything)
@examples(300)
def test_random_structures(structure: Any) -> None:
    decode_and_apply(msgspec.msgpack.encode(structure))


FIELDS = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "lookahead_token_ids",
    "cache_salt",
    "origin",
    "skipped_parent_block_hash",
    "skipped_token_ids",
    "skipped_extra_keys",
    "block_offsets",
    "block_parent_hashes",
]


@given(st.integers(0, 2**32), st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3))
@examples(500)
def test_plausible_events_with_random_fields(seed: int, garbage: dict[str, Any]) -> None:
    random = Random(seed)
    decode_and_apply(payload(Publisher(random).stored(), Publisher(random).stored() | garbage))


@cache
def recorded_payloads() -> list[bytes]:
    payloads = []
    for path in captures():
        with gzip.open(path, "rt") as lines:
            records = (json.loads(line) for line, _ in zip(lines, range(60), strict=False))
            frames = [base64.b64decode(r["payload_b64"]) for r in records if r["type"] == "frame"]
        payloads += sorted(frames, key=len)[:: max(1, len(frames) // 4)]
    return payloads


@given(st.integers(0, 2**32))
@examples(600)
def test_damaged_recorded_batches(seed: int) -> None:
    random = Random(seed)
    data = bytearray(random.choice(recorded_payloads()))
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(data))
        match random.randrange(4):
            case 0:
                data[at] = random.randrange(256)
            case 1:
                del data[at : at + random.randint(1, 9)]
            case 2:
                data[at:at] = random.randbytes(random.randint(1, 9))
            case _:
                data[at] ^= 1 << random.randrange(8)
        if not data:
            return
    decode_and_apply(bytes(data))


# ---------------------------------------------------------------------- well-formed nonsense

HASHES: list[Any] = [
    1,
    2,
    3,
    4,
    5,
    6,
    2**40,
    2**40 + 1,
    2**64 - 1,
    -1,
    b"a" * 32,
    b"b" * 32,
    b"a" * 32 + b"b" * 32,
    b"",
]
SIZES = [16, 16, 16, 16, 16, 32, 32, 64, 8, 1, 0, 7, 48]
KINDS = [None, None, "full_attention", "sliding_window", "mamba", "chunked_local_attention", "martian"]
TEXTS = [None, None, None, "a", "salt"]


class Publisher:
    """Publishes well-formed events that make little sense together."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def event(self) -> Any:
        roll = self.random.random()
        if roll < 0.66:
            return self.stored()
        if roll < 0.93:
            return {
                "type": "BlockRemoved",
                "block_hashes": self.random.choices(HASHES, k=self.random.randint(0, 4)),
                **self.place(),
            }
        return {"type": self.random.choice(["AllBlocksCleared", "TierBlocksCleared"]), "medium": self.medium()}

    def medium(self) -> str | None:
        return self.random.choice([None, "GPU", "GPU", "GPU", "gpu", "CPU", "CPU_PINNED", "DISK", "XYZ", ""])

    def place(self) -> dict[str, Any]:
        return {
            "medium": self.medium(),
            "group_idx": self.random.choice([None, None, 0, 0, 1, 2]),
            "locality": self.random.choice([None, None, None, "LOCAL", "REMOTE"]),
            "ownership": self.random.choice([None, None, None, None, "owner"]),
        }

    def stored(self) -> dict[str, Any]:
        random = self.random
        hashes = random.sample(HASHES, k=random.choice([0, 1, 1, 1, 2, 3, 4]))
        size = random.choice(SIZES)
        chunks = random.choice([len(hashes)] * 6 + [0, 1, len(hashes) + 1, len(hashes) + 2])
        count = chunks * size - random.choice([0] * 9 + [min(chunks * size, 3)])
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": random.choice([None, *HASHES]),
            "token_ids": self.tokens(count),
            "block_size": size,
            "lora_name": random.choice(TEXTS),
            "kv_cache_spec_kind": random.choice(KINDS),
            "kv_cache_spec_sliding_window": random.choice([None, None, 0, 1, 32, 40, 2**31 - 1]),
            **self.place(),
        }
        chosen = {name: value for name, value in self.optional(len(hashes)).items() if random.random() < 0.12}
        return event | chosen

    def optional(self, hashes: int) -> dict[str, Any]:
        random = self.random
        some = random.choice([hashes, hashes, hashes, hashes + 1, max(0, hashes - 1)])
        return {
            "extra_keys": [self.extra_key() for _ in range(some)],
            "lookahead_token_ids": [self.tokens(random.choice([0, 1, 1, 1, 2])) for _ in range(some)],
            "cache_salt": random.choice(TEXTS),
            "origin": random.choice(["REUSED", "NEW"]),
            "skipped_parent_block_hash": random.choice([None, *HASHES]),
            "skipped_token_ids": self.tokens(random.choice([0, 16, 16, 32, 7])),
            "skipped_extra_keys": [self.extra_key() for _ in range(random.randint(0, 3))],
            "block_offsets": sorted(random.sample(range(6), k=min(6, some))),
            "block_parent_hashes": random.choices([None, *HASHES], k=some),
        }

    def extra_key(self) -> Any:
        return self.random.choice(
            [
                None,
                None,
                [],
                ["a"],
                ["salt"],
                ["a", "salt"],
                [["img", 3]],
                [["img", -3]],
                [["img", 16]],
                [["img", 10**6]],
                [b"digest"],
                ["img", "img"],
                [5],
                {},
            ]
        )

    def tokens(self, count: int) -> list[int]:
        start = self.random.choice([0, 0, 1, 2, 2**33])
        return [start] * count


def check_queries(index: ContentIndex) -> None:
    for token in (0, 1, 2, 2**33):
        for count in (1, 16, 17, 65):
            for lora_name in (None, "a"):
                for hit in index.prefix_hits(PrefixQuery(MODEL, [token] * count, lora_name=lora_name)).hits:
                    assert 0 <= hit.hit_tokens < count
                    assert 0 <= hit.resident_tokens <= count
                    assert list(hit.tiers.values()) == sorted(hit.tiers.values())
                    assert hit.resident_tokens == max(hit.tiers.values())


def rebuilt(index: ContentIndex, engine: Engine, store: DictStore) -> None:
    registration = engine.publisher.registration
    index.remove_publisher(PublisherKey(registration.worker_id, registration.dp_rank))
    engine.publisher = index.add_publisher(registration)
    store.recover(engine.publisher)
    store.assert_equals(engine.publisher)


def live_through(seed: int, limits: IndexLimits, batches: int) -> None:
    random = Random(seed)
    index = ContentIndex(limits)
    engines = [
        Engine(
            index,
            f"w{i}",
            engine=random.choice(["vllm", "vllm", "sglang"]),
            options={"counting": random.choice(["set", "count"])},
            block_size=random.choice([None, None, 16, 64]),
        )
        for i in range(random.randint(1, 3))
    ]
    stores = [DictStore() for _ in engines]
    publisher = Publisher(random)
    for _ in range(batches):
        i = random.randrange(len(engines))
        roll = random.random()
        if roll < 0.04:
            engines[i].restart()
        elif roll < 0.06:
            engines[i].publisher.drop_residencies()
        elif roll < 0.08:
            engines[i].publisher.skip(engines[i].sequence_number, 0, "truncated_batch")
        else:
            engines[i].send(*(publisher.event() for _ in range(random.randint(1, 4))))
        check_index(index)
        j = random.randrange(len(engines))
        if random.random() < 0.2:
            changes = engines[j].publisher.take_changes()
            if changes is not None:
                if random.random() < 0.5:
                    stores[j].write(changes)
                engines[j].publisher.restore_changes(changes)
            check_index(index)
        if random.random() < 0.2:
            stores[j].flush(engines[j].publisher)
            stores[j].assert_equals(engines[j].publisher)
            if random.random() < 0.2:
                rebuilt(index, engines[j], stores[j])
                check_index(index)
        if random.random() < 0.2:
            check_queries(index)
    for engine in engines:
        index.remove_publisher(engine.publisher.registration.key)
    assert index.scope("default", MODEL) is None


@given(st.integers(0, 2**32))
@examples(250)
def test_nonsense_with_tight_bounds(seed: int) -> None:
    live_through(seed, SMALL, 40)


@given(st.integers(0, 2**32))
@examples(150)
def test_nonsense_with_wide_bounds(seed: int) -> None:
    live_through(seed, ROOMY, 60)
