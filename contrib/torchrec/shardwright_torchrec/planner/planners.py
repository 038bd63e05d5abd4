"""`EmbeddingShardingPlanner` of TorchRec's scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

import shardwright as sw
from shardwright.host import host
from shardwright_torchrec.parallel.sharders import (
    REPLICATED,
    get_default_sharders,
    kernels_with_gradients,
)

__all__ = ["EmbeddingShardingPlanner", "bent"]


class EmbeddingShardingPlanner(sw.EmbeddingShardingPlanner):
    """The planner of a model's tables, as TorchRec's scripts call it.

    Args:
        topology: ranks and devices; `collective_plan` derives it from the process group if not given.
        batch_size: samples per rank and step.
        constraints: table name -> constraints of the table.
        debug: print the report of each plan.
        further: arguments of `shardwright.EmbeddingShardingPlanner`.
    """

    def __init__(
        self,
        topology: sw.Topology | None = None,
        batch_size: int | None = None,
        *,
        constraints: Mapping[str, sw.ParameterConstraints] | None = None,
        debug: bool = True,
        **further: Any,
    ) -> None:
        super().__init__(topology, batch_size, constraints=bent(constraints), debug=debug, **further)

    def collective_plan(
        self, module: Any, sharders: Sequence[Any] | None = None, pg: Any = None, **further: Any
    ) -> sw.ShardingPlan:
        """Plan on rank 0 and give every rank the same plan; TorchRec's two sharders by default."""
        sharders = get_default_sharders() if sharders is None else sharders
        return super().collective_plan(module, sharders, pg, **further)


def bent(
    constraints: Mapping[str, sw.ParameterConstraints] | None,
) -> dict[str, sw.ParameterConstraints] | None:
    """The constraints as TorchRec reads them.

    A table that may be nothing but replicated takes the kernel that its sharder has for that, whatever fused kernels
    the constraints name: TorchRec's tutorial on sharding does so.
    """
    if constraints is None:
        return None
    return {name: _without_fused(rule) for name, rule in constraints.items()}


def _without_fused(rule: sw.ParameterConstraints) -> sw.ParameterConstraints:
    if rule.sharding_types != (REPLICATED,) or rule.compute_kernels is None:
        return rule
    kernels = host().compute_kernels
    if {kernels.canonical(name) for name in rule.compute_kernels} & set(kernels_with_gradients()):
        return rule
    return attrs.evolve(rule, compute_kernels=None)
