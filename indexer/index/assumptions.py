"""What is assumed of an engine because neither its events nor its registration say it, as far as that costs answers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from indexer.index.groups import CHUNKED_LOCAL
from indexer.wire.dialects.recognition import VLLM

if TYPE_CHECKING:
    from indexer.index.publisher import PublisherIndex

MAY_DROP = frozenset({VLLM, None})
SUSPICIOUS_STORES = 8
SUSPICIOUS_SHARE = 50  # one in so many batches


class Assumption(StrEnum):
    """A closed set; docs/operations.md says what to do about each."""

    EAGLE_OFF = "eagle_off"
    EAGLE_SUSPECTED = "eagle_suspected"
    CHUNK_SIZE_UNKNOWN = "chunk_size_unknown"
    NO_REMOVALS = "no_removals"


MESSAGES = {
    Assumption.EAGLE_OFF: "taken for an engine without EAGLE, or one whose hashes look ahead; if it drops the last"
    " block of hits, register it with options.eagle",
    Assumption.EAGLE_SUSPECTED: "it stores the last block of many hits again, as engines with EAGLE do, but was"
    " registered without options.eagle: hits may be one block too high",
    Assumption.CHUNK_SIZE_UNKNOWN: "it has chunked local attention and was registered without"
    " options.attention_chunk_size: hits are too low",
    Assumption.NO_REMOVALS: "it never says what it removes: its blocks count up to the bound in options.no_removals",
}
SHOWN_IN_ANSWERS = frozenset(Assumption) - {Assumption.EAGLE_OFF}


def assumptions_of(publisher: PublisherIndex) -> Iterator[Assumption]:
    options, groups = publisher.options, publisher.groups
    is_told = options.eagle is not None or bool(options.eagle_groups)
    if publisher.dialect in MAY_DROP and not is_told and not publisher.residents.lookahead_tokens:
        yield Assumption.EAGLE_SUSPECTED if _is_suspicious(publisher) else Assumption.EAGLE_OFF
    chunked = {index for index, group in groups.by_index.items() if group.kind == CHUNKED_LOCAL}
    if chunked - options.attention_chunk_size.keys():
        yield Assumption.CHUNK_SIZE_UNKNOWN
    if options.no_removals is not None:
        yield Assumption.NO_REMOVALS


def _is_suspicious(publisher: PublisherIndex) -> bool:
    """Other engines do this only where two prompts part one block after what was cached, while both are computed."""
    stores = publisher.counters["stores_from_last_hit"]
    return stores >= SUSPICIOUS_STORES and stores * SUSPICIOUS_SHARE >= publisher.batches_applied
