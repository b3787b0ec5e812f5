"""The example does what it says: it saves more than chance with an index, and serves every prompt without one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.service_process import ServiceProcess, clean_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "router.py"


def run_router(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment() | {"PYTHONPATH": str(EXAMPLE.parents[1])},
    ).stdout


def test_a_router_with_the_index_computes_less_than_one_without(data_dir: Path) -> None:
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        output = run_router("--url", service.url, "--deadline-ms", "1000")
        found = re.search(r"not computed: (\d+) at random, (\d+) by the index", output)
        assert found, output
        assert int(found[2]) > int(found[1]), output
        assert "no signal" not in output
        assert service.call("GET", "/v1/publishers")[1] == {"publishers": []}


def test_without_an_index_it_routes_by_load() -> None:
    output = run_router("--url", "http://127.0.0.1:1")
    assert "no signal: unreachable: http://127.0.0.1:1" in output
    assert "no signal: cooling_down" in output
    assert "not computed" in output
