"""A directory for an embedded database.

Not pytest's `tmp_path`: every run of pytest makes its parent private again, while the database of another run, which
works under an account of its own, must pass through it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def data_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kv-index-data-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def shared_data_dir() -> Iterator[Path]:
    """One for all tests of a module."""
    directory = Path(tempfile.mkdtemp(prefix="kv-index-data-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
