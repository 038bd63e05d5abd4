"""All tests here have the plugin of quantized tables."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _plugged(serving: object) -> None:
    pass
