"""The index on flat arrays beside the same index in plain dicts, fed with the same payloads.

Both hear every payload: the flat one reads whole batches as columns where it can, the plain one event by event. After
each they hold the same, answer the same, and a flush leaves the same rows. Tables, logs and buffers start so small that
the kernels ask for room, steps and new chunks all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.identity.chain import chain_keys, chain_seed, local_hashes, salted_seed
from indexer.index import (
    change_log,
    holder,
    kernels,
    key_space,
    parent_links,
    publisher,
    residents,
    table,
    unverified,
    whole_batches,
)
from indexer.index.content_index import ContentIndex
from indexer.index.limits import IndexLimits
from indexer.index.prefix_query import PrefixQuery
from indexer.index.publisher import PublisherIndex
from indexer.index.state import PublisherChanges
from indexer.registration import Registration
from indexer.wire.columns import PayloadReader, read_batch
from indexer.wire.decode import decode_batch
from indexer.wire.errors import WireError
from tests.engine_events import MODEL, cleared, payload, removed, stored
from tests.explaining import check_explanations
from tests.index_invariants import check_index
from tests.plain_index.index import PlainIndex, plain_classes
from tests.sizes import examples
from tests.store_stand_in import DictStore

GRANULE = 16
DEPTH = 12  # granules of a prompt
STATUSES = {
    getattr(kernels, name): name
    for name in ("DONE", "HAND_OVER", "HOLDER_FULL", "SPACE_FULL", "LOG_FULL", "GHOSTS_FULL", "STEP_MISSING")
}
SAME_HOME = pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # multiplied by this, small numbers belong into the first slots

# ---------------------------------------------------------------------- what engines publish

Prefix = tuple[str | None, tuple[int, ...]]  # adapter, tokens
HashOf = Callable[[int], Any]
HASH_KINDS: dict[str, HashOf] = {
    "random": lambda number: Random(number).getrandbits(64),
    "counters": lambda number: number,
    "extremes": lambda number: [0, 2**64 - 1, 1, 2**63, -1, -(2**63)][number] if number < 6 else 2**64 - number,
    "equal low bits": lambda number: number << 40,
    "one home": lambda number: number * SAME_HOME % 2**64,
    "wide": lambda number: Random(number).randbytes(32),
    "mixed": lambda number: Random(number).randbytes(32) if number % 5 == 0 else Random(number).getrandbits(64),
}


@dataclass
class Style:
    """What one engine is like. `oddity`: the share of events that no plain engine sends."""

    engine: str
    options: dict[str, object]
    medium: str
    block: int
    hash_kind: str
    oddity: float
    is_array: bool


@dataclass
class Publisher:
    """One engine: which number its blocks have, and what it announced."""

    style: Style
    random: Random
    shared: list[Prefix]
    numbers: dict[Prefix, int] = field(default_factory=dict)
    announced: list[Any] = field(default_factory=list)

    def hash(self, prefix: Prefix) -> Any:
        if not prefix[1]:
            return None
        if self.random.random() < self.style.oddity / 4:
            self.numbers.pop(prefix, None)  # from now on another hash means the same
        number = self.numbers.setdefault(prefix, len(self.numbers))
        if self.random.random() < self.style.oddity / 8:
            number = self.random.randrange(len(self.numbers))  # a hash that means something else
        return HASH_KINDS[self.style.hash_kind](number)

    def odd(self, share: float = 1.0) -> bool:
        return self.random.random() < self.style.oddity * share

    def events(self) -> list[Any]:
        return [self.event() for _ in range(self.random.choice([1, 1, 2, 3, 6, 12]))]

    def event(self) -> Any:
        roll = self.random.random()
        if self.odd(0.1):
            return cleared() if roll < 0.7 else cleared(medium=self.random.choice(["GPU", "CPU"]))
        event = self.stored() if roll < 0.55 or not self.announced else self.removed()
        return as_array(event) if self.style.is_array and self.random.random() < 0.9 else event

    def prompt(self) -> Prefix:
        """Mostly one that goes on from another: prefixes are shared, also between publishers."""
        random = self.random
        lora_name = None if not self.odd(0.3) else "adapter"
        if self.shared and random.random() < 0.8:
            lora_name, tokens = random.choice(self.shared)
            tokens = tokens[: random.randint(0, len(tokens) // GRANULE) * GRANULE]
        else:
            tokens = ()
        while len(tokens) < DEPTH * GRANULE and random.random() < 0.85:
            token = random.choice([1, 1, 2, 300, 70_000]) if random.random() < 0.9 else random.randrange(2**32)
            tokens += (token,) * GRANULE
        self.shared.append((lora_name, tokens))
        del self.shared[:-30]
        return lora_name, tokens

    def stored(self) -> Any:
        random, block = self.random, self.style.block
        if random.random() < 0.02:
            block = random.choice([16, 32, 48])
        if self.odd(0.1):
            block = 8
        lora_name, tokens = self.prompt()
        blocks = len(tokens) // block
        if not blocks:
            return removed([random.getrandbits(64)], self.style.medium)
        known = [i for i in range(1, blocks) if (lora_name, tokens[: i * block]) in self.numbers]
        first = random.randrange(blocks) if self.odd(0.2) else random.choice([0, *known])
        last = random.randint(first + 1, blocks)
        hashes = [self.hash((lora_name, tokens[: i * block])) for i in range(first + 1, last + 1)]
        self.announced += hashes
        parent = self.hash((lora_name, tokens[: first * block]))
        event = stored(hashes, parent, tokens[first * block : last * block], block, self.style.medium)
        event["lora_name"] = lora_name
        return event | self.oddities(event) if self.odd() else event

    def oddities(self, event: Any) -> Any:
        random, hashes = self.random, event["block_hashes"]
        blocks = len(hashes)
        none: Any = random.choice([[None] * blocks, [[]] * blocks, [None] * (blocks + 1), [[None]] * blocks])
        return random.choice(
            [
                {"extra_keys": none},
                {"extra_keys": none},
                {"extra_keys": [["salt"]] + [[]] * (blocks - 1)},
                {"cache_salt": "salt", "extra_keys": None},
                {"medium": random.choice(["CPU", "GPU", None, "DISK"])},
                {"group_idx": random.choice([0, 0, 1])},
                {"kv_cache_spec_kind": random.choice(["full_attention", "full_attention", "chunked_local_attention"])},
                {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 40},
                {"token_ids": event["token_ids"][: -random.choice([1, 16])]},
                {"token_ids": [2**33, *event["token_ids"][1:]]},
                {"block_hashes": [*hashes, random.choice(hashes)], "token_ids": [*event["token_ids"], *[7] * 16]},
                {"block_hashes": hashes[:1]},
                {"parent_block_hash": random.choice(hashes)},
                {"parent_block_hash": random.choice([0, 5, 2**64 - 1])},
                {"origin": "REUSED"},
                {"lookahead_token_ids": [[3]] * blocks},
                {"ownership": random.choice(["", "owner"])},
                {"session_id": 5, "lora_id": 7},
            ]
        )

    def removed(self) -> Any:
        random = self.random
        hashes = [random.choice(self.announced) for _ in range(random.choice([1, 1, 2, 5]))]
        if random.random() < 0.8:
            hashes = list(dict.fromkeys(hashes))
            self.announced = [h for h in self.announced if h not in hashes] or hashes
        if random.random() < 0.1:
            hashes.append(random.getrandbits(64))
        event = removed(hashes, self.style.medium)
        return event | random.choice([{"medium": "CPU"}, {"group_idx": 1}, {"medium": None}]) if self.odd() else event


def as_array(event: Any) -> Any:
    """The form of older engines; fields that it has no place for are left out."""
    names = ["type", "block_hashes", "medium", "group_idx"]
    if event["type"] == "BlockStored":
        names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
        names += ["lora_name", "extra_keys", "group_idx"]
    return [event.get(name) for name in names]


ENGINE_OPTIONS: list[dict[str, object]] = [
    {},
    {},
    {},
    {"eagle": True},
    {"attention_chunk_size": {"0": 64, "1": 32}},
    {"lora_aliases": {"adapter": "alias"}},
    {"engine_hash": {"algorithm": "sha256_cbor"}},  # made-up hashes: nothing ever matches
]


def styles(random: Random, *, with_clears: bool) -> Iterator[Style]:
    oddity = random.choice([0.0, 0.02, 0.02, 0.25]) if with_clears else 0.0
    hash_kind = random.choice([*HASH_KINDS, "random", "counters", "one home"])
    for _ in range(random.randint(1, 3)):
        yield Style(
            random.choice(["vllm", "vllm", "sglang", "tensorrt-llm"]),
            {"counting": random.choice(["set", "count", "count"])} | random.choice(ENGINE_OPTIONS),
            random.choice(["GPU"] * 5 + ["CPU"]),
            random.choice([16, 16, 32, 48]),
            hash_kind if random.random() < 0.7 else random.choice(list(HASH_KINDS)),
            oddity,
            random.random() < 0.4,
        )


def damaged(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data))
    match random.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + random.randbytes(1) + data[at + 1 :]
        case 2:
            return data[:at] + random.randbytes(random.randint(1, 3)) + data[at:]
        case _:
            return data[:at] + data[at + 1 :]


# ---------------------------------------------------------------------- both indexes


class Side:
    """One of the two, and the stores of its publishers."""

    def __init__(self, index: ContentIndex, classes: Callable[[], Any]) -> None:
        self.index = index
        self.classes = classes
        self.publishers: list[PublisherIndex] = []
        self.stores: list[DictStore] = []
        self.flushes: dict[int, PublisherChanges] = {}

    def add(self, registration: Registration) -> None:
        self.publishers.append(self.index.add_publisher(registration))
        self.stores.append(DictStore())

    def apply(self, i: int, batch: Any, number: int) -> Any:
        with self.classes():
            return self.publishers[i].apply(batch, number, number)

    def restart(self, i: int) -> None:
        with self.classes():
            self.publishers[i].restart()

    def lose(self, i: int, number: int, *, is_read: bool) -> None:
        with self.classes():
            if is_read:
                self.publishers[i].skip(number, number, "unreadable")
            else:
                self.publishers[i].count_gap(number, number)

    def help_along(self, i: int, now: float) -> None:
        with self.classes():
            self.index.expire_unverified(now, 10.0)
            self.stores[i].give_links(self.publishers[i])

    def take(self, i: int) -> None:
        changes = self.publishers[i].take_changes()
        if changes is not None:
            self.flushes[i] = changes

    def end_flush(self, i: int, *, folds: bool, writes: bool, restores: bool) -> None:
        changes = self.flushes.pop(i, None)
        if changes is None:
            return
        if folds:
            changes.fold()
        if writes:
            self.stores[i].write(changes)
        if restores:
            with self.classes():
                self.publishers[i].restore_changes(changes)

    def recover(self, i: int) -> None:
        self.flushes.pop(i, None)
        registration = self.publishers[i].registration
        with self.classes():
            self.index.remove_publisher(registration.key)
            self.publishers[i] = self.index.add_publisher(registration)
            self.stores[i].recover(self.publishers[i])
            self.publishers[i].catch_up_with_others()


class World:
    """Engines, and the two indexes that hear of them."""

    def __init__(self, seed: int, limits: IndexLimits, *, may_clear: bool) -> None:
        self.random = Random(seed)
        self.reader = PayloadReader()
        self.plain_index = PlainIndex(limits)
        self.flat, self.plain = Side(ContentIndex(limits), nullcontext), Side(self.plain_index, plain_classes)
        self.sides = (self.flat, self.plain)
        self.may_clear = may_clear
        self.gaps = self.random.choice([0.0, 0.05, 0.2])
        self.now = 0.0
        self.shared: list[Prefix] = []
        self.engines: list[Publisher] = []
        self.sequence_number = 0
        self.applied_together = 0
        for style in styles(self.random, with_clears=may_clear):
            i = len(self.engines)
            registration = Registration(
                f"w{i}", 0, MODEL, "tcp://h:1", engine=style.engine, options=style.options, publisher_id=i + 1
            )
            self.engines.append(Publisher(style, Random(self.random.random()), self.shared))
            for side in self.sides:
                side.add(registration)

    def step(self) -> None:
        i = self.random.randrange(len(self.engines))
        roll = self.random.random()
        if roll < 0.02 and self.may_clear:
            for side in self.sides:
                side.restart(i)
        elif roll < 0.04:
            for side in self.sides:
                side.recover(i)
        elif roll < 0.08 and self.may_clear:
            self.send(i, payload(cleared(), *self.engines[i].events()))
        elif roll < 0.08 + self.gaps:
            self.sequence_number += 1
            is_read = self.random.random() < 0.3
            for side in self.sides:
                side.lose(i, self.sequence_number, is_read=is_read)
            self.send(i, self.batch(i))
        elif roll < 0.25 + self.gaps:
            self.send_together(i, [self.batch(i) for _ in range(self.random.randint(2, 6))])
        else:
            self.send(i, self.batch(i))

    def batch(self, i: int) -> bytes:
        data = payload(*self.engines[i].events(), rank=self.random.choice([0, None, 1, 200]))
        is_damaged = self.random.random() < self.engines[i].style.oddity / 2
        return damaged(data, self.random) if is_damaged else data

    def send_together(self, i: int, payloads: list[bytes]) -> None:
        """As a follower does with what has piled up: read and applied by one pass, as far as that goes."""
        while payloads:
            columns = self.reader.read(*payloads)
            numbered = [(number, number, data) for number, data in enumerate(payloads, self.sequence_number + 1)]
            applied = self.flat.publishers[i].apply_columns(columns, numbered) if columns is not None else 0
            for number, _, data in numbered[:applied]:
                self.plain.apply(i, decode_batch(data), number)
            self.sequence_number += applied
            self.applied_together += max(0, applied - 1)
            if not applied:
                self.send(i, payloads[0])
            del payloads[: max(1, applied)]

    def send(self, i: int, data: bytes) -> None:
        self.sequence_number += 1
        try:
            expected = decode_batch(data)
        except WireError:
            with pytest.raises(WireError):
                read_batch(data, self.reader)
            return
        outcome = self.flat.apply(i, read_batch(data, self.reader), self.sequence_number)
        assert outcome == self.plain.apply(i, expected, self.sequence_number)

    def flush(self) -> None:
        """Begin one; or end one that began before other batches were applied."""
        i = self.random.randrange(len(self.engines))
        if i in self.flat.flushes:
            how = self.random.randrange(4)  # it failed, or was written and nobody knows, or was written
            folds = self.random.random() < 0.5
            for side in self.sides:
                side.end_flush(i, folds=folds, writes=how > 0, restores=how < 2)
        else:
            for side in self.sides:
                side.take(i)

    def help_along(self) -> None:
        i = self.random.randrange(len(self.engines))
        self.now += self.random.choice([0.1, 1.0, 4.0])
        for side in self.sides:
            side.help_along(i, self.now)

    def flush_all(self) -> None:
        for side in self.sides:
            for i in range(len(self.engines)):
                side.end_flush(i, folds=False, writes=True, restores=False)
                side.stores[i].flush(side.publishers[i])
                side.stores[i].assert_equals(side.publishers[i])
        for flat, plain in zip(self.flat.stores, self.plain.stores, strict=True):
            assert flat.rows == plain.rows
            assert (flat.groups, flat.side_state) == (plain.groups, plain.side_state)

    def compare(self) -> None:
        for flat, plain in zip(self.flat.publishers, self.plain.publishers, strict=True):
            assert set(flat.residencies()) == set(plain.residencies())
            assert set(flat.ghosts()) == set(plain.ghosts())
            assert flat.checkpoint == plain.checkpoint
            assert status_of(flat) == status_of(plain)
        for _ in range(2):
            self.compare_answers()

    def compare_answers(self) -> None:
        lora_name, tokens = self.random.choice(self.shared) if self.shared else (None, (1,) * 64)
        tokens += (1,) * self.random.choice([0, 1, 16, 40])
        lora_name = "alias" if lora_name and self.random.random() < 0.5 else lora_name
        cache_salt = self.random.choice([None, None, None, "salt"])
        query = PrefixQuery(MODEL, tokens, lora_name=lora_name, cache_salt=cache_salt)
        expected = self.plain_index.hits(query)
        assert self.flat.index.prefix_hits(query).hits == expected
        check_explanations(self.flat.index, query)
        scope = self.flat.index.scope("default", MODEL)
        if scope is not None and list(scope.spaces) == [GRANULE] and not any(hit for hit in expected if is_ahead(self)):
            seed = chain_seed(lora_name)
            buffer = b"".join(token.to_bytes(4, "little") for token in tokens[: len(tokens) // GRANULE * GRANULE])
            locals_ = local_hashes(buffer, GRANULE, seed, first_seed=salted_seed(seed, cache_salt))
            whole = PrefixQuery(MODEL, tokens[: len(locals_) * GRANULE], lora_name=lora_name, cache_salt=cache_salt)
            hashed = PrefixQuery(MODEL, [], local_hashes=locals_)
            keyed = PrefixQuery(MODEL, content_keys=chain_keys(None, locals_), granule=GRANULE)
            for by_hashes in (hashed, keyed):
                assert self.flat.index.prefix_hits(by_hashes).hits == self.plain_index.hits(whole)


def is_ahead(world: World) -> bool:
    """Whether anybody's hashes cover tokens behind a block: those are not told by local hashes."""
    return any(publisher.residents.lookahead_tokens for publisher in world.flat.publishers)


def status_of(publisher: PublisherIndex) -> Any:
    """All that is counted. Ghosts of a batch are forgotten together, so one may be forgotten that is then remembered
    again by the same batch."""
    status = publisher.status()
    del status.counters["forgotten_ghosts"]
    return status


# ---------------------------------------------------------------------- small buffers


@contextmanager
def small_buffers(*, chunk_words: int = 8, ghosts: int = 2, slots: int = 4, unused_sets: int = 3) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in (
            (change_log, "CHUNK_WORDS_MIN", chunk_words),
            (change_log, "CHUNK_WORDS_MAX", 8 * chunk_words),
            (whole_batches, "GHOSTS_AT_ONCE", ghosts),
            (residents, "GHOSTS_AT_ONCE", ghosts),
            (residents, "RUN_MIN", 2),
            (table, "SMALLEST", slots),
            (table, "SMALL", slots),
            (key_space, "UNUSED_SETS_MAX", unused_sets),
            (key_space, "PLACES_AT_ONCE", 1),
            (key_space, "SWEEP_WORK", 1),
            (key_space, "RETIRED_MAX", 3),
            (publisher, "SWEEP_WORK_PER_BATCH", 1),
            (residents, "PROVEN_AT_ONCE", 3),
            (unverified, "JOINED_MAX", 3),
            (unverified, "MERGED_AT_ONCE", 1),
            (unverified, "APART_MAX", 2),
            (holder, "CHAIN_MAX", 2),
            (parent_links, "SPARE", 0),
            (parent_links, "LOOKED_AT_ONCE", 2),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


@contextmanager
def counted_statuses() -> Iterator[Counter[str]]:
    """How often the kernel came back, and with what."""
    counts: Counter[str] = Counter()
    real = whole_batches.apply_events

    def counting(*arguments: Any) -> Any:
        status = real(*arguments)
        counts[STATUSES[int(status)]] += 1
        return status

    with patch.object(whole_batches, "apply_events", counting):
        yield counts


ROOMY = IndexLimits()
TIGHT = IndexLimits(ghosts_max=20, orphans_max=9, unplaced_max=9, tail_bytes_max=3_000, unverified_max=12)
"""So few ghosts are forgotten one by one: both sides keep the same. But a clear makes ghosts in the order in which
residencies lie, which is not the same, so with these limits nothing is cleared."""


def live_through(seed: int, limits: IndexLimits = ROOMY, *, may_clear: bool = True, steps: int = 30) -> None:
    world = World(seed, limits, may_clear=may_clear)
    for i in range(steps):
        world.step()
        world.compare()
        if i % 8 == 0:
            check_index(world.flat.index)
        if world.random.random() < 0.4:
            world.flush()
        if world.random.random() < 0.2:
            world.help_along()
        if world.random.random() < 0.1:
            world.flush_all()
            for _ in world.flat.index.rest():
                pass
    world.flush_all()
    check_index(world.flat.index)
    while world.flat.index.sweep():
        check_index(world.flat.index)


SEEDS = st.integers(0, 2**32)


@given(SEEDS)
@examples(50)
def test_both_hold_answer_and_store_the_same(seed: int) -> None:
    live_through(seed)


@given(SEEDS, st.sampled_from([4, 8, 64]), st.sampled_from([0, 3]))
@examples(60)
def test_they_do_so_with_buffers_that_are_always_full(seed: int, slots: int, unused_sets: int) -> None:
    with small_buffers(slots=slots, unused_sets=unused_sets):
        live_through(seed)


@given(SEEDS)
@examples(30)
def test_they_do_so_with_tight_bounds(seed: int) -> None:
    with small_buffers():
        live_through(seed, TIGHT, may_clear=False)


def test_every_status_of_the_kernel_occurs() -> None:
    with counted_statuses() as counts, small_buffers():
        for seed in range(40):
            live_through(seed)
    assert set(STATUSES.values()) == {status for status, count in counts.items() if count > 10}, counts
