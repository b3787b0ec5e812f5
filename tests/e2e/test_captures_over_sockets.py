"""Recorded streams over real sockets to the service as its users start it: answers are the engines' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.player import CAPTURES, limits
from tests.e2e.recorded_engines import RecordedFleet, audit
from tests.e2e.service_process import ServiceProcess

KINDS = (
    "vllm-0.33.0-dense-lora-salt-mm-s0",  # maps, adapters, salts, images
    "vllm-0.23.0-dense-gpu16-s1",  # arrays, raw digests as hashes
    "vllm-0.32.0+skipped-skipped-s0",  # skipped context
    "vllm-0.33.0-mla-swa-s0",  # windows, unequal blocks, a granule finer than 16
    "vllm-0.33.0-hybrid-mamba-align-s0",
    "sglang-0.5.23-page16-s0",
)


@pytest.fixture(scope="module")
def service(shared_data_dir: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(shared_data_dir) as service:
        yield service.wait_until_ready()


@pytest.mark.parametrize("with_replay", [True, False], ids=["with replay", "without replay"])
@pytest.mark.parametrize("name", KINDS)
def test_answers_over_sockets_are_the_engines_own(service: ServiceProcess, name: str, with_replay: bool) -> None:
    path = CAPTURES / f"{name}.jsonl.gz"
    with RecordedFleet(path, f"{name}-{with_replay}", with_replay=with_replay) as fleet:
        fleet.register(service)
        fleet.play(service)
        verdict = fleet.verdict
        too_low, too_high = limits(path)
        assert verdict.exact > 50
        assert (verdict.too_low <= too_low, verdict.too_high <= too_high) == (True, True), verdict.first_wrong
        assert audit(service)["residencies_in_memory"] > 0
        fleet.check_stats(service)
        fleet.unregister(service)
    assert audit(service)["publishers"] == 0
