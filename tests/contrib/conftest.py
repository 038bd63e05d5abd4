"""Makes every distribution of contrib importable in its tests, as if it were installed."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest
from tests.contrib import distributions

# Their folders, not `contrib` itself: below that, folders bear the names of other people's packages.
sys.path[:0] = [str(distributions.ROOT / name) for name in distributions.NAMES]


@pytest.fixture(params=distributions.NAMES)
def distribution(request: pytest.FixtureRequest) -> str:
    """Each distribution's name."""
    return str(request.param)


@pytest.fixture
def entry_points(distribution: str) -> list[EntryPoint]:
    """Its plugins."""
    return distributions.entry_points(distribution)
