"""What the ranks of the collective planning tests do; importable by their processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests import as_asked

from shardwright import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from shardwright.testing.guests import installed


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=100 * (i + 1), embedding_dim=64, feature_names=[f"f{i}"]
            )
            for i in range(3)
        ],
    )


def constraints(pattern: str = "t*") -> dict[str, ParameterConstraints]:
    return {pattern: ParameterConstraints(pooling_factors=[3.0])}


def plan_json(topology_ranks: int | None = None, pattern: str = "t*") -> str:
    """The plan document that this rank gets, or the error."""
    topology: Any = topology_ranks and Topology(world_size=topology_ranks, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints(pattern))
    try:
        plan = planner.collective_plan(collection(), [EmbeddingBagCollectionSharder()], dist.group.WORLD)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return plan.to_json()


def plan_json_of_type(name: str) -> str:
    """The plan document for two tables of a type that looks at extras and data types, or the error."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{bits}",
            num_embeddings=100,
            embedding_dim=8,
            feature_names=[f"f{bits}"],
            data_type=f"FP{bits}",
        )
        for bits in (16, 32)
    ]
    rule = ParameterConstraints(sharding_types=[name], extras={"cut": True})
    with installed({"as_asked": as_asked.AsAsked, "moody": as_asked.Moody}[name]()):
        planner = EmbeddingShardingPlanner(constraints={"*": rule})
        module = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
        try:
            return planner.collective_plan(module, [EmbeddingBagCollectionSharder()]).to_json()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
