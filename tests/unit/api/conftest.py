"""The real application over a real, empty index; only the registry, the store and the start are stood in for."""

from __future__ import annotations

import pytest

from tests.unit.api.stand_ins import World, empty_world


@pytest.fixture
def world() -> World:
    return empty_world()
