"""Event streams for measuring: what engines publish, encoded beforehand, so that the sender costs as little as it can.

Every worker stores chains of CHAIN_BLOCKS blocks. All chains begin with the same SHARED_BLOCKS blocks, as prompts with
one system prompt do; the rest is drawn from the chain's number, so whoever knows the number knows the tokens. Messages
are vLLM's, in its array form, which every reader of such events understands.
Pure: the same `StreamPlan` gives the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import msgspec
import numpy as np

BLOCK_TOKENS = 16
CHAIN_BLOCKS = 2_048
SHARED_BLOCKS = 8
VOCABULARY = 128_000
MARKER_FIRST_TOKEN = 3_000_000
"""Markers are blocks of one token repeated, outside the vocabulary: no prompt of a chain can meet them."""

RUNNING_CHAINS = 32
"""Chains that one-block events grow at the same time, as running requests do."""

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Shape:
    """`blocks_per_event` blocks in each event, `events_per_batch` events in each message."""

    name: str
    blocks_per_event: int
    events_per_batch: int


PREFILL = Shape("32-block events", 32, 8)
DECODE = Shape("one-block events", 1, 32)
TRICKLE = Shape("32-block messages", 32, 1)
SHAPES = {shape.name: shape for shape in (PREFILL, DECODE, TRICKLE)}


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What to publish: `blocks` residencies over `workers` workers.

    `live_blocks` above 0 evicts whole chains, tail first, so that no more than about so many stay (churn). Each chain
    is stored by `copies` workers; `workers` is a multiple of it. Another `seed`, other content.
    """

    shape: str
    blocks: int
    workers: int
    seed: int = 1
    live_blocks: int = 0
    copies: int = 1

    @property
    def contents(self) -> int:
        """How many workers store something of their own; worker w stores what w modulo this does."""
        return self.workers // self.copies

    def chain_number(self, worker: int, place: int) -> int:
        """Of the `place`-th chain of a worker."""
        return place * self.contents + worker % self.contents

    def chains_within(self, blocks: int, depth: int) -> list[int]:
        """Numbers of the chains of which `depth` blocks are surely stored once `blocks` residencies are, in turn.

        Not for one-block events, which grow many chains at once, nor for churn.
        """
        one_turn = SHAPES[self.shape].blocks_per_event * SHAPES[self.shape].events_per_batch
        stored = blocks // self.workers - (one_turn if blocks < self.blocks else 0)
        places = max(0, (stored - depth) // (CHAIN_BLOCKS - SHARED_BLOCKS) + 1)
        return [self.chain_number(worker, place) for place in range(places) for worker in range(self.contents)]


class Message(NamedTuple):
    """One encoded batch of one worker."""

    worker: int
    payload: bytes
    stored: int
    removed: int


class Event(NamedTuple):
    """Fields as on the wire, and how many blocks they store or remove."""

    fields: list[object]
    stored: int
    removed: int


def chain_tokens(seed: int, chain: int, blocks: int = CHAIN_BLOCKS) -> list[int]:
    """The tokens of the first `blocks` blocks of a chain."""
    shared = np.random.default_rng(seed).integers(0, VOCABULARY, SHARED_BLOCKS * BLOCK_TOKENS)
    own = np.random.default_rng([seed, chain]).integers(0, VOCABULARY, (CHAIN_BLOCKS - SHARED_BLOCKS) * BLOCK_TOKENS)
    tokens: list[int] = np.concatenate([shared, own])[: blocks * BLOCK_TOKENS].tolist()
    return tokens


def chain_hashes(seed: int, chain: int) -> list[int]:
    """What the engine calls the blocks of a chain: numbers that say nothing."""
    shared = np.random.default_rng([seed, 1, 1]).integers(1, 1 << 63, SHARED_BLOCKS)
    own = np.random.default_rng([seed, chain, 2]).integers(1, 1 << 63, CHAIN_BLOCKS - SHARED_BLOCKS)
    hashes: list[int] = np.concatenate([shared, own]).tolist()
    return hashes


def marker_tokens(marker: int) -> list[int]:
    return [MARKER_FIRST_TOKEN + marker] * BLOCK_TOKENS


def marker_payload(marker: int) -> bytes:
    """A batch that stores one block that is found by `marker_tokens`."""
    return encode_batch([_store([1 << 62 | marker], None, marker_tokens(marker))])


def encode_batch(events: list[list[object]]) -> bytes:
    return _encoder.encode([0.0, events, 0])


def encode_stream(shape: Shape, blocks: int, seed: int = 1) -> list[bytes]:
    """The payloads of one worker alone."""
    return [message.payload for message in messages(StreamPlan(shape.name, blocks, 1, seed))]


def messages(plan: StreamPlan) -> list[Message]:
    """The whole stream in the order of sending: worker by worker in turn, one message each."""
    columns = [list(_batches(plan, worker)) for worker in range(plan.contents)]
    return [
        Message(worker, *row[worker % plan.contents][1:])
        for row in zip_longest(*columns)
        for worker in range(plan.workers)
        if row[worker % plan.contents] is not None
    ]


def _batches(plan: StreamPlan, worker: int) -> Iterator[Message]:
    waiting: list[Event] = []
    for event in _events(plan, worker):
        waiting.append(event)
        if len(waiting) == SHAPES[plan.shape].events_per_batch:
            yield _message(worker, waiting)
            waiting = []
    if waiting:
        yield _message(worker, waiting)


def _message(worker: int, events: list[Event]) -> Message:
    payload = encode_batch([event.fields for event in events])
    return Message(worker, payload, sum(event.stored for event in events), sum(event.removed for event in events))


def _events(plan: StreamPlan, worker: int) -> Iterator[Event]:
    """One worker's events. One-block events go round RUNNING_CHAINS chains; others finish a chain first."""
    size = SHAPES[plan.shape].blocks_per_event
    chains = list(_chains(plan, worker))
    if size > 1:
        yield from _with_evictions(plan, chains, size)
        return
    yield from _grow(plan, *chains[0], size)  # the first one stores the shared blocks
    for first in range(1, len(chains), RUNNING_CHAINS):
        together = [_grow(plan, *chain, size) for chain in chains[first : first + RUNNING_CHAINS]]
        for row in zip_longest(*together):
            yield from (event for event in row if event is not None)


def _chains(plan: StreamPlan, worker: int) -> Iterator[tuple[int, int, int]]:
    """(chain number, first block to store, block after the last) until the worker has its part of the blocks."""
    left, place = plan.blocks // plan.workers, 0
    while left > 0:
        first = SHARED_BLOCKS if place else 0
        end = min(CHAIN_BLOCKS, first + left)
        yield plan.chain_number(worker, place), first, end
        left, place = left - (end - first), place + 1


def _with_evictions(plan: StreamPlan, chains: list[tuple[int, int, int]], size: int) -> Iterator[Event]:
    """The shared blocks stay for ever; of the rest, the oldest chain goes when too many live."""
    live: deque[tuple[int, int]] = deque()
    live_max = plan.live_blocks // (plan.workers * CHAIN_BLOCKS)
    for number, first, end in chains:
        yield from _grow(plan, number, first, end, size)
        live.append((number, end))
        if live_max and len(live) > live_max:
            gone, gone_end = live.popleft()
            yield from _evict(chain_hashes(plan.seed, gone)[SHARED_BLOCKS:gone_end], size)


def _grow(plan: StreamPlan, chain: int, first: int, end: int, size: int) -> Iterator[Event]:
    tokens, hashes = chain_tokens(plan.seed, chain), chain_hashes(plan.seed, chain)
    for start in range(first, end, size):
        stop = min(start + size, end)
        parent = hashes[start - 1] if start else None
        fields = _store(hashes[start:stop], parent, tokens[start * BLOCK_TOKENS : stop * BLOCK_TOKENS])
        yield Event(fields, stop - start, 0)


def _evict(hashes: list[int], size: int) -> Iterator[Event]:
    """Tail first, as engines free a finished request."""
    for stop in range(len(hashes), 0, -size):
        gone = hashes[max(0, stop - size) : stop][::-1]
        yield Event(["BlockRemoved", gone, "GPU"], 0, len(gone))


def _store(hashes: list[int], parent: int | None, tokens: list[int]) -> list[object]:
    return ["BlockStored", hashes, parent, tokens, BLOCK_TOKENS, None, "GPU", None, None]
