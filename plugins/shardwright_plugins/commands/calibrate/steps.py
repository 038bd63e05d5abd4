"""Experiments with steps of unlike tables by one or several sharding types, phase by phase.

What is not lookups and updates is what the engine does: routing, exchanges, order of columns, copies kept equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from shardwright.host import host
from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.search.loaded import LoadedPlan
from shardwright.planning.search.objectives import largest_rank_time
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.workload import Workload
from shardwright_plugins.commands.calibrate.kernels import OPTIMIZER
from shardwright_plugins.estimators.engine import Engine, amounts_of
from shardwright_plugins.estimators.engine.machine import STEP, Machine
from shardwright_plugins.estimators.engine.step import OF_ENGINE, StepWork
from shardwright_plugins.estimators.engine.work import OF_KERNELS
from shardwright_plugins.measuring.steps import Measured
from shardwright_plugins.plan_differences.rederived import Rederived


@frozen
class StepCase:
    """Tables by some sharding types in turn: samples of a rank; number, mean rows and columns of tables, ids of a bag.

    Rows and columns differ from table to table: tables of the same rows share kernel calls, which real ones do not.
    """

    kinds: Sequence[str]
    batch: int
    tables: int
    rows: int
    columns: int
    ids: int

    @property
    def workload(self) -> dict[str, Any]:
        """The tables as JSON data of a workload."""
        optimizer = {"name": OPTIMIZER.name, "learning_rate": OPTIMIZER.learning_rate, "eps": 1e-8}
        tables = [
            {
                "name": f"t{index}",
                "num_embeddings": int(self.rows * _ROWS[index % len(_ROWS)]) + index,
                "embedding_dim": int(self.columns * _COLUMNS[index % len(_COLUMNS)]),
                "pooling_factor": self.ids,
                "optimizer": optimizer,
            }
            for index in range(self.tables)
        ]
        return {
            "name": f"{'+'.join(self.kinds)} {self.tables}",
            "batch_size_per_rank": self.batch,
            "tables": tables,
        }

    def kind_of(self, index: int) -> str:
        """The sharding type of a table."""
        return self.kinds[index % len(self.kinds)]


_ROWS = (0.5, 1.0, 2.0)
_COLUMNS = (1, 1, 2, 0.5)
_WHOLE, _CUT, _COLUMN, _COPY = "table_wise", "row_wise", "column_wise", "data_parallel"
# Samples, tables, rows, columns, ids.
_SIZES = (
    (64, 2, 20_000, 16, 1),
    (512, 16, 20_000, 16, 1),
    (2048, 16, 50_000, 64, 2),
    (1024, 8, 100_000, 128, 4),
    (1024, 8, 100_000, 16, 20),
    (2048, 12, 150_000, 32, 8),
    (512, 4, 20_000, 64, 30),
    (256, 30, 2_000, 16, 4),
    (2048, 15, 2_000, 32, 6),
    (2048, 16, 100_000, 64, 10),
    (1024, 6, 400_000, 64, 3),
)
_KINDS = (
    (_WHOLE,),
    (_CUT,),
    (_COLUMN,),
    (_COPY,),
    (_COPY, _WHOLE),
    (_WHOLE, _WHOLE, _WHOLE, _COPY),
    (_WHOLE, _COLUMN, _CUT, _COPY),
)


def cases() -> list[StepCase]:
    """The experiments, as far as their sharding types are installed: each size by each choice of types."""
    offered = host().sharding_types
    return [
        StepCase(kinds, *size)
        for kinds in _KINDS
        if all(kind in offered for kind in kinds)
        for size in _SIZES
    ]


OF_KERNELS_ALONE: Mapping[str, tuple[str, Sequence[int]]] = {
    STEP: (_WHOLE, (0, 1, 7, 10)),
    "cut": (_CUT, (1, 4, 5, 8)),
    "copied": (_COPY, (1, 4, 5, 8)),
}
"""Constant of a kernel that steps tell -> the sharding type, and places in :data:`_SIZES`.

Short steps tell what any step takes; few and many rows and ids tell efforts. They are fitted in this order.
"""


def effort_cases(effort: str) -> list[StepCase]:
    """The experiments that tell a kernel's effort; none if their sharding type is not installed.

    Args:
        effort: one of :data:`OF_KERNELS_ALONE`.
    """
    kind, sizes = OF_KERNELS_ALONE[effort]
    return [StepCase((kind,), *_SIZES[size]) for size in sizes if kind in host().sharding_types]


def step_ms_by(machine: Machine, plan: ShardingPlan) -> float:
    """Time of a plan's step by a machine's constants, ms."""
    again = Rederived.of(plan, host())
    placed, space, engine = again.loaded_plan(), again.space, Engine.of(machine)
    phases = engine.estimate(space.options, space.topology)
    loads = LoadedPlan(evolve(space, phases=phases), placed.proposal, placed.ranks).phases_ms
    return largest_rank_time(engine.step_phases(loads, space.options, placed.proposal, space.topology))


def plan_of(case: StepCase, topology: Topology, kernel: str) -> ShardingPlan:
    """The plan of a case: its tables about even on the ranks, in a moment rather than as even as can be."""
    workload = Workload.from_data(case.workload)
    constraints = {
        table.path: ParameterConstraints(
            sharding_types=[case.kind_of(index)],
            compute_kernels=[kernel],
            min_partition=4,
            pooling_factors=workload.constraints[table.path].pooling_factors,
        )
        for index, table in enumerate(workload.tables)
    }
    planner = TablePlanner(
        topology,
        workload.batch_size,
        constraints=constraints,
        estimator="roofline",
        proposer="uniform",
        storage_reservation=0.0,
        progress=False,
    )
    return planner.plan_tables(workload.tables)


def loads_of(plan: ShardingPlan, cache_bytes: float) -> Mapping[str, Floats]:
    """The amounts of a plan on each rank: ``[W]`` each."""
    again = Rederived.of(plan, host())
    placed, space = again.loaded_plan(), again.space
    amounts = amounts_of(StepWork(space.options, space.topology, cache_bytes))
    return LoadedPlan(evolve(space, phases=amounts), placed.proposal, placed.ranks).phases_ms


def without_travel(run: Measured, plan: ShardingPlan) -> Measured:
    """The times of a run less what ``roofline`` says of exchanges, which ``engine`` adds to its own between hosts.

    Args:
        run: times of a plan on several hosts.
        plan: the plan, by ``roofline`` for a topology with the links as they were measured.
    """
    travel = {
        phase: float(ms.mean()) * (phase not in OF_KERNELS)
        for phase, ms in Rederived.of(plan, host()).loaded_plan().phases_ms.items()
    }
    return evolve(
        run, phases_ms={phase: max(ms - travel.get(phase, 0.0), 0.0) for phase, ms in run.phases_ms.items()}
    )


def amounts_of_ranks(
    loads: Sequence[Mapping[str, Floats]], ends: Callable[[Floats], float]
) -> dict[str, Floats]:
    """The engine's amounts of experiments, of exchanges the mean over ranks, else what they wait for: ``[E]`` each.

    Args:
        loads: the amounts of experiments on each rank.
        ends: function of the amounts of each rank, ``[W]``, to what all wait for.
    """
    computed = {name for phase in OF_KERNELS for name in OF_ENGINE[phase]}
    found = {
        name: np.array([ends(own[name]) if name in computed else own[name].mean() for own in loads])
        for name in loads[0]
    }
    results = np.array([found[f"{kind}_result"] for kind in ("whole", "cut", "copy")])
    elements, is_there = results.sum(0), results > 0
    # All are moved once more where tables are of several kinds (``mixing.py``).
    arranged = elements * (is_there.sum(0) > 1)
    regrouped = elements * (is_there[0] & is_there[1])
    return {**found, "mixed_sent": regrouped, "mixed_result": arranged, "mixed_gradient": arranged}


def alone(
    loads: Sequence[Mapping[str, Floats]],
    kernel: Mapping[str, float],
    names: Sequence[str],
    ends: Callable[[Floats], float],
) -> Floats:
    """Time that a kernel takes alone for the work of a step's ranks, ms: ``[E]``.

    Args:
        loads: the amounts of experiments.
        kernel: constants of the kernel.
        names: names of the amounts of lookups, or of updates.
        ends: function of the times of each rank, ``[W]``, to what all wait for.
    """
    return np.array([ends(np.sum([own[name] * kernel[name] for name in names], axis=0)) for own in loads])
