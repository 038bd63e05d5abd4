"""What shards that fit into a rank together are worth at most: a knapsack problem, by branch and bound.

Kind after kind, those with most worth for their size first (Martello and Toth, Knapsack Problems, 1990, chapter 3),
all sets of a kind at once. What is left of a rank is worth no more than its size in some measure, a sum of dimensions,
times the best worth for such size of the kinds that are left; of several measures the least counts. A search that is to
prove that nothing is worth more than some number looks at little.

Legend: K kinds of shards, D dimensions, J measures, N sets.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from shardwright.planning.options import Floats, Ints

# So many sets are looked at, at most; and measures that are compared.
_MOST_SETS, _NUM_MEASURES = 400_000, 33
_ROUNDING = 1e-9


@frozen(eq=False)
class Best:
    """What was found.

    Args:
        bound: no set is worth more.
        number: how many there are of each kind in the best set that is worth more than was asked, or none: ``[K]``.
    """

    bound: float
    number: Floats


def best_set(size: Floats, prices: Floats, enough: float) -> Best | None:
    """The best set that fits into a rank, or the proof that none is worth more than ``enough``.

    Args:
        size: of each kind of shards, in parts of a rank: ``[K, D]``.
        prices: of each kind: ``[K]``.
        enough: what sets may be worth.

    Returns:
        ``None`` if that would take long.
    """
    kinds = np.flatnonzero((prices > 0) & (size <= 1 + _ROUNDING).all(axis=1))
    if not len(kinds):
        return Best(enough, np.zeros(len(prices)))
    # A little smaller than they are: what rounding makes fit is not missed.
    lesser = size[kinds] * (1 - _ROUNDING)
    measures = _measures(lesser, prices[kinds])
    order = np.argsort(-prices[kinds] / np.maximum(lesser @ measures[0], 1e-12), kind="stable")
    search = _Search(lesser[order], prices[kinds][order], measures, enough)
    if not search.look():
        return None
    number = np.zeros(len(prices))
    number[kinds[order]] = search.best
    return Best(search.most * (1 + _ROUNDING), number)


def _measures(size: Floats, prices: Floats) -> Floats:
    """Sums of dimensions by which a whole rank is worth least, the best first: ``[J, D]``."""
    dims = size.shape[1]
    parts = np.linspace(0, 1, _NUM_MEASURES)
    found = [np.eye(dims), np.full((1, dims), 1 / dims)]
    for one in range(dims):
        for other in range(one):
            weights = np.zeros((len(parts), dims))
            weights[:, one], weights[:, other] = parts, 1 - parts
            found.append(weights)
    measures = np.concatenate(found)
    worth = (prices / np.maximum(size @ measures.T, 1e-12).T).max(axis=1)
    best = np.argsort(worth, kind="stable")[0]
    useful = np.flatnonzero(size.any(axis=0))
    return np.vstack([measures[best], np.eye(dims)[useful]])


class _Search:
    """The sets of shards that may be worth more than some number.

    Args:
        size: of each kind, the best first: ``[K, D]``.
        prices: ``[K]``.
        measures: ``[J, D]``.
        most: what sets may be worth.
    """

    def __init__(self, size: Floats, prices: Floats, measures: Floats, most: float) -> None:
        self._size, self._prices, self._measures = size, prices, measures
        worth = prices / np.maximum(size @ measures.T, 1e-12).T
        # The best worth for size of the kinds after each, of each measure: [J, K].
        self._rest: Floats = np.maximum.accumulate(worth[:, ::-1], axis=1)[:, ::-1]
        self.most, self.best = most, np.zeros(len(prices))
        # Of the sets of each kind: which of the sets before each is made of, and how many of the kind it has more.
        self._made: list[tuple[Ints, Ints]] = []

    def look(self) -> bool:
        """Look at all sets; whether these were not too many."""
        left, worth = np.ones((1, self._size.shape[1])), np.zeros(1)
        for kind in range(len(self._size)):
            takes = np.flatnonzero(self._size[kind])
            if not len(takes):
                return False
            count = np.floor(np.maximum((left[:, takes] / self._size[kind, takes]).min(axis=1), 0.0))
            if count.sum() + len(count) > _MOST_SETS:
                return False
            count = count.astype(np.int64)
            before = np.repeat(np.arange(len(left)), count + 1)
            number = np.arange(len(before)) - np.repeat(np.cumsum(count + 1) - count - 1, count + 1)
            left = left[before] - number[:, None] * self._size[kind]
            worth = worth[before] + number * self._prices[kind]
            self._made.append((before, number))
            self._keep_best(worth)
            kept = self._promising(left, worth, kind + 1)
            self._made[-1] = before[kept], number[kept]
            left, worth = left[kept], worth[kept]
        return True

    def _keep_best(self, worth: Floats) -> None:
        """Note the set that is worth most, if it is worth more than was asked."""
        at = int(worth.argmax()) if len(worth) else 0
        if len(worth) and worth[at] > self.most:
            self.most, self.best = float(worth[at]), np.zeros(len(self._prices))
            for kind in reversed(range(len(self._made))):
                before, number = self._made[kind]
                self.best[kind] = number[at]
                at = int(before[at])

    def _promising(self, left: Floats, worth: Floats, kind: int) -> Ints:
        """The sets that may become worth more than the best by kinds from one on."""
        if kind == len(self._size):
            return np.empty(0, dtype=np.int64)
        room = np.maximum(left, 0.0) @ self._measures.T
        return np.flatnonzero(worth + (room * self._rest[:, kind]).min(axis=1) > self.most)
