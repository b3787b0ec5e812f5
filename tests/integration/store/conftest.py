"""What the tests of the store share: an open store, registrations, rows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A directory that the account of an embedded server can reach."""
    directory = Path(tempfile.mkdtemp(prefix="kv-index-test-"))
    yield directory
    shutil.rmtree(directory)
