"""What ranks do in the tests of tables updated in ``optimizer.step()``; importable by their processes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import workers

from shardwright import DistributedModelParallel, EmbeddingBagCollectionSharder, ShardingEnv, clip_grad_norm_

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
    return model.state_dict(), norms, scaler.get_scale()


def spoil(model: DistributedModelParallel) -> None:
    """Make one value of rank 1's gradients of tables infinite, which no other rank has."""
    if dist.get_rank() != 1:
        return
    for name, parameter in model.named_parameters():
        if name.startswith("sparse.") and parameter.grad is not None and parameter.grad._nnz():
            parameter.grad._values()[0, 0] = math.inf
            return
    raise AssertionError("rank 1 has no block with a gradient")
