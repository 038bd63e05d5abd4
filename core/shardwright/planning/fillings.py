"""Ranks filled greedily with shards at some prices, in many orders at once: patterns for column generation.

Legend: K kinds of shards, D dimensions (time, then memory tiers), V orders, N patterns.
"""

from __future__ import annotations

import numpy as np

from shardwright.planning.distinct import sorted_rows
from shardwright.planning.options import Floats

# What fits but for rounding.
_TOLERANCE = 1e-9
# Weights of the dimensions by which greedy fillings order shards: random directions, the same ones always.
_NUM_WEIGHTS = 12
# So many of the best patterns are filled again after a few shards were taken out.
_MOST_REFILLED = 5
MOST_SHARDS = 1e4
"""Shards that cost nothing: so many of a kind in a pattern at most."""


def orders_of(dims: int) -> Floats:
    """Weights of the dimensions: each alone, all alike, and some between: ``[V, D]``."""
    random = np.sqrt(2 + np.arange(_NUM_WEIGHTS * dims) * 7919.0) % 1
    return np.vstack([np.eye(dims) + 1e-3, np.ones((1, dims)), random.reshape(-1, dims) ** 2 + 1e-3])


def many_fillings(size: Floats, prices: Floats, weights: Floats) -> Floats:
    """Ranks filled after one shard of each kind that is worth something; the best of them again, less one shard.

    Args:
        size: of each kind: ``[K, D]``.
        prices: of each kind: ``[K]``.
        weights: ``[V, D]``.

    Returns:
        shards of each kind: ``[N, K]``.
    """
    found = fillings(size, prices, weights, np.eye(len(size))[np.flatnonzero(prices > 1e-9)])
    return np.concatenate([found, fillings(size, prices, weights, _less(found, found @ prices))])


def _less(filling: Floats, worth: Floats) -> Floats:
    """The best of some patterns without one shard of one kind: ``[N, K]``."""
    best = sorted_rows(filling[np.argsort(-worth, kind="stable")[:_MOST_REFILLED]])
    pattern, kind = np.nonzero(best)
    less = best[pattern]
    less[np.arange(len(pattern)), kind] -= 1
    return sorted_rows(less)


def fillings(size: Floats, prices: Floats, weights: Floats, starts: Floats) -> Floats:
    """Ranks filled by price for what is taken, dimensions weighted in several ways, after what is there at first.

    Args:
        size: of each kind: ``[K, D]``.
        prices: of each kind: ``[K]``.
        weights: ``[V, D]``.
        starts: shards that are there at first: ``[N, K]``.

    Returns:
        shards of each kind: ``[N V, K]``.
    """
    worth = np.flatnonzero(prices > 1e-12)
    density = prices[worth] / np.maximum(weights @ size[worth].T, 1e-12)
    order = worth[np.argsort(-density, axis=1, kind="stable")]
    # Of each order all starts together, [V, K, N]: what a kind takes is then one number for all of these.
    filling = np.repeat(starts.T[None], len(order), axis=0)
    columns = [(column, 1 / np.maximum(column, 1e-12)) for column in size.T if column.any()]
    left = [np.repeat(1 + _TOLERANCE - (starts @ column)[None], len(order), axis=0) for column, _ in columns]
    each = np.arange(len(order))
    for kind in order.T:
        number = np.full((len(order), len(starts)), MOST_SHARDS)
        for room, (_, times) in zip(left, columns, strict=True):
            np.minimum(number, room * times[kind, None], out=number)
        number = np.floor(np.maximum(number, 0.0, out=number), out=number)
        if not number.any():
            continue
        filling[each, kind] += number
        for room, (column, _) in zip(left, columns, strict=True):
            room -= number * column[kind, None]
    return filling.transpose(2, 0, 1).reshape(-1, len(prices))
