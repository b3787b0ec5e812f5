"""Recorded streams over bad networks, with replay: messages are lost, repeated and held back, and no answer differs.

Compared is every publisher of which the newest message came through: before a later one shows it, no consumer can know
that something was lost. At the end every connection is cut once, which brings even that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.player import CAPTURES, limits
from tests.e2e.recorded_engines import RecordedFleet, audit
from tests.e2e.service_process import ServiceProcess
from tests.lossy_proxy import Faults

STREAMS = (
    "vllm-0.33.0-dense-gpu16-s0",  # evictions, four restarts
    "vllm-0.33.0-many-workers-s0",
    "vllm-0.33.0-hybrid-swa-s0",  # groups, sparse placement
    "sglang-0.5.23-page16-s0",
)
FEWER = STREAMS[::2]
NETWORKS = {
    "1 in 100 lost": (STREAMS, Faults(seed=1, lost=0.01)),
    "5 in 100 lost": (STREAMS, Faults(seed=2, lost=0.05)),
    "a third repeated": (FEWER, Faults(seed=3, repeated=0.33)),
    "a subscriber that stalls": (FEWER, Faults(seed=4, stall_every=12, stall_for=10, kept_max=4)),
    "all of it": (FEWER, Faults(seed=5, lost=0.05, repeated=0.1, stall_every=15, stall_for=6, kept_max=3)),
}


@pytest.fixture(scope="module")
def service(shared_data_dir: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(shared_data_dir) as service:
        yield service.wait_until_ready()


@pytest.mark.parametrize("network", NETWORKS)
def test_with_replay_every_answer_is_exact(service: ServiceProcess, network: str) -> None:
    streams, faults = NETWORKS[network]
    links: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name in streams:
        path, model = CAPTURES / f"{name}.jsonl.gz", f"{name}-{network.replace(' ', '-')}"
        with RecordedFleet(path, model, with_replay=True, ask_every=4, faults=faults) as fleet:
            fleet.register(service)
            fleet.play(service)
            fleet.cut_links(service)
            fleet.check_stats(service)
            counts += fleet.stream_counts(service)
            for link in fleet.links.values():
                links.update(lost=link.lost, repeated=link.repeated, kept=link.kept)
            fleet.unregister(service)
        verdict, (too_low, too_high) = fleet.verdict, limits(path)
        assert verdict.exact > 20
        assert (verdict.too_low <= too_low, verdict.too_high <= too_high) == (True, True), verdict.first_wrong
    assert audit(service)["publishers"] == 0
    assert (counts["gaps_lost"], counts["batches_lost"]) == (0, 0), "replay brings everything"
    is_lossy = bool(faults.lost or faults.stall_every)
    assert (links["lost"] > 0, counts["gaps_repaired"] > 0) == (is_lossy, is_lossy)
    assert (links["repeated"] > 0, links["kept"] > 0) == (faults.repeated > 0, faults.stall_every > 0)
    assert counts["duplicates"] >= links["repeated"]
