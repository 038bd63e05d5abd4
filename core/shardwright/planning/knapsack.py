"""What shards that fit into a rank together are worth at most: a knapsack of a few dimensions, solved exactly.

Kinds are gone through from the largest to the smallest, and every set of shards of those before is kept that could
still be worth more than a floor: at the prices per room of the linear program over the kinds that are left, what has
room beside it is worth no more than these prices times that room (the bound of Dantzig 1957, for several dimensions).
With a floor near the best, as column generation has one, a few thousand sets are all; a solver takes fifty times as
long.

Legend: K kinds of shards, D dimensions (time, then memory tiers), N sets of shards.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from shardwright.planning.options import Floats, Ints
from shardwright.planning.solver import most_worth as solved_most_worth

# The prices of room are made anew so often on the way; so many sets are too many, or so many shards of the smallest
# kind in one, and the solver is asked.
_PIECES, _MOST_SETS, _MOST_SHARDS = 6, 150_000, 5000
# Sums of sizes are off by rounding; the linear program's prices are, too.
_ROUNDING, _EXACT = 1e-12, 1e-9


@frozen(eq=False)
class _Stage:
    """What became of all sets at one kind: each has a set before it and so many shards more."""

    before: Ints
    number: Ints


def most_worth(size: Floats, prices: Floats, floor: float) -> tuple[float, Floats]:
    """What a set of shards that fits into a rank is worth at most, and the best set; or that none is above a floor.

    Args:
        size: of each kind of shards, in parts of a rank: ``[K, D]``.
        prices: of each kind: ``[K]``.
        floor: sets that are worth no more do not count.

    Returns:
        The larger of the floor and what the best set is worth, and how many it has of each kind, ``[K]``; none at all
        where no set is worth more than the floor.
    """
    number = np.zeros(len(prices))
    kinds = np.flatnonzero(prices > 0)
    if not len(kinds):
        return max(floor, 0.0), number
    kinds = kinds[np.argsort(-size[kinds].max(axis=1), kind="stable")]
    is_coarse = float(size[kinds].max(axis=1).min()) * _MOST_SHARDS >= 1
    best = _best(size[kinds], prices[kinds], floor) if is_coarse else None
    if best is None:
        worth, number = solved_most_worth(size, prices)
        return max(floor, worth), number
    number[kinds] = best
    return max(floor, float(number @ prices)), number


def _best(size: Floats, prices: Floats, floor: float) -> Floats | None:
    """How many of each kind are in the best set, ``[K]``; ``None`` if there are too many sets.

    Args:
        size: the largest kinds first: ``[K, D]``.
        prices: all above zero: ``[K]``.
        floor: sets that are worth no more are left out.
    """
    starts = set(np.linspace(0, len(prices), _PIECES + 1).astype(np.int64)[:-1].tolist())
    used, worth, stages = np.zeros((1, size.shape[1])), np.zeros(1), list[_Stage]()
    room = np.zeros(size.shape[1])
    for kind in range(len(prices)):
        if kind in starts:
            room = _prices_of_room(size[kind:], prices[kind:])
        stage, used, worth = _with_more(used, worth, size[kind], float(prices[kind]), room, floor)
        stages.append(stage)
        if len(worth) > _MOST_SETS:
            return None
        if not len(worth):
            return np.zeros(len(prices))
    number = np.zeros(len(prices))
    if worth.max() > floor:
        index = int(np.argmax(worth))
        for kind in range(len(prices) - 1, -1, -1):
            number[kind] = stages[kind].number[index]
            index = int(stages[kind].before[index])
    return number


def _with_more(
    used: Floats, worth: Floats, size: Floats, price: float, room: Floats, floor: float
) -> tuple[_Stage, Floats, Floats]:
    """All sets with any number more of one kind that could still be worth more than the floor."""
    left, now, before = used, worth, np.arange(len(worth))
    found = list[tuple[Floats, Floats, Ints, Ints]]()
    while len(now):
        promises = now + (1 - left) @ room > floor
        promises &= (left <= 1 + _ROUNDING).all(axis=1)
        left, now, before = left[promises], now[promises], before[promises]
        found.append((left, now, before, np.full(len(now), len(found))))
        left, now = left + size, now + price
    sets, values, befores, numbers = (np.concatenate(each) for each in zip(*found, strict=True))
    return _Stage(befores, numbers), sets, values


def _prices_of_room(size: Floats, prices: Floats) -> Floats:
    """The least prices of a rank's dimensions at which no kind is worth more than what it takes: ``[D]``."""
    from scipy.optimize import linprog

    scale = float(prices.max())
    found = linprog(np.ones(size.shape[1]), A_ub=-size, b_ub=-prices / scale, method="highs")
    room: Floats = np.maximum(found.x, 0.0) * scale
    worth = size @ room
    return room * max(1.0, float((prices / np.maximum(worth, 1e-300)).max())) * (1 + _EXACT)
