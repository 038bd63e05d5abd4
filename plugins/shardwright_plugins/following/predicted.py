"""The prediction of a plan: phases of a step on each rank, and what each table's lookups and updates take.

Legend: A tables, W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from attrs import evolve, frozen

from shardwright.errors import PlanError
from shardwright.host import host
from shardwright.planning.arrays import Floats
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.search.objectives import largest_rank_time
from shardwright_plugins.plan_differences.rederived import Rederived


@frozen
class Predicted:
    """An estimator's price of a plan.

    Args:
        estimator: name of the estimator.
        step_ms: time of a step, that of the rank whose phases take longest.
        phases_ms: phase of a step -> milliseconds on each rank.
    """

    estimator: str
    step_ms: float
    phases_ms: Mapping[str, Sequence[float]]


@frozen(eq=False, slots=False)
class Prices:
    """An estimator's prices of plans of one workload, which was asked of all alike.

    Args:
        estimator: name, as ``--estimator`` has it.
        asked: any of the plans, with all options and costs.
    """

    estimator: str
    asked: Rederived

    @classmethod
    def by(cls, plan: ShardingPlan, estimator: str | None = None) -> Prices:
        """The prices by an estimator; by that which the plan was made with, if none is named.

        Raises:
            PlanError: the plan does not say what was asked of the planner.
        """
        inputs = plan.document.get("inputs", {})
        if estimator is not None:
            inputs = {**inputs, "estimator": {"value": estimator, "provenance": "given"}}
            plan = evolve(plan, document={**plan.document, "inputs": inputs})
        asked = Rederived.of(plan, host())
        return cls(estimator or str(inputs["estimator"]["value"]), asked)

    def of(self, plan: ShardingPlan) -> Predicted | None:
        """Price a plan; ``None`` if it has options that the estimator knows nothing of."""
        try:
            placed = evolve(self.asked, plan=plan).loaded_plan()
        except PlanError:
            return None
        space = self.asked.space
        performance = self.asked.plugins.performance
        phases = performance.step_phases(placed.phases_ms, space.options, placed.proposal, space.topology)
        told = {name: own.round(5).tolist() for name, own in phases.items() if own.any()}
        return Predicted(self.estimator, round(largest_rank_time(phases), 5), told)

    @cached_property
    def of_tables(self) -> Mapping[str, Mapping[str, Floats]]:
        """Phase -> path of each table of the plan -> milliseconds of its shards on each rank, ``[W]``."""
        space = self.asked.space
        tables = list(zip(space.options.all_tables, *self.asked.match, strict=True))
        return {
            phase: {
                table.path: np.bincount(
                    ranks,
                    space.on_ranks(space.options.spread(costs, option), np.array(ranks)),
                    minlength=space.topology.world_size,
                ).astype(np.float64)
                for table, option, ranks in tables
                if option is not None
            }
            for phase, costs in space.phases.items()
        }
