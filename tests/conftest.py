"""Fixtures that every test folder may use."""

import pytest

from indexer.compiled import IS_COMPILED, OVERFLOW_WARNING

pytest_plugins = ["tests.directory_fixtures", "tests.postgres_fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    if not IS_COMPILED:  # pytest puts its own filters in the place of those that compiled.py has set
        config.addinivalue_line("filterwarnings", f"ignore:{OVERFLOW_WARNING}:RuntimeWarning")
