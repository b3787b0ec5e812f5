"""Three replicas over one store that are killed, frozen and cut off at any moment; one of them writes at a time.

A seed decides the order of everything; a step is a batch applied, a flush begun or ended, a lock lost or got, a store
that fails before or after a commit. After every write that the store accepts, its rows are those of a replica that has
applied exactly what the checkpoint says. A failure prints its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from indexer.errors import StoreUnavailable
from indexer.index.columns import PublisherState
from indexer.index.content_index import ContentIndex
from indexer.index.publisher import PublisherIndex
from indexer.index.state import HolderKey, PublisherChanges
from indexer.store.difference import ghost_differences, residency_differences
from indexer.store.lease import Lease, LeaseTable, StoredState
from indexer.store.merge import WriteOutcome
from indexer.store.writer import Writer
from indexer.stream.follower import fingerprint_of
from indexer.wire.decode import decode_batch
from tests.sizes import fewer
from tests.store_stand_in import DictStore, stored_residencies
from tests.stream_stand_ins import CLEARED, payload, registration, removed, stored

ID, SHARD = 1, 1
REPLICAS = 3
STEPS = 120
BLOCKS = 40

Rows = dict[tuple[HolderKey, object], tuple[int, int]]


class Truth:
    """What the engine publishes, and what a publisher holds after each batch."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.batches: list[bytes] = []
        self.rows: list[Rows] = []
        self._publisher = new_publisher()

    def publish(self) -> None:
        dice = self._dice
        medium = dice.choice(("GPU", "GPU", "CPU"))
        first = dice.randrange(1, BLOCKS)
        event = dice.choices(
            (stored(*range(first, first + dice.randint(1, 4)), medium=medium), removed(first, medium=medium), CLEARED),
            (6, 5, 0.4),
        )[0]
        self.batches.append(payload(event))
        apply(self._publisher, self.batches, len(self.batches) - 1)
        self.rows.append(rows_of(self._publisher))


def new_publisher() -> PublisherIndex:
    return ContentIndex().add_publisher(registration(publisher_id=ID, engine="vllm"))


def apply(publisher: PublisherIndex, batches: Sequence[bytes], number: int) -> None:
    publisher.apply(decode_batch(batches[number]), number, fingerprint_of(batches[number]))


def rows_of(publisher: PublisherIndex) -> Rows:
    return {(holder, h): (key, count) for holder, h, key, count in publisher.residencies()}


class SharedStore:
    """One publisher's rows, its term and its flushes. A call takes some turns of the loop, and may fail."""

    def __init__(self, dice: random.Random, truth: Truth) -> None:
        self.dice = dice
        self._truth = truth
        self.rows = DictStore()
        self.term = 0
        self.flushes = 0
        self.lock: object = None  # who has it
        self.fenced = 0
        self.has_losses = False

    @property
    def state(self) -> StoredState:
        return StoredState(self.rows.checkpoint.generation, self.rows.checkpoint.sequence_number, self.flushes)

    def claim(self) -> Lease:
        self.term += 1
        return Lease(self.term, self.flushes)

    async def write(self, changes: Sequence[PublisherChanges], terms: Mapping[int, int]) -> WriteOutcome:
        await self._turns()
        if terms[ID] != self.term:
            self.fenced += 1
            return WriteOutcome(0, frozenset({ID}))
        for change in changes:
            self.rows.write(change)
        self._committed()
        await self._turns()
        return WriteOutcome(1)

    async def reconcile(self, state: PublisherState, term: int) -> int | None:
        await self._turns()
        if term != self.term:
            self.fenced += 1
            return None
        self.rows.write(state.changes)
        rows = stored_residencies((*place, row) for place, row in self.rows.rows.items())
        rest = replace(
            state.changes,
            holders=residency_differences(rows, state.held),
            ghosts_cleared=False,
            ghosts=ghost_differences(self.rows.ghosts.items(), state.ghosts),
        )
        self.rows.write(rest)
        self._committed()
        await self._turns()
        return rest.size

    def _committed(self) -> None:
        self.flushes += 1
        number = self.rows.checkpoint.sequence_number
        if number is not None and not self.has_losses:
            found = {place: (row.content_key, row.reference_count) for place, row in self.rows.rows.items()}
            assert found == self._truth.rows[number], f"rows are not those of batch {number}"

    async def _turns(self) -> None:
        for _ in range(self.dice.choice((0, 0, 1, 5, 20))):
            await asyncio.sleep(0)
        if self.dice.random() < 0.08:
            raise StoreUnavailable("it is away")


class Replica:
    """One process: its memory, its locks, its writer. A new one has read the rows."""

    def __init__(self, store: SharedStore) -> None:
        index = ContentIndex()
        self.store = store
        self.publisher = index.add_publisher(registration(publisher_id=ID, engine="vllm"))
        store.rows.recover(self.publisher)
        self.table = LeaseTable()
        self.writer = Writer(store, index, leases=self.table)  # type: ignore[arg-type]
        self.writer.note_loaded(ID, store.flushes)
        self.flush: asyncio.Task[None] | None = None

    @property
    def next_number(self) -> int:
        number = self.publisher.checkpoint.sequence_number
        return 0 if number is None else number + 1

    def look(self) -> None:
        """As `LeaseKeeper` does twice a second: try the lock, claim, see how far the rows are."""
        if self.store.lock is None:
            self.store.lock = self
        if self.store.lock is self:
            self.table.locked([SHARD])
        else:
            self.table.session_lost()
        if self.table.to_claim({ID}):
            self.table.claimed(ID, self.store.claim())
        self.writer.confirm({ID: self.store.state})

    def begin_flush(self) -> None:
        if self.flush is None or self.flush.done():
            self.flush = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            await self.writer.flush()

    async def end_flush(self) -> None:
        if self.flush is not None:
            await self.flush

    async def die(self) -> None:
        """What it had in memory is gone; what it had sent may still be written."""
        if self.flush is not None:
            if self.store.dice.random() < 0.5:
                self.flush.cancel()
            await asyncio.wait({self.flush})
        self.lose_lock()

    def lose_lock(self) -> None:
        """It does not know: it was frozen, or the network was cut."""
        if self.store.lock is self:
            self.store.lock = None


async def play(seed: int, *, with_losses: bool) -> SharedStore:
    dice = random.Random(seed)
    truth = Truth(dice)
    store = SharedStore(dice, truth)
    store.has_losses = with_losses
    replicas = [Replica(store) for _ in range(REPLICAS)]
    for _ in range(STEPS):
        at = dice.randrange(REPLICAS)
        replica = replicas[at]
        act = dice.choices(
            ("publish", "apply", "look", "flush", "wait", "lose", "freeze", "die"), (9, 20, 8, 9, 6, 1, 1, 1)
        )
        match act[0]:
            case "publish":
                truth.publish()
            case "apply":
                follow(replica, truth, dice.randint(1, 3))
            case "look":
                replica.look()
            case "flush":
                replica.begin_flush()
            case "wait":
                await asyncio.sleep(0)
            case "freeze":
                replica.lose_lock()
            case "lose" if with_losses and replica.next_number < len(truth.batches):
                lose(replica, truth)
            case "die":
                await replica.die()
                replicas[at] = Replica(store)
    await settle(replicas, truth)
    return store


def follow(replica: Replica, truth: Truth, batches: int) -> None:
    for number in range(replica.next_number, min(len(truth.batches), replica.next_number + batches)):
        apply(replica.publisher, truth.batches, number)


def lose(replica: Replica, truth: Truth) -> None:
    """A batch that this replica never gets."""
    number = replica.next_number
    replica.publisher.count_gap(number, number)
    replica.publisher.skip(number, fingerprint_of(truth.batches[number]), "lost")


async def settle(replicas: Sequence[Replica], truth: Truth) -> None:
    """Everything is applied, nothing fails any more, one has the lock: rows equal its memory."""
    store = replicas[0].store
    for replica in replicas:
        follow(replica, truth, len(truth.batches))
        await replica.end_flush()
    while store.flushes == 0 or any(replica.publisher.changes_pending for replica in replicas):
        truth.publish()
        for replica in replicas:
            follow(replica, truth, len(truth.batches))
            replica.look()
            replica.begin_flush()
            await replica.end_flush()
    writers = [replica for replica in replicas if replica.writer.writes(ID) and store.lock is replica]
    assert len(writers) == 1
    store.rows.assert_equals(writers[0].publisher)
    for replica in replicas:
        assert len(replica.writer._standings[ID].kept) <= STEPS


@pytest.mark.parametrize("with_losses", [False, True], ids=["all receive everything", "some lose batches"])
def test_rows_are_always_one_replicas_memory(with_losses: bool) -> None:
    fenced = 0
    for seed in range(fewer(60)):
        try:
            fenced += asyncio.run(play(seed, with_losses=with_losses)).fenced
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert fenced > 0, "no writer was overtaken in the middle"
