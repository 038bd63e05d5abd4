"""Pools of real processes, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.distributed import workers

from shardwright.testing.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(4, backend="gloo") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pool_without_fbgemm() -> Iterator[RankPool]:
    with RankPool(2, backend="gloo", initializer=workers.hide_fbgemm) as ranks:
        yield ranks
