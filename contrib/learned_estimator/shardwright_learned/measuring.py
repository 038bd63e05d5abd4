"""Measures tables on this machine, each sharded by itself: a step's forward and backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import numpy as np

import shardwright as sw
from shardwright_learned.features import features_of
from shardwright_learned.measurements import Measurement


class _Recorder(sw.Estimator):
    """Estimates nothing: it keeps the features of what it is asked, by the size of a shard."""

    name: ClassVar[str] = "learned_recorder"

    def __init__(self) -> None:
        self.features: dict[tuple[int, int], dict[str, float]] = {}

    def estimate(self, options: sw.Options, topology: sw.Topology) -> Mapping[str, np.ndarray]:
        columns = features_of(options, topology)
        sizes = zip(options.num_rows.tolist(), options.num_columns.tolist(), strict=True)
        for run, size in enumerate(sizes):
            self.features.setdefault(size, {name: float(column[run]) for name, column in columns.items()})
        return {"nothing": np.ones(options.num_shards)}


def measure(
    tables: Sequence[sw.EmbeddingBagConfig],
    *,
    sharding_types: Sequence[str],
    compute_kernels: Sequence[str],
    batch_size: int,
    pooling_factor: int = 1,
    steps: int = 10,
) -> list[Measurement]:
    """Measure each table with each sharding type and kernel, alone; every rank of the process group makes this call.

    A table alone, cut evenly, is as slow as its largest shard, so the slowest rank's median time is that shard's. Each
    combination is planned, and measured as ``calibrate`` and ``bench truth`` measure steps.

    Args:
        tables: tables to measure; a few very different sizes are better than many similar ones.
        sharding_types: names of sharding types.
        compute_kernels: names of kernels.
        batch_size: bags of a rank in a step.
        pooling_factor: ids of a bag.
        steps: steps that count.

    Returns:
        The measurements, the same on every rank.

    Raises:
        PlanningError: A combination cannot be planned here.
    """
    return [
        _measure_one(table, kind, kernel, batch_size, pooling_factor, steps)
        for table, kind, kernel in product(tables, sharding_types, compute_kernels)
    ]


def _measure_one(
    table: sw.EmbeddingBagConfig, kind: str, kernel: str, batch_size: int, pooling_factor: int, steps: int
) -> Measurement:
    from shardwright_plugins.measuring.steps import drawn_batches, measure_plan

    rule = sw.ParameterConstraints(
        sharding_types=[kind],
        compute_kernels=[kernel],
        pooling_factors=[float(pooling_factor)] * len(table.feature_names),
    )
    recorder = _Recorder()
    planner = sw.EmbeddingShardingPlanner(
        batch_size=batch_size, constraints={table.name: rule}, estimator=recorder, progress=False
    )
    bags = sw.EmbeddingBagCollection([table], device="meta")
    plan = planner.collective_plan(bags, [sw.EmbeddingBagCollectionSharder()])
    workload = sw.Workload("alone", (sw.TableSpec.from_config(table),), {table.name: rule}, batch_size)
    phases = measure_plan(workload, plan, drawn_batches(workload), steps).phases_ms
    block = max(plan.plan[""][table.name].layout.blocks, key=lambda block: block.num_rows * block.num_columns)
    # Only the rank that plans has asked the recorder.
    features = _from_first_rank(recorder.features.get((block.num_rows, block.num_columns)))
    return Measurement(kernel, kind, features, phases)


def _from_first_rank(value: Any) -> Any:
    import torch.distributed as dist

    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
