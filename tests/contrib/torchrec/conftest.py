"""A process group of one rank, for scripts that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.ports import group_of_one


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    with group_of_one():
        yield
