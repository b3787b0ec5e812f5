"""Plays a recorded engine stream straight into the index and compares its answers with the engine's own.

Of the engine's side only the frames are read, and at each probe the length that the engine answered. Workers between
their restart and their first frame after it are not compared: nobody can know yet.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import MultimodalItem, PrefixQuery, PublisherHit
from indexer.index.publisher import PublisherIndex
from indexer.registration import PublisherKey, Registration
from indexer.wire.columns import PayloadReader, read_batch
from tests.explaining import check_explanations

CAPTURES = Path(__file__).parent / "captures"
MORE_CAPTURES = Path(__file__).parent / "captures-more"
MODEL = "captured"
READER = PayloadReader()
EXPLAINED_EACH = 20  # answers
Record = dict[str, Any]

# What no content-keyed consumer can know from the stream alone: (name's start, answers too low, answers too high).
LIMITS: tuple[tuple[str, int, int], ...] = (
    ("vllm-0.23.0-hybrid-swa-s1", 325, 0),  # byte hashes of 0.21 to 0.23: the anchored placement does not apply
    ("vllm-0.33.0-hybrid-mamba-align-s1", 70, 0),  # tokens of partial Mamba entries are never sent
    ("vllm-0.33.0-dense-report-full-s0", 0, 1),  # re-announced blocks are not marked: one double count
    ("vllm-0.33.0-chunked-local-s0", 60, 0),  # parents of later chunks are never announced
)
# Told how the engine hashes, all of that is known, but for what chunked local attention grants before its first event.
LIMITS_WITH_ENGINE_HASH: tuple[tuple[str, int, int], ...] = (
    ("vllm-0.33.0-dense-report-full-s0", 0, 1),
    ("vllm-0.33.0-chunked-local-s0", 9, 0),
)


@dataclass
class Verdict:
    """Answers beside the engine's own; `first_wrong` says where they differ, for a failure's message."""

    exact: int = 0
    too_low: int = 0
    too_high: int = 0
    tiers: Counter[str] = field(default_factory=Counter)  # the same of the reach per tier, if the capture has it
    first_wrong: list[str] = field(default_factory=list)

    def count(self, got: int, expected: int, what: str) -> None:
        if got == expected:
            self.exact += 1
            return
        if got < expected:
            self.too_low += 1
        else:
            self.too_high += 1
        if len(self.first_wrong) < 5:
            self.first_wrong.append(f"{what}: answered {got}, the engine {expected}")


@dataclass
class Player:
    """One capture, played into an index. `rebuild(worker)` replaces a publisher in the middle of it.

    `has_engine_hash`: the engines' hash algorithm, which the header has, is told at registration.
    """

    path: Path
    has_engine_hash: bool = False
    index: ContentIndex = field(default_factory=ContentIndex)
    publishers: dict[str, PublisherIndex] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    last_sequence_number: dict[str, int] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)

    def records(self) -> Iterator[Record]:
        """Registers the workers of the header, then yields the records; `play_one` plays each."""
        with gzip.open(self.path, "rt") as lines:
            header = json.loads(next(lines))
            for i, worker in enumerate(header["workers"]):
                options = dict(header.get("options") or {})
                if self.has_engine_hash:
                    options["engine_hash"] = {"algorithm": header["hash_algo"]}
                self.register(worker["name"], header["engine"], options, publisher_id=i + 1)
            yield from (json.loads(line) for line in lines)

    def register(self, worker: str, engine: str, options: dict[str, object], publisher_id: int) -> None:
        registration = Registration(
            worker, 0, MODEL, "tcp://127.0.0.1:5557", engine=engine, options=options, publisher_id=publisher_id
        )
        self.publishers[worker] = self.index.add_publisher(registration)

    def rebuild(self, worker: str, recover: Callable[[PublisherIndex], None]) -> None:
        """Forget this publisher and let `recover` load it anew."""
        self.rebuild_all({worker: recover})

    def rebuild_all(self, recoveries: dict[str, Callable[[PublisherIndex], None]]) -> None:
        """Forget these publishers, then load them one after the other, as a service that starts again."""
        for worker in recoveries:
            self.index.remove_publisher(PublisherKey(worker, 0))
        for worker, recover in recoveries.items():
            self.publishers[worker] = self.index.add_publisher(self.publishers[worker].registration)
            recover(self.publishers[worker])

    def play(self) -> Verdict:
        for record in self.records():
            self.play_one(record)
        return self.verdict

    def play_one(self, record: Record) -> None:
        worker = record.get("worker", "")
        if record["type"] == "frame":
            self._apply(worker, record["seq"], base64.b64decode(record["payload_b64"]))
        elif record["type"] == "note" and record["op"] == "restart":
            self.restarted.add(worker)
        elif record["type"] == "probe":
            self._compare(record)

    def _apply(self, worker: str, sequence_number: int, payload: bytes) -> None:
        publisher = self.publishers[worker]
        if sequence_number <= self.last_sequence_number.get(worker, -1):
            publisher.restart()
        self.last_sequence_number[worker] = sequence_number
        self.restarted.discard(worker)
        publisher.apply(read_batch(payload, READER), sequence_number, 0)

    def answers(self, probe: Record) -> dict[str, int]:
        """Hit tokens per worker."""
        hits = Counter({worker: hit.hit_tokens for worker, hit in self.hits(probe).items()})
        return {worker: hits[worker] for worker in self.publishers}

    def hits(self, probe: Record) -> dict[str, PublisherHit]:
        return {hit.worker_id: hit for hit in self.index.prefix_hits(query_of(probe)).hits}

    def _compare(self, probe: Record) -> None:
        hits = self.hits(probe)
        if not self.verdict.exact % EXPLAINED_EACH:
            check_explanations(self.index, query_of(probe))
        for worker, expected in self.expected(probe):
            what = f"{worker}, {len(probe['tokens'])} tokens, lora {probe.get('lora_name')}"
            self.verdict.count(hits[worker].hit_tokens if worker in hits else 0, expected, what)
        for worker, truth in (probe.get("expected_tiers") or {}).items():
            if worker not in self.restarted:
                self._compare_tiers(hits[worker].tiers if worker in hits else {}, truth)

    def expected(self, probe: Record) -> Iterator[tuple[str, int]]:
        """What each engine would skip. Not of those that restarted, and whose request would wait for a store."""
        tiers = probe.get("expected_tiers") or {}
        for worker, local in probe["expected_hit_tokens"].items():
            length = tiers[worker]["engine"] if worker in tiers else local
            if worker not in self.restarted and length is not None:
                yield worker, min(length, len(probe["tokens"]) - 1)

    def _compare_tiers(self, tiers: dict[str, int], truth: dict[str, int | None]) -> None:
        for tier in ("GPU", "CPU"):
            expected = truth[tier]
            if expected is not None:
                reach = tiers.get(tier, 0)
                self.verdict.tiers["exact" if reach == expected else "high" if reach > expected else "low"] += 1

    def bad_events(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for publisher in self.publishers.values():
            counts.update(publisher.bad_events)
        return counts


def query_of(probe: Record) -> PrefixQuery:
    items = tuple(MultimodalItem(m["id"], m["offset"], m["length"]) for m in probe.get("mm") or [])
    names = probe.get("lora_name"), probe.get("cache_salt")
    return PrefixQuery(MODEL, probe["tokens"], lora_name=names[0], cache_salt=names[1], multimodal=items)


def limits(path: Path, *, has_engine_hash: bool = False) -> tuple[int, int]:
    """(answers that may be too low, answers that may be too high)."""
    table = LIMITS_WITH_ENGINE_HASH if has_engine_hash else LIMITS
    return next(((low, high) for name, low, high in table if path.name.startswith(name)), (0, 0))


def captures() -> list[Path]:
    return sorted(CAPTURES.glob("*.jsonl.gz"))


def more_captures() -> list[Path]:
    """Of engines of which events do not say all."""
    return sorted(MORE_CAPTURES.glob("*.jsonl.gz"))
