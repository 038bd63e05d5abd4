"""What the ranks of the edited plans' tests do; importable by their processes."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed import workers
from tests.distributed.planning import plan_workers

from shardwright import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingShardingPlanner,
    Proposer,
    ShardingEnv,
    ShardingPlan,
)


def planned(types: list[str]) -> str:
    """The plan document of the little model, with a sharding type for each of its tables."""
    sharders = [EmbeddingBagCollectionSharder(fused_params=workers.FUSED)]
    planner = workers.planner(dist.get_world_size(), types)
    return planner.collective_plan(workers.clicks(), sharders, dist.group.WORLD).to_json()


def train_from(document: str, steps: int) -> dict[str, torch.Tensor]:
    """The state of the little model after some steps under the plan in a document."""
    env = ShardingEnv.from_process_group()
    model = DistributedModelParallel(
        workers.clicks(),
        env=env,
        plan=ShardingPlan.from_json(document),
        sharders=[EmbeddingBagCollectionSharder(fused_params=workers.FUSED)],
        device=torch.device("cpu"),
    )
    optimizer = workers.optimizers_of(model)
    for step in range(steps):
        workers.train(model, step, dist.get_rank(), optimizer)
    return model.full_state_dict()


def train_on_hosts(document: str, steps: int, local_world_size: int) -> dict[str, torch.Tensor]:
    """The same, with so many ranks a host."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(local_world_size)}):
        return train_from(document, steps)


SHORT_S = 4.0  # time-out of the ranks that plan slowly


class Slow(Proposer):
    """Proposes the first options again and again, a little later each time."""

    name = "slow"

    def __init__(self, is_interrupted: bool, is_broken: bool) -> None:
        self.is_interrupted, self.is_broken = is_interrupted, is_broken

    def proposals(self, space: Any) -> Any:
        """Proposals without end, but for what happens to them."""
        proposal = space.options.first_option[:-1][space.options.distinct_table].copy()
        for count in range(1000):
            yield proposal.copy()
            time.sleep(0.1)
            if count == 5 and self.is_interrupted:
                os.kill(os.getpid(), signal.SIGINT)
            if count == 5 and self.is_broken:
                raise ZeroDivisionError("slow broke")


@workers.or_error
def plan_slowly(is_interrupted: bool = False, is_broken: bool = False, seconds: float | None = None) -> str:
    """The document that this rank gets."""
    planner = EmbeddingShardingPlanner(proposer=Slow(is_interrupted, is_broken), seconds=seconds)
    group = dist.new_group(timeout=timedelta(seconds=SHORT_S))
    sharders = [EmbeddingBagCollectionSharder()]
    return planner.collective_plan(plan_workers.collection(), sharders, group).to_json()
