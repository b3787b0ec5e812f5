"""The library is usable alone: nothing of the service comes with it."""

from __future__ import annotations

import subprocess
import sys

ALLOWED = {"msgspec", "httptools", "xxhash", "typing_extensions", "cython_runtime"}  # the last two come with these
PROGRAM = f"""
import sys
before = set(sys.modules)
import indexer.client
loaded = set(sys.modules) - before
foreign = {{name.partition(".")[0] for name in loaded}} - sys.stdlib_module_names - {ALLOWED | {"indexer"}!r}
ours = {{name for name in loaded if name.startswith("indexer.")}}
print(sorted(name for name in foreign if not name.startswith("_cython")))
print(sorted(ours - {{name for name in ours if name.startswith("indexer.client")}}))
"""


def test_importing_it_imports_no_service() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    foreign, ours = output.splitlines()
    assert foreign == "[]"
    assert ours == str(
        [
            "indexer.identity",
            "indexer.identity.chain",
            "indexer.identity.extra_keys",
            "indexer.wire",
            "indexer.wire.errors",
        ]
    )
