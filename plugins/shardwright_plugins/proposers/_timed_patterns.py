"""Plans within a time by patterns in whole numbers, where a gap is wide.

For several parts of each rank's time and memory that are left to what lies on every rank, the program of patterns says
how many ranks all tables need at least; where these are enough, a solver looks for whole numbers.
"""

from __future__ import annotations

import numpy as np

from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.proposers._divisions import Divisions
from shardwright_plugins.proposers._whole_patterns import seated, whole_numbers

# Where the program of fractions needs more of the ranks there are, whole numbers are not worth a try.
_WORTH_A_TRY = 1.0
# What is found is found soon: the part of the solver's nodes and seconds, which are meant for the last resort.
_PART = 0.15


def packed_within(catalogue: Catalogue, limit_ms: float) -> Assignment | None:
    """A plan that takes about as long as it may, or less; ``None`` if patterns do not find one.

    Args:
        catalogue: of the space.
        limit_ms: the time that no rank should exceed.
    """
    space, best = catalogue.space, None
    for division in Divisions(catalogue, limit_ms).fewest():
        if division.ranks > _WORTH_A_TRY * len(space.capacity_bytes) or space.watch.is_over:
            break
        whole = whole_numbers(space, division.kinds, division.patterns, part=_PART)
        if whole is None:
            continue
        found = seated(catalogue, division.kinds, whole, limit_ms)
        if np.isfinite(found.value_ms) and (best is None or found.value_ms < best.value_ms):
            best = found
        if best is not None and best.value_ms <= limit_ms:
            break
    return best
