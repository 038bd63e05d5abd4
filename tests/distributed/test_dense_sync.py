"""The dense part of a model: its gradients are averaged, and a rank that is lost meanwhile is named."""

from __future__ import annotations

import pytest
from tests.distributed import dense_workers
from tests.distributed.failures.strikes import VICTIM

from shardwright_plugins.dense_part import data_parallel as dense_sync
from shardwright_testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed

slow = pytest.mark.slow
BUCKETS, WRAPPING = (pytest.param(name, marks=slow) for name in (dense_sync.BUCKETS, dense_workers.WRAPPING))


@pytest.mark.slow
@pytest.mark.parametrize("collective", [dense_sync.GRADIENTS, BUCKETS, WRAPPING])
def test_rank_that_is_stuck_before_a_collective_of_the_dense_part_is_named(
    pool: RankPool, collective: str
) -> None:
    text, own = pool.run(dense_workers.lose_a_rank, 2, collective, "stall")
    assert text.startswith(f"DistributedError: rank 0: {collective} failed: no word from rank 1 in "), text
    assert f"rank 0 failed in {collective}" in own, own


@pytest.mark.parametrize("collective", [dense_sync.GRADIENTS, BUCKETS, WRAPPING])
def test_rank_that_is_killed_before_a_collective_of_the_dense_part_is_named(
    pool: RankPool, collective: str
) -> None:
    with pytest.raises(RankError) as error:
        pool.run(dense_workers.lose_a_rank, 2, collective, "kill")
    assert error.value.errors == {VICTIM: "the process died"}
    text = error.value.results[0]
    assert text.startswith(f"DistributedError: rank 0: {collective} failed: rank 1 has ended: "), text


@pytest.mark.parametrize(("width", "num_buckets"), [(2, 1), (600, 2)])
def test_dense_gradients_accumulated_over_passes_are_the_mean_over_ranks(
    pool: RankPool, width: int, num_buckets: int
) -> None:
    for num_sums, deviations in pool.run(dense_workers.accumulate_gradients, 2, width):
        assert num_sums[::2] == [0, 0, 0]
        assert num_sums[-1] == num_buckets
        assert deviations == pytest.approx([0.0] * 3, abs=1e-4)


def test_layer_without_gradients_is_told_as_torch_tells_it(pool: RankPool) -> None:
    for text in pool.run(dense_workers.leave_a_layer_out, 2):
        assert text.startswith("RuntimeError: Expected to have finished reduction in the prior iteration"), (
            text
        )
