"""The measure by which plans of a search are compared: its objective, or the time of a step."""

from __future__ import annotations

from attrs import frozen

from shardwright.contracts.estimator import Estimator
from shardwright.planning.arrays import Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.objectives import OBJECTIVES, Phases, largest_rank_time


@frozen(eq=False)
class Measure:
    """Measure of plans: an estimator that refines plans by the step's time (``Estimator.step_phases``) compares by it.

    Args:
        performance: estimator that the costs are by.
        space: options and costs.
    """

    performance: Estimator
    space: SearchSpace

    def step_of(self, phases: Phases, chosen: Ints) -> Phases | None:
        """Phases of a step, ms of each rank; ``None`` where plans are compared by the objective.

        Args:
            phases: phase -> milliseconds that the shards of a plan take on each rank, ``[W]``.
            chosen: the option of each of all tables, ``[A]``.
        """
        topology = self.space.topology
        if not self.performance.refinements(topology):
            return None
        step = self.performance.step_phases(phases, self.space.options, chosen, topology)
        return None if step is phases else step  # it says no more of a step than of tables

    def of(self, phases: Phases, chosen: Ints) -> float:
        """The measure of a plan, ms; arguments as of :meth:`step_of`."""
        step = self.step_of(phases, chosen)
        return OBJECTIVES[self.space.objective](phases) if step is None else largest_rank_time(step)
