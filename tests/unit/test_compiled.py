"""What is kept of compiled kernels is only used as long as all that they were compiled of is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.compiled import IS_COMPILED

ROOT = Path(__file__).parents[2]
CALLED = "from indexer.compiled import kernel\n\n@kernel\ndef called(x):\n    return x + {}\n"
CALLING = """
import called
from called import called as f
from indexer.compiled import kernel_over

@kernel_over(called)
def calling(x):
    return f(x)

print(calling(1), sum(calling.stats.cache_hits.values()))
"""


@pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled")
def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    printed = []
    for number in (10, 10, 2000):
        (tmp_path / "called.py").write_text(CALLED.format(number))
        (tmp_path / "calling.py").write_text(CALLING)
        os.utime(tmp_path / "called.py", (number, number))
        os.utime(tmp_path / "calling.py", (1, 1))
        command = [sys.executable, "-B", str(tmp_path / "calling.py")]
        printed.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert printed == ["11 0\n", "11 1\n", "2001 0\n"]
