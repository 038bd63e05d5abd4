"""uniform: every table with the same sharding type."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.arrays import Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers._ranking import ranked_options


class Uniform(Proposer):
    """Propose each table's cheapest option of one sharding type, for each type and measure of cost.

    A table for which the type offers nothing that fits takes its cheapest option of any.
    """

    name: ClassVar[str] = "uniform"
    preference: ClassVar[int] = 0

    def proposals(self, space: SearchSpace, watch: Watch) -> Proposals:
        """Each type in turn, by the cost of the slowest shard and by that of all shards."""
        for code in np.unique(space.options.sharding_type).tolist():
            for cost in (space.largest_cost_ms, space.total_cost_ms):
                yield _of_type(space, code, ranked_options(space, cost))


def _of_type(space: SearchSpace, code: int, order: Ints) -> Ints:
    """The first option of each table in ``order`` that is of type ``code`` and fits alone, or the first of all."""
    options = space.options
    wanted = (options.sharding_type[order] == code) & space.fits_alone[order]
    place = np.where(wanted, np.arange(len(order)), len(order))
    first = np.minimum.reduceat(place, options.first_option[:-1])
    return order[np.where(first < len(order), first, options.first_option[:-1])][options.distinct_table]
