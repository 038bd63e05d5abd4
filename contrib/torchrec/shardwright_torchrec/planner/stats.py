"""TorchRec's reporters of plans and ratings of plans."""

from __future__ import annotations

from typing import Any

import shardwright as sw
from shardwright_torchrec.planner.types import PerfModel, ShardingOption, Stats


class EmbeddingStats(Stats):
    """Prints shardwright's report of a plan."""

    def log(self, sharding_plan: sw.ShardingPlan, *arguments: Any, **further: Any) -> None:
        """Print the plan."""
        print(sharding_plan)


class NoopEmbeddingStats(Stats):
    """Prints nothing."""

    def log(self, *arguments: Any, **further: Any) -> None:
        """Do nothing."""


class NoopPerfModel(PerfModel):
    """Rates a plan by its slowest rank, ms, which is shardwright's objective.

    Args:
        topology: the ranks.
    """

    def __init__(self, topology: sw.Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """The time of the slowest rank, ms."""
        return max(self._loads(plan, "perf"), default=0.0)

    def _loads(self, plan: list[ShardingOption], cost: str) -> list[float]:
        loads = [0.0] * self._topology.world_size
        for shard in (shard for option in plan for shard in option.shards):
            if shard.rank is not None:
                value = getattr(shard, cost)
                loads[shard.rank] += value.total if cost == "perf" else value.hbm
        return loads


class NoopStorageModel(NoopPerfModel):
    """Rates a plan by the device memory of its fullest rank, bytes."""

    def rate(self, plan: list[ShardingOption]) -> float:
        """Device memory of the fullest rank, bytes."""
        return max(self._loads(plan, "storage"), default=0.0)
