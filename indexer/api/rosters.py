"""What the kernel for known queries is told of the key space that a query asks: arrays, and who holds what.

Purpose: the kernel judges publishers of the plain kind and writes what answers say of them. A roster has both as
arrays: which slots of the key space are plain, and a card for each of their publishers.

Invariants: a roster is kept in `KeySpace.known`, and so forgotten when a slot is given or freed, or when the kind or
the coverage of a publisher changes; what the kernel takes is asked for anew with every query.

If broken: answers would name publishers that are gone, or in another order than the route does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np

from indexer.api import answer_kernels as a
from indexer.api.answer_texts import Texts, joined, name_of, tails_of, texts_of
from indexer.index.content_index import ContentIndex
from indexer.index.holder import Holder
from indexer.index.key_space import KeySpace
from indexer.index.publisher import DEFAULT_GRANULE, PublisherIndex
from indexer.index.scope import Scope
from indexer.index.table import I64

MASK_WORDS_MAX = 1_024  # 65,536 holders
MET_AT_ONCE = 128  # further holders, when one is met: less than a millisecond


class Plan:
    """The key space that queries for one model ask, as long as there is one."""

    def __init__(self, index: ContentIndex, tenant: str, model: str) -> None:
        self._index = index
        self._empty: tuple[Scope, KeySpace] | None = None
        self.tenant, self.model = tenant, model

    @property
    def granule(self) -> int:
        """Of what was found held, if anything was."""
        scope = self._index.scope(self.tenant, self.model)
        return next(iter(scope.spaces), DEFAULT_GRANULE) if scope is not None else DEFAULT_GRANULE

    def arguments(self) -> tuple[Any, ...] | None:
        """What the kernel takes; None = it cannot answer now."""
        scope = self._index.scope(self.tenant, self.model)
        if scope is None or scope.pools or scope.asked_always or scope.assumptions or scope.expected is not None:
            return None
        if len(scope.spaces) > 1:
            return None
        space = next(iter(scope.spaces.values())) if scope.spaces else self._empty_space(scope)
        if space.words > MASK_WORDS_MAX:
            return None
        return (
            space.granule,
            not space.needs_whole_walk,
            space.words,
            *space.table.arrays,
            space.mask_words,
            *_roster(scope, space).arrays,
            scope.numbers.array,
        )

    def _empty_space(self, scope: Scope) -> KeySpace:
        """Where nobody has stored anything yet."""
        if self._empty is None or self._empty[0] is not scope:
            self._empty = scope, KeySpace(1)
        return self._empty[1]

    def learn(self, runs: I64, count: int) -> bool:
        """Of the holders that have anything of the prompt: whether the kernel can judge them all from now on."""
        scope = self._index.scope(self.tenant, self.model)
        assert scope is not None
        (space,) = scope.spaces.values()
        held = 0
        for set_id in runs[: 2 * count : 2].tolist():
            held |= space.masks[set_id]
        return _roster(scope, space).learn(held)


class _Roster:
    """The holders of a key space, as far as queries have met them: which are plain, and their cards."""

    def __init__(self, scope: Scope, space: KeySpace) -> None:
        self._scope = scope
        self._space = space
        self._plain: dict[int, tuple[PublisherIndex, Texts]] = {}  # by slot
        self._passed_over = 0  # slots that nobody asks for
        self._others = 0  # that the kernel cannot judge
        self._met = 0  # all of these
        self.write()

    def learn(self, slots: int) -> bool:
        """Meet these, and some of the others, for there will be queries for them too."""
        if slots & self._others:
            return False
        unmet = ~(self._met | slots) & (1 << len(self._space.slots)) - 1
        for slot in (*_bits(slots & ~self._met), *islice(_bits(unmet), MET_AT_ONCE)):
            self._meet(slot)
        self.write()
        return not slots & self._others

    def _meet(self, slot: int) -> None:
        self._met |= 1 << slot
        holder = self._space.slots[slot]
        if not isinstance(holder, Holder) or not holder.is_verified:
            self._passed_over |= 1 << slot
            return
        publisher = cast("PublisherIndex", holder.owner)
        texts = texts_of(*publisher.registration.key, publisher.trust)
        if texts is None or publisher.plain_holder is not holder or publisher.reuse.drops_blocks:
            self._others |= 1 << slot
        else:
            self._plain[slot] = publisher, texts

    def write(self) -> None:
        """Cost: 3 us a holder, and 1 us a publisher below `complete`."""
        self.changes = self._scope.trust_changes
        least_tokens = self._scope.least_block_tokens
        words = self._space.words
        kinds = [sum(1 << slot for slot in self._plain), self._passed_over]
        count = max(self._plain, default=0) + 1
        cards = np.zeros((count, a.CARD_FIELDS), np.int64)
        slots = sorted(self._plain, key=lambda slot: self._plain[slot][0].registration.key)
        slot_of_rank = np.zeros(count, np.int64)
        slot_of_rank[: len(slots)] = slots
        names = [text for key in self._scope.not_complete for text in name_of(key)]
        *tails, causes = tails_of(self._scope)
        texts, places = joined([text for slot in slots for text in self._plain[slot][1]] + names + tails)
        if slots:
            card_places = places[: a.TEXT_COUNT * len(slots) + 1]
            cards[slots, : a.TEXTS] = self._card_numbers(slots)
            cards[slots, a.TEXTS :: 2] = card_places[:-1].reshape(-1, a.TEXT_COUNT)
            cards[slots, a.TEXTS + 1 :: 2] = card_places[1:].reshape(-1, a.TEXT_COUNT)
        self.arrays = (
            np.frombuffer(bytearray(b"".join(mask.to_bytes(8 * words, "little") for mask in kinds)), "<u8"),
            cards.reshape(-1),
            slot_of_rank,
            texts,
            self._doubts(places[a.TEXT_COUNT * len(slots) : len(places) - len(tails)]),
            np.array([*places[[-3, -2, -2, -1]], causes, least_tokens, self._scope.names.number], np.int64),
        )

    def _card_numbers(self, slots: list[int]) -> list[tuple[int, int, int, bool]]:
        """RANK, NUMBER_ROW, NAME and HAS_SIBLINGS of each."""
        publishers = [self._plain[slot][0] for slot in slots]
        workers = [publisher.registration.worker_id for publisher in publishers]
        ranks, first = Counter(workers), {worker: rank for rank, worker in reversed(list(enumerate(workers)))}
        return [
            (rank, publisher.number_row, first[worker], ranks[worker] > 1)
            for rank, (publisher, worker) in enumerate(zip(publishers, workers, strict=True))
        ]

    def _doubts(self, places: I64) -> I64:
        """Rows of the publishers below `complete`, in their order."""
        slots = {publisher.registration.key: slot for slot, (publisher, _) in self._plain.items()}
        doubts = np.zeros((len(places) // 2, a.DOUBT_FIELDS), np.int64)
        doubts[:, a.DOUBT_SLOT] = [slots.get(key, -1) for key in self._scope.not_complete]
        doubts[:, a.DOUBT_JSON], doubts[:, a.DOUBT_JSON + 1] = places[:-1:2], places[1::2]
        doubts[:, a.DOUBT_RAW], doubts[:, a.DOUBT_RAW + 1] = places[1:-1:2], places[2::2]
        return doubts.reshape(-1)


def _roster(scope: Scope, space: KeySpace) -> _Roster:
    roster: _Roster | None = space.known.get(_Roster)
    if roster is None:
        roster = space.known[_Roster] = _Roster(scope, space)
    elif roster.changes != scope.trust_changes:
        roster.write()
    return roster


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit.bit_length() - 1


def _nothing_held() -> tuple[Any, ...]:
    scope = Scope()
    space = scope.key_space(1)
    return 1, True, 1, *space.table.arrays, space.mask_words, *_Roster(scope, space).arrays, scope.numbers.array


NOTHING_HELD = _nothing_held()
