"""Fixtures that every test folder may use."""

pytest_plugins = ["tests.directory_fixtures", "tests.postgres_fixtures"]
