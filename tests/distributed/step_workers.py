"""What ranks do in the tests of tables updated in ``optimizer.step()``; importable by their processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import workers

from shardwright import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    ShardingEnv,
    clip_grad_norm_,
)

State = dict[str, torch.Tensor]
MICRO_BATCHES, MAX_NORM = 3, 0.05


def model_in_step(types: list[str]) -> DistributedModelParallel:
    """The small model of the other tests, by the argument of ``DistributedModelParallel``."""
    env, module = ShardingEnv.from_process_group(), workers.clicks()
    sharders = [EmbeddingBagCollectionSharder(fused_params=workers.FUSED)]
    plan = workers.planner(env.world_size, types).collective_plan(module, sharders)
    return DistributedModelParallel(module, env, "cpu", plan, sharders, update="in_step")


def train(types: list[str], steps: int) -> tuple[State, list[float], float]:
    """Accumulate, scale and clip; returns weights, norms and the last scale.

    Args:
        types: sharding types of the tables.
        steps: number of steps.
    """
    model = model_in_step(types)
    optimizer, rank = workers.optimizers_of(model), dist.get_rank()
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=256.0), []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            loss: Any = model(workers.batch(MICRO_BATCHES * step + micro, rank)).square().mean()
            scaler.scale(loss / MICRO_BATCHES).backward()
        scaler.unscale_(optimizer)
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        scaler.step(optimizer)
        scaler.update()
    return model.full_state_dict(), norms, scaler.get_scale()


# A pipeline whose stages accumulate


@workers.or_error
def no_sync_beside_updates_in_backward() -> None:
    """Call `no_sync()` where tables are updated in the backward pass."""
    workers.wrap(workers.clicks(), ["row_wise"]).no_sync()
