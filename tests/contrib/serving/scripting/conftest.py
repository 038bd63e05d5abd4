"""All tests here have TorchScript and traces take sparse types and float collections."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _installed(scripting: object) -> None:
    pass
