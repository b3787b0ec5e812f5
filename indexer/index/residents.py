"""What each engine hash of one publisher means, and which holders have its block.

A hash is resident in some holder, or a ghost, or unknown. Residencies begin (`hold`), gain and lose references, and end
here; each that ends leaves a ghost, since children of blocks that are gone are announced all the same.

What is held may be verified or not (see unverified.py); `holders` are verified, one of every place that has any.

Invariants: a hash in a holder is resolvable; what is held under one hash stays under it. Where an engine leaves
something out of its hashes, one hash has several contents: the first is kept under the hash itself, the others under
made-up hashes, its variants. Where hashes cover tokens after their block (lookahead), what is resident is not what
chains go on from: every hash is a ghost from the start there, and chains go on from ghosts alone.

If broken: a chain would go on from another prompt's prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, count
from typing import NamedTuple

import numpy as np

from indexer.index.columns import Flags, StoredResidencies
from indexer.index.ghosts import Ghosts
from indexer.index.holder import Holder
from indexer.index.key_space import KeySpace
from indexer.index.offloading import part_hash
from indexer.index.parent_links import ParentLinks
from indexer.index.pending import Pending
from indexer.index.state import EngineHash, GhostRow, HolderKey, ResidencyRow
from indexer.index.tiers import GPU, Media
from indexer.index.unverified import Cohort, Unverified
from indexer.index.waiting import WaitingRoom
from indexer.wire.errors import WireError

PROVEN_AT_ONCE = 64  # blocks: half a millisecond, or a whole one where tables grow
RUN_MIN = 64  # hashes: below, one by one is as quick
GHOSTS_AT_ONCE = 1_024
VARIANTS_MAX = 4_096  # hashes with several contents; at the bound the oldest's further contents are forgotten


class Point(NamedTuple):
    """Where a chain stands: its content key (None at the root) and the granules up to there."""

    key: int | None
    granules: int


class Namespace(NamedTuple):
    """What an event says of the prompt its blocks belong to. Engines may leave it out of their hashes."""

    lora_name: str | None
    cache_salt: str | None


class Residents:
    """All residencies and ghosts of one publisher, in one granule."""

    def __init__(
        self,
        owner: object,
        ghosts: Ghosts,
        waiting: WaitingRoom,
        counters: Counter[str],
        media: Media,
        holders_max: int,
        unverified_max: int,
    ) -> None:
        self.holders: dict[HolderKey, Holder] = {}
        self.unverified = Unverified(unverified_max)
        self.links: dict[HolderKey, ParentLinks] = {}  # of places where blocks can be proven, while there is trouble
        self.ghosts = ghosts
        self.cohort = 0  # of the rows of what is verified
        self._proofs_left = PROVEN_AT_ONCE
        self.lookahead_tokens = 0
        self.variants: dict[EngineHash, dict[EngineHash, Namespace]] = {}
        self.variants_are_changed = False
        self.holders_max = holders_max
        self._owner = owner
        self._waiting = waiting
        self._counters = counters
        self._media = media
        self._space: KeySpace | None = None

    @property
    def granule(self) -> int | None:
        """None as long as it is not known."""
        return None if self._space is None else self._space.granule

    # ------------------------------------------------------------------ what a hash means

    def resolve(self, engine_hash: EngineHash) -> Point | None:
        """Where the chain stands after this block, if any holder or ghost knows it."""
        resident = None if self.lookahead_tokens else self._resident(engine_hash)
        return resident if resident is not None else self._ghost(engine_hash)

    def keys_of(self, hashes: Sequence[EngineHash]) -> list[int | None]:
        """The content keys of `resolve`, for many; None = unknown. Cost: 0.2 us each, 2 us if one is wide."""
        if any(isinstance(engine_hash, bytes) for engine_hash in hashes) or any(h.wide for h in self.all_holders()):
            points = [self.resolve(engine_hash) for engine_hash in hashes]
            return [None if point is None else point.key for point in points]
        column = np.array(hashes, np.uint64)
        keys = self.ghosts.keys_of(column)
        for holder in () if self.lookahead_tokens else self.all_holders():
            held = holder.table.values(column)
            keys = np.where(held, held, keys)
        return [key or None for key in keys.tolist()]

    def resolve_in(self, engine_hash: EngineHash, namespace: Namespace) -> Point | None:
        """The same for a hash that may have several contents: the newest of this namespace, else the first."""
        variants = self.variants.get(engine_hash) if self.variants else None
        if variants:
            engine_hash = next((v for v in reversed(variants) if variants[v] == namespace), engine_hash)
        return self.resolve(engine_hash)

    def held_content(self, engine_hash: EngineHash) -> Point | None:
        """What a further residency of this hash would hold. With lookahead a ghost does not tell."""
        resident = self._resident(engine_hash)
        return resident if resident is not None or self.lookahead_tokens else self._ghost(engine_hash)

    def remember(self, engine_hash: EngineHash, point: Point) -> None:
        """A ghost from now on. The root is no block's end."""
        assert point.key is not None
        self.ghosts.remember(engine_hash, point.key, point.granules)

    def remember_again(self, engine_hash: EngineHash) -> None:
        """A ghost that is of use is forgotten later."""
        ghost = self._ghost(engine_hash)
        if ghost is not None:
            self.remember(engine_hash, ghost)

    def load_ghosts(self, ghosts: Iterable[tuple[EngineHash, GhostRow]]) -> None:
        """Recovery, after the residencies and the lookahead, which say how many may be kept."""
        self._allow_ghosts()
        self.ghosts.load(ghosts)

    def remember_run(self, ends: Iterable[tuple[EngineHash, Point]]) -> None:
        """Ghosts of blocks that are placed with lookahead: beside the usual ones, as many as there are residencies."""
        self._allow_ghosts()
        self.ghosts.remember_each([(h, point.key, point.granules) for h, point in ends if point.key is not None])

    def remember_between(
        self, hashes: Sequence[EngineHash], keys: Sequence[int], start: int, step: int, chosen: Flags
    ) -> None:
        """Ghosts of the chosen ones of consecutive blocks of `step` granules, the first from granule `start` on."""
        ends = np.arange(1, len(keys) + 1, dtype=np.uint64) * np.uint64(step) + np.uint64(start)
        if any(isinstance(engine_hash, bytes) for engine_hash in hashes):
            self.ghosts.remember_each(list(compress(zip(hashes, keys, ends.tolist(), strict=True), chosen)))
        else:
            columns = np.array(hashes, np.uint64), np.array(keys, np.uint64), ends
            self.ghosts.remember_all(*(column[chosen] for column in columns))

    def _allow_ghosts(self) -> None:
        held = sum(len(holder) for holder in self.all_holders()) if self.lookahead_tokens else 0
        self.ghosts.allowance = held
        self.ghosts.keep_bound()

    def learn_lookahead(self, tokens: int) -> bool:
        """Hashes cover so many tokens after their block. From the first time on chains go on from ghosts alone, so all
        that is resident becomes one. True if that is news."""
        if tokens <= self.lookahead_tokens:
            return False
        if not self.lookahead_tokens:
            for holder in self.all_holders():
                self._remember_some(holder, len(holder))
        self.lookahead_tokens = tokens
        return True

    def _ghost(self, engine_hash: EngineHash) -> Point | None:
        ghost = self.ghosts.get(engine_hash)
        return None if ghost is None else Point(*ghost)

    def _resident(self, engine_hash: EngineHash) -> Point | None:
        for holder in self.all_holders():
            key = holder.get(engine_hash)
            if key is not None:
                return Point(key, holder.space.end_of(key))
        return None

    def all_holders(self) -> Iterator[Holder]:
        """Those that are verified, then the others."""
        return chain(self.holders.values(), self.unverified.holders())

    @property
    def has_wide(self) -> bool:
        """Whether some hash is in no table."""
        return any(holder.wide for holder in self.all_holders())

    def _remember_resident(self, engine_hash: EngineHash, key: int) -> None:
        if self.lookahead_tokens:
            return  # it is one since it was placed
        assert self._space is not None
        self.ghosts.remember(engine_hash, key, self._space.end_of(key))

    @property
    def waits(self) -> bool:
        """Whether blocks wait for what their hashes mean."""
        return bool(self._waiting)

    # ------------------------------------------------------------------ references

    def hold(
        self,
        holder: Holder,
        engine_hash: EngineHash,
        row: ResidencyRow,
        end: int,
        counts: bool = True,
        namespace: Namespace | None = None,
    ) -> None:
        """One more reference of a block whose content is known. `end`: of the block, in granules."""
        known = holder.get(engine_hash)
        if known is None and self.unverified.cohorts:
            known = self._end_unverified(holder.key, engine_hash, row.content_key)
        if known is None:
            holder.hold(engine_hash, row, end)
        elif known == row.content_key:
            if counts:
                holder.refer(engine_hash, row.reference_count)
        elif namespace is None:
            self._counters["contradicted_hashes"] += 1  # nobody says which prompt it is of: the known content stays
        else:
            self.hold(holder, self._variant(engine_hash, row.content_key, namespace), row, end, counts)

    def release(self, holder: Holder, engine_hash: EngineHash) -> bool:
        """One reference ends. False if the hash is not resident there.

        Of several contents under one hash it is unknown which one is meant, so one reference of each ends: no answer
        is too high.
        """
        if self.variants and engine_hash in self.variants:
            self._release_variants(holder, engine_hash)
        is_released = self._release(holder, engine_hash)
        if self.lookahead_tokens:
            self._allow_ghosts()
        return is_released

    def release_run(self, holder: Holder, hashes: Sequence[EngineHash]) -> Sequence[EngineHash]:
        """The same for many at once, as far as they are no more than resident here, with one reference each. Returns
        those that are left to be looked at one by one. Cost: 3 us each."""
        if len(hashes) < RUN_MIN or self.lookahead_tokens or self.variants or self.unverified.cohorts:
            return hashes
        plain, keys, left = holder.single_references(hashes)
        for first in range(0, len(plain), GHOSTS_AT_ONCE):
            part, part_keys = plain[first : first + GHOSTS_AT_ONCE], keys[first : first + GHOSTS_AT_ONCE]
            self.ghosts.remember_all(part, part_keys, holder.space.ends_of(part_keys))
        holder.end_run(plain, keys)
        return left

    def release_parts(self, key: HolderKey, last_hash: EngineHash) -> None:
        """The chunk that this hash stood for is gone: so are its other blocks, if they had to be given hashes."""
        held_in: Holder | None
        for before in count(1):
            part = part_hash(last_hash, before)
            held_in = self.holders[key] if part in self.holders[key] else self.unverified.find(key, part)
            if held_in is None:
                return
            held_in.end(part)

    def clear(self, holders: set[HolderKey]) -> None:
        """All residencies of these holders end. What their hashes mean stays known."""
        for key in holders & self.holders.keys():
            if not self.lookahead_tokens:  # else all of them are ghosts already, and more would be forgotten at once
                for holder in (self.holders[key], *self.unverified.of(key)):
                    self._remember_some(holder, self.ghosts.ghosts_max)
            self.holders[key].clear()
        for holder in self.unverified.clear(holders):
            holder.leave()
        self.links = {key: links for key, links in self.links.items() if key not in holders}
        self._allow_ghosts()
        self._forget_variants()

    def _remember_some(self, holder: Holder, count: int) -> None:
        """So many residencies become ghosts."""
        hashes, keys, others = holder.some_items(count)
        self.ghosts.remember_all(hashes, keys, holder.space.ends_of(keys))
        self.ghosts.remember_each([(engine_hash, key, holder.space.end_of(key)) for engine_hash, key in others])

    def _release(self, holder: Holder, engine_hash: EngineHash) -> bool:
        """Of what is not verified nobody knows how many references there are: it ends with the first that does."""
        held_in = holder if engine_hash in holder else self.unverified.find(holder.key, engine_hash)
        key = None if held_in is None else held_in.get(engine_hash)
        if held_in is None or key is None:
            return False
        if not held_in.extra_references(engine_hash):
            self._remember_resident(engine_hash, key)
        held_in.release(engine_hash)
        return True

    def _variant(self, engine_hash: EngineHash, content_key: int, namespace: Namespace) -> EngineHash:
        self._counters["hashes_with_several_contents"] += 1
        variant = _variant_hash(engine_hash, content_key)
        self.variants.setdefault(engine_hash, {})[variant] = namespace
        self.variants_are_changed = True
        if len(self.variants) > VARIANTS_MAX:
            del self.variants[next(iter(self.variants))]
            self._counters["forgotten_variants"] += 1
        return variant

    def _release_variants(self, holder: Holder, engine_hash: EngineHash) -> None:
        self.variants_are_changed = True
        for variant in list(self.variants[engine_hash]):
            if not self._release(holder, variant) and self.resolve(variant) is None:
                del self.variants[engine_hash][variant]
        if not self.variants[engine_hash]:
            del self.variants[engine_hash]

    def _forget_variants(self) -> None:
        """Those that are neither resident nor ghosts mean nothing any more."""
        for engine_hash, by_hash in list(self.variants.items()):
            known = {v: namespace for v, namespace in by_hash.items() if self.resolve(v) is not None}
            self.variants_are_changed = True
            if known:
                self.variants[engine_hash] = known
            else:
                del self.variants[engine_hash]

    # ------------------------------------------------------------------ trust

    def lose_trust(self) -> None:
        """A batch is lost that may have removed anything: nothing that is held is verified any more.

        What waits is forgotten: it was not credited, and most of it could never be proven. Cost: see `Unverified.add`.
        """
        cohort = self.cohort
        lost = {key: holder for key, holder in self.holders.items() if len(holder)}
        for key, holder in lost.items():
            self.holders[key] = Holder(key, holder.space, self._owner, holder.pending, holder.tier)
            self._need_links(holder)
        self.unverified.add(cohort, lost)
        for holder in self.holders.values():
            holder.pending.begin_cohort(cohort + 1)
        for links in self.links.values():
            links.forget_ends()
        self.cohort = cohort + 1
        if self._waiting:
            self._waiting.clear({key for key, _, _ in self._waiting.residencies()})

    def prove(self, holder: Holder, engine_hash: EngineHash | None) -> None:
        """The engine has this block in this place, and its ancestors, or could not have gone on from it. What is
        verified has been proven with its ancestors before, so a proof ends there. Each block is moved once a gap.

        A long proof goes on with `prove_more`; what is removed until then ends it there, and less is proven.
        """
        links = self.links[holder.key]
        while engine_hash is not None and (held_in := self.unverified.find(holder.key, engine_hash)) is not None:
            if self._proofs_left <= 0:
                links.ends.append(engine_hash)
                return
            before = len(held_in)
            engine_hash = held_in.give_chain(engine_hash, links, holder, self._proofs_left)
            self._proofs_left -= before - len(held_in)

    def use_links(self, key: HolderKey, links: ParentLinks) -> bool:
        """All that the store has of this place was learned: proofs that ended early go on, some of them. True: there
        are more.

        Of a place that was cleared meanwhile nothing is proven.
        """
        if self.links.get(key) is not links:
            return False
        if not links.is_complete:
            links.complete(self.holders[key])
        if not links.ends and links.to_look_at:
            links.find_ends(self.unverified.of(key))
        self.prove_more()
        return bool(links.ends or links.to_look_at)

    def prove_more(self) -> bool:
        """Go on with proofs that were too long for the batches that gave them. True: there are more. Cost: a
        millisecond."""
        self._proofs_left = PROVEN_AT_ONCE
        for key, links in self.links.items():
            while links.ends and self._proofs_left > 0:
                self.prove(self.holders[key], links.ends.pop())
                self._proofs_left -= 1
        self._proofs_left = PROVEN_AT_ONCE
        return self.is_proving

    @property
    def is_proving(self) -> bool:
        """Whether there are such proofs."""
        return any(links.ends for links in self.links.values())

    def tidy_trust(self) -> bool:
        """What a gap leaves to be done, a millisecond of it: proofs, cohorts that have been put together, links of
        blocks that are gone. False: there was nothing left."""
        return self.prove_more() or self.unverified.merge() or self._sweep_links()

    def load(self, stored: StoredResidencies) -> None:
        """Recovery, of a place of a fresh publisher whose `cohort` is known: what is not of that is unverified."""
        verified = self.holder(stored.holder)
        is_verified = stored.cohorts == self.cohort
        if not is_verified.all() or stored.wide:
            self._load_unverified(verified, stored.chosen(~is_verified, lambda cohort: cohort != self.cohort))
            stored = stored.chosen(is_verified, lambda cohort: cohort == self.cohort)
        verified.load(stored)

    def copy(self) -> list[StoredResidencies]:
        """Every residency, verified or not, as recovery would read it."""
        held = [holder.copy(self.cohort) for holder in self.holders.values()]
        for cohort in self.unverified.cohorts:
            held += [holder.copy(cohort.number) for holder in cohort.holders()]
        return held

    def _load_unverified(self, verified: Holder, stored: StoredResidencies) -> None:
        if not len(stored):
            return
        if not self.unverified.cohorts:
            self.unverified.cohorts.append(Cohort(self.cohort - 1))
        (cohort,) = self.unverified.cohorts
        if verified.key not in cohort.places:
            holder = Holder(verified.key, verified.space, self._owner, verified.pending, verified.tier)
            cohort.join({verified.key: holder})
            self._need_links(verified)
        (holder,) = cohort.places[verified.key]
        holder.load(stored)
        holder.lose_trust()

    def _need_links(self, verified: Holder) -> None:
        """Of blocks on the engine's own GPU, which go on from one another there."""
        if verified.tier == GPU and verified.is_credited and not verified.key.owner:
            self.links.setdefault(verified.key, ParentLinks())

    def keep_links(self) -> None:
        """Begin to forget those of blocks that are gone."""
        for key, links in self.links.items():
            links.keep([self.holders[key], *self.unverified.of(key)])

    def _sweep_links(self) -> bool:
        return any(links.sweep([self.holders[key], *self.unverified.of(key)]) for key, links in self.links.items())

    def is_unverified(self, key: HolderKey, hashes: Sequence[EngineHash]) -> bool:
        """Whether one of these is."""
        return any(engine_hash in holder for holder in self.unverified.of(key) for engine_hash in hashes)

    def _end_unverified(self, key: HolderKey, engine_hash: EngineHash, content_key: int) -> int | None:
        """A block is stored anew. If it was held under this hash with another content: that."""
        held_in = self.unverified.find(key, engine_hash)
        known = None if held_in is None else held_in.get(engine_hash)
        if held_in is None or known != content_key:
            return known
        held_in.end(engine_hash)
        return None

    # ------------------------------------------------------------------ holders

    def admit(self, key: HolderKey) -> Holder:
        """The holder that an event names. Raises WireError for a new one at the bound, if none can go.

        Holders that hold nothing and have nothing to tell the store go first; all of them at once, because looking
        for them is dear.
        """
        if key not in self.holders and len(self.holders) >= self.holders_max and not self._drop_idle_holders():
            raise WireError("too_many_holders", "more groups, media and owners than a publisher may have")
        return self.holder(key)

    def holder(self, key: HolderKey) -> Holder:
        """The holder of this key, made if need be: what is stored is recovered, whatever the bound is by now."""
        holder = self.holders.get(key)
        if holder is None:
            assert self._space is not None, "a granule is known before the first holder"
            tier = self._media.tier_of(key.medium)
            holder = self.holders[key] = Holder(key, self._space, self._owner, Pending(self.cohort), tier)
        return holder

    def change_space(self, space: KeySpace) -> None:
        """Content keys of another granule mean nothing: forget them all, and what hashes meant."""
        held_before = list(self.holders)
        self.leave()
        self._space = space
        for key in held_before:
            self.holder(key).pending.cleared = True
        if len(self.ghosts):
            self.ghosts.clear()
        self.variants.clear()

    def leave(self) -> None:
        """Give up every key and slot."""
        for holder in (*self.holders.values(), *self.unverified.clear(set(self.holders))):
            holder.leave()
        self.holders, self.links = {}, {}

    def _drop_idle_holders(self) -> bool:
        idle = {key: h for key, h in self.holders.items() if not len(h) and not h.changes_pending}
        for holder in self.unverified.holders():
            idle.pop(holder.key, None)
        for key, _, _ in self._waiting.residencies() if idle else ():
            if idle.pop(key, None) is not None and not idle:
                break
        for key, holder in idle.items():
            holder.space.release(holder.slot)
            del self.holders[key]
            self.links.pop(key, None)
        return bool(idle)


def _variant_hash(engine_hash: EngineHash, content_key: int) -> bytes:
    """A hash that no engine publishes, for a further content under one that it does."""
    data = engine_hash if isinstance(engine_hash, bytes) else engine_hash.to_bytes(8, "big")
    return data + b"#" + content_key.to_bytes(8, "big")
