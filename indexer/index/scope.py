"""One (tenant, model): its publishers, a key space per granule, and what its publishers tell each other.

Purpose: nothing matches across scopes, and within one a publisher's orphans may be explained by another publisher that
stored the same parent. Wide engine hashes are digests of content, so they mean the same to all of them.

Invariants: a publisher only ever hears of a hash in its own granule; between two batches nothing is left to tell.

If broken: orphans would wait for ever, or be placed where another granule's chain ends.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from indexer.index.assumptions import SHOWN_IN_ANSWERS, Assumption, assumptions_of
from indexer.index.engine_hashes import EngineHashes
from indexer.index.expected import ExpectedBlocks
from indexer.index.key_space import KeySpace
from indexer.index.names_seen import NamesSeen
from indexer.index.publisher import PublisherIndex
from indexer.index.sequence_numbers import SequenceNumbers
from indexer.index.state import Coverage, EngineHash
from indexer.index.whole_batches import Scratch
from indexer.registration import PublisherKey

if TYPE_CHECKING:
    from indexer.index.residents import Point

AWAITED_MAX = 65_536


class Scope:
    def __init__(self) -> None:
        self.publishers: dict[PublisherIndex, None] = {}
        self.pools: dict[PublisherIndex, frozenset[str] | None] = {}  # and the workers they serve, None = all
        self.not_complete: list[PublisherKey] = []  # whose coverage is below `complete`, in order
        self.asked_always: dict[PublisherIndex, None] = {}  # see `PublisherReuse.is_asked_always`
        self.assumptions: dict[PublisherKey, list[Assumption]] = {}  # those that answers show
        self.engine_hashes = EngineHashes()
        self.expected: ExpectedBlocks | None = None  # None = nothing is, which is usual
        self.trust_changes = 0  # how often that has changed, or what follows
        self.disconnected: list[PublisherKey] = []  # in order, as the following
        self.silent: list[PublisherKey] = []  # no batch of them has ever come
        self.refused: list[PublisherKey] = []  # nothing of their last batches could be read, or was for them
        self.names = NamesSeen()
        self._least_block_tokens: int | None = None
        self.numbers = SequenceNumbers()
        self.scratch = Scratch()
        self.spaces: dict[int, KeySpace] = {}
        # (granule, engine hash) -> publishers with orphans under that hash, which another publisher may explain
        # (bounded: the oldest goes, and its orphans wait for their own publisher alone)
        self.awaited: dict[tuple[int | None, EngineHash], dict[PublisherIndex, None]] = {}
        self.explained: list[tuple[PublisherIndex, EngineHash, Point]] = []

    def note_coverage(self, publisher: PublisherIndex, *, is_complete: bool) -> None:
        """Kept in order here, where it seldom changes, so that no query looks at all of them."""
        self._note(self.not_complete, publisher, not is_complete)
        is_disconnected = not is_complete and publisher.trust.coverage is Coverage.DISCONNECTED
        self._note(self.disconnected, publisher, is_disconnected)

    def note_voice(self, publisher: PublisherIndex) -> None:
        self._note(self.silent, publisher, not publisher.has_spoken)

    def note_refusal(self, publisher: PublisherIndex) -> None:
        self._note(self.refused, publisher, publisher.is_refused)

    def _note(self, noted: list[PublisherKey], publisher: PublisherIndex, is_so: bool) -> None:
        key = publisher.registration.key
        place = bisect_left(noted, key)
        is_noted = noted[place : place + 1] == [key]
        if is_noted and not is_so:
            del noted[place]
        elif is_so and not is_noted and publisher in self.publishers:
            noted.insert(place, key)
        else:
            return
        self.trust_changes += 1

    @property
    def is_disconnected(self) -> bool:
        """Whether nobody is connected."""
        return len(self.disconnected) == len(self.publishers)

    @property
    def has_trouble(self) -> bool:
        """Whether answers without hits say why, whatever the prompt."""
        return bool(self.silent or self.refused or len(self.disconnected) == len(self.publishers))

    @property
    def least_block_tokens(self) -> int:
        """Tokens of the smallest blocks of any publisher; 0 = nobody has shown one."""
        if self._least_block_tokens is None:
            known = [publisher.reuse.least_block_tokens for publisher in self.publishers]
            self._least_block_tokens = min(filter(None, known), default=0)
        return self._least_block_tokens

    def note_kind(self, publisher: PublisherIndex) -> None:
        """Kept here, so that no query looks for them."""
        self._least_block_tokens = None
        self.asked_always.pop(publisher, None)
        if publisher.reuse.is_asked_always and publisher in self.publishers:
            self.asked_always[publisher] = None

    def note_assumptions(self, publisher: PublisherIndex) -> None:
        key = publisher.registration.key
        self.assumptions.pop(key, None)
        assumptions = SHOWN_IN_ANSWERS.intersection(assumptions_of(publisher))
        if assumptions and publisher in self.publishers:
            self.assumptions[key] = sorted(assumptions)

    def key_space(self, granule: int) -> KeySpace:
        space = self.spaces.get(granule)
        if space is None:
            space = self.spaces[granule] = KeySpace(granule)
            space.needs_whole_walk = bool(self.pools)
        return space

    def join(self, publisher: PublisherIndex) -> None:
        """A new publisher. A pool may have what comes before a block that only a worker has."""
        self.publishers[publisher] = None
        self.note_voice(publisher)
        if publisher.registration.is_pool:
            self.pools[publisher] = publisher.registration.serves
            for space in self.spaces.values():
                space.needs_whole_walk = True
                space.known.clear()

    def is_served(self, worker_id: str) -> bool:
        """Whether some pool extends what this worker holds."""
        return any(serves is None or worker_id in serves for serves in self.pools.values())

    def wait(self, publisher: PublisherIndex, engine_hash: EngineHash) -> None:
        """This publisher has orphans under a hash that another one may learn."""
        self.awaited.setdefault((publisher.granule, engine_hash), {})[publisher] = None
        if len(self.awaited) > AWAITED_MAX:
            for forgotten in self.awaited.pop(next(iter(self.awaited))):
                forgotten.counters["forgotten_awaited_hashes"] += 1

    def explain(self, publisher: PublisherIndex, engine_hash: EngineHash, point: Point) -> None:
        """This publisher learned a hash: whoever waits for it is told by `tell`."""
        for other in self.awaited.pop((publisher.granule, engine_hash), ()):
            if other is not publisher and other.granule == publisher.granule and other.registration.publisher_id:
                self.explained.append((other, engine_hash, point))

    def tell(self) -> None:
        """Tell what was explained, and what that explains in turn: one after the other, however long the chain."""
        while self.explained:
            publisher, engine_hash, point = self.explained.pop()
            publisher.placing.settling.learn(engine_hash, point)

    def sweep(self, work: int) -> None:
        """Go on with what cleared holders left behind. Cost: see `KeySpace.sweep`, for every granule."""
        for space in self.spaces.values():
            if space.sweeps:
                space.sweep(work)

    def tell_again(self, publisher: PublisherIndex) -> None:
        """This publisher was recovered. Two publishers may be stored in different transactions: what one told the other
        is then stored for the one that knew it, and maybe not for the one that waited. Cost: per hash awaited."""
        for granule, engine_hash in [awaited for awaited in self.awaited if awaited[0] == publisher.granule]:
            point = publisher.residents.resolve(engine_hash)
            if point is not None:
                self.explain(publisher, engine_hash, point)
            elif publisher in self.awaited[granule, engine_hash]:
                point = publisher.resolve_elsewhere(engine_hash)
                if point is not None:
                    self.explained.append((publisher, engine_hash, point))
        self.tell()

    def forget_expected(self, publisher: PublisherIndex) -> None:
        """Its engine has lost what it was sent."""
        if self.expected is not None:
            self.expected.forget(publisher)

    def leave(self, publisher: PublisherIndex) -> None:
        """The publisher is removed: its keys, slots and places in line become free."""
        publisher.leave()
        self.forget_expected(publisher)
        self._least_block_tokens = None
        self.trust_changes += 1  # whoever is left may be disconnected
        for noted in (self.silent, self.refused):
            self._note(noted, publisher, is_so=False)
        self.note_coverage(publisher, is_complete=True)
        self.asked_always.pop(publisher, None)
        self.assumptions.pop(publisher.registration.key, None)
        del self.publishers[publisher]
        if publisher in self.pools:
            del self.pools[publisher]
            for space in self.spaces.values():
                space.known.clear()
        for awaited, waiting in list(self.awaited.items()):
            waiting.pop(publisher, None)
            if not waiting:
                del self.awaited[awaited]
        used = {p.granule for p in self.publishers}
        for granule in [g for g in self.spaces if g not in used]:
            del self.spaces[granule]
