"""One collection sharded by a plan made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright_torchrec.distributed.sharding_plan import (
    apply_to_all,
    construct_module_sharding_plan,
    sharder_of,
)

__all__ = ["shard"]


def shard(
    module: torch.nn.Module,
    plan: sw.EmbeddingModuleShardingPlan | Mapping[str, Callable[..., Any]] | Callable[..., Any],
    env: sw.ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: sw.ModuleSharder | None = None,
) -> torch.nn.Module:
    """The sharded collection; every rank makes this call.

    Args:
        module: the collection.
        plan: its plan; or a generator such as `table_wise(rank=0)`, for all tables or by table.
        env: the ranks; the world's process group by default.
        device: device of this rank's shards.
        sharder: the collection's sharder; TorchRec's by default.
    """
    env = env or sw.ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    sharder = sharder_of(module, sharder)
    if callable(plan):
        plan = apply_to_all(module, plan, sharder)
    if not isinstance(plan, sw.EmbeddingModuleShardingPlan):
        kind = (
            "cpu" if device is None and not torch.cuda.is_available() else torch.device(device or "cuda").type
        )
        plan = construct_module_sharding_plan(
            module, plan, sharder, world_size=env.world_size, device_type=kind
        )
    return sharder.shard(module, plan, env, device)
