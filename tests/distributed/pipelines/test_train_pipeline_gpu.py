"""Train pipelines on one GPU over NCCL, world size 1: equal to the plain loop on the CPU, copies on a stream beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.distributed import workers
from tests.distributed.pipelines import pipeline_workers
from tests.ports import nccl_group_of_one

from shardwright import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    ShardingEnv,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    in_backward_optimizer_filter,
    lockstep_batches,
)

pytestmark = pytest.mark.gpu

NUM_STEPS = 8
RATE = workers.LEARNING_RATE


@pytest.fixture
def nccl_env() -> Iterator[ShardingEnv]:
    with nccl_group_of_one() as group:
        yield ShardingEnv.from_process_group(group)


def sharded_on_gpu(env: ShardingEnv) -> tuple[Any, Any]:
    sharders = [EmbeddingBagCollectionSharder(fused_params=workers.FUSED)]
    model = pipeline_workers.WithLoss()
    plan = workers.planner(1, ["table_wise", "row_wise", "data_parallel"], device="cuda").plan(
        model, sharders
    )
    device = torch.device("cuda", torch.cuda.current_device())
    sharded = DistributedModelParallel(model, env=env, plan=plan, sharders=sharders, device=device)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    wrapper = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=RATE))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, wrapper])


def examples() -> Iterator[pipeline_workers.Example]:
    """Sizes that go up and down, so that freed memory is taken again at once."""
    for step in range(NUM_STEPS):
        yield from pipeline_workers.examples(1, 0, size=(4000, 30, 1, 2500)[step % 4], start=step)


def on_cpu() -> dict[str, torch.Tensor]:
    model = pipeline_workers.WithLoss()
    tables = {name: p for name, p in model.named_parameters() if ".sparse." in name}
    optimizers = [
        RowWiseAdagrad(list(tables.values()), lr=RATE, eps=1e-8),
        torch.optim.SGD(model.clicks.over.parameters(), lr=RATE),
    ]
    for example in examples():
        model.zero_grad()
        model(example)[0].backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.full_state_dict()


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].cpu(), value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist])
def test_pipeline_on_gpu_equals_the_plain_loop_on_the_cpu(nccl_env: ShardingEnv, kind: Any) -> None:
    model, optimizer = sharded_on_gpu(nccl_env)
    pipeline, loader = kind(model, optimizer, model.device), examples()
    for _ in range(NUM_STEPS):
        assert pipeline.progress(loader).device.type == "cuda"
    with pytest.raises(StopIteration):
        pipeline.progress(loader)
    assert_close(model.full_state_dict(), on_cpu())


def test_lockstep_batches_move_to_the_gpu_and_equal_the_plain_loop_on_the_cpu(nccl_env: ShardingEnv) -> None:
    model, optimizer = sharded_on_gpu(nccl_env)
    for example in lockstep_batches(model, examples(), device=model.device):
        assert example.labels.device.type == example.features.device().type == "cuda"
        optimizer.zero_grad()
        model(example)[0].backward()
        optimizer.step()
    assert_close(model.full_state_dict(), on_cpu())


def test_batches_are_copied_from_pinned_memory_on_a_stream_beside(nccl_env: ShardingEnv) -> None:
    from torch.profiler import ProfilerActivity, profile

    model, optimizer = sharded_on_gpu(nccl_env)
    pipeline, loader = TrainPipelineSparseDist(model, optimizer, model.device), examples()
    for _ in range(3):
        pipeline.progress(loader)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            pipeline.progress(loader)
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event for event in events if "Memcpy HtoD (Pinned" in event.name]
    kernels = [event for event in events if "gemm" in event.name.lower() or "sgd" in event.name.lower()]
    assert copies
    assert kernels
    assert not {event.device_resource_id for event in copies} & {
        event.device_resource_id for event in kernels
    }
