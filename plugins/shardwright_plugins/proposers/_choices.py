"""Choices of options: at the multipliers of the bound's proof, and dearer ones that may leave room for others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.planning.options import Floats, Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue

# Times are tried at these parts above the bound until one is possible.
LADDER = (0.005, 0.015, 0.03, 0.08, 0.2, 0.5, 1.0, 3.0, 10.0, 100.0, 1e4)
# The part of memory left free when options are chosen: shards of some size fill no rank to the brim.
MARGINS = (0.01, 0.03, 0.08, 0.2)


def choices(space: SearchSpace) -> Iterator[Ints]:
    """The options that are cheapest at the multipliers of several times, more and more of memory left free."""
    problem = space.bound.problem
    for part in LADDER:
        for margin in MARGINS:
            proposal = problem.maximise(space.bound.possible_ms * (1 + part), margin=margin).proposal()
            if proposal is not None:
                yield proposal


def kicks(catalogue: Catalogue, plan: Assignment, price: Floats, bound_ms: float) -> list[tuple[int, int]]:
    """Tables and other options for them, those first that add the least to what all ranks have to do.

    Args:
        catalogue: of the space.
        plan: of the tables that are alike and sharded alike, one is tried.
        price: of each option: ``[O]``.
        bound_ms: what no plan is faster than; options that add more than all ranks have above it are left out.
    """
    space, options, proposal = catalogue.space, catalogue.space.options, plan.proposal
    _, leader = np.unique(options.alike * options.num_options + proposal, return_index=True)
    most = len(space.capacity_bytes) * (plan.value_ms - bound_ms)
    usable = catalogue.is_efficient & (space.largest_cost_ms <= bound_ms)
    found = []
    for table in leader.tolist():
        mine, chosen = np.array(options.of_table(int(options.alike[table]))), int(proposal[table])
        mine = mine[usable[mine] & (mine != chosen)]
        more = price[mine] - price[chosen]
        found += [(float(more[i]), table, int(mine[i])) for i in np.flatnonzero(more <= most)]
    return [(table, option) for _, table, option in sorted(found)]
