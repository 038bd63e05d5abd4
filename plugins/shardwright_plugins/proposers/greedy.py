"""greedy: each table's cheapest option, then the worst table's next one, and so on."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.arrays import FREE, Floats, Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.loaded import Feedback, LoadedPlan
from shardwright.planning.search.placement import chosen_runs, propose
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers._ranking import Measure, ranked_options

# Proposals in a row that may be no better than the best before a descent gives up; more while nothing has
# fitted.
PATIENCE = 24
PATIENCE_WITHOUT_PLAN = 200


class Greedy(Proposer):
    """Starts with the cheapest option of each table and moves one table at a time on to its next option.

    The idea is TorchRec's ``GreedyProposer``. The outcome of the last proposal tells which table
    moves. If it fitted, the slowest on the most loaded rank moves. If not, the one whose shard takes most of the
    memory that was short moves, or the smallest of those that are cut over all ranks, if these were too many.
    Four descents are made: from the options of least cost on any rank, of least cost over all ranks, of least
    memory on any rank, and of least memory over all ranks.
    """

    name: ClassVar[str] = "greedy"
    preference: ClassVar[int] = 0

    def proposals(self, space: SearchSpace, watch: Watch) -> Proposals:
        """Proposals of the four descents, one after the other."""
        capacity = np.maximum(space.capacity_bytes.max(axis=0), 1)
        largest_share: Floats = (space.largest_bytes / capacity).max(axis=1)
        total_share: Floats = (space.total_bytes / capacity).max(axis=1)
        for cost in (space.largest_cost_ms, space.total_cost_ms, largest_share, total_share):
            yield from _Descent(space, cost).proposals()


class _Descent:
    """One way down through the options of each table."""

    def __init__(self, space: SearchSpace, cost: Measure) -> None:
        self.space = space
        self.order = ranked_options(space, cost)
        self.place = space.options.first_option[:-1][space.options.distinct_table]
        self.costs = [
            _Measured(self, space.largest_cost_ms),
            _Measured(self, space.total_cost_ms),
        ]
        self.bytes = [
            [_Measured(self, space.largest_bytes[:, tier]), _Measured(self, space.total_bytes[:, tier])]
            for tier in range(len(space.tiers))
        ]

    @property
    def proposal(self) -> Ints:
        """The option of each table."""
        return self.order[self.place]

    def proposals(self) -> Proposals:
        best_ms, patience = float("inf"), PATIENCE_WITHOUT_PLAN
        while patience and self._shrink():
            proposal = self.proposal
            feedback = yield proposal
            if feedback.value_ms < best_ms:
                best_ms, patience = feedback.value_ms, PATIENCE
            patience -= 1
            if not self._relieve(proposal, feedback):
                return

    def _shrink(self) -> bool:
        """Move tables on until all together need no more memory than there is; whether they came so far."""
        have = self.space.capacity_bytes.sum(axis=0)
        while True:
            over = self.space.total_bytes[self.proposal].sum(axis=0) - have
            if (over <= 0).all():
                return True
            tier = int(np.argmax(over))
            total = self.bytes[tier][1]
            if not self._move([total], np.argsort(-total.values[self.proposal], kind="stable")):
                return False

    def _relieve(self, proposal: Ints, feedback: Feedback) -> bool:
        """Move the table on that matters most; whether there was one to move."""
        if feedback.plan is not None:
            return self._move(self.costs, self._bottleneck_tables(feedback.plan))
        assert feedback.misfit is not None  # there is no plan
        largest, total = self.bytes[self.space.tiers.index(feedback.misfit.tier)]
        size = largest.values[proposal]
        if feedback.misfit.is_fixed:
            # What every rank has a part of is too much. Copies first, the largest; then what is cut over all ranks:
            # each cut costs buffers, and small tables fit whole.
            copied = self.space.options.is_replicated[proposal]
            return self._move([total], np.lexsort((np.where(copied, -size, size), ~copied)))
        return self._move([largest], np.argsort(-size, kind="stable"))

    def _bottleneck_tables(self, plan: LoadedPlan) -> Ints:
        """The tables with shards on the most loaded rank, the slowest first."""
        rank = int(np.argmax(plan.load_ms))
        cost = _cost_on(self.space, plan.proposal, plan.ranks, rank)
        order = np.argsort(-cost, kind="stable")
        return order[cost[order] > 0]

    def _move(self, measures: list[_Measured], tables: Ints) -> bool:
        """Move the first of ``tables`` that can on to its next option that is better in some measure."""
        able = np.logical_or.reduce([measure.can_improve() for measure in measures])[tables]
        if not able.any():
            return False
        table = int(tables[np.argmax(able)])
        option = self.order[self.place[table]]
        start = int(self.place[table]) + 1
        stop = int(self.space.options.first_option[self.space.options.distinct_table[table] + 1])
        later = self.order[start:stop]
        better = np.logical_or.reduce(
            [measure.values[later] < measure.values[option] for measure in measures]
        )
        self.place[table] = start + int(np.argmax(better))
        return True


def _cost_on(space: SearchSpace, proposal: Ints, ranks: Ints, rank: int) -> Floats:
    """Compute the time that each table adds to a rank, ms: ``[A]``."""
    shards, (runs, tables) = propose(space, proposal), chosen_runs(space, proposal)
    there = ranks == rank
    moved = np.bincount(shards.table[there], weights=shards.cost_ms[there], minlength=len(proposal))
    first = space.options.rank[runs]
    here = (first != FREE) & (first <= rank) & (rank < first + space.options.count[runs])
    fixed = np.bincount(tables[here], weights=space.cost_ms[runs[here]], minlength=len(proposal))
    both: Floats = np.asarray(moved + fixed, dtype=np.float64)
    return both


class _Measured:
    """A measure of options, and the least of it among the options that come later in a table's order."""

    def __init__(self, descent: _Descent, values: Measure) -> None:
        self.values = values
        self._descent = descent
        order = descent.order
        # [O]: the least of values over the later places of the same table; the largest number at its last
        # place.
        self._later = np.full(len(order), np.inf)
        for start, stop in pairwise(descent.space.options.first_option.tolist()):
            backwards = values[order[start + 1 : stop]][::-1]
            self._later[start : stop - 1] = np.minimum.accumulate(backwards)[::-1]

    def can_improve(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """True for tables with a later option that is better than the present one: ``[T]``."""
        place = self._descent.place
        return np.less(self._later[place], self.values[self._descent.order[place]])
