"""The linear program of patterns: the fewest ranks that hold all tables, by column generation.

A *pattern* is a set of shards that fits into a rank: ``a_k`` shards of each kind. The program chooses how many tables
take each option, ``x_o``, and how many ranks hold each pattern, ``y_p`` (Gilmore and Gomory 1961):

    least  sum of y_p    where  sum of a_kp y_p >= sum of n_ko x_o  for each kind k   (price pi_k)
                                sum of x_o = tables of t            for each distinct table t
                                sum of spread_od x_o <= budget_d    for each dimension d

Patterns are made as they are needed: with ``sum of pi_k a_k > 1`` one makes the ranks fewer. They are found by
filling ranks greedily in many orders at once, so not all are seen, and the program is no proof of anything.

Legend: K kinds of shards, O' options, T distinct tables, D dimensions, V orders, P patterns.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve, frozen

from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.columns.distinct_rows import distinct_rows, sorted_rows
from shardwright_plugins.proposers.proving.columns.kinds import Kinds
from shardwright_plugins.proposers.proving.columns.linear import LinearProgram
from shardwright_plugins.proposers.proving.effort import Effort

# What fits but for rounding; the least gain of a new pattern, in ranks; and a price that is none.
_ROUNDING, _LEAST_GAIN, _NO_PRICE = 1e-9, 1e-6, 1e-9
# New patterns of a round, those that are worth most; and of the best, those that are filled again less a shard.
_MOST_NEW, _MOST_REFILLED = 12, 5
# Random directions in which greedy orders weigh the dimensions, the same ones always.
_NUM_WEIGHTS = 12
# Shards that cost nothing: so many of a kind in a pattern at most.
_MOST_SHARDS = 1e4
# New patterns are made as long as so many rounds of them make the ranks fewer by this part.
_STALL, _LEAST_PROGRESS = 40, 2e-3
# Microseconds of a pivot for each row, and of a pattern for each kind (measured).
_PIVOT_ROW_US, _PATTERN_KIND_US = 0.08, 0.15


@frozen(eq=False)
class Patterns:
    """Solution of the program.

    Args:
        ranks: number of ranks that are needed.
        tables: number of tables that take each option: ``[O']``.
        shards: shards of each kind in each pattern in use: ``[P, K]``.
        number: number of ranks that hold each pattern: ``[P]``.
    """

    ranks: float
    tables: Floats
    shards: Ints
    number: Floats


class Master:
    """The program, with the patterns made so far.

    Args:
        kinds: kinds of shards.
        multiplicity: number of tables that each distinct table stands for: ``[T]``.
        known: patterns to begin with, where they fit: ``[P, K]``.
    """

    def __init__(self, kinds: Kinds, multiplicity: Ints, known: Floats) -> None:
        num_kinds, dims = kinds.size.shape
        num_tables, num_options = len(multiplicity), len(kinds.options)
        self._kinds, self._rows = kinds, num_kinds + num_tables + dims
        free = np.full(num_kinds, np.inf)
        budget = kinds.budget * (1 + 1e-6) + 1e-9
        self._program = LinearProgram(
            np.concatenate(
                [1e-4 * (1 + np.arange(num_kinds) * 0.618 % 1), multiplicity, np.full(dims, -np.inf)]
            ),
            np.concatenate([free, multiplicity, budget]),
        )
        options = np.zeros((self._rows, num_options))
        options[:num_kinds] = -kinds.needs
        options[num_kinds + kinds.table, np.arange(num_options)] = 1
        options[num_kinds + num_tables :] = kinds.spread.T
        self._program.add(np.zeros(num_options), options)
        self._orders = _orders(dims)
        alone = np.diag(np.minimum(np.floor((1 + _ROUNDING) / kinds.size.max(axis=1)), _MOST_SHARDS))
        fullest = greedy_patterns(kinds.size, kinds.size.sum(axis=1) + 1e-6, self._orders, np.eye(num_kinds))
        fitting = known[(known @ kinds.size <= 1 + _ROUNDING).all(axis=1)]
        self.patterns: Floats = np.empty((0, num_kinds))
        self._add(distinct_rows(np.vstack([alone, fullest, fitting])))

    def _add(self, patterns: Floats) -> None:
        columns = np.zeros((self._rows, len(patterns)))
        columns[: patterns.shape[1]] = patterns.T
        self._program.add(np.ones(len(patterns)), columns)
        self.patterns = np.vstack([self.patterns, patterns])

    def solve(self, enough: float, most: float, effort: Effort, watch: Watch) -> Patterns | None:
        """The least number of ranks, or one that is enough; or what there is when no more is to be done.

        With prices at which no pattern is worth more than ``w``, the least is no less than the program's value
        divided by ``w`` (Farley 1990): where that is more than there are ranks, the search for patterns ends.

        Args:
            enough: ranks.
            most: ranks that there are.
            effort: amount of work that may be done.
            watch: ends it, and counts its work.
        """
        values: list[float] = []
        for _ in range(effort.column_rounds):
            if not self._program.solve():
                return None
            watch.spend(_PIVOT_ROW_US * self._rows * (10 + self._program.pivots))
            values.append(self._program.value)
            is_stuck = len(values) > _STALL and values[-1] > values[-_STALL] * (1 - _LEAST_PROGRESS)
            if values[-1] <= enough or is_stuck or watch.is_over:
                break
            new, worth = self._priced(watch)
            if values[-1] / worth > most * (1 + _LEAST_PROGRESS):
                return evolve(self._solution(), ranks=values[-1] / worth)
            if not len(new):
                break
            self._add(new)
        return self._solution()

    def _priced(self, watch: Watch) -> tuple[Floats, float]:
        """New patterns that are worth more than a rank ``[P, K]``; what one is worth at most, or infinity."""
        size, prices = self._kinds.size, np.maximum(self._program.prices[: len(self._kinds.size)], 0.0)
        found = greedy_patterns(size, prices, self._orders, np.zeros((1, len(size))))
        for is_last in (False, True):
            worth = found @ prices
            best = np.argsort(-worth, kind="stable")
            new = distinct_rows(found[best[worth[best] > 1 + _LEAST_GAIN]])[:_MOST_NEW]
            watch.spend(_PATTERN_KIND_US * found.size)
            if len(new) or is_last or not (prices > _NO_PRICE).any():
                break
            starts = np.eye(len(size))[np.flatnonzero(prices > _NO_PRICE)]
            found = greedy_patterns(size, prices, self._orders, starts)
            starts = _less(found, found @ prices)
            found = np.vstack([found, greedy_patterns(size, prices, self._orders, starts)])
        return new, float(worth.max(initial=1.0)) if is_last else np.inf

    def _solution(self) -> Patterns:
        amount = self._program.solution
        tables, number = np.split(amount, [len(self._kinds.options)])
        used = np.flatnonzero(number > 1e-4)
        shards = self.patterns[used].astype(np.int64)
        return Patterns(float(number.sum()), tables, shards, number[used])


def _orders(dims: int) -> Floats:
    """Weights of the dimensions: each alone, all alike, and some between: ``[V, D]``."""
    random = np.sqrt(2 + np.arange(_NUM_WEIGHTS * dims) * 7919.0) % 1
    return np.vstack([np.eye(dims) + 1e-3, np.ones((1, dims)), random.reshape(-1, dims) ** 2 + 1e-3])


def _less(patterns: Floats, worth: Floats) -> Floats:
    """The best of some patterns without one shard of one kind: ``[P, K]``."""
    best = sorted_rows(patterns[np.argsort(-worth, kind="stable")[:_MOST_REFILLED]])
    pattern, kind = np.nonzero(best)
    less = best[pattern]
    less[np.arange(len(pattern)), kind] -= 1
    return sorted_rows(less)


def greedy_patterns(size: Floats, prices: Floats, weights: Floats, starts: Floats) -> Floats:
    """Ranks filled by price for what is taken, dimensions weighted in several ways, after what is there at first.

    The greedy algorithm of the knapsack problem (Dantzig 1957): kinds in falling order of ``pi_k / (w . size_k)``, as
    many of each as there is room for.

    Args:
        size: load of a shard of each kind: ``[K, D]``.
        prices: price of a shard of each kind: ``[K]``.
        weights: weights of the dimensions, one row an order: ``[V, D]``.
        starts: shards that are there at first: ``[P, K]``.

    Returns:
        shards of each kind: ``[P V, K]``.
    """
    worth = np.flatnonzero(prices > 1e-12)
    density = prices[worth] / np.maximum(weights @ size[worth].T, 1e-12)
    order = worth[np.argsort(-density, axis=1, kind="stable")]
    # Of each order all starts together, [V, K, P]: what a kind takes is then one number for all of these.
    pattern = np.repeat(starts.T[None], len(order), axis=0)
    columns = [(column, 1 / np.maximum(column, 1e-12)) for column in size.T if column.any()]
    left = [np.repeat(1 + _ROUNDING - (starts @ column)[None], len(order), axis=0) for column, _ in columns]
    each = np.arange(len(order))
    for kind in order.T:
        number = np.full((len(order), len(starts)), _MOST_SHARDS)
        for room, (_, times) in zip(left, columns, strict=True):
            np.minimum(number, room * times[kind, None], out=number)
        number = np.floor(np.maximum(number, 0.0, out=number), out=number)
        if not number.any():
            continue
        pattern[each, kind] += number
        for room, (column, _) in zip(left, columns, strict=True):
            room -= number * column[kind, None]
    return pattern.transpose(2, 0, 1).reshape(-1, len(prices))
