"""What the ranks do in the tests of train pipelines; importable by their processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from tests.distributed import workers
from torch import nn

from shardwright import KeyedJaggedTensor, TrainPipelineBase, TrainPipelineSparseDist, lockstep_batches
from shardwright.contracts.comm_backend import EXCHANGE_EVENT

TYPES = ["table_wise", "row_wise", "data_parallel"]
KINDS = {"base": TrainPipelineBase, "sparse_dist": TrainPipelineSparseDist}


@frozen(eq=False)
class Example:
    features: KeyedJaggedTensor
    labels: torch.Tensor


class WithLoss(nn.Module):
    """The losses of a model, and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = workers.clicks()

    def forward(self, example: Example) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.clicks(example.features)
        loss = (output - example.labels).square().mean() if len(output) else output.sum()
        return loss, output.detach()


def examples(count: int, rank: int, *, size: int | None = None, start: int = 0) -> Iterator[Example]:
    for step in range(start, start + count):
        batch_size = 2 + (step + rank) % 3 if size is None else size
        features = workers.batch(step, rank, batch_size)
        yield Example(features, torch.arange(batch_size, dtype=torch.float32) % 2)


def model_and_optimizer() -> tuple[Any, Any]:
    model = workers.wrap(WithLoss(), TYPES)
    return model, workers.optimizers_of(model)


def run_loop(kind: str, model: Any, optimizer: Any, counts: list[int], end_of_data: str) -> int:
    """Train until the data ends, of which ranks have different amounts; returns the steps made."""
    batches, steps = examples(counts[dist.get_rank()], dist.get_rank()), 0
    if kind == "lockstep_batches":
        for example in lockstep_batches(model, batches, end_of_data=end_of_data):
            optimizer.zero_grad()
            model(example)[0].backward()
            optimizer.step()
            steps += 1
        return steps
    pipeline = KINDS[kind](model, optimizer, "cpu", end_of_data=end_of_data)
    with suppress(StopIteration):
        while True:
            pipeline.progress(batches)
            steps += 1
    return steps


def profile_steps(num_steps: int) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of the parts of steps and of the collectives under way."""
    from torch.profiler import ProfilerActivity, profile

    model, optimizer = model_and_optimizer()
    pipeline = TrainPipelineSparseDist(model, optimizer, "cpu")
    loader = examples(num_steps + 3, dist.get_rank(), size=64)
    for _ in range(2):
        pipeline.progress(loader)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(num_steps):
            pipeline.progress(loader)
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.name.startswith(("##", EXCHANGE_EVENT))
    ]
