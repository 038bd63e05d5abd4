"""Real processes that serve quantized tables come to the unsharded model's outputs."""

from __future__ import annotations

import pytest
from tests.contrib.serving.distributed import workers_of_tables

from shardwright_testing.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]  # in each run, simulated ranks do so


@pytest.mark.parametrize(
    ("sharding_type", "allowed"),
    [("table_wise", 0.0), ("column_wise", 0.0), ("row_wise", 2e-6), ("serving", 0.0)],
)
def test_ranks_serve_what_the_unsharded_model_gives(
    pool: RankPool, sharding_type: str, allowed: float
) -> None:
    largest = pool.run(workers_of_tables.serve_by, 2, sharding_type)
    assert max(largest) <= allowed
