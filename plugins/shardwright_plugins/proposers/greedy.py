"""greedy: each table's cheapest option, then the worst table's next one, and so on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.options import Ints
from shardwright.planning.placement import Feedback, propose
from shardwright.planning.space import SearchSpace
from shardwright_plugins.proposers._ranking import Measure, ranked_options

# Proposals in a row that may be no better than the best before a descent gives up.
PATIENCE = 24


class Greedy(Proposer):
    """Starts with the cheapest option of each table and moves one table at a time on to its next option.

    The idea is TorchRec's ``GreedyProposer``. Which table moves is learnt from what became of the last proposal: if it
    fitted, the dearest on the most loaded rank; if not, the one that takes most of the memory that was short. Three
    descents are made: from the options of least cost on any rank, of least cost over all ranks, of least memory on any
    rank.
    """

    name: ClassVar[str] = "greedy"
    preference: ClassVar[int] = 20

    def proposals(self, space: SearchSpace) -> Proposals:
        """Proposals of the three descents, one after the other."""
        share = (space.largest_bytes / np.maximum(space.capacity_bytes.max(axis=0), 1)).max(axis=1)
        for cost in (space.largest_cost_ms, space.total_cost_ms, share):
            yield from _Descent(space, cost).proposals()


class _Descent:
    """One way down through the options of each table."""

    def __init__(self, space: SearchSpace, cost: Measure) -> None:
        self.space = space
        self.order = ranked_options(space, cost)
        self.position = space.options.first_option[:-1].copy()
        self.best_ms = float("inf")
        self.patience = PATIENCE

    def proposals(self) -> Proposals:
        while True:
            proposal = self.order[self.position]
            feedback = yield proposal
            if feedback.misfit is None and not self._goes_on(feedback.value_ms):
                return
            step = self._relieve(proposal, feedback)
            if step is None:
                return
            table, position = step
            self.position[table] = position

    def _goes_on(self, value_ms: float) -> bool:
        if value_ms < self.best_ms:
            self.best_ms, self.patience = value_ms, PATIENCE
        self.patience -= 1
        return self.patience > 0

    def _relieve(self, proposal: Ints, feedback: Feedback) -> tuple[int, int] | None:
        """The table to move on, and to which place in its order; ``None`` at the end of the way."""
        space = self.space
        if feedback.misfit is not None:
            tier = space.tiers.index(feedback.misfit.tier)
            gains: list[Measure] = [space.largest_bytes[:, tier], space.total_bytes[:, tier]]
            tables: Iterator[int] = iter(np.argsort(-gains[0][proposal], kind="stable").tolist())
        else:
            gains = [space.largest_cost_ms, space.total_cost_ms]
            tables = self._bottleneck_tables(proposal, feedback)
        for table in tables:
            position = self._next_position(table, int(proposal[table]), gains)
            if position is not None:
                return table, position
        return None

    def _bottleneck_tables(self, proposal: Ints, feedback: Feedback) -> Iterator[int]:
        """The tables with shards on the most loaded rank, the dearest first."""
        assert feedback.load_ms is not None  # it fitted
        shards = propose(self.space, proposal)
        there = feedback.ranks == np.argmax(feedback.load_ms)
        cost = np.bincount(shards.table[there], weights=shards.cost_ms[there], minlength=len(proposal))
        order = np.argsort(-cost, kind="stable")
        return iter(order[cost[order] > 0].tolist())

    def _next_position(self, table: int, option: int, gains: list[Measure]) -> int | None:
        """The next place in a table's order with an option that is better than ``option`` in some measure."""
        start, stop = int(self.position[table]) + 1, self.space.options.of_table(table).stop
        later = self.order[start:stop]
        better = np.logical_or.reduce([gain[later] < gain[option] for gain in gains])
        found = np.flatnonzero(better)
        return start + int(found[0]) if len(found) else None
