"""grid_search: every combination of options, where there are few."""

from __future__ import annotations

import math
from itertools import product
from typing import ClassVar

import numpy as np

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers._ranking import ranked_options
from shardwright_plugins.proposers.dominance import efficient_options

# As many as TorchRec's GridSearchProposer looks at.
MOST_COMBINATIONS = 10_000


class GridSearch(Proposer):
    """Every combination of one option per table, the cheapest options first.

    Options that another of the same table beats in every respect are left out. If there are more than 10 000
    combinations, those of fewer options a table are tried: of each table as many of the cheapest as make fewer.
    """

    name: ClassVar[str] = "grid_search"

    def proposals(self, space: SearchSpace, watch: Watch) -> Proposals:
        """The combinations, the last table's option changing fastest."""
        efficient = efficient_options(space)
        order = ranked_options(space, space.total_cost_ms)
        each = []
        for table in space.options.distinct_table.tolist():
            mine = order[space.options.first_option[table] : space.options.first_option[table + 1]]
            each.append([option for option in mine.tolist() if efficient[option]] or mine[:1].tolist())
        most = max(map(len, each))
        while math.prod(min(len(options), most) for options in each) > MOST_COMBINATIONS and most > 1:
            most -= 1
        for proposal in product(*(options[:most] for options in each)):
            yield np.array(proposal, dtype=np.int64)
