"""A server that follows publishers: registered, fed with their stream, and waited for until it has applied it."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from tests.benchmarks.publishers import Publishers, Sent
from tests.benchmarks.servers import Server, wait_for
from tests.benchmarks.streams import BLOCK_TOKENS, chain_tokens, marker_tokens

VISIBLE_PAUSE_S = 0.02
STORED_PAUSE_S = 0.5
VISIBLE_LIMIT_S = 600.0
STORED_LIMIT_S = 1_800.0
RESIDENT_AFTER_S = 1.0
WARM_UP_QUERIES = 20


@dataclass(frozen=True, slots=True)
class Ingested:
    """What it took to apply a part of a stream.

    `cpu_s` until queries see the last block; `stored_cpu_s` until the database has all of it as well, which a server
    without one has at the same moment. Processor time of the database is told apart.
    """

    blocks: int
    visible_s: float
    cpu_s: float
    stored_s: float
    stored_cpu_s: float
    database_cpu_s: float

    def __add__(self, other: Ingested) -> Ingested:
        return Ingested(
            self.blocks + other.blocks,
            self.visible_s + other.visible_s,
            self.cpu_s + other.cpu_s,
            self.stored_s + other.stored_s,
            self.stored_cpu_s + other.stored_cpu_s,
            self.database_cpu_s + other.database_cpu_s,
        )


class Feed:
    """One server and the publishers that it follows, under worker numbers from `first_worker` on."""

    def __init__(self, server: Server, publishers: Publishers, first_worker: int = 1) -> None:
        self.server = server
        self.publishers = publishers
        self.plan = publishers.plan
        self.audience = server.name
        self._workers = range(first_worker, first_worker + self.plan.workers)
        self._markers = itertools.count()

    def attach(self) -> Feed:
        """Register all workers and wait until the server has their first block and has answered a few queries."""
        endpoints = self.publishers.open(self.audience)
        for worker, endpoint in zip(self._workers, endpoints, strict=True):
            self.server.register(worker, endpoint)
        self.publishers.wait_until_subscribed(self.audience)
        marker = self.mark()
        self.wait_until_visible(marker)
        for _ in range(WARM_UP_QUERIES):
            self.server.held(marker_tokens(marker))
        return self

    def detach(self) -> None:
        """Unregister all workers, so that the server does not look for publishers that are about to go."""
        for worker in self._workers:
            self.server.unregister(worker)

    def ingest(self, until_blocks: int | None = None) -> Ingested:
        """Send the stream on as fast as the server takes it."""
        cpu, database = self.server.tree.cpu_s(), self.server.tree.database_cpu_s()
        sent = self.publishers.send(self.audience, until_blocks)
        self.wait_until_visible(self.mark())
        visible, visible_cpu = time.monotonic(), self.server.tree.cpu_s()
        self.wait_until_stored()
        return Ingested(
            sent.blocks,
            visible - sent.started,
            visible_cpu - cpu,
            time.monotonic() - sent.started,
            self.server.tree.cpu_s() - cpu if self.server.unstored_changes() is not None else visible_cpu - cpu,
            self.server.tree.database_cpu_s() - database,
        )

    def begin_paced(
        self, blocks_per_s: float, seconds: float, probe_interval_s: float = 0.0, first_probe: int = 0
    ) -> None:
        """Send on at this pace, for at most so long; `publishers.sent()` tells how it went."""
        self.publishers.begin_send(
            self.audience,
            blocks_per_s=blocks_per_s,
            seconds_max=seconds,
            probe_interval_s=probe_interval_s,
            first_probe=first_probe,
        )

    def finish_paced(self) -> Sent:
        """Wait until the sender is done and the server has everything."""
        sent = self.publishers.sent()
        self.wait_until_visible(self.mark())
        return sent

    def mark(self) -> int:
        marker = next(self._markers)
        self.publishers.mark(self.audience, marker)
        return marker

    def is_visible(self, marker: int) -> bool:
        return self.server.held(marker_tokens(marker)).keys() >= set(self._workers)

    def wait_until_visible(self, marker: int) -> None:
        what = f"{self.server.name} has applied what was sent"
        wait_for(lambda: self.is_visible(marker), what, VISIBLE_LIMIT_S, VISIBLE_PAUSE_S)

    def wait_until_stored(self) -> None:
        what = f"{self.server.name} has stored what was sent"
        wait_for(lambda: not self.server.unstored_changes(), what, STORED_LIMIT_S, STORED_PAUSE_S)

    def resident_bytes(self) -> int:
        """Of the server, a moment after it has stored everything."""
        self.wait_until_stored()
        time.sleep(RESIDENT_AFTER_S)
        return self.server.tree.resident_bytes()

    def check(self, blocks: int, depth: int = 512, samples: int = 8) -> None:
        """That the chains sent so far are found to their full depth, and by those that hold them. Raises if not."""
        chains = self.plan.chains_within(blocks, depth)
        for chain in chains[:: max(1, len(chains) // samples)]:
            owners = [
                w for w in self._workers if (w - self._workers[0]) % self.plan.contents == chain % self.plan.contents
            ]
            held = self.server.held(chain_tokens(self.plan.seed, chain, depth))
            wrong = [worker for worker in owners if held.get(worker) != depth * BLOCK_TOKENS]
            if wrong:
                raise AssertionError(f"{self.server.name}: chain {chain} is not found at workers {wrong[:4]}")
