"""How memory is got from the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOUCH_MANY_PAGES = """
import numpy as np
from indexer.allocator import tune_allocator
tune_allocator()
column = np.zeros(8 << 20, np.uint64)
column[:] = 1
with open("/proc/self/smaps_rollup") as usage:
    print(sum(int(line.split()[1]) for line in usage if line.startswith("AnonHugePages")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked of Linux")
def test_large_arrays_have_no_huge_pages() -> None:
    found = subprocess.run([sys.executable, "-c", TOUCH_MANY_PAGES], capture_output=True, text=True, check=True)
    assert found.stdout == "0\n"
