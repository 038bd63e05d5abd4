"""Pools of real processes, started once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from tests.distributed import workers
from tests.equality import Case, train_simulated
from tests.plugins.training.test_equality import tables_of

from shardwright_testing.ranks import RankPool


@pytest.fixture(scope="session", autouse=True)
def compiled_loops() -> None:
    """Compile the Numba kernel's loops once, and not on four ranks at once within their time-outs."""
    if importlib.util.find_spec("numba") is None:
        return
    for sharding_type in ("table_wise", "data_parallel"):
        train_simulated(Case(tables_of(sharding_type, "fused_numba"), (2, 2), "row_wise_adagrad"))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(4, backend="gloo") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pool_without_fbgemm() -> Iterator[RankPool]:
    with RankPool(2, backend="gloo", initializer=workers.hide_fbgemm) as ranks:
        yield ranks
