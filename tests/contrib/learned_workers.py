"""What the ranks of the measuring tests do."""

from __future__ import annotations

import attrs
import torch
from shardwright_learned import LearnedEstimator, measure

import shardwright as sw


def tables() -> list[sw.EmbeddingBagConfig]:
    return [
        sw.EmbeddingBagConfig(
            name=f"t{rows}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{rows}"]
        )
        for rows, dim in ((64, 8), (640, 16), (6400, 32))
    ]


def measure_and_plan() -> tuple[list[dict], str, dict[str, str]]:
    """Measures, and then plans with what was learned: the measurements, the plan and the types."""
    torch.set_num_threads(1)
    measurements = measure(
        tables(),
        sharding_types=["table_wise", "row_wise"],
        compute_kernels=["fused_torch"],
        batch_size=4,
        pooling_factor=2,
        steps=3,
    )
    planner = sw.EmbeddingShardingPlanner(estimator=LearnedEstimator.fit(measurements), batch_size=4)
    model = sw.EmbeddingBagCollection(tables(), device="meta")
    plan = planner.collective_plan(model, [sw.EmbeddingBagCollectionSharder()])
    types = {name: sharding.sharding_type for name, sharding in plan.plan[""].items()}
    return [attrs.asdict(one) for one in measurements], plan.to_json(), types
