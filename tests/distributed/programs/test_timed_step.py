"""The step that tests/benchmarks/steps/step.py times: pooled sums, and row-wise Adagrad in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from tests.benchmarks.steps import timed_step as step
from tests.benchmarks.steps.timed_step import StepSettings, bench_batch, bench_model, measured

from shardwright import EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad, UnsupportedError

STEP = StepSettings(("table_wise", "row_wise"), ranks=1, batch=4, tables=3, rows=20, dim=8, ids=2, steps=1)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "sees no device of type 'cuda' here"), (1, r"sees 1 of type 'cuda' here: give --ranks 1")],
)
def test_ranks_without_a_device_each_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch, count: int, told: str
) -> None:
    monkeypatch.setattr(step, "has_accelerator", lambda _: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    with pytest.raises(UnsupportedError, match=told):
        measured(evolve(STEP, ranks=2, device="cuda"))


@pytest.mark.gpu
def test_step_on_cuda_times_a_kernel() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    figures = measured(evolve(STEP, device="cuda", kernel="fused_triton", dim=16))
    assert figures["min_ms"] > 0
    assert figures["collectives"]


@pytest.mark.usefixtures("group_of_one")
def test_bench_model_takes_the_step_of_the_unsharded_module_with_row_wise_adagrad() -> None:
    sharded = bench_model(STEP)
    configs = [
        EmbeddingBagConfig(20, 8, name=f"t{index}", feature_names=[f"f_t{index}"]) for index in range(3)
    ]
    unsharded = EmbeddingBagCollection(configs)
    unsharded.load_state_dict(sharded.full_state_dict())
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
        torch.testing.assert_close(sharded.full_state_dict()[name], weight)
