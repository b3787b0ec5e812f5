"""What an answer says beside its hits: why there may be fewer than the caller expects.

A router cannot tell "nobody holds this" from "you asked for the wrong thing": both are zero. So an answer without hits
names every cause that can be found out. Most are kept by the scope (scope.py) and cost a comparison; whether a prompt
would have hits without its adapter, salt or items is asked again, for the beginning of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from enum import StrEnum
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from indexer.index.assumptions import MESSAGES, Assumption
from indexer.index.prefix_query import PrefixQuery, PublisherHit, QueryWarning
from indexer.registration import PublisherKey

if TYPE_CHECKING:
    from indexer.index.scope import Scope

UNKNOWN_WORKERS_NAMED_MAX = 100
NAMED_MAX = 5
NEAREST_NAMED_MAX = 3
COMPARED_MODELS_MAX = 32  # those of the most similar length
COMPARED_LENGTH_MAX = 128  # of names that are compared
PROBED_TOKENS = 4_096  # of a prompt that is asked again


class Cause(StrEnum):
    """A closed set; docs/api.md says what to do about each. Assumptions are codes of warnings, too."""

    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_WORKER = "unknown_worker"
    UNKNOWN_GRANULE = "unknown_granule"
    COVERAGE_BELOW_COMPLETE = "coverage_below_complete"
    # only of answers without hits
    NO_PUBLISHER_CONNECTED = "no_publisher_connected"
    PUBLISHER_NEVER_SPOKE = "publisher_never_spoke"
    EVENTS_REFUSED = "events_refused"
    PROMPT_TOO_SHORT = "prompt_too_short"
    TOKENS_NEEDED = "tokens_needed"
    ADAPTER_NEVER_SEEN = "adapter_never_seen"
    SALT_NEVER_SEEN = "salt_never_seen"
    ITEMS_NEVER_MATCH = "items_never_match"


HasHits = Callable[[PrefixQuery], bool]


# ---------------------------------------------------------------------- who and what is asked


def unknown_model(model: str, tenant: str, known: Iterable[str]) -> QueryWarning:
    """`known`: the tenant's models. Cost: two milliseconds, where there are many."""
    near = ""
    if len(model) <= COMPARED_LENGTH_MAX:
        short = (name for name in known if len(name) <= COMPARED_LENGTH_MAX)
        compared = nsmallest(COMPARED_MODELS_MAX, short, key=lambda name: abs(len(name) - len(model)))
        if found := get_close_matches(model, compared, NEAREST_NAMED_MAX):
            near = f"; the nearest names are {', '.join(map(repr, found))}"
    message = f"no publisher of model {model!r} is registered for tenant {tenant!r}{near}"
    return QueryWarning(Cause.UNKNOWN_MODEL, message)


def unknown_workers(unknown: Iterable[str]) -> Iterator[QueryWarning]:
    """The first ones by name, the rest by number."""
    names = sorted(unknown)
    for worker_id in names[:UNKNOWN_WORKERS_NAMED_MAX]:
        yield QueryWarning(Cause.UNKNOWN_WORKER, f"no publisher of worker {worker_id!r} is registered")
    if (more := len(names) - UNKNOWN_WORKERS_NAMED_MAX) > 0:
        yield QueryWarning(Cause.UNKNOWN_WORKER, f"and of {more} more workers none is registered")


def unknown_granule(granule: int, known: Iterable[int]) -> QueryWarning:
    have = ", ".join(map(str, sorted(known)))
    message = f"nothing of this model is kept by {granule} tokens" + (f", only by {have}" if have else "")
    return QueryWarning(Cause.UNKNOWN_GRANULE, message)


# ---------------------------------------------------------------------- how far hits can be trusted


def not_complete(query: PrefixQuery, scope: Scope, hits: set[tuple[str, int]]) -> Iterator[QueryWarning]:
    """Of publishers without a hit: they may hold more than is known. Those with one have their coverage in it.

    Cost: per hit, and per publisher that is below `complete` and not among `workers`.
    """
    others = (key for key in _asked(query, scope.not_complete) if key not in hits)
    if named := [_name(key) for key in islice(others, NAMED_MAX)]:
        yield not_complete_warning(named, is_more=next(others, None) is not None)


def not_complete_warning(named: Sequence[str], *, is_more: bool) -> QueryWarning:
    more = " and more" if is_more else ""
    message = f"no hit, but perhaps not all is known: {', '.join(named)}{more}"
    return QueryWarning(Cause.COVERAGE_BELOW_COMPLETE, message)


def assumed(scope: Scope, hits: Sequence[PublisherHit]) -> Iterator[QueryWarning]:
    """What these hits rest on that nobody said, the first of the publishers by name. Cost: per publisher with any."""
    named: dict[Assumption, list[PublisherKey]] = {}
    found = {(hit.worker_id, hit.dp_rank) for hit in hits}
    for key, assumptions in scope.assumptions.items():
        for assumption in assumptions if key in found else ():
            named.setdefault(assumption, []).append(key)
    for assumption, keys in named.items():
        yield QueryWarning(assumption, f"{_names(keys)}: {MESSAGES[assumption]}")


# ---------------------------------------------------------------------- answers without hits


def has_more_to_say(query: PrefixQuery, prompt_tokens: int, scope: Scope) -> bool:
    """Whether `of_no_hits` may say anything of a prompt that is given by tokens. Every miss asks this: cheap."""
    if scope.has_trouble or prompt_tokens < scope.least_block_tokens:
        return True
    return bool(query.lora_name or query.cache_salt or query.multimodal)


def of_no_hits(query: PrefixQuery, prompt_tokens: int, scope: Scope, has_hits: HasHits) -> Iterator[QueryWarning]:
    """`has_hits`: asks another query. Cost: a comparison each, but for adapters, salts and items that are not known:
    up to four look-ups of PROBED_TOKENS."""
    if scope.has_trouble:
        yield from troubles(query, scope)
    if prompt_tokens < (least := scope.least_block_tokens):
        message = f"a prompt of {prompt_tokens} tokens is shorter than the smallest block of this model: {least} tokens"
        yield QueryWarning(Cause.PROMPT_TOO_SHORT, message)
    if query.is_hashed:
        looking_ahead = [p.registration.key for p in scope.asked_always if p.residents.lookahead_tokens]
        if keys := list(_asked(query, looking_ahead)):
            message = f"their hashes cover tokens after a block, so that only token_ids find it: {_names(keys)}"
            yield QueryWarning(Cause.TOKENS_NEEDED, message)
    elif query.lora_name or query.cache_salt or query.multimodal:
        yield from _set_apart(query, scope, has_hits)


def troubles(query: PrefixQuery, scope: Scope) -> Iterator[QueryWarning]:
    """What every answer without hits says, whatever the prompt."""
    if scope.is_disconnected:
        message = "no publisher of this model is connected: its engines cannot be heard"
        yield QueryWarning(Cause.NO_PUBLISHER_CONNECTED, message)
    if keys := list(_asked(query, scope.silent)):
        message = f"registered, but no event has ever come: {_names(keys)}"
        yield QueryWarning(Cause.PUBLISHER_NEVER_SPOKE, message)
    if keys := list(_asked(query, scope.refused)):
        message = f"none of their last events could be read, or was for them: {_names(keys)}"
        yield QueryWarning(Cause.EVENTS_REFUSED, message)


def _set_apart(query: PrefixQuery, scope: Scope, has_hits: HasHits) -> Iterator[QueryWarning]:
    """What the prompt would have hits without, of what no event has named. Several that only help together are all
    named."""
    warnings: dict[str, QueryWarning] = {}
    if query.lora_name and scope.names.lacks_adapter(query.lora_name):
        message = f"there would be hits without lora_name: no event has named the adapter {query.lora_name!r}"
        warnings["lora_name"] = QueryWarning(Cause.ADAPTER_NEVER_SEEN, message)
    if query.cache_salt and scope.names.lacks_salt(query.cache_salt):
        message = "there would be hits without cache_salt: no event has named this salt"
        warnings["cache_salt"] = QueryWarning(Cause.SALT_NEVER_SEEN, message)
    if query.multimodal:
        message = "there would be hits without multimodal: engines do not publish these identifiers at these offsets"
        warnings["multimodal"] = QueryWarning(Cause.ITEMS_NEVER_MATCH, message)
    beginning = query.beginning(PROBED_TOKENS)
    alone = [field for field in warnings if has_hits(_without(beginning, [field]))]
    if alone or (len(warnings) > 1 and has_hits(_without(beginning, warnings))):
        yield from (warnings[field] for field in alone or warnings)


def _without(query: PrefixQuery, fields: Iterable[str]) -> PrefixQuery:
    plain: dict[str, Any] = {"lora_name": None, "cache_salt": None, "multimodal": ()}
    return msgspec.structs.replace(query, **{field: plain[field] for field in fields})


def _asked(query: PrefixQuery, keys: Iterable[PublisherKey]) -> Iterator[PublisherKey]:
    workers = query.workers
    return (key for key in keys if workers is None or key.worker_id in workers)


def _names(keys: Sequence[PublisherKey]) -> str:
    more = " and more" if len(keys) > NAMED_MAX else ""
    return ", ".join(map(_name, keys[:NAMED_MAX])) + more


def _name(key: PublisherKey) -> str:
    return f"{key.worker_id} rank {key.dp_rank}"
