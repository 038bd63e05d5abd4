"""Real processes that serve quantised tables come to the unsharded model's outputs."""

from __future__ import annotations

import pytest
from tests.distributed import quantized_workers

from shardwright.testing.ranks import RankPool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("sharding_type", "allowed"), [("table_wise", 0.0), ("column_wise", 0.0), ("row_wise", 2e-6)]
)
def test_ranks_serve_what_the_unsharded_model_gives(
    pool: RankPool, sharding_type: str, allowed: float
) -> None:
    largest = pool.run(quantized_workers.serve_by, 2, sharding_type)
    assert max(largest) <= allowed
