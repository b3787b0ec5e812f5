"""The last thing that happened to blocks of a prompt, by a journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from indexer.index.journal import Batch, Entry, Journal, Kind, Note, size_of
from indexer.index.journal_reading import SLICE_BYTES, Happening, JournalReader
from indexer.index.publisher import PublisherIndex
from indexer.index.tiers import GPU

READ_BYTES_MAX = 1024 * 1024  # of a journal for one explanation; what is older is not looked at
LOSSES = frozenset({Kind.GAP, Kind.UNREADABLE})
HELD_BEFORE = frozenset({Kind.STORED, *LOSSES})
"""After these a block may be held."""


class LastEvents:
    """Of one publisher. `wanted`: content keys by group."""

    def __init__(self, publisher: PublisherIndex, wanted: Mapping[int, set[int | None]]) -> None:
        self._publisher = publisher
        self._wanted = wanted
        self._last: dict[int, dict[int | None, Happening]] = {group: {} for group in wanted}
        self._loss: Happening | None = None  # the newest
        journal = publisher.journal
        self._entries = journal.newest(READ_BYTES_MAX)
        self.is_whole = _is_whole(journal, self._entries)

    def read(self) -> Iterator[None]:
        """All of the journal, with a pause now and then."""
        reader = JournalReader(self._publisher)
        size = 0
        for entry in self._entries if self._wanted else ():
            for happening in reader.read(entry):
                self._note(happening)
            size += size_of(entry)
            if size > SLICE_BYTES:
                size = 0
                yield

    def of(self, group: int) -> Mapping[int | None, Happening]:
        """The last of each of its keys that the journal names."""
        return self._last.get(group, {})

    @property
    def loss(self) -> Happening | None:
        """The last one that made all that was held unverified."""
        return self._loss

    @property
    def begins(self) -> tuple[int | None, float | None]:
        """Sequence number and time of the first entry that was looked at, if there is one."""
        first = next(iter(self._entries), None)
        return (None, None) if first is None else (first.sequence_number, first.at)

    def _note(self, happening: Happening) -> None:
        if happening.kind in LOSSES:
            self._loss = happening
            self.is_whole = False
        if not happening.hashes:
            if happening.kind is not Kind.STORED:  # a store without blocks is about none
                self._note_blanket(happening)
            return
        group = happening.group or 0
        wanted, last = self._wanted.get(group), self._last.get(group)
        if wanted and last is not None:
            last.update(dict.fromkeys(wanted.intersection(happening.keys), happening))

    def _note_blanket(self, happening: Happening) -> None:
        """It was about whatever was held."""
        for last in self._last.values():
            for key, before in last.items():
                if self._may_be_about(happening, before):
                    last[key] = happening

    def _may_be_about(self, happening: Happening, before: Happening) -> bool:
        if before.kind not in HELD_BEFORE or happening.kind is Kind.RECOVERED:
            return False
        if happening.kind is Kind.UNVERIFIED_DROPPED:
            return before.kind in LOSSES
        if happening.kind is not Kind.CLEARED or before.medium is None:
            return True
        if happening.medium is not None:
            return before.medium == happening.medium
        publisher = self._publisher
        is_own = publisher.media.tier_of(before.medium) == GPU and not before.owner
        return is_own or not publisher.connector.survives_clears


def _is_whole(journal: Journal, entries: list[Entry]) -> bool:
    """Whether it says all that ever happened: the batches from the first one on, and nothing was before."""
    if not journal.bytes_max or journal.dropped or len(entries) < len(journal):
        return False
    numbers = (entry.sequence_number for entry in entries if isinstance(entry, Batch))
    is_recovered = any(isinstance(entry, Note) and entry.kind is Kind.RECOVERED for entry in entries)
    return not is_recovered and next(numbers, 0) == 0
