"""TorchScript and traces take sparse types and float collections, for as long as a module's tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shardwright_serving.scripting import install, uninstall


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()
