"""Options of each table in the order of some cost."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.options.search_space import SearchSpace

Measure: TypeAlias = Floats | Ints
"""Some cost of each option: ``[O]``."""


def ranked_options(space: SearchSpace, cost: Measure) -> Ints:
    """All options, distinct table after distinct table, each table's in the order they should be tried.

    Those that fit at least alone come first, then the cheaper, then those of fewer shards, then as enumerated
    (the preferred kernel first): the order depends on nothing else.

    Args:
        space: the options.
        cost: ``[O]``.

    Returns:
        Option indices ``[O]``; those of distinct table ``t`` at ``first_option[t]:first_option[t + 1]``.
    """
    options = space.options
    index = np.arange(options.num_options)
    return np.lexsort((index, options.shards_per_option, cost, ~space.fits_alone, options.table))
