"""Options that no other option of the same table dominates."""

from __future__ import annotations

import numpy as np

from shardwright.planning.arrays import NO_GANG, Bools
from shardwright.planning.options.search_space import SearchSpace


def efficient_options(space: SearchSpace) -> Bools:
    """True for options that no other of their table equals in every respect and beats in one: ``[O]``.

    The respects are time, on each class of ranks, and memory, of all shards together and of the largest one; whether
    shards must share a host; and the number of shards. Of two that are equal in all, the first one stays.
    """
    gangs = np.logical_or.reduceat(space.options.gang != NO_GANG, space.options.first_shard[:-1])
    measures = np.column_stack(
        [
            *(space.total_of(own) for own in space.class_ms.T),
            np.maximum.reduceat(space.class_ms, space.options.first_shard[:-1]),
            space.total_bytes,
            space.largest_bytes,
            gangs.astype(np.float64),
            space.options.shards_per_option,
        ]
    )
    kept = space.fits_alone.copy()
    for table in range(len(space.options.tables)):
        mine = np.array(space.options.of_table(table))
        mine = mine[kept[mine]]
        mine = mine[np.argsort(space.total_cost_ms[mine], kind="stable")]
        values = measures[mine]
        no_worse = (values[:, None] <= values[None]).all(axis=2)
        is_better = no_worse & ~no_worse.T | np.triu(no_worse & no_worse.T, 1)
        kept[mine] = ~is_better.any(axis=0)
    return kept
