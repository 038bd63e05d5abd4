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

# The prices of room are made anew so often on the way. Of more sets those are kept that promise most; where so many
# shards of the smallest kind go into one, the solver is asked.
_PIECES, _MOST_SETS, _MOST_SHARDS = 6, 20_000, 5000
# Sums of sizes are off by rounding; the linear program's prices are, too.
_ROUNDING, _EXACT = 1e-12, 1e-9
# The least price of two is looked for among so many, so often; a kind that takes less of one dimension takes so much.
_TRIALS, _NARROWINGS, _SMALL = 33, 5, 1e-6


@frozen(eq=False)
class _Stage:
    """What became of all sets at one kind: each has a set before it and so many shards more."""

    before: Ints
    number: Ints


def most_worth(size: Floats, prices: Floats, floor: float, most: int = 1) -> tuple[float, Floats]:
    """What a set of shards that fits into a rank is worth at most, and the best sets; or that none is above a floor.

    Args:
        size: of each kind of shards, in parts of a rank: ``[K, D]``.
        prices: of each kind: ``[K]``.
        floor: sets that are worth no more do not count.
        most: how many sets to return at most.

    Returns:
        No set is worth more than the first, which is no less than the floor; and how many the best sets found have of
        each kind, the best first, ``[N, K]``: none where no set was found that is worth more than the floor. The first
        is what the best set is worth, unless there were too many sets to look at.
    """
    kinds = np.flatnonzero(prices > 0)
    if not len(kinds):
        return max(floor, 0.0), np.zeros((0, len(prices)))
    if float(size[kinds].max(axis=1).min()) * _MOST_SHARDS < 1:
        worth, number = solved_most_worth(size, prices)
        return max(floor, worth), number[None][: int(number @ prices > floor)]
    kinds = kinds[np.argsort(-size[kinds].max(axis=1), kind="stable")]
    search = _Search(size[kinds], prices[kinds], floor)
    best = search.best(most)
    found = np.zeros((len(best), len(prices)))
    found[:, kinds] = best
    return max(floor, search.dropped, float((found @ prices).max(initial=0.0))), found


class _Search:
    """The sets that could still be worth more than a floor, kind after kind.

    Args:
        size: of each kind, the largest first: ``[K, D]``.
        prices: all above zero: ``[K]``.
        floor: sets that are worth no more are left out.
    """

    def __init__(self, size: Floats, prices: Floats, floor: float) -> None:
        self._size, self._prices, self._floor = size, prices, floor
        self.dropped = 0.0
        """What a set of those that were left out because they were too many is worth at most."""

    def best(self, most: int) -> Floats:
        """How many of each kind are in the best sets: ``[N, K]``."""
        size, prices = self._size, self._prices
        starts = set(np.linspace(0, len(prices), _PIECES + 1).astype(np.int64)[:-1].tolist())
        used, worth, stages = np.zeros((1, size.shape[1])), np.zeros(1), list[_Stage]()
        room = np.zeros(size.shape[1])
        for kind in range(len(prices)):
            if kind in starts:
                room = _prices_of_room(size[kind:], prices[kind:])
            stage, used, worth = self._with_more(kind, used, worth, room)
            stages.append(stage)
            if not len(worth):
                return np.zeros((0, len(prices)))
        order = np.argsort(-worth, kind="stable")[:most]
        chosen = order[worth[order] > self._floor]
        number = np.zeros((len(chosen), len(prices)))
        for kind in range(len(prices) - 1, -1, -1):
            number[:, kind] = stages[kind].number[chosen]
            chosen = stages[kind].before[chosen]
        return number

    def _with_more(
        self, kind: int, used: Floats, worth: Floats, room: Floats
    ) -> tuple[_Stage, Floats, Floats]:
        """All sets with any number more of one kind that could still be worth more than the floor."""
        promise, before = worth + (1 - used) @ room, np.arange(len(worth))
        size, price, found = self._size[kind], self._prices[kind], list[tuple[Floats, Floats, Ints, Ints]]()
        less = float(size @ room - price)  # what one more of the kind takes away from what a set promises
        while len(before):
            good = np.flatnonzero((promise > self._floor) & (used <= 1 + _ROUNDING).all(axis=1))
            used, promise, before = used[good], promise[good], before[good]
            found.append((used, promise, before, np.full(len(before), len(found))))
            used, promise = used + size, promise - less
        sets, promises, befores, numbers = (np.concatenate(each) for each in zip(*found, strict=True))
        if len(promises) > _MOST_SETS:
            order = np.argsort(-promises, kind="stable")
            self.dropped = max(self.dropped, float(promises[order[_MOST_SETS]]))
            kept = order[:_MOST_SETS]
            sets, promises, befores, numbers = sets[kept], promises[kept], befores[kept], numbers[kept]
        return _Stage(befores, numbers), sets, promises - (1 - sets) @ room


def _prices_of_room(size: Floats, prices: Floats) -> Floats:
    """About the least prices of a rank's dimensions at which no kind is worth more than what it takes: ``[D]``.

    Any such prices are good for a bound; those of the linear program are the best.
    """
    used = np.flatnonzero(size.any(axis=0))
    room = np.zeros(size.shape[1])
    room[used] = _solved(size[:, used], prices) if len(used) > 2 else _nearly_least(size[:, used], prices)
    worth = size @ room
    room *= max(1.0, float((prices / np.maximum(worth, 1e-300)).max())) * (1 + _EXACT)
    return room


def _solved(size: Floats, prices: Floats) -> Floats:
    from scipy.optimize import linprog

    scale = float(prices.max())
    found = linprog(np.ones(size.shape[1]), A_ub=-size, b_ub=-prices / scale, method="highs")
    room: Floats = np.maximum(found.x, 0.0) * scale
    return room


def _nearly_least(size: Floats, prices: Floats) -> Floats:
    """The same for one dimension or two: the second price follows from the first, and their sum is convex in it."""
    first, last = size[:, 0], size[:, -1]
    if size.shape[1] == 1:
        return np.array([(prices / first).max()])
    low, high = 0.0, float((prices / np.maximum(first, _SMALL)).max())
    for _ in range(_NARROWINGS):
        trial = np.linspace(low, high, _TRIALS)
        left = np.maximum(prices - trial[:, None] * first, 0.0)
        second = (left / np.maximum(last, _SMALL)).max(axis=1)
        best = int(np.argmin(trial + second))
        low, high = trial[max(best - 1, 0)], trial[min(best + 1, _TRIALS - 1)]
    return np.array([trial[best], second[best]])
