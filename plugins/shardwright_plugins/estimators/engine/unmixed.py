"""Plans whose tables are all whole and of one kernel, beside which a mixed plan has to stand.

That a plan is mixed costs its outputs once, however many tables are of another kind. A search, which is told a cost of
each table, does not see that. So when it has found a mixed plan, that is compared with plans of one kind.

Legend: A tables, O options.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.planning.arrays import Bools, Floats, Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.placement import Misfit, Placed, fixed_misfit, propose
from shardwright.planning.search.ruled_placement import place_within
from shardwright_plugins.estimators.engine.mixing import WHOLE, Mixing
from shardwright_plugins.partitioners.longest_first import LongestFirst


def unmixed_plans(space: SearchSpace) -> Iterator[Placed]:
    """Plans of whole tables of one kernel: for each kernel those of least time, and of least time of the longest shard.

    Args:
        space: options and costs; what fits no rank is left out.
    """
    options = space.options
    is_whole = (Mixing(options, {}).kind == WHOLE) & space.fits_alone
    for kernel in range(len(options.compute_kernels)):
        allowed = is_whole & (options.compute_kernel == kernel)
        for cost in (space.total_cost_ms, space.largest_cost_ms):
            proposal = _cheapest(space, np.where(allowed, cost, np.inf), allowed)
            if proposal is None:
                continue
            shards = propose(space, proposal)
            if fixed_misfit(space, proposal, shards) is not None:
                continue
            ranks = place_within(space.rules, LongestFirst(), shards)
            if not isinstance(ranks, Misfit):
                yield Placed(proposal, ranks)


def _cheapest(space: SearchSpace, cost: Floats, allowed: Bools) -> Ints | None:
    """The allowed option of each table that costs least, ``[A]``; ``None`` if a table has none."""
    options = space.options
    first = options.first_option[:-1]
    if not np.logical_or.reduceat(allowed, first).all():
        return None
    least = [
        int(cost[slice(*ends)].argmin()) + ends[0]
        for ends in zip(first, options.first_option[1:], strict=True)
    ]
    chosen: Ints = np.array(least, dtype=np.int64)[options.distinct_table]
    return chosen
