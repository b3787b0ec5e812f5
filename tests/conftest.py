"""Fixtures that every test folder may use, and what runs beside what."""

import os
from pathlib import Path

import pytest

from indexer.compiled import IS_COMPILED, OVERFLOW_WARNING

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # before anybody imports it: see indexer/grpc_server.py

pytest_plugins = ["tests.directory_fixtures", "tests.postgres_fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    if not IS_COMPILED:  # pytest puts its own filters in the place of those that compiled.py has set
        config.addinivalue_line("filterwarnings", f"ignore:{OVERFLOW_WARNING}:RuntimeWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, tests that start processes and servers take turns on one of them: what they
    wait for would come later otherwise. The rest of the suite runs beside them."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here / "e2e") or item.path.is_relative_to(here / "integration"):
            item.add_marker(pytest.mark.xdist_group("processes"))
