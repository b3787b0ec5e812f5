"""The whole index in memory: scopes, publishers, and the one query.

Everything is synchronous and belongs to one thread, so every read sees a consistent state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, cast

from msgspec.structs import replace

from indexer.index.expected import ExpectedBlocks, Room
from indexer.index.explain import Explaining, explain
from indexer.index.groups import MAMBA
from indexer.index.heat import NO_KEYS, Heat, Sample
from indexer.index.holder import Holder
from indexer.index.key_space import SWEEP_WORK
from indexer.index.limits import IndexLimits
from indexer.index.lookup import prompt_keys
from indexer.index.prefix_hits import answer, block_of_hits, prompt_tokens
from indexer.index.prefix_query import PrefixAnswer, PrefixQuery, QueryWarning
from indexer.index.publisher import DEFAULT_GRANULE, PublisherIndex
from indexer.index.query_warnings import unknown_model, unknown_workers
from indexer.index.scope import Scope
from indexer.registration import PublisherKey, Registration

UNKNOWN_MODELS_MAX = 256  # warnings that are kept


class BlockHolder(NamedTuple):
    """One holder of a content key. `end_tokens`: the length of the prefix that the key stands for."""

    worker_id: str
    dp_rank: int
    tenant: str
    model: str
    medium: str
    group: int
    owner: str
    reference_count: int
    end_tokens: int


class Expectation(NamedTuple):
    """How many blocks are expected now, and the content key at the end of the prompt's last whole block."""

    blocks: int
    content_key: int | None


class ContentIndex:
    """Who holds what. Keys of publishers are unique over all scopes."""

    def __init__(self, limits: IndexLimits | None = None) -> None:
        self.limits = limits or IndexLimits()
        self._publishers: dict[PublisherKey, PublisherIndex] = {}
        self._scopes: dict[tuple[str, str], Scope] = {}
        self.heat = Heat(self.limits.heat_sample_every, self.limits.heat_keys_max)
        self.expected_room = Room(self.limits.expected_blocks_total_max)
        self._workers: dict[str, Counter[str]] = {}  # tenant -> worker -> its publishers
        self._unknown_models: dict[tuple[str, str], QueryWarning] = {}  # as long as the models are the same
        self._journal_shared = self._journal_share

    def add_publisher(self, registration: Registration) -> PublisherIndex:
        """Raises ValueError if the key exists."""
        if registration.key in self._publishers:
            raise ValueError(f"publisher {registration.key} exists")
        scope = self._scopes.setdefault((registration.tenant, registration.model), Scope())
        publisher = PublisherIndex(registration, scope, self.limits)
        self._publishers[registration.key] = publisher
        self._unknown_models.clear()
        self._workers.setdefault(registration.tenant, Counter())[registration.worker_id] += 1
        publisher.journal.bytes_max = self._journal_share
        scope.join(publisher)
        return publisher

    def remove_publisher(self, key: PublisherKey) -> None:
        """Drop it with all its residencies; an unknown key is a no-op. Cost: as `Holder.leave`."""
        publisher = self._publishers.pop(key, None)
        self._unknown_models.clear()
        if publisher is None:
            return
        name = (publisher.registration.tenant, publisher.registration.model)
        scope = self._scopes[name]
        scope.leave(publisher)
        if not scope.publishers:
            del self._scopes[name]
        self._forget_worker(publisher.registration.tenant, key.worker_id)

    def _forget_worker(self, tenant: str, worker_id: str) -> None:
        workers = self._workers[tenant]
        workers[worker_id] -= 1
        if not workers[worker_id]:
            del workers[worker_id]
        if not workers:
            del self._workers[tenant]

    def publisher(self, key: PublisherKey) -> PublisherIndex | None:
        return self._publishers.get(key)

    def publishers(self) -> list[PublisherIndex]:
        return [self._publishers[key] for key in sorted(self._publishers)]

    def scope(self, tenant: str, model: str) -> Scope | None:
        return self._scopes.get((tenant, model))

    def scopes(self) -> list[tuple[tuple[str, str], Scope]]:
        """All, with tenant and model, in their order."""
        return sorted(self._scopes.items(), key=itemgetter(0))

    def models(self, tenant: str) -> list[str]:
        return sorted(model for t, model in self._scopes if t == tenant)

    def prefix_hits(self, query: PrefixQuery, now: float = 0.0) -> PrefixAnswer:
        """How much of this prompt each publisher of its scope holds. Cost: about 1 us a granule, plus 5 us a hit.

        `now`: as for `expect`.
        """
        scope = self._scopes.get((query.tenant, query.model))
        if scope is None:
            result = PrefixAnswer(prompt_tokens(query, ()), [], [self._unknown_model(query.tenant, query.model)])
        else:
            result = answer(query, scope, now)
        if query.workers:
            known: Mapping[str, int] = self._workers.get(query.tenant, {})
            result.warnings[:0] = unknown_workers(worker for worker in query.workers if worker not in known)
        return result

    def _unknown_model(self, tenant: str, model: str) -> QueryWarning:
        """Routers that are configured wrongly ask thousands of times."""
        warning = self._unknown_models.get((tenant, model))
        if warning is None:
            if len(self._unknown_models) == UNKNOWN_MODELS_MAX:
                self._unknown_models.clear()
            warning = unknown_model(model, tenant, self.models(tenant))
            self._unknown_models[tenant, model] = warning
        return warning

    def predict(self, publisher: PublisherIndex, query: PrefixQuery) -> int:
        """What this publisher of the query's scope would skip of the prompt, in tokens."""
        worker_id, _ = key = publisher.registration.key
        narrowed = replace(query, workers=frozenset({worker_id}))
        hits = answer(narrowed, self._scopes[query.tenant, query.model]).hits
        return next((hit.hit_tokens for hit in hits if (hit.worker_id, hit.dp_rank) == key), 0)

    def expect(self, publisher: PublisherIndex, query: PrefixQuery, until: float) -> Expectation:
        """The prompt was sent to this publisher of its scope: its whole blocks are expected until then, by a clock that
        only goes on, or until events tell. Cost: 1 us a block."""
        scope = self._scopes[query.tenant, query.model]
        granule = publisher.granule or publisher.registration.block_size or DEFAULT_GRANULE
        keys, _ = prompt_keys(query, granule)
        step = block_of_hits(publisher, granule) // granule
        keys = keys[step - 1 :: step].copy()
        rules = publisher.reuse.rules
        if rules is not None and any(spec.kind == MAMBA for spec in rules.specs):
            keys = keys[-1:]  # states are kept where a prompt ends, not all the way
        if scope.expected is None:
            scope.expected = ExpectedBlocks(self.expected_room, self.limits.expected_blocks_max)
        blocks = scope.expected.note(publisher, granule, keys, until)
        return Expectation(blocks, int(keys[-1]) if len(keys) else None)

    def note_heat(self, query: PrefixQuery, now: float) -> None:
        """A query that is sampled, whatever its answer leaves out. Cost: that of its look-up again."""
        scope = self._scopes.get((query.tenant, query.model))
        longest = Sample(now, query.tenant, query.model, DEFAULT_GRANULE, NO_KEYS)
        for granule, space in scope.spaces.items() if scope is not None else ():
            if query.asks(space):
                keys, _ = prompt_keys(query, granule)
                is_held = space.look_up(keys) != 0
                held = len(keys) if is_held.all() else int(is_held.argmin())
                if held * granule > len(longest.keys) * longest.granule:
                    longest = longest._replace(granule=granule, keys=keys[:held].copy())
        self.heat.note(longest)

    def expire_expected(self, now: float) -> Iterator[None]:
        """Now and then: what was expected until now no longer is. Between two steps the index may be used."""
        for scope in list(self._scopes.values()):
            if scope.expected is not None:
                yield from scope.expected.expire(now)
                if not len(scope.expected):
                    scope.expected = None

    def explain(self, query: PrefixQuery, publishers: Sequence[PublisherIndex]) -> Explaining:
        """Why these have the hits of this prompt that they have. `publishers`: one, or two to compare."""
        return explain(query, self._scopes.get((query.tenant, query.model)), publishers)

    def rest(self) -> Iterator[None]:
        """Now and then: let tables that are growing go on with that, bit by bit; between two steps the index may be
        used. Cost: 1 us a publisher and table, and see `Table.rest` for each step."""
        spaces = [space for scope in self._scopes.values() for space in scope.spaces.values()]
        publishers = list(self._publishers.values())
        held = (holder.table for publisher in publishers for holder in list(publisher.residents.all_holders()))
        for table in chain((space.table for space in spaces), held):
            while table.rest():
                yield

    def expire_unverified(self, now: float, age_max_s: float, at: float | None = None) -> None:
        """Now and then: see `PublisherIndex.expire_unverified`. Cost: 1 us a publisher without trouble."""
        for publisher in self._publishers.values():
            publisher.expire_unverified(now, age_max_s, at)

    def expire_blocks(self, now: float, at: float | None = None) -> None:
        """Now and then: see `PublisherIndex.expire_blocks`. Cost: 2 us a block that expires."""
        for publisher in self._publishers.values():
            publisher.expire_blocks(now, at)

    def share_journals(self) -> None:
        """Now and then: let each journal keep its share of what all may. Cost: nothing while that is the same."""
        share = self._journal_share
        if share == self._journal_shared:
            return
        self._journal_shared = share
        for publisher in self._publishers.values():
            publisher.journal.bytes_max = share
            publisher.journal.trim()

    @property
    def _journal_share(self) -> int:
        each = self.limits.journals_bytes_max // max(1, len(self._publishers))
        return min(self.limits.journal_bytes_max, each)

    def sweep(self) -> bool:
        """Go on with what cleared holders and gaps have left, a millisecond at most. False: there was nothing left."""
        for publisher in self._publishers.values():
            if publisher.tidy_trust():
                return True
        for scope in self._scopes.values():
            for space in scope.spaces.values():
                if space.sweeps:
                    space.sweep(SWEEP_WORK)
                    return True
        return False

    def block(self, content_key: int, tenants: Collection[str] | None = None) -> list[BlockHolder]:
        """Who of these tenants (None = all) holds the block that ends this prefix, over all their scopes."""
        return sorted(self._block_holders(content_key, tenants))

    def _block_holders(self, content_key: int, tenants: Collection[str] | None) -> Iterator[BlockHolder]:
        scopes = (scope for (tenant, _), scope in self._scopes.items() if tenants is None or tenant in tenants)
        for scope in scopes:
            for space in scope.spaces.values():
                end = space.end_granules(content_key)
                held = (cast("Holder", holder) for holder in space.holders(content_key) if end is not None)
                for holder in held:
                    if not holder.is_verified:
                        continue
                    registration = cast("PublisherIndex", holder.owner).registration
                    yield BlockHolder(
                        registration.worker_id,
                        registration.dp_rank,
                        registration.tenant,
                        registration.model,
                        *holder.key,
                        holder.references_of_key(content_key),
                        (end or 0) * space.granule,
                    )

    def stats(self, tenants: Collection[str] | None = None) -> dict[str, object]:
        """Totals per model, medium and publisher of these tenants (None = all), as plain values."""
        models = []
        for (tenant, model), scope in sorted(self._scopes.items()):
            if tenants is not None and tenant not in tenants:
                continue
            by_medium: Counter[str] = Counter()
            publishers = []
            for publisher in sorted(scope.publishers, key=lambda p: p.registration.key):
                status = publisher.status()
                by_medium.update(status.residencies_by_medium)
                publishers.append(
                    {
                        "worker_id": publisher.registration.worker_id,
                        "dp_rank": publisher.registration.dp_rank,
                        "residencies": status.residencies,
                        "residencies_by_medium": status.residencies_by_medium,
                        "orphans": status.orphans,
                        "ghosts": status.ghosts,
                        "unplaced": status.unplaced,
                    }
                )
            models.append(
                {
                    "tenant": tenant,
                    "model": model,
                    "granules": sorted(scope.spaces),
                    "content_keys": sum(space.held_keys for space in scope.spaces.values()),
                    "residencies": sum(by_medium.values()),
                    "residencies_by_medium": dict(sorted(by_medium.items())),
                    "publishers": publishers,
                }
            )
        return {"models": models}
