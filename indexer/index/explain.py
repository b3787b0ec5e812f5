"""Why a publisher's hit of a prompt is what it is: what is held of it, where it ends and by which rule, and what last
happened to the blocks that are missing.

The hit and its rules come from the very objects that answer queries (judgement.py, reuse.py): an explanation cannot
say another number. Whatever is said block by block is said in ranges of blocks of which the same holds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import msgspec

from indexer.index.intervals import reach, without
from indexer.index.journal_reading import Happening
from indexer.index.judgement import Judgement
from indexer.index.last_events import LastEvents
from indexer.index.prefix_hits import NOT_JUDGED, judge_one
from indexer.index.prefix_query import Detail, PrefixQuery, Span
from indexer.index.publisher import PublisherIndex
from indexer.index.reuse import Spec, Step
from indexer.index.scope import Scope
from indexer.index.tiers import tier_rank

RANGES_MAX = 1_000  # of each group
HELD, REMOTE, UNVERIFIED, MISSING = "held", "remote", "unverified", "missing"
State: TypeAlias = tuple[str, list[str]]
"""One of these, and the tiers."""
NEVER_SEEN, NOT_IN_JOURNAL = "never_seen", "not_in_journal"


class LastEvent(msgspec.Struct, frozen=True, gc=False):
    """What last happened to a block that does not count, on any medium. `kind`: see `journal.Kind`; or `never_seen`:
    the journal has all that ever happened, and nothing in it names the block; or `not_in_journal`: nothing of what it
    has does, which is not all."""

    kind: str
    sequence_number: int | None = None
    at: float | None = None
    medium: str | None = None


class Range(msgspec.Struct, gc=False):
    """Blocks in a row, from token `start` to before `end`. `state`: held; remote: on another machine, from where the
    engine cannot load; unverified: from before a gap; missing. `tiers`: where, fastest first."""

    start: int
    end: int
    state: str
    tiers: list[str]
    last_event: LastEvent | None = None


class GroupBlocks(msgspec.Struct, gc=False):
    """What is held of the prompt in one KV-cache group. Of many ranges the first ones are said."""

    group: int
    kind: str
    block_tokens: int
    window: int | None
    chunk_tokens: int | None
    drops: bool
    ranges: list[Range]
    ranges_left_out: int = 0


class RuleStep(msgspec.Struct, gc=False):
    """By this rule a candidate of `before` tokens became one of `after`; `groups`: which follow it, none = all."""

    rule: str
    groups: list[int]
    before: int
    after: int


class Miss(msgspec.Struct, gc=False):
    """The first block that does not count."""

    start: int
    group: int
    state: str
    content_key: str
    last_event: LastEvent | None


class JournalReach(msgspec.Struct, gc=False):
    """From where on a journal tells. `is_whole`: since the engine's start, without a hole."""

    is_whole: bool
    begins_at_number: int | None
    begins_at: float | None


class PublisherExplanation(msgspec.Struct, gc=False):
    """`absent`: why it is in no answer to this prompt, whatever it holds; None = it is, if it has a hit."""

    worker_id: str
    dp_rank: int
    model: str
    tenant: str
    absent: str | None
    hit_tokens: int
    resident_tokens: int
    tiers: dict[str, int]
    limited_by: RuleStep | None
    steps: list[RuleStep]
    first_miss: Miss | None
    granule: int | None
    alignment: int | None
    groups: list[GroupBlocks]
    spans: list[Span]
    pools: list[str]
    coverage: str
    coverage_reason: str
    coverage_at: float | None
    sequence_number: int | None
    orphans: int
    unplaced: int
    unverified: int
    assumptions: list[str]
    journal: JournalReach


class Parting(msgspec.Struct, gc=False):
    """From token `start` on one of two publishers holds what the other has not."""

    start: int
    worker_id: str
    dp_rank: int


class Explanation(msgspec.Struct, gc=False):
    prompt_tokens: int
    publishers: list[PublisherExplanation]
    parting: Parting | None


Explaining: TypeAlias = Generator[None, None, Explanation]


def explain(query: PrefixQuery, scope: Scope | None, publishers: Sequence[PublisherIndex]) -> Explaining:
    """The explanation, as what the generator returns. Each of its steps takes some milliseconds; what is held, and the
    hit, are of the first step, whatever is applied meanwhile.

    `scope`: that of the prompt; a publisher may be of another one. Cost: that of the query, some 0.5 us a block that is
    missing, and 5 to 50 ms for a journal of a megabyte.
    """
    explained = [_Explained(query, scope, publisher) for publisher in publishers]
    for one in explained:
        yield from one.find_last_events()
    parting = _parting(*explained) if len(explained) > 1 else None
    return Explanation(explained[0].prompt_tokens, [one.explanation() for one in explained], parting)


def _parting(one: _Explained, other: _Explained) -> Parting | None:
    differences = ((one, without(one.held, other.held)), (other, without(other.held, one.held)))
    starts = [(apart[0][0], *who.publisher.registration.key) for who, apart in differences if apart]
    return Parting(*min(starts)) if starts else None


class _Explained:
    """One publisher. All that is said of the index is found out when this is made."""

    def __init__(self, query: PrefixQuery, scope: Scope | None, publisher: PublisherIndex) -> None:
        self.publisher = publisher
        judged = NOT_JUDGED
        if scope is not None and publisher in scope.publishers:
            judged = judge_one(msgspec.structs.replace(query, detail=Detail.INTERVALS, workers=None), scope, publisher)
        self.prompt_tokens = query.token_count
        self._keys = judged.keys
        self._judgement = judged.judgement
        self._hit, self.held = None, list[tuple[int, int]]()
        self._steps: list[Step] = []
        self._held_by_group: list[tuple[Spec, int, list[Range]]] = []
        self._groups: list[GroupBlocks] = []
        self._absent = _why_absent(query, scope, publisher, is_known=self._judgement is not None)
        if self._judgement is not None:
            self._hit = self._judgement.hit() if judged.is_asked else None
            self.held = self._judgement.held
            self._steps = self._judgement.explained().steps
            specs = self._judgement.rules.specs
            self._held_by_group = [(s, group, _ranges(self._judgement, s, group)) for s in specs for group in s.groups]
        self._last_events = LastEvents(publisher, self._wanted())
        self._status = publisher.status()
        self._trust, self._sequence_number = publisher.trust, publisher.checkpoint.sequence_number

    def find_last_events(self) -> Iterator[None]:
        """Read the journal, with a pause now and then."""
        yield
        yield from self._last_events.read()
        for spec, group, ranges in self._held_by_group:
            what = group, spec.kind, spec.block_tokens, spec.window, spec.chunk_tokens, spec.drops
            self._groups.append(GroupBlocks(*what, list(self._told(spec, group, ranges))))
            yield

    def explanation(self) -> PublisherExplanation:
        """After that."""
        publisher, hit = self.publisher, self._hit
        registration, status = publisher.registration, self._status
        steps = [RuleStep(step.rule, list(step.groups), step.before, step.after) for step in self._steps]
        cuts = [step for step in steps if step.after < step.before]
        first_miss = self._first_miss()
        for group in self._groups:
            group.ranges_left_out = max(0, len(group.ranges) - RANGES_MAX)
            del group.ranges[RANGES_MAX:]
        pools = hit.pools if hit is not None and hit.pools else []
        spans = hit.spans if hit is not None and hit.spans else []
        return PublisherExplanation(
            worker_id=registration.worker_id,
            dp_rank=registration.dp_rank,
            model=registration.model,
            tenant=registration.tenant,
            absent=self._absent,
            hit_tokens=0 if hit is None else hit.hit_tokens,
            resident_tokens=0 if hit is None else hit.resident_tokens,
            tiers={} if hit is None else hit.tiers,
            limited_by=max(cuts, key=lambda step: step.before - step.after, default=None),
            steps=steps,
            first_miss=first_miss,
            granule=publisher.granule,
            alignment=None if self._judgement is None else self._judgement.rules.alignment,
            groups=self._groups,
            spans=list(spans),
            pools=list(pools),
            coverage=self._trust.coverage,
            coverage_reason=self._trust.reason,
            coverage_at=self._trust.at,
            sequence_number=self._sequence_number,
            orphans=status.orphans,
            unplaced=status.unplaced,
            unverified=status.unverified,
            assumptions=list(status.assumptions),
            journal=JournalReach(self._last_events.is_whole, *self._last_events.begins),
        )

    def _first_miss(self) -> Miss | None:
        """Where the prefix ends that full attention needs; without such a group, that of any."""
        if self._judgement is None:
            return None
        end = reach(self.held)
        needed = {group for spec in self._judgement.full_specs for group in spec.groups}
        for group in self._groups:
            for part in group.ranges if group.group in needed else ():
                if part.state != HELD and part.start <= end < part.end:
                    start = end // group.block_tokens * group.block_tokens
                    key = int(self._keys[(start + group.block_tokens) // self._judgement.granule - 1])
                    return Miss(start, group.group, part.state, f"{key:016x}", part.last_event)
        return None

    # ------------------------------------------------------------------ what is missing

    def _keys_of(self, spec: Spec, part: Range) -> list[int | None]:
        """Of the blocks in a range."""
        assert self._judgement is not None
        granule = self._judgement.granule
        step = spec.block_tokens // granule
        keys: list[int | None] = self._keys[part.start // granule + step - 1 : part.end // granule : step].tolist()
        return keys

    def _wanted(self) -> dict[int, set[int | None]]:
        """Content keys of the blocks that do not count, by group."""
        wanted: dict[int, set[int | None]] = {}
        for spec, group, ranges in self._held_by_group:
            for part in ranges:
                if part.state != HELD:
                    wanted.setdefault(group, set()).update(self._keys_of(spec, part))
        return wanted

    def _told(self, spec: Spec, group: int, ranges: Sequence[Range]) -> Iterator[Range]:
        """The ranges, with what last happened to the blocks that do not count."""
        last = self._last_events.of(group)
        for part in ranges:
            if part.state == HELD:
                yield part
                continue
            otherwise = _otherwise(part.state, self._last_events)
            start = part.start
            keys = self._keys_of(spec, part) if last else [None] * ((part.end - part.start) // spec.block_tokens)
            for happening, blocks in groupby(last.get(key) for key in keys):
                end = start + sum(1 for _ in blocks) * spec.block_tokens
                event = otherwise if happening is None else _to_last_event(happening)
                yield Range(start, end, part.state, part.tiers, event)
                start = end


def _why_absent(query: PrefixQuery, scope: Scope | None, publisher: PublisherIndex, *, is_known: bool) -> str | None:
    """A closed set; docs/api.md says what each means."""
    registration = publisher.registration
    if registration.tenant != query.tenant:
        return "other_tenant"
    if scope is None or publisher not in scope.publishers:
        return "other_model"
    if publisher.is_pool:
        return "pool"
    if not publisher.is_credited:
        return "not_credited"
    return None if is_known else "nothing_announced"


def _otherwise(state: str, last_events: LastEvents) -> LastEvent:
    """Of blocks that the journal does not name."""
    if state == UNVERIFIED and last_events.loss is not None:
        return _to_last_event(last_events.loss)
    return LastEvent(NEVER_SEEN if last_events.is_whole and state == MISSING else NOT_IN_JOURNAL)


def _to_last_event(happening: Happening) -> LastEvent:
    return LastEvent(happening.kind, happening.sequence_number, happening.at, happening.medium)


def _ranges(judgement: Judgement, spec: Spec, group: int) -> list[Range]:
    """What is held of the whole blocks of a prompt in one group, in ranges that are as long as can be."""
    block = spec.block_tokens
    slots = _Slots(judgement.publisher, group)
    runs: Iterable[tuple[State, int]] = (
        (slots.state(mask), blocks) for mask, blocks in judgement.sets.all_runs(block // judgement.granule)
    )
    if judgement.matched:
        runs = _with_matched(runs, judgement, block, group)
    ranges: list[Range] = []
    end = 0
    for (state, tiers), blocks in runs:
        start, end = end, end + blocks * block
        if ranges and (ranges[-1].state, ranges[-1].tiers) == (state, tiers):
            ranges[-1].end = end
        else:
            ranges.append(Range(start, end, state, tiers))
    return ranges


def _with_matched(
    runs: Iterable[tuple[State, int]], judgement: Judgement, block: int, group: int
) -> Iterator[tuple[State, int]]:
    """Block by block, with those that no event says to be there: their hashes do."""
    end = 0
    for state, blocks in runs:
        for _ in range(blocks):
            end += block
            tiers = sorted({tier for g, tier in judgement.matched.get(end, ()) if g == group}, key=tier_rank)
            yield (state if state[0] == HELD or not tiers else (HELD, tiers)), 1


class _Slots:
    """The holders of one group, verified or not, by what their blocks count."""

    def __init__(self, publisher: PublisherIndex, group: int) -> None:
        holders = [holder for holder in publisher.residents.all_holders() if holder.key.group == group]
        self._holders = [(1 << holder.slot, holder) for holder in holders]
        self._states: dict[int, State] = {}

    def state(self, mask: int) -> State:
        """Of a block that these slots have."""
        found = self._states.get(mask)
        if found is None:
            found = self._states[mask] = self._state(mask)
        return found

    def _state(self, mask: int) -> State:
        held = [holder for bit, holder in self._holders if mask & bit]
        credited = [holder for holder in held if holder.is_credited]
        remote = [holder for holder in held if holder.is_verified]
        state = HELD if credited else REMOTE if remote else UNVERIFIED if held else MISSING
        return state, sorted({holder.tier for holder in credited or remote or held}, key=tier_rank)
