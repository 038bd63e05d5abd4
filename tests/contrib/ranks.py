"""What real ranks do with an installed distribution; importable by their processes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

import shardwright as sw

RATE, ROWS, STEPS = 0.5, 200, 3


def find_plugins_in(site: str) -> None:
    """Put the folder on the path before anything asks for a plugin."""
    sys.path.insert(0, site)


def model() -> sw.EmbeddingBagCollection:
    torch.manual_seed(0)
    table = {"name": "item", "num_embeddings": ROWS, "embedding_dim": 8, "feature_names": ["item"]}
    return sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(**table)])


def batch(step: int, rank: int) -> sw.KeyedJaggedTensor:
    """Four bags of three ids, small ones more often."""
    ids = (np.random.default_rng(10 * step + rank).random(12) ** 4 * ROWS).astype(np.int64)
    return sw.KeyedJaggedTensor(
        keys=["item"], values=torch.from_numpy(ids), lengths=torch.full((4,), 3, dtype=torch.int32)
    )


def constraints(name: str) -> sw.ParameterConstraints:
    """Those that make a planner take a sharding type."""
    if name == "hot_rows":
        from shardwright_hot_rows import AccessCounts

        counts = AccessCounts.of(1000 // np.arange(1, ROWS + 1))
        return sw.ParameterConstraints(sharding_types=[name], extras=counts.to_extras())
    if name == "hash_rows":
        from shardwright_hash_embedding import HashSettings

        return HashSettings().constraints()
    return sw.ParameterConstraints(sharding_types=[name])


def train(name: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Plan, shard and train on this rank; the plan's document and the state."""
    sharders: list[Any] = [
        sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": RATE})
    ]
    planner = sw.EmbeddingShardingPlanner(batch_size=4, constraints={"*": constraints(name)})
    unsharded = model()
    plan = planner.collective_plan(unsharded, sharders)
    sharded = sw.DistributedModelParallel(unsharded, plan=plan, sharders=sharders)
    for step in range(STEPS):
        sharded(batch(step, dist.get_rank())).values().sum().backward()
    return plan.to_json(), sharded.full_state_dict()
