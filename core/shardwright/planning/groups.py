"""Shards of about one size, where programs of patterns would have too many kinds of shards.

A proof counts all of a group as the least of them, a plan as the largest: what fits together then does so in fact.

Legend: K kinds of shards, D dimensions (time, then memory tiers).
"""

from __future__ import annotations

import numpy as np

from shardwright.planning.options import Floats, Ints

# Sizes of a group are within this part of each other, or so many times it until there are few enough groups; what is
# less than the last part of a rank is of one size.
_FINEST, _COARSER, _TINY = 1e-3, 1.4, 2e-3


def groups(size: Floats, most: int) -> Ints:
    """The group of each kind, each its own where that is few enough: ``[K]``.

    Args:
        size: in parts of a rank: ``[K, D]``.
        most: how many groups there may be.
    """
    result, step, number = np.arange(len(size)), _FINEST, len(size)
    scale = np.log(np.maximum(size, _TINY))
    while number > most:
        _, place = np.unique(np.floor(scale / np.log1p(step)), axis=0, return_inverse=True)
        result, step = place.reshape(-1), step * _COARSER
        number = int(result.max()) + 1
    return result
