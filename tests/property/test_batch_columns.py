"""Reading a payload as columns beside decoding it event by event: the same meaning, or no columns at all.

What is read is the memory of one payload and no byte after it: with NUMBA_DISABLE_JIT=1, where arrays know their
bounds, reading further would raise.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from functools import cache
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.wire.batch_kernels import REMOVED, STORED
from indexer.wire.columns import BatchColumns, PayloadReader, read_batch
from indexer.wire.decode import EventBatch, decode_batch, decode_event
from indexer.wire.errors import WireError
from indexer.wire.events import BlockRemoved, BlockStored
from tests.conformance.player import captures
from tests.engine_events import cleared, payload, removed, stored
from tests.sizes import examples

MEANINGLESS = {"lora_id", "session_id", "token_ids"}  # the last is emptied: `tokens` has them
OF_EVENT = {"block_hashes", "parent_block_hash", "tokens", "token_count", "extra_keys"}
OF_SHAPE = {BlockStored: set(BlockStored.__struct_fields__) - OF_EVENT - MEANINGLESS}
OF_SHAPE[BlockRemoved] = set(BlockRemoved.__struct_fields__) - OF_EVENT


def outcome_of(read: Any, *arguments: Any) -> EventBatch | str:
    """The batch, or why it is none."""
    try:
        batch: EventBatch = read(*arguments)
    except WireError as error:
        return error.reason
    return batch


def check(data: bytes, reader: PayloadReader) -> bool:
    """Whether the payload was read as columns; that is right in any case, or this fails."""
    expected, batch = outcome_of(decode_batch, data), outcome_of(read_batch, data, reader)
    if isinstance(expected, str) or isinstance(batch, str):
        assert batch == expected
        return False
    if batch.columns is None:
        assert plain(batch) == plain(expected)
        return False
    assert (batch.events, batch.bad_events, expected.bad_events) == ([], {}, {})
    same = "timestamp", "data_parallel_rank", "payload"
    assert [getattr(batch, name) for name in same] == [getattr(expected, name) for name in same]
    check_columns(batch.columns, expected, data)
    return True


def plain(batch: EventBatch) -> str:
    """In a form in which NaN equals itself."""
    return repr((batch.timestamp, batch.events, batch.data_parallel_rank, batch.payload, batch.bad_events))


def check_columns(columns: BatchColumns, expected: EventBatch, data: bytes) -> None:
    count = columns.count
    assert count == len(expected.events) > 0
    assert columns.shapes_seen == sum(1 << shape for shape in set(columns.shape_ids[:count].tolist()))
    ends = zip(columns.hash_ends[:count].tolist(), columns.token_ends[:count].tolist(), strict=True)
    hash_start, token_start = 0, 0
    for i, (hash_end, token_end) in enumerate(ends):
        event = expected.events[i]
        assert repr(decode_event(columns.event_bytes(i))) == repr(event)
        assert isinstance(event, BlockStored | BlockRemoved)
        assert event.block_hashes == columns.hashes[hash_start:hash_end].tolist()
        shape = columns.shapes[columns.shape_ids[i]]
        kind = BlockStored if isinstance(event, BlockStored) else BlockRemoved
        assert isinstance(shape, kind)
        assert columns.kinds[i] == (STORED if kind is BlockStored else REMOVED)
        for name in OF_SHAPE[kind]:
            assert getattr(shape, name) == getattr(event, name), name
        if isinstance(event, BlockStored):
            assert isinstance(shape, BlockStored)
            check_stored(columns, i, event, shape)
            assert event.tokens == columns.tokens[token_start:token_end].tobytes()
        assert token_end - token_start == getattr(event, "token_count", 0)
        hash_start, token_start = hash_end, token_end
    assert (columns.hash_count, columns.token_count) == (hash_start, token_start)


def check_stored(columns: BatchColumns, i: int, event: BlockStored, shape: BlockStored) -> None:
    parent = int(columns.parents[i]) if columns.has_parent[i] else None
    assert parent == event.parent_block_hash
    assert (shape.extra_keys is None) == (event.extra_keys is None)
    assert not any(event.extra_keys or ())
    assert not any(shape.extra_keys or ())


# ---------------------------------------------------------------------- what engines send

HASHES: list[Any] = [0, 1, 127, 128, 2**16, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -32, -33, -129, -(2**31), -(2**63)]
ODD_HASHES: list[Any] = [b"x" * 32, b"12345678", b"", 1.5, None, "hash", True, [1]]
TOKENS: list[Any] = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1]
ODD_TOKENS: list[Any] = [2**32, 2**63 - 1, 2**63, -1, [1, 2], 1.0, True, None, "1", b"1"]
TEXTS: list[Any] = [None, "", "GPU", "CPU", "a" * 31, "b" * 32, "c" * 129]
ODD_TEXTS: list[Any] = ["d" * 256, "tokén", "nul\0", b"GPU", 5, ["GPU"], {"cache_salt": "s"}]
NUMBERS: list[Any] = [None, 0, 1, 3, 64]
ODD_NUMBERS: list[Any] = [-1, 2**31, 2**63, 2**64 - 1, 1.0, "0", False, [0]]
ANYTHING: list[Any] = [None, 5, -5, "text"]
ODD_ANYTHING: list[Any] = [1.5, True, b"x", [1, [2]], {"a": {"b": 1}}, "é"]
EXTRA_KEYS: list[Any] = [None, None, [], [None], [[]], [None, [], None], [None] * 20]
ODD_EXTRA_KEYS: list[Any] = [[[None]], [["salt"]], [[["image", 3]]], "lora", {}, [0], [False], [[], [[]]], [{}], [b""]]
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "block_size": ([1, 16, 16, 2**31 - 1], [0, -1, 2**31, 2**63, None, 16.0, "16"]),
    "lora_id": (ANYTHING, ODD_ANYTHING),
    "medium": (TEXTS, ODD_TEXTS),
    "lora_name": (TEXTS, ODD_TEXTS),
    "extra_keys": (EXTRA_KEYS, ODD_EXTRA_KEYS),
    "group_idx": (NUMBERS, [*ODD_NUMBERS, 1023, 1024]),
    "kv_cache_spec_kind": (TEXTS, ODD_TEXTS),
    "kv_cache_spec_sliding_window": (NUMBERS, ODD_NUMBERS),
    "locality": (TEXTS, ODD_TEXTS),
    "ownership": (TEXTS, ODD_TEXTS),
    "session_id": (ANYTHING, ODD_ANYTHING),
}
BY_NAME: dict[str, list[Any]] = {
    "cache_salt": [None, "s", 5],
    "origin": [None, "REUSED"],
    "skipped_parent_block_hash": [None, 5, -1],
    "skipped_token_ids": [None, [], [1, 2]],
    "lookahead_token_ids": [None, [], [[3]]],
    "block_offsets": [None, [0]],
    "block_parent_hashes": [None, [-2]],
    "shiny": [None, {"deep": [[1.5]]}],
}
STORED_ARRAY = ["block_hashes", "parent_block_hash", "token_ids", *FIELDS, "lookahead_token_ids"]
REMOVED_ARRAY = ["block_hashes", "medium", "group_idx", "locality", "ownership", "surplus"]


class Engine:
    """Sends batches of every dialect. `oddity`: the share of values that no simple event has."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.oddity = random.choice([0.0, 0.0, 0.02, 0.2])

    def choose(self, usual: list[Any], odd: list[Any]) -> Any:
        return self.random.choice(odd if self.random.random() < self.oddity else usual)

    def list_of(self, usual: list[Any], odd: list[Any], most: int) -> list[Any]:
        count = self.random.choice([1, 1, 2, 15, 16, most]) if self.random.random() >= self.oddity else 0
        return [self.choose(usual, odd) for _ in range(count)]

    def event(self) -> Any:
        random = self.random
        roll = random.random()
        if roll < self.oddity / 2:
            return random.choice(
                [cleared(), ["AllBlocksCleared"], [], {}, 5, None, "BlockStored", ["BlockTeleported", [1]]]
            )
        fields = self.stored() if roll < 0.6 else self.removed()
        if random.random() < 0.4:
            return self.as_array(fields)
        names = list(fields)[1:]
        if random.random() < 0.2:
            random.shuffle(names)
        first = {"type": fields["type"]}
        named = {name: fields[name] for name in names}
        return named | first if random.random() < self.oddity else first | named

    def stored(self) -> dict[str, Any]:
        hashes = self.list_of(HASHES, ODD_HASHES, 40)
        parent = self.choose([None, *HASHES], ODD_HASHES)
        fields = stored(hashes, parent, self.list_of(TOKENS, ODD_TOKENS, 300))
        chosen = {name: self.choose(*values) for name, values in FIELDS.items() if self.random.random() < 0.3}
        by_name = {name: self.random.choice(v) for name, v in BY_NAME.items() if self.random.random() < self.oddity}
        return fields | chosen | by_name

    def removed(self) -> dict[str, Any]:
        fields = removed(self.list_of(HASHES, ODD_HASHES, 40))
        names = [*REMOVED_ARRAY[1:5], "lora_id"] if self.random.random() >= self.oddity else list(FIELDS)
        return fields | {name: self.choose(*FIELDS[name]) for name in names if self.random.random() < 0.3}

    def as_array(self, fields: dict[str, Any]) -> list[Any]:
        names = STORED_ARRAY if fields["type"] == "BlockStored" else REMOVED_ARRAY
        whole = [fields["type"], *(fields.get(name) for name in names)]
        shortest = 5 if names is STORED_ARRAY else 2
        longest = len(whole) - 1
        if self.random.random() < self.oddity:
            shortest, longest = 1, len(whole)
        return whole[: self.random.randint(shortest, longest)]

    def payload(self) -> bytes:
        events = [self.event() for _ in range(self.random.choice([1, 1, 2, 3, 15, 16]))]
        rank = self.choose([None, 0, 1, 127], [128, 255, -1, 2**40, "0", True, 1.5, [], {}])
        time = self.choose([0.0, 1.5, 1e300, -1.0], [float("inf"), float("nan"), 5, None])
        outer: list[Any] = [time, events, rank]
        if self.random.random() < self.oddity:
            return msgspec.msgpack.encode(
                self.random.choice(
                    [[*outer, "later"], dict(zip(["ts", "events", "data_parallel_rank"], outer, strict=True)), []]
                )
            )
        return msgspec.msgpack.encode(outer[: self.random.choice([2, 3, 3])])


@cache
def recorded_payloads() -> list[bytes]:
    """Some of each recording, short and long."""
    payloads = []
    for path in captures():
        with gzip.open(path, "rt") as lines:
            records = (json.loads(line) for line, _ in zip(lines, range(200), strict=False))
            frames = [base64.b64decode(r["payload_b64"]) for r in records if r["type"] == "frame"]
        payloads += sorted(frames, key=len)[:: max(1, len(frames) // 12)]
    return payloads


def damaged(data: bytes, random: Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        at = random.randrange(len(damaged))
        match random.randrange(7):
            case 0 | 1:
                damaged[at] ^= 1 << random.randrange(8)
            case 2:
                damaged[at] = random.choice(
                    [0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xCA, 0xCF, 0xD3, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF]
                )
            case 3:
                del damaged[at : at + random.randint(1, 9)]
            case 4:
                damaged[at:at] = random.randbytes(random.randint(1, 9))
            case 5:
                damaged[at:at] = damaged[at : at + random.randint(1, 40)]
            case _:
                del damaged[at:]
        if not damaged:
            break
    return bytes(damaged)


SEEDS = st.integers(0, 2**32)


@given(SEEDS)
@examples(300)
def test_columns_mean_what_the_events_say(seed: int) -> None:
    engine, reader = Engine(Random(seed)), PayloadReader()
    for _ in range(4):
        check(engine.payload(), reader)


@given(SEEDS)
@examples(300)
def test_damaged_batches_are_read_as_they_are_decoded(seed: int) -> None:
    random, reader = Random(seed), PayloadReader()
    whole = Engine(random).payload()
    for data in (whole, *(damaged(whole, random) for _ in range(6))):
        check(data, reader)


@given(SEEDS)
@examples(150)
def test_damaged_recorded_batches_are_read_as_they_are_decoded(seed: int) -> None:
    random, reader = Random(seed), PayloadReader()
    whole = random.choice(recorded_payloads())
    for data in (whole, *(damaged(whole, random) for _ in range(6))):
        check(data, reader)


@given(st.binary(max_size=100), st.binary(max_size=20))
@examples(200)
def test_random_bytes_are_read_as_they_are_decoded(data: bytes, tail: bytes) -> None:
    reader = PayloadReader()
    head = payload()[:11]
    for whole in (data, head + data, payload(removed([1]))[:-1] + tail, head[:-1] + b"\x91\x93\xabBlockStored" + data):
        check(whole, reader)


@pytest.mark.parametrize("seed", range(3))
def test_every_cut_is_read_as_it_is_decoded(seed: int) -> None:
    engine = Engine(Random(seed))
    engine.oddity = 0.0
    reader = PayloadReader()
    whole = payload(*(engine.event() for _ in range(3)))
    for end in range(len(whole)):
        check(whole[:end], reader)


def test_recorded_batches_are_read_as_columns_but_for_those_that_say_more() -> None:
    reader = PayloadReader()
    counts = Counter(check(data, reader) for data in recorded_payloads())
    assert counts[True] > counts[False] > 0


def test_simple_batches_are_read_as_columns() -> None:
    reader, engine = PayloadReader(), Engine(Random(0))
    engine.oddity = 0.0
    fields: dict[str, Any] = {"block_size": 2, "group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    for form in (lambda event: event, engine.as_array):
        for seed in range(10):
            random = Random(seed)
            hashes = random.sample(HASHES, k=3)
            events = [stored(hashes, random.choice(HASHES), random.choices(TOKENS, k=6), **fields), removed(hashes)]
            assert check(payload(*map(form, events)), reader)
