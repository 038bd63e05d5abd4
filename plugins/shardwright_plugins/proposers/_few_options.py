"""The options that a program of patterns begins with, and those that its prices ask for: few of many.

The work of a program grows with the square of the kinds of shards that there are, and most options are in no good plan.
So the program is made of the options that cost little more than the best of their tables, at the multipliers of the
bound's proof. Its prices tell which others are missing: a kind of shards that the program does not have is worth no
more than a rank less the best that fits beside it, and at such prices an option may be cheaper than those of its table
(column generation over rows and columns at once, with prices that rows would have at most: Muter, Birbil and
Buelbuel 2013).

Legend: O options, K kinds of shards, K' kinds of a program, V orders.
"""

from __future__ import annotations

import numpy as np

from shardwright.planning.fillings import fillings, orders_of
from shardwright.planning.options import Bools, Floats, Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.proposers._pattern_program import Kinds, Program

# So many options at first, beside those that put one shard on every rank; so many more are not worth the difference.
_AT_FIRST, _SOME_MORE = 40, 8
# So many missing options are added at a time, those that would save most, in ranks; they save as much at least.
_MOST_ADDED, _LEAST_SAVED = 8, 1e-3


class FewOptions:
    """The options in use so far.

    Args:
        space: options and costs.
        covers: options whose layout puts one shard on every rank: ``[O]``.
    """

    def __init__(self, space: SearchSpace, covers: Bools) -> None:
        self._space, self._covers = space, covers
        self.kept: Bools = np.zeros(space.options.num_options, dtype=bool)
        """Those that were added: ``[O]``."""
        problem = space.bound.problem
        self._price: Floats = problem.cost + problem.share @ space.bound.multipliers

    def of(self, allowed: Bools) -> Bools:
        """Those to use of some that are allowed: ``[O]``."""
        elsewhere = allowed & ~self._covers
        if np.count_nonzero(elsewhere) <= _AT_FIRST + _SOME_MORE:
            return allowed
        options = self._space.options
        price = np.where(allowed, self._price, np.inf)
        regret = price - np.minimum.reduceat(price, options.first_option[:-1])[options.table]
        order = np.argsort(np.where(elsewhere, regret, np.inf), kind="stable")
        result: Bools = allowed & (self._covers | self.kept)
        result[order[:_AT_FIRST]] = True
        return result

    def add_missing(self, program: Program, kinds: Kinds, everything: Kinds) -> Floats | None:
        """Add the options that would save most ranks; patterns with their shards ``[N, K]``, or ``None`` if none would.

        Args:
            program: solved.
            kinds: of its shards.
            everything: the kinds of all options that are allowed.
        """
        position = {label: index for index, label in enumerate(everything.labels)}
        known = np.array([position[label] for label in kinds.labels])
        missing = np.setdiff1d(np.arange(len(everything.labels)), known)
        if not len(missing):
            return None
        prices = np.zeros(len(everything.labels))
        prices[known] = program.prices
        beside, best = _beside(everything.size, prices, missing)
        prices[missing] = np.maximum(1 - beside, 0.0)
        dearer = prices @ everything.needs - program.worth_of(everything)
        new = np.flatnonzero((dearer < -_LEAST_SAVED) & ~np.isin(everything.options, kinds.options))
        new = new[np.argsort(dearer[new], kind="stable")[:_MOST_ADDED]]
        self.kept[everything.options[new]] = True
        return best[(everything.needs[:, new][missing] > 0).any(axis=1)] if len(new) else None


def _beside(size: Floats, prices: Floats, missing: Ints) -> tuple[Floats, Floats]:
    """What fits beside one shard of each missing kind is worth ``[N]``, and that pattern ``[N, K]``."""
    orders = orders_of(size.shape[1])
    found = fillings(size, prices, orders, np.eye(len(size))[missing]).reshape(len(missing), -1, len(size))
    worth = found @ prices
    best = worth.argmax(axis=1)
    rows = np.arange(len(missing))
    return worth[rows, best], found[rows, best]
