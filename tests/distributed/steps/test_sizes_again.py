"""Steps of any kind, one after the other, on batches of sizes that come again: as in one process."""

from __future__ import annotations

import pytest
from tests.distributed.steps import size_workers

from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("seeds", [range(7), pytest.param(range(7, 200), marks=pytest.mark.slow)])
def test_drawn_steps_on_sizes_that_come_again_train_as_one_process(pool: RankPool, seeds: range) -> None:
    pool.run(size_workers.follow, 2, seeds, timeout_s=600)
