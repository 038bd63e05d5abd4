"""Plans of many kinds of one workload: what planners choose, and what nobody would but a draw.

Legend: A tables, N shards that may move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import evolve, frozen

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.errors import PlanningError
from shardwright.host import host
from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.search.placement import Placed, propose
from shardwright.planning.tables.workload import Workload

_TYPES_A_PLAN = (1, 1, 2, 3, 100)
"""Number of sharding types that a drawn plan has at most, in turn."""
_SECONDS = 1.0
"""Limit of a proposer's search; the plan of an estimator has the planner's own."""
_PREFERRED_KERNEL = 0.75
"""Part of the drawn plans in which all tables have the kernel that planners prefer."""
_DRAWN_BY = "torchrec"
"""Estimator of the drawn ones: one without refinements, which would search near a draw and keep the best."""


@frozen
class Candidate:
    """A plan to be measured.

    Args:
        label: name of its origin.
        plan: the plan.
        chosen_by: the estimators whose own plan it is: what the planner makes with them.
    """

    label: str
    plan: ShardingPlan
    chosen_by: tuple[str, ...] = ()


def candidates(
    workload: Workload, topology: Topology, estimators: Sequence[str], *, count: int, seed: int = 0
) -> list[Candidate]:
    """Each estimator's own plan, each proposer's best by each, and drawn ones; no plan twice.

    Args:
        workload: the tables and their use.
        topology: the ranks.
        estimators: performance estimators, as ``--estimator`` names them.
        count: number of plans; all own plans are made, however many there are.
        seed: number that decides the drawn ones.
    """
    found: dict[str, Candidate] = {}

    def add(label: str, planner: TablePlanner, chosen_by: tuple[str, ...] = ()) -> None:
        plan = planner.plan_tables(workload.tables)
        key = evolve(plan, document={}).to_json()  # its shards, not what it says of itself
        known = found.get(key, Candidate(label, plan))
        found[key] = evolve(known, chosen_by=known.chosen_by + chosen_by)

    for estimator in estimators:
        add(f"planned by {estimator}", _planner(workload, topology, estimator), (estimator,))
    planned = (len(found) + count) // 2  # the other half is drawn
    for proposer in host().proposers.names:
        for estimator in estimators:
            if len(found) >= planned:
                break
            try:
                add(f"{proposer} by {estimator}", _planner(workload, topology, estimator, proposer))
            except PlanningError:  # a proposer may find nothing in a large space
                continue
    for number in range(10 * count):  # draws may repeat each other
        if len(found) >= count:
            break
        drawn = _Drawn(seed, number)
        add(f"drawn {number}", _planner(workload, topology, _DRAWN_BY, drawn))
    return list(found.values())


def _planner(
    workload: Workload, topology: Topology, estimator: str, proposer: str | Proposer | None = None
) -> TablePlanner:
    return TablePlanner(
        topology,
        workload.batch_size,
        constraints=workload.constraints,
        estimator=estimator,
        proposer=proposer,
        seconds=None if proposer is None else _SECONDS,
        storage_reservation=0.0,
        progress=False,
    )


class _Drawn(Proposer):
    """One plan, drawn: some sharding types dealt to the tables by chance, ranks by chance or even."""

    name: ClassVar[str] = "drawn"

    def __init__(self, seed: int, number: int) -> None:
        self._draw = np.random.default_rng([seed, number])
        self._types = _TYPES_A_PLAN[number % len(_TYPES_A_PLAN)]

    def proposals(self, space: SearchSpace) -> Proposals:  # type: ignore[override]  # needs no watch
        """The plan, as soon as one fits."""
        plan = None
        while plan is None:  # the search would keep the best of more
            proposal = self._options(space.options)
            plan = (yield Placed(proposal, self._ranks(space, proposal))).plan

    def _options(self, options: Options) -> Ints:
        draw = self._draw
        types = draw.permutation(len(options.sharding_types))[: self._types]
        is_common = draw.random() < _PREFERRED_KERNEL
        offered = np.unique(options.compute_kernel)  # the preferred one first
        kernel = int(offered[0] if is_common else draw.choice(offered))
        chosen = [
            self._option(options, np.array(options.of_table(table)), types, kernel)
            for table in options.distinct_table.tolist()
        ]
        return np.array(chosen, dtype=np.int64)

    def _option(self, options: Options, own: Ints, types: Ints, kernel: int) -> int:
        """An option of the types and of the kernel; of others where the table has none of these."""
        for wanted in (
            np.isin(options.sharding_type[own], types) & (options.compute_kernel[own] == kernel),
            options.compute_kernel[own] == kernel,
        ):
            if wanted.any():
                own = own[wanted]
                break
        return int(self._draw.choice(own))

    def _ranks(self, space: SearchSpace, proposal: Ints) -> Ints:
        shards = propose(space, proposal)
        ranks: Ints = self._draw.integers(shards.world_size, size=len(shards))
        if self._draw.random() < 0.5:
            return ranks
        # Even by bytes of rows looked up, which no estimator has a part in.
        options = space.options
        work = options.ids_per_batch[options.shard_table] * options.id_fraction * options.num_columns
        loads: Floats = np.zeros(shards.world_size)
        for place in np.argsort(-work[shards.shard]).tolist():
            ranks[place] = loads.argmin()
            loads[ranks[place]] += work[shards.shard[place]]
        return ranks


def described(plan: ShardingPlan) -> Mapping[str, int]:
    """Number of tables of a plan with each sharding type and kernel: ``{"row_wise fused": 3}``."""
    counts: dict[str, int] = {}
    for sharding in _shardings(plan):
        name = f"{sharding.sharding_type} {sharding.compute_kernel}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _shardings(plan: ShardingPlan) -> Iterator[Any]:
    for module in plan.plan.values():
        yield from module.values()
