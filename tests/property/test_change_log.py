"""A log of changes beside a naive replay: a list of operations, and a store that may or may not have got them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexer.identity.chain import chain_keys
from indexer.index import change_log
from indexer.index.change_log import ChangeLog
from indexer.index.columns import ColumnChanges
from indexer.index.kernels import LOCATED, ROOTED, RUN, RUN_HEAD
from indexer.index.state import CountChange, HolderChanges, HolderKey, ResidencyRow
from tests.sizes import examples
from tests.store_stand_in import rows_of

HASHES = [0, 1, 2, 3, 2**63, 2**64 - 1, *(i << 40 for i in range(1, 9)), *range(100, 110)]
U64 = np.uint64
State = ResidencyRow | CountChange | None


class Operation(NamedTuple):
    """What happened to one hash: a whole row, a new count, or (None) its end."""

    engine_hash: int
    state: State


def replayed(operations: list[Operation], *, is_uncertain: bool) -> dict[int, State]:
    """What a flush has to write, hash by hash. Where the store may have no row for sure, an end needs none."""
    states: dict[int, State] = {}
    born: set[int] = set()
    for engine_hash, state in operations:
        before = states.get(engine_hash)
        if engine_hash not in states and isinstance(state, ResidencyRow):
            born.add(engine_hash)
        is_counted = isinstance(state, CountChange) and isinstance(before, ResidencyRow)
        states[engine_hash] = before._replace(reference_count=state.reference_count) if is_counted else state
    return {h: state for h, state in states.items() if state is not None or is_uncertain or h not in born}


def written(changes: ColumnChanges) -> dict[int, State]:
    rows = rows_in(changes)
    overwritten = set(changes.removed.tolist()) & set(changes.upserted.engine_hashes.tolist())
    assert len(rows) == len(changes) == len(dict(rows)) + len(overwritten)
    return dict(rows)


def rows_in(changes: ColumnChanges) -> list[tuple[int, State]]:
    return list(rows_of(HolderChanges(HolderKey("GPU", 0, ""), columns=changes)))  # type: ignore[arg-type]


def write(store: dict[int, ResidencyRow], changes: dict[int, State]) -> None:
    for engine_hash, state in changes.items():
        if state is None:
            store.pop(engine_hash, None)
        elif isinstance(state, ResidencyRow):
            store[engine_hash] = state
        elif engine_hash in store:
            store[engine_hash] = store[engine_hash]._replace(reference_count=state.reference_count)


def add_unkeyed_run(
    log: ChangeLog, hashes: list[int], parent: int | None, locals_: list[int], tokens: int, at: int
) -> None:
    """As the kernel of whole batches writes it: the keys follow from the local hashes."""
    words = [RUN | (LOCATED | (ROOTED if parent is None else 0)) << 8 | len(hashes) << 32]
    words += [tokens | 1 << 32, parent or 0, at, *hashes, *locals_]
    log.provide(RUN_HEAD + 3 * len(hashes))
    log.chunk[log.fill : log.fill + len(words)] = words
    log.fill += len(words)
    log.entries += len(hashes)


class Holder:
    """What is resident, the log of it, and every operation that the log has to remember."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.log = ChangeLog()
        self.operations: list[Operation] = []
        self.is_uncertain = False
        self.held: dict[int, ResidencyRow] = {}
        self.store: dict[int, ResidencyRow] = {}

    def step(self) -> None:
        free = [h for h in HASHES if h not in self.held]
        match self.random.choice(["row", "run", "unkeyed run", "count", "gone", "gone"]):
            case "row" if free:
                self.hold(self.random.choice(free))
            case "run" | "unkeyed run" as kind if free:
                hashes = self.random.sample(free, k=self.random.randint(1, min(6, len(free))))
                self.hold_run(hashes, is_keyed=kind == "run")
            case "count" if self.held:
                engine_hash, references = self.random.choice(list(self.held)), self.random.randint(1, 2**31)
                self.log.add_count(engine_hash, references)
                self.note(engine_hash, CountChange(references))
            case "gone" if self.held:
                engine_hash = self.random.choice(list(self.held))
                self.log.add_gone(engine_hash)
                self.note(engine_hash, None)
            case _:
                pass

    def hold(self, engine_hash: int) -> None:
        random = self.random
        row = ResidencyRow(
            random.choice([0, 2**64 - 1, random.getrandbits(64)]),
            random.choice([None, 0, 2**64 - 1, random.getrandbits(64)]),
            random.choice([None, 0, random.getrandbits(64)]),
            random.choice([0, 16, 2**31 - 1]),
            random.choice([0, 16, 2**40]),
            random.choice([1, 1, 7, 2**31]),
        )
        self.log.add_row(engine_hash, row)
        self.note(engine_hash, row)

    def hold_run(self, hashes: list[int], *, is_keyed: bool) -> None:
        random = self.random
        parent = random.choice([None, 0, 5, random.getrandbits(64)])
        locals_ = [random.getrandbits(64) for _ in hashes]
        tokens, position = random.choice([16, 48]), random.choice([0, 64, 2**33])
        keys = [random.getrandbits(64) for _ in hashes] if is_keyed else chain_keys(parent, locals_)
        if is_keyed:
            columns = np.array(hashes, U64), np.array(keys, U64), parent, np.array(locals_, U64)
            self.log.add_run(*columns, tokens, position)
        else:
            add_unkeyed_run(self.log, hashes, parent, locals_, tokens, position)
        for i, engine_hash in enumerate(hashes):
            before = parent if i == 0 else keys[i - 1]
            self.note(engine_hash, ResidencyRow(keys[i], before, locals_[i], tokens, position + i * tokens, 1))

    def note(self, engine_hash: int, state: State) -> None:
        self.operations.append(Operation(engine_hash, state))
        write(self.held, {engine_hash: state})

    def check(self) -> ColumnChanges:
        changes = self.log.folded()
        expected = replayed(self.operations, is_uncertain=self.is_uncertain)
        assert written(changes) == expected
        assert written(self.log.folded()) == expected  # folding changes nothing
        assert len(self.log) >= len(expected)
        return changes

    def flush(self) -> None:
        """It is written, or not, or nobody knows; meanwhile the log goes on."""
        changes = self.check()
        taken, operations, random = self.log, self.operations, self.random
        self.log, self.operations, self.is_uncertain = ChangeLog(), [], False
        for _ in range(random.choice([0, 0, 5])):
            self.step()
        is_written, is_known = random.random() < 0.7, random.random() < 0.6
        if is_written:
            for engine_hash, state in rows_in(changes):
                assert not isinstance(state, ResidencyRow) or engine_hash not in self.store, "it is removed first"
                write(self.store, {engine_hash: state})
        if is_written and is_known:
            assert self.operations or self.store == self.held
            return
        is_folded = random.random() < 0.5
        self.log.put_before(ChangeLog.of(changes) if is_folded else taken)
        self.operations, self.is_uncertain = [*operations, *self.operations], True
        if is_folded:  # of what came to nothing, nothing is left
            self.operations = [*_as_operations(written(changes)), *self.operations[len(operations) :]]
        self.check()


def _as_operations(changes: dict[int, State]) -> Iterator[Operation]:
    return (Operation(engine_hash, state) for engine_hash, state in changes.items())


@contextmanager
def small_chunks(words: int) -> Iterator[None]:
    with patch.object(change_log, "CHUNK_WORDS_MIN", words), patch.object(change_log, "CHUNK_WORDS_MAX", 4 * words):
        yield


@given(st.integers(0, 2**32), st.sampled_from([1, 8, 50, 512]))
@examples(150)
def test_the_log_comes_to_what_its_operations_come_to_one_by_one(seed: int, words: int) -> None:
    with small_chunks(words):
        holder = Holder(Random(seed))
        for _ in range(60):
            holder.step()
        holder.check()


@given(st.integers(0, 2**32), st.sampled_from([1, 8, 50, 512]))
@examples(150)
def test_the_store_has_what_is_held_whatever_becomes_of_flushes(seed: int, words: int) -> None:
    with small_chunks(words):
        holder = Holder(Random(seed))
        for _ in range(60):
            holder.step()
            if holder.random.random() < 0.2:
                holder.flush()
        write(holder.store, written(holder.check()))
        assert holder.store == holder.held
