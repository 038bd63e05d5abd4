"""Loops that accumulate, scale and clip, on real ranks, with tables updated in ``optimizer.step()``."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import step_workers, workers
from tests.distributed.test_training import assert_same_state

from shardwright import RowWiseAdagrad
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed

STEPS = 3


def one_process(steps: list[int]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The unsharded model on all micro-batches of both ranks; its weights and norms."""
    model = workers.clicks()
    tables = RowWiseAdagrad(model.sparse.parameters(), lr=workers.LEARNING_RATE, eps=1e-8)
    dense, norms = torch.optim.SGD(model.over.parameters(), lr=workers.LEARNING_RATE), []
    for step in steps:
        model.zero_grad()
        for micro in range(step_workers.MICRO_BATCHES):
            for rank in range(2):
                batch = workers.batch(step_workers.MICRO_BATCHES * step + micro, rank)
                (model(batch).square().mean() / (2 * step_workers.MICRO_BATCHES)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), step_workers.MAX_NORM)))
        tables.step()
        dense.step()
    return model.state_dict(), norms


# Of whole tables one rank may have none: it takes part in the norm all the same.
@pytest.mark.parametrize("types", [["row_wise", "table_wise", "data_parallel"], ["table_wise"]])
def test_accumulated_scaled_and_clipped_gradients_train_as_one_process(
    pool: RankPool, types: list[str]
) -> None:
    expected, norms = one_process(list(range(STEPS)))
    for state, own, scale in pool.run(step_workers.train, 2, types, STEPS):
        assert_same_state(state, expected)
        assert own == pytest.approx(norms, rel=1e-4)
        assert scale == 256.0


def test_no_sync_beside_tables_updated_in_backward_is_refused_by_argument(pool: RankPool) -> None:
    for text in pool.run(step_workers.no_sync_beside_updates_in_backward, 2):
        assert "is updated in each backward pass" in text
        assert "update='in_step'" in text
