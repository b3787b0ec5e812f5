"""One place of a publisher that holds blocks: engine hash -> content key, with reference counts and what changed.

Purpose: hashes of 64 bits, nearly all there are, lie in a flat table; the few that do not fit one (wider hashes, and
content keys that mean "empty" there) in a dict beside it, so that equality stays sure. Further references and keys
that several hashes share lie beside, too.

Invariants: a hash in the holder is resident, with one reference more than `extra` has; its key is in the key space
under this holder's slot exactly while some hash of this holder means it (`aliases` counts hashes that share a key).
What is not verified has no references to count: how many are left, nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any

import numpy as np

from indexer.index.columns import U64, Flags, StoredResidencies, WideResidency
from indexer.index.kernels import DONE, HOLDER_FULL, holder_insert, holder_take_chain
from indexer.index.key_space import KeySpace
from indexer.index.parent_links import ParentLinks
from indexer.index.pending import Pending
from indexer.index.retired import RetiredSlot
from indexer.index.state import EngineHash, HolderChanges, HolderKey, ResidencyRow
from indexer.index.table import Table, Walk, fits
from indexer.index.tiers import GPU, is_credited

CHAIN_MAX = 64  # blocks proven at once
_make_row = partial(tuple.__new__, ResidencyRow)  # a third of the cost of calling the class


class Holder:
    """Cost: 16 bytes a slot of the table; a change costs some microseconds by itself, 0.2 us a block in a run."""

    __slots__ = (
        "aliases",
        "extra",
        "is_credited",
        "is_verified",
        "key",
        "owner",
        "pending",
        "slot",
        "space",
        "table",
        "tier",
        "wide",
        "wide_extra",
    )

    def __init__(self, key: HolderKey, space: KeySpace, owner: object, pending: Pending, tier: str = GPU) -> None:
        self.key = key
        self.owner = owner
        self.space = space
        self.slot = space.allocate(self)
        self.tier = tier
        self.is_credited = is_credited(key.medium)
        self.is_verified = True
        self.pending = pending
        self.table = Table()
        self.extra = Table()  # engine hash -> references beyond the first
        self.wide: dict[EngineHash, int] = {}
        self.wide_extra: dict[EngineHash, int] = {}
        self.aliases: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.table) + len(self.wide)

    def __contains__(self, engine_hash: EngineHash) -> bool:
        return self.get(engine_hash) is not None

    def get(self, engine_hash: EngineHash) -> int | None:
        """The content key, or None if the hash is not resident."""
        if self.wide and engine_hash in self.wide:
            return self.wide[engine_hash]
        return None if isinstance(engine_hash, bytes) else self.table.get(engine_hash) or None

    def walk(self) -> Walk:
        """Through what is resident, but for what fits no table."""
        return self.table.walk()

    def has_each(self, hashes: U64) -> Flags:
        """Which of these are resident, but for content keys that fit no table. Cost: 10 ns each."""
        has: Flags = self.table.values(hashes) != 0
        return has

    def items(self) -> Iterator[tuple[EngineHash, int]]:
        """(engine hash, content key) of each residency, in no order."""
        hashes, keys = self.table.items()
        yield from zip(hashes.tolist(), keys.tolist(), strict=True)
        yield from self.wide.items()

    def some_items(self, count: int) -> tuple[U64, U64, list[tuple[EngineHash, int]]]:
        """So many residencies, or all: engine hashes and content keys, and pairs of both for those that are in no
        table. Whatever else there is costs nothing."""
        hashes, keys = self.table.items(count)
        return hashes, keys, list(islice(self.wide.items(), count - len(hashes)))

    def copy(self, cohort: int) -> StoredResidencies:
        """Every residency, as recovery would read it from rows of this cohort. Cost: 0.2 us each."""
        hashes, keys = self.table.items()
        counts = self.extra.values(hashes) if len(self.extra) else np.zeros(len(hashes), np.uint64)
        columns = hashes, keys, self.space.ends_of(keys), counts + np.uint64(1)
        beside = [(h, key, self.space.end_of(key), self.reference_count(h)) for h, key in self.wide.items()]
        granule = self.space.granule
        wide = [WideResidency(h, key, end * granule, n, cohort) for h, key, end, n in beside if isinstance(h, bytes)]
        narrow = [residency for residency in beside if isinstance(residency[0], int)]
        hashes, keys, ends, counts = (
            np.concatenate((column, np.array([residency[i] for residency in narrow], np.uint64)))
            for i, column in enumerate(columns)
        )
        cohorts = np.full(len(hashes), cohort, np.int32)
        ends *= np.uint64(granule)
        return StoredResidencies(self.key, hashes, keys, ends, counts.astype(np.uint32), cohorts, wide)

    def extra_references(self, engine_hash: EngineHash) -> int:
        """References beyond the first."""
        if engine_hash in self.wide:
            return self.wide_extra.get(engine_hash, 0)
        return self.extra.get(engine_hash) if len(self.extra) and not isinstance(engine_hash, bytes) else 0

    def reference_count(self, engine_hash: EngineHash) -> int:
        return 1 + self.extra_references(engine_hash) if engine_hash in self else 0

    def references_of_key(self, key: int) -> int:
        """References of every hash that means this key. Cost: per residency; for inspection only."""
        return sum(self.reference_count(h) for h, k in self.items() if k == key)

    def hold(self, engine_hash: EngineHash, row: ResidencyRow, end_granules: int) -> None:
        """A residency begins; the hash was not resident here."""
        key = row.content_key
        self._put_in(engine_hash, key, end_granules)
        if engine_hash in self.wide:
            self.pending.note_wide(engine_hash, row)
        else:
            assert isinstance(engine_hash, int)
            self.pending.log.add_row(engine_hash, row)
        if row.reference_count > 1:
            self._set_extra(engine_hash, row.reference_count - 1)

    def hold_run(
        self,
        hashes: Sequence[EngineHash],
        keys: U64,
        parent_key: int | None,
        local_hashes: U64,
        block_tokens: int,
        position: int,
    ) -> bool:
        """Residencies of consecutive blocks begin, the first at token `position`. False, and nothing happened, if one
        of the hashes is resident already, or wide: then they go one by one."""
        if isinstance(hashes[0], bytes):
            return self._hold_wide_run(hashes, keys, parent_key, local_hashes, block_tokens, position)
        if self.wide or any(isinstance(engine_hash, bytes) for engine_hash in hashes):
            return False
        distinct = np.array(hashes, np.uint64)
        table = self.table
        while (status := holder_insert(*table.arrays, distinct, keys)) == HOLDER_FULL:
            table.make_room(len(distinct))
        if status != DONE:
            return False
        self._add_run(keys, block_tokens, position)
        self.pending.log.add_run(distinct, keys, parent_key, local_hashes, block_tokens, position)
        table.tidy()
        return True

    def _hold_wide_run(
        self,
        hashes: Sequence[EngineHash],
        keys: U64,
        parent_key: int | None,
        local_hashes: U64,
        block_tokens: int,
        position: int,
    ) -> bool:
        if not all(isinstance(engine_hash, bytes) for engine_hash in hashes) or not self.wide.keys().isdisjoint(hashes):
            return False
        plain_keys = keys.tolist()
        self.wide.update(zip(hashes, plain_keys, strict=True))
        self._add_run(keys, block_tokens, position)
        parents = [parent_key, *plain_keys[:-1]]
        positions = range(position, position + len(hashes) * block_tokens, block_tokens)
        rows = zip(
            plain_keys,
            parents,
            local_hashes.tolist(),
            repeat(block_tokens),
            positions,
            repeat(1),
            repeat(self.pending.cohort),
            strict=False,
        )
        self.pending.wide_changes.update(zip(hashes, map(_make_row, rows), strict=True))
        return True

    def _add_run(self, keys: U64, block_tokens: int, position: int) -> None:
        ends = np.arange(1, len(keys) + 1, dtype=np.int64) * block_tokens + position
        self.note_aliases(self.space.add_run(self.slot, keys, ends // self.space.granule))

    def load(self, stored: StoredResidencies) -> None:
        """Recovery: residencies that are in the store, none of which is here. Cost: 0.2 us each."""
        table, granule = self.table, np.uint64(self.space.granule)
        table.make_room(len(stored.engine_hashes))
        if holder_insert(*table.arrays, stored.engine_hashes, stored.content_keys) == DONE:
            ends = (stored.end_tokens // granule).astype(np.int64)
            self.note_aliases(self.space.add_run(self.slot, stored.content_keys, ends))
            counted = np.flatnonzero(stored.reference_counts > 1)
            counts = zip(stored.engine_hashes[counted].tolist(), stored.reference_counts[counted].tolist(), strict=True)
            for engine_hash, count in counts:
                self._set_extra(engine_hash, count - 1)
        else:
            columns = stored.engine_hashes, stored.content_keys, stored.end_tokens, stored.reference_counts
            self._load_each(zip(*(column.tolist() for column in columns), strict=True))
        self._load_each(stored.wide)

    def _load_each(self, residencies: Iterable[Sequence[Any]]) -> None:
        for engine_hash, key, end_tokens, count, *_ in residencies:
            row = ResidencyRow(key, None, None, 0, 0, count)
            self.hold(engine_hash, row, end_tokens // self.space.granule)
        self.pending.forget()

    def note_aliases(self, keys: Sequence[int]) -> None:
        """One more hash means each of these keys, which the holder had already."""
        for key in keys:
            self.aliases[key] = self.aliases.get(key, 1) + 1

    def refer(self, engine_hash: EngineHash, references: int = 1) -> None:
        """More (or, negative, fewer) references to a residency that stays."""
        extra = self.extra_references(engine_hash) + references
        assert extra >= 0
        self._set_extra(engine_hash, extra)
        self._note_count(engine_hash, extra + 1)

    def release(self, engine_hash: EngineHash) -> None:
        """One reference ends, and at zero the residency."""
        if self.extra_references(engine_hash):
            self.refer(engine_hash, -1)
        else:
            self.end(engine_hash)

    def end(self, engine_hash: EngineHash) -> None:
        """The residency ends, whatever its count."""
        self._set_extra(engine_hash, 0)
        if engine_hash in self.wide:
            self.pending.wide_changes[engine_hash] = None
        else:
            assert isinstance(engine_hash, int)
            self.pending.log.add_gone(engine_hash)
        self._take_out(engine_hash)

    def single_references(self, hashes: Sequence[EngineHash]) -> tuple[U64, U64, Sequence[EngineHash]]:
        """Those that are resident with one reference, with their keys, and the others; none of them if there are wide
        hashes, or one comes twice. Cost: 0.2 us each."""
        named = dict.fromkeys(hashes)
        if self.wide or len(named) < len(hashes) or any(isinstance(engine_hash, bytes) for engine_hash in named):
            return np.empty(0, np.uint64), np.empty(0, np.uint64), hashes
        column = np.array(list(named), np.uint64)
        keys = self.table.values(column)
        is_single = (keys != 0) & (self.extra.values(column) == 0)
        return column[is_single], keys[is_single], column[~is_single].tolist()

    def end_run(self, hashes: U64, keys: U64) -> None:
        """Residencies of one reference each end; `keys`: what the hashes mean. Cost: 2 us each."""
        for engine_hash in hashes.tolist():
            self.table.remove(engine_hash)
            self.pending.log.add_gone(engine_hash)
        self._end_keys(keys)

    def give_chain(
        self, engine_hash: EngineHash, links: ParentLinks, verified: Holder, count_max: int
    ) -> EngineHash | None:
        """The block and its ancestors have been proven: from now on they are there, with the one reference that is
        sure. As far as they are here, at most `count_max`, and at most CHAIN_MAX; returns the next ancestor.

        Cost: 1.5 us each, some 10 if they are wide or share their keys.
        """
        if isinstance(engine_hash, bytes) or self.wide or links.wide:
            return self._give(engine_hash, links, verified)
        count_max = min(count_max, CHAIN_MAX)
        hashes, keys = np.zeros(count_max + 1, np.uint64), np.empty(count_max, np.uint64)
        count = holder_take_chain(*self.table.arrays, *links.table.arrays, np.uint64(engine_hash), hashes, keys)
        following, hashes, keys = int(hashes[count]), hashes[:count].copy(), keys[:count].copy()
        self.table.tidy()
        self._hand_on(hashes, keys, verified)
        self.pending.log.add_counts(hashes)
        return following or None

    def _hand_on(self, hashes: U64, keys: U64, other: Holder) -> None:
        """What was taken out of the table here is held there."""
        other.table.make_room(len(hashes))
        status = holder_insert(*other.table.arrays, hashes, keys)
        assert status == DONE, "a hash is in one holder of a place"
        other.table.tidy()
        other.note_aliases(self.space.add_run(other.slot, keys, self.space.ends_of(keys).astype(np.int64)))
        self._end_keys(keys)

    def _give(self, engine_hash: EngineHash, links: ParentLinks, verified: Holder) -> EngineHash | None:
        """One block."""
        key = self.get(engine_hash)
        assert key is not None
        end = self.space.end_of(key)
        self._take_out(engine_hash)
        verified._put_in(engine_hash, key, end)
        verified._note_count(engine_hash, 1)
        return links.get(engine_hash)

    def _end_keys(self, keys: U64) -> None:
        """Each is meant by one hash less."""
        shared = [key in self.aliases for key in keys.tolist()] if self.aliases else []
        if any(shared):
            is_shared = np.array(shared)
            for key in keys[is_shared].tolist():
                self._end_key(key)
            keys = keys[~is_shared]
        if len(keys):
            self.space.remove_run(self.slot, keys)

    def give_some(self, other: Holder, count: int) -> None:
        """So many residencies, or all, move to another holder of the place that is not verified, either. Cost: 1 us
        each, some 5 if they are wide."""
        hashes, keys, others = self.some_items(count)
        self.table.remove_all(hashes)
        self._hand_on(hashes, keys, other)
        for engine_hash, key in others:
            end = self.space.end_of(key)
            self._take_out(engine_hash)
            other._put_in(engine_hash, key, end)

    def clear(self) -> None:
        """Every residency ends. Cost: that of `leave`, however many there are."""
        self.leave(self.pending.clear())
        self.slot = self.space.allocate(self)
        self.table, self.extra = Table(), Table()
        self.wide, self.wide_extra, self.aliases = {}, {}, {}

    def leave(self, *others: dict[Any, Any]) -> None:
        """Give up every key, and the slot. Cost: see `KeySpace.retire`. `others`: what is let go of besides."""
        if len(self):
            retired = RetiredSlot(self.slot, self.table, self.wide, self.aliases, self.wide_extra, *others)
            self.space.retire(retired)
        else:
            self.space.release(self.slot)

    def lose_trust(self) -> None:
        """From now on nothing here is verified."""
        self.is_verified = self.is_credited = False
        self.extra, self.wide_extra = Table(), {}

    def take_changes(self) -> HolderChanges | None:
        return self.pending.take(self.key)

    def restore_changes(self, changes: HolderChanges) -> None:
        self.pending.restore(changes)

    @property
    def changes_pending(self) -> int:
        return self.pending.size

    def _put_in(self, engine_hash: EngineHash, key: int, end_granules: int) -> None:
        if isinstance(engine_hash, bytes) or not fits(key):
            self.wide[engine_hash] = key
        else:
            self.table.put(engine_hash, key)
        if not self.space.add(self.slot, key, end_granules):
            self.note_aliases([key])

    def _take_out(self, engine_hash: EngineHash) -> None:
        if engine_hash in self.wide:
            key = self.wide.pop(engine_hash)
        else:
            assert isinstance(engine_hash, int)
            key = self.table.remove(engine_hash)
        self._end_key(key)

    def _end_key(self, key: int) -> None:
        if self.aliases and key in self.aliases:
            self._end_alias(key)
        else:
            self.space.remove(self.slot, key)

    def _end_alias(self, key: int) -> None:
        self.aliases[key] -= 1
        if self.aliases[key] == 1:
            del self.aliases[key]

    def _set_extra(self, engine_hash: EngineHash, extra: int) -> None:
        if engine_hash in self.wide or isinstance(engine_hash, bytes):
            self.wide_extra[engine_hash] = extra
            if not extra:
                del self.wide_extra[engine_hash]
        elif extra:
            self.extra.put(engine_hash, extra)
        elif len(self.extra):
            self.extra.remove(engine_hash)

    def _note_count(self, engine_hash: EngineHash, count: int) -> None:
        if engine_hash not in self.wide:
            assert isinstance(engine_hash, int)
            self.pending.log.add_count(engine_hash, count)
        else:
            self.pending.note_wide_count(engine_hash, count)
