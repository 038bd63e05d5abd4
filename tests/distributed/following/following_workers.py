"""What ranks do in the tests of plans that follow their data; importable by their processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.errors import error_of
from tests.plugins.following import models
from torch import nn

import shardwright as sw
from shardwright_plugins.following import Look, MeasuredTimes, Replanner, StepTimes

_DRIFT = 4
HEAVY, LIGHT = 40, 1


def _train(model: sw.DistributedModelParallel, step: int, heavy: list[bool]) -> None:
    """A step; from the fourth on, the tables that rank 0 had first have nearly all ids."""
    ids = [models.IDS if step < _DRIFT else (HEAVY if own else LIGHT) for own in heavy]
    models.train(model, models.batch(2 * step + dist.get_rank(), ids))


def follow(
    steps: int, every: int | None, arguments: dict[str, Any]
) -> tuple[list[Look], dict[str, Any], dict[str, list[int]]]:
    """Train with a replanner, or without one, and return its looks, the weights and the ranks of tables."""
    model = models.model(sw.ShardingEnv.from_process_group())
    heavy = [own.ranks == [0] for own in model.plan.plan[""].values()]
    replanner = None if every is None else Replanner(model, every=every, **arguments)
    for step in range(steps):
        _train(model, step, heavy)
        if replanner is not None:
            replanner.step()
    looks = [] if replanner is None else replanner.looks
    if replanner is not None:
        replanner.close()
    return looks, model.full_state_dict(), {name: own.ranks for name, own in model.plan.plan[""].items()}


def follow_until_a_look() -> tuple[Look | None, int]:
    """Train while a search goes on in the background, until it is heard of."""
    model = models.model(sw.ShardingEnv.from_process_group())
    heavy = [own.ranks == [0] for own in model.plan.plan[""].values()]
    look, step = None, _DRIFT
    with Replanner(model, every=2, move_cost=0.0) as replanner:
        while look is None:
            _train(model, step, heavy)
            look, step = replanner.step(), step + 1
    _train(model, step, heavy)
    return look, step - _DRIFT


def measure() -> MeasuredTimes:
    """Times of a few steps."""
    model = models.model(sw.ShardingEnv.from_process_group())
    with StepTimes(model) as times:
        for step in range(3):
            models.train(model, models.batch(step))
    return times.gather()


def refuse_together(folder: str) -> list[str]:
    """Numbers that differ, and a file that cannot be written; returns what each rank raised."""
    model = models.model(sw.ShardingEnv.from_process_group())
    with StepTimes(model) as times:
        models.train(model, models.batch(0))
    return [
        error_of(lambda: Replanner(model, every=2 + dist.get_rank())).partition(":")[0],
        error_of(lambda: times.write(f"{folder}/none/x")).partition(":")[0],
    ]


def step_with_a_batch_in_progress_on_one_rank(every: int, steps: int) -> list[str]:
    """What each step of a replanner raises here; the last has no backward pass, and rank 0 keeps its outputs."""
    env = sw.ShardingEnv.from_process_group()
    model, raised = models.model(env), []
    with Replanner(model, every=every) as replanner:
        for step in range(steps):
            output = model(models.batch(step)).values().square().sum()
            if step < steps - 1:
                output.backward()
            elif env.rank == 1:
                del output
            raised.append(error_of(replanner.step).partition(":")[0])
    return raised


def measure_pipeline() -> tuple[int, set[str]]:
    """Number of steps that a pipeline makes, as it is measured, and the phases that took some time."""
    model = models.model(sw.ShardingEnv.from_process_group())
    pipeline = sw.TrainPipelineSparseDist(_Loss(model), model.fused_optimizer, torch.device("cpu"))
    batches = iter([models.batch(step) for step in range(4)])
    with StepTimes(model) as times:
        for _ in range(4):
            pipeline.progress(batches)
    found = times.gather()
    return found.num_steps, {phase for phase, ms in found.ranks[0].phases_ms.items() if ms > 0}


class _Loss(nn.Module):
    def __init__(self, model: sw.DistributedModelParallel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: sw.KeyedJaggedTensor) -> tuple[torch.Tensor, None]:
        return self.model(batch).values().square().sum(), None
