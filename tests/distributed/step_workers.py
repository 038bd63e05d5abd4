"""What ranks do in the tests of tables updated in ``optimizer.step()``; importable by their processes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed import workers

from shardwright import (
    Backward,
    CopyToDevice,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    ExchangeHeaders,
    ExchangeIds,
    Forward,
    OptimizerStep,
    PipelineStage,
    PipelineStep,
    ShardingEnv,
    StageAround,
    TrainPipeline,
    UnsupportedError,
    ZeroGrad,
    clip_grad_norm_,
)
from shardwright_plugins.dense_part.data_parallel import _Sums

State = dict[str, torch.Tensor]
MICRO_BATCHES, MAX_NORM = 3, 0.05


def model_in_step(types: list[str]) -> DistributedModelParallel:
    """The small model of the other tests, by the argument of ``DistributedModelParallel``."""
    env, module = ShardingEnv.from_process_group(), workers.clicks()
    sharders = [EmbeddingBagCollectionSharder(fused_params=workers.FUSED)]
    plan = workers.planner(env.world_size, types).collective_plan(module, sharders)
    return DistributedModelParallel(module, env, "cpu", plan, sharders, update="in_step")


def train(types: list[str], steps: int, *, infinite: int | None = None) -> tuple[State, list[float], float]:
    """Accumulate, scale and clip; returns weights, norms and the last scale.

    Args:
        types: sharding types of the tables.
        steps: number of steps.
        infinite: step in which rank 1 has an infinite gradient in a table.
    """
    model = model_in_step(types)
    optimizer, rank = workers.optimizers_of(model), dist.get_rank()
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=256.0), []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            loss: Any = model(workers.batch(MICRO_BATCHES * step + micro, rank)).square().mean()
            scaler.scale(loss / MICRO_BATCHES).backward()
        if step == infinite:
            spoil(model)
        scaler.unscale_(optimizer)
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        scaler.step(optimizer)
        scaler.update()
    return model.full_state_dict(), norms, scaler.get_scale()


# A pipeline whose stages accumulate


class Every(StageAround):
    """A stage that runs for one of every few batches."""

    def __init__(self, inner: PipelineStage, place: int) -> None:
        super().__init__(inner)
        self.place = place

    def run(self, step: PipelineStep) -> None:
        if step.number % MICRO_BATCHES == self.place:
            self.inner.run(step)


class Accumulated(StageAround):
    """A pass whose dense gradients are averaged over the ranks for the last of every few batches only."""

    def run(self, step: PipelineStep) -> None:
        is_last = step.number % MICRO_BATCHES == MICRO_BATCHES - 1
        with nullcontext() if is_last else step.model.no_sync():
            self.inner.run(step)


class Clip(PipelineStage):
    name, phase = "clip", "update"

    def __init__(self) -> None:
        self.norms: list[float] = []

    def run(self, step: PipelineStep) -> None:
        self.norms.append(float(clip_grad_norm_(step.model.parameters(), MAX_NORM)))


def train_by_stages(types: list[str], steps: int) -> tuple[State, list[float], list[int]]:
    """Accumulate and clip in a pipeline; returns weights, norms, and how many averages each batch made."""
    model, rank = model_in_step(types), dist.get_rank()
    clip, last = Clip(), MICRO_BATCHES - 1
    stages: list[PipelineStage] = [
        CopyToDevice(),
        ExchangeHeaders(),
        ExchangeIds(),
        Every(ZeroGrad(), 0),
        Accumulated(Forward(lambda features: (model(features).square().mean() / MICRO_BATCHES, None))),
        Accumulated(Backward()),
        Every(clip, last),
        Every(OptimizerStep(), last),
    ]
    pipeline: Any = TrainPipeline(model, workers.optimizers_of(model), "cpu", stages=stages)
    loader, averages = iter([workers.batch(step, rank) for step in range(steps * MICRO_BATCHES)]), []
    for _ in range(steps * MICRO_BATCHES):
        with mock.patch.object(_Sums, "start", autospec=True, side_effect=_Sums.start) as start:
            pipeline.progress(loader)
        averages.append(start.call_count)
    return model.full_state_dict(), clip.norms, averages


def no_sync_beside_updates_in_backward() -> str:
    """The error of `no_sync()` where tables are updated in the backward pass."""
    try:
        workers.wrap(workers.clicks(), ["row_wise"]).no_sync()
    except UnsupportedError as error:
        return str(error)
    return "nothing was raised"


def spoil(model: DistributedModelParallel) -> None:
    """Make one value of rank 1's gradients of tables infinite, which no other rank has."""
    if dist.get_rank() != 1:
        return
    for name, parameter in model.named_parameters():
        if name.startswith("sparse.") and parameter.grad is not None and len(parameter.grad.to_local()):
            parameter.grad.coalesce().values().to_local()[0, 0] = math.inf
            return
    raise AssertionError("rank 1 has no block with a gradient")
