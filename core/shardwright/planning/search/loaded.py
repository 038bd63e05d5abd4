"""A plan with its loads, and the answer to a proposal.

Legend: A tables, N shards that may move, W ranks, M memory tiers, S runs of equal shards, C classes of ranks.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import Factory, frozen

from shardwright.planning.arrays import FREE, Floats, Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.objectives import OBJECTIVES, Phases
from shardwright.planning.search.placement import Misfit, ProposedShards, chosen_runs, fixed_loads, propose


@frozen(eq=False)
class Feedback:
    """Outcome of a proposal.

    Args:
        plan: the plan with its loads; ``None`` if its shards did not fit.
        misfit: shard that did not fit, and where.
    """

    plan: LoadedPlan | None = None
    misfit: Misfit | None = None

    @property
    def value_ms(self) -> float:
        """The objective; infinite if the shards did not fit."""
        return float("inf") if self.plan is None else self.plan.value_ms


@frozen(eq=False, slots=False)
class LoadedPlan:
    """A plan in its search space, with what it puts on each rank: all sums over its shards are made here.

    Args:
        space: options and costs.
        proposal: the option of each of all tables: ``[A]``; some of all tables, if loads are all that is asked for.
        ranks: ranks of its shards that have none by their layout, in the order of tables and shards: ``[N]``.
        shards: these shards.
    """

    space: SearchSpace
    proposal: Ints
    ranks: Ints
    shards: ProposedShards = Factory(lambda self: propose(self.space, self.proposal), takes_self=True)

    @cached_property
    def phases_ms(self) -> Phases:
        """Phase of a step -> time of each rank: ``[W]``."""
        return {phase: self.by_rank(cost) for phase, cost in self.space.phases.items()}

    @cached_property
    def used_bytes(self) -> Ints:
        """Memory used on each rank: ``[W, M]``."""
        return self.shards.used_bytes(self.ranks)

    @cached_property
    def load_ms(self) -> Floats:
        """Time of each rank, all phases together: ``[W]``."""
        total: Floats = np.sum(list(self.phases_ms.values()), axis=0)
        return total

    @cached_property
    def table_ms(self) -> Floats:
        """Time of all shards of each table on their ranks: ``[A]``."""
        shards, space = self.shards, self.space
        beyond_mean = space.on_ranks(shards.class_ms, self.ranks) - shards.cost_ms
        total: Floats = space.total_cost_ms[self.proposal]
        return total + np.bincount(shards.table, beyond_mean, minlength=len(total))

    @cached_property
    def value_ms(self) -> float:
        """The objective."""
        return OBJECTIVES[self.space.objective](self.phases_ms)

    @cached_property
    def _fixed_runs(self) -> Ints:
        runs, _ = chosen_runs(self.space, self.proposal)
        fixed: Ints = runs[self.space.options.rank[runs] != FREE]
        return fixed

    def by_rank(self, column: Floats | Ints) -> Floats:
        """A column over runs of shards, ``[S]`` or by class ``[S, C]``, added up over each rank's shards: ``[W]``."""
        fixed = fixed_loads(self.space, self._fixed_runs, cost_ms=column)[0]
        moved = self.space.on_ranks(column[self.shards.shard], self.ranks)
        total: Floats = fixed + np.bincount(self.ranks, weights=moved, minlength=len(fixed))
        return total

    @cached_property
    def ranks_of_tables(self) -> list[tuple[int, ...]]:
        """The rank of every shard of each of all tables, in the order of its layout's blocks: ``A`` tuples."""
        chosen, moved = self.proposal.tolist(), iter(self.ranks.tolist())
        fixed = {option: tuple(self.space.options.fixed_ranks(option).tolist()) for option in set(chosen)}
        return [
            tuple(next(moved) if rank == FREE else rank for rank in ranks) if FREE in ranks else ranks
            for ranks in map(fixed.__getitem__, chosen)
        ]
