"""With NUMBA_DISABLE_JIT=1 the kernels are plain Python with the same results: what goes through them most, that way.

`make test-uncompiled` runs all tests so; this is the part that every run can afford.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.compiled import IS_COMPILED

ROOT = Path(__file__).parents[2]
SELECTION = [
    "tests/unit/identity",
    "tests/unit/index",
    "tests/unit/wire",
    "tests/unit/test_rehearsal.py",
    "tests/property/test_anything_is_survived.py::test_plausible_events_with_random_fields",
    "tests/conformance/test_captures.py::test_answers_equal_the_engines_own",
]
LIMIT_S = 240  # a minute, where nobody else is at work


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.skipif(not IS_COMPILED, reason="the whole run is uncompiled")
def test_the_kernels_are_right_as_plain_python() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SELECTION],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5_000:] + run.stderr[-1_000:]
