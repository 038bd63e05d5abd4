"""Experiments with steps of equal tables by one sharding type, beside what the compute kernel takes of them.

A step less its lookups and updates is what the engine does: routing, exchanges, order of columns, copies kept equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from shardwright.host import host
from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.report.rederived import Rederived
from shardwright.planning.search.objectives import phase_loads
from shardwright.planning.search.placement import propose
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.workload import Workload
from shardwright_plugins.commands.calibrate.kernels import OPTIMIZER
from shardwright_plugins.estimators.engine import amounts_of
from shardwright_plugins.estimators.engine.step import ENGINE, StepWork


@frozen
class StepCase:
    """Equal tables by one sharding type: their number, rows, columns, samples of a rank, ids of a bag."""

    kind: str
    tables: int
    rows: int
    columns: int
    batch: int
    ids: int

    @property
    def workload(self) -> dict[str, Any]:
        """The tables as JSON data of a workload."""
        optimizer = {"name": OPTIMIZER.name, "learning_rate": OPTIMIZER.learning_rate, "eps": 1e-8}
        tables = [
            {
                "name": f"t{index}",
                "num_embeddings": self.rows,
                "embedding_dim": self.columns,
                "pooling_factor": self.ids,
                "optimizer": optimizer,
            }
            for index in range(self.tables)
        ]
        return {"name": f"{self.kind} {self.tables}", "batch_size_per_rank": self.batch, "tables": tables}


_EACH = (
    (2, 20_000, 16, 64, 1),
    (16, 20_000, 8, 512, 1),
    (16, 50_000, 64, 2048, 2),
    (8, 100_000, 128, 1024, 4),
    (8, 100_000, 16, 1024, 20),
    (12, 150_000, 32, 2048, 8),
    (4, 20_000, 64, 512, 30),
    (32, 2_000, 16, 256, 4),
    (16, 100_000, 64, 2048, 10),
)
_COPIES = (
    (2, 1_000, 16, 64, 1),
    (32, 1_000, 16, 256, 4),
    (8, 500, 64, 1024, 20),
    (8, 5_000, 32, 2048, 10),
    (4, 1_000, 128, 2048, 4),
    (8, 50_000, 32, 1024, 3),
    (4, 100_000, 128, 512, 10),
    (16, 50_000, 8, 512, 1),
)


def cases(types: Sequence[str]) -> list[StepCase]:
    """The experiments of some sharding types: those that copy tables have small ones too."""
    offered = host().sharding_types
    found = []
    for kind in types:
        found += [StepCase(kind, *case) for case in (_COPIES if _copies(kind) else _EACH) if kind in offered]
    return found


def _copies(kind: str) -> bool:
    """True if a type's tables are on every rank."""
    workload = Workload.from_data(StepCase(kind, 1, 100, 8, 1, 1).workload)
    plan = _planned(workload, Topology(2, "cpu"), kind, "")
    sharding = next(iter(plan.plan[""].values()))
    return all(dataflow.is_replicated for dataflow in sharding.layout.dataflows)


def plan_of(case: StepCase, topology: Topology, kernel: str) -> ShardingPlan:
    """The plan of a case: its tables even on the ranks."""
    return _planned(Workload.from_data(case.workload), topology, case.kind, kernel)


def _planned(workload: Workload, topology: Topology, kind: str, kernel: str) -> ShardingPlan:
    rule = ParameterConstraints(
        sharding_types=[kind], compute_kernels=[kernel] if kernel else None, min_partition=4
    )
    constraints = {
        table.path: evolve(rule, pooling_factors=workload.constraints[table.path].pooling_factors)
        for table in workload.tables
    }
    planner = TablePlanner(
        topology,
        workload.batch_size,
        constraints=constraints,
        estimator="roofline",
        storage_reservation=0.0,
        progress=False,
    )
    return planner.plan_tables(workload.tables)


def loads_of(plan: ShardingPlan, cache_bytes: float) -> Mapping[str, Floats]:
    """The amounts of a plan on each rank: ``[W]`` each."""
    again = Rederived.of(plan, host())
    placed, space = again.placed_plan(), again.space
    amounts = amounts_of(StepWork(space.options, space.topology, cache_bytes))
    shards = propose(space, placed.proposal)
    loads: Mapping[str, Floats] = phase_loads(
        evolve(space, phases=amounts), placed.proposal, shards, placed.ranks
    )
    return loads


def table_of(loads: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """The amounts of experiments: of exchanges the mean over ranks, else the most: ``[E]`` each, with the fixed one."""
    found = {
        name: np.array([own[name].mean() if name in ENGINE else own[name].max() for own in loads])
        for name in loads[0]
    }
    return {**found, "step": np.ones(len(loads))}
