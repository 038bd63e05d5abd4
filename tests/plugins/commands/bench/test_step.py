"""The step that `shardwright bench step` times: pooled sums, and row-wise Adagrad fused into the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shardwright import EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad
from shardwright_plugins.commands.bench.step import StepSettings, bench_batch, bench_model

STEP = StepSettings(("table_wise", "row_wise"), ranks=1, batch=4, tables=3, rows=20, dim=8, ids=2, steps=1)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_bench_model_takes_the_step_of_the_unsharded_module_with_row_wise_adagrad() -> None:
    sharded = bench_model(STEP)
    configs = [
        EmbeddingBagConfig(20, 8, name=f"t{index}", feature_names=[f"f_t{index}"]) for index in range(3)
    ]
    unsharded = EmbeddingBagCollection(configs)
    unsharded.load_state_dict(sharded.state_dict())
    optimizer = RowWiseAdagrad(unsharded.parameters(), lr=0.02, eps=1e-8)
    gradient = torch.rand(STEP.batch, 3 * STEP.dim)
    for number in range(2):
        batch = bench_batch(STEP, number)
        assert batch.lengths().tolist() == [STEP.ids] * 3 * STEP.batch
        for module in (sharded, unsharded):
            module(batch).values().backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in unsharded.state_dict().items():
        torch.testing.assert_close(sharded.state_dict()[name], weight)
