"""The relaxed problem: one option a table, shards in parts, all ranks' memory as one.

For a time ``z``, a plan that is faster than ``z`` uses only options of which every shard takes less than ``z``, and
all its shards together take less than ``W z``. So if for some multipliers ``lambda >= 0`` of the memory tiers

    sum over tables of min over these options of (total cost + lambda . total bytes)  -  lambda . capacity  >=  W z

then no plan is faster than ``z``: with any such plan the left side is at most its total cost, as it fits. Where ranks
are of several classes of speed, times on the ranks of a class are weighed, so that all ranks' weights are ``W``
together, and a shard costs the least of its weighed times. This is
Lagrangian relaxation of the multiple-choice knapsack problem (Sinha and Zoltners 1979; Kellerer, Pferschy and Pisinger,
Knapsack Problems, 2004, chapter 11). ``z`` and the multipliers are the certificate of the bound.

Legend: T distinct tables, O options, S runs of shards, M memory tiers, W ranks, C classes of ranks.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import FREE, Bools, Floats, Ints
from shardwright.planning.options.search_space import SearchSpace

_EXPONENTS = np.linspace(0, 10, 41)
"""Exponents of the classes' speeds that are tried as weights."""
_WEIGHT_STEPS = (0.1, 0.03, 0.01)
"""Parts by which weights of classes are changed then, one after the other."""
TOLERANCE = 1e-9
"""A claim must hold by this part more than rounding."""


@frozen(eq=False)
class Choice:
    """The cheapest options at some multipliers.

    Args:
        option: option of each distinct table: ``[T]``.
        cost_ms: cost of all shards of all tables together, ms.
        used: the part of each resource that is used: ``[M]``.
        multipliers: ms for all there is of each resource: ``[M]``.
        value_ms: the Lagrangian, ``cost + multipliers . (used - 1)``.
    """

    option: Ints
    cost_ms: float
    used: Floats
    multipliers: Floats
    value_ms: float


def best_weights(space: SearchSpace) -> Floats:
    """The weights of the classes of ranks with which the least costs of all tables make most: ``[C]``.

    The sum is concave in the weights. Powers of the classes' speeds are tried first: one number, however many classes
    there are. From the best of these each weight is changed as long as the sum grows.
    """
    ranks, count = np.bincount(space.topology.rank_class), space.options.multiplicity
    if len(ranks) == 1:
        return np.ones(1)
    times = np.ascontiguousarray(
        space.class_ms.T
    )  # the least of each column is found many times faster than of rows

    def scaled(weights: Floats) -> Floats:
        return weights * ranks.sum() / (ranks @ weights)

    def value(weights: Floats) -> float:
        costs = space.total_of(_weighed(space, times, weights))
        return float(np.minimum.reduceat(costs, space.options.first_option[:-1]) @ count)

    total = times.sum(axis=1) + 1e-300
    speeds: Floats = np.maximum(
        total.min() / total, 1e-6
    )  # a class may take no time: its weight is above 0 too
    best = max((scaled(speeds**exponent) for exponent in _EXPONENTS), key=value)
    for step in _WEIGHT_STEPS:
        for factor in step * np.eye(len(ranks)):
            best = max(best, scaled(best * (1 + factor)), scaled(best / (1 + factor)), key=value)
    return best


def _weighed(space: SearchSpace, times: Floats, weights: Floats) -> Floats:
    """The least of the weighed times ``[C, S]`` of each shard on the ranks that it may go to: ``[S]``."""
    rank, fixed = space.options.rank, space.options.rank != FREE
    own = times[0] * weights[space.topology.rank_class[rank]]
    result: Floats = np.where(fixed, own, (times * weights[:, None]).min(axis=0))
    return result


class Relaxation:
    """The columns of the relaxed problem, one value an option.

    Args:
        space: options and costs.
        least_ms: time that no plan can beat, ms, for reasons that options and capacities do not show.
    """

    def __init__(self, space: SearchSpace, least_ms: float = 0.0) -> None:
        self.space, self._given_least_ms = space, least_ms
        self.capacity: Ints = space.capacity_bytes.sum(axis=0)
        self.world_size = len(space.capacity_bytes)
        self.weights, self.largest = best_weights(space), space.largest_cost_ms
        self.cost = space.total_of(_weighed(space, space.class_ms.T, self.weights))
        self.share: Floats = space.total_bytes / np.maximum(self.capacity, 1)
        self.first = space.options.first_option[:-1]
        self.count: Floats = space.options.multiplicity.astype(np.float64)
        self.fits: Bools = (space.largest_bytes <= space.capacity_bytes.max(axis=0)).all(axis=1)
        self._distinct = np.arange(len(self.count))

    @cached_property
    def least_ms(self) -> float:
        """No plan is faster than the table whose best option is worst: its largest shard."""
        largest = np.where(self.fits, self.largest, np.inf)
        return max(float(np.minimum.reduceat(largest, self.first).max()), self._given_least_ms)

    @cached_property
    def covers(self) -> Bools:
        """True for options whose layout puts one shard on every rank, and no others: ``[O]``."""
        options, first = self.space.options, self.space.options.first_shard
        before = np.cumsum(options.count) - options.count
        before = before - np.repeat(before[first[:-1]], np.diff(first))
        covers = np.logical_and.reduceat(options.rank == before, first[:-1])
        result: Bools = covers & (options.shards_per_option == self.world_size)
        return result

    @cached_property
    def _needs(self) -> Floats:
        """Time and memory of each shard of a run: ``[S, 1 + M]``."""
        return np.column_stack([self.space.class_ms.min(axis=1), self.space.memory_bytes])

    @cached_property
    def _spread(self) -> Floats:
        """Compute the least load of every rank under options whose layout covers all: ``[O, 1 + M]``."""
        least = np.minimum.reduceat(self._needs, self.space.options.first_shard[:-1])
        return np.where(self.covers[:, None], least, 0.0)

    @cached_property
    def _movable(self) -> Floats:
        """The largest of each option's shards that have no rank by their layout: ``[O, 1 + M]``."""
        free = np.where((self.space.options.rank == FREE)[:, None], self._needs, 0.0)
        return np.maximum.reduceat(free, self.space.options.first_shard[:-1])

    def allowed(self, z_ms: float) -> Bools:
        """The options that plans faster than ``z_ms`` may use: ``[O]``.

        Every shard takes less and fits on some rank. One that its layout gives no rank must find room beside what
        every rank has of options that cover all: at least what those of each table need.
        """
        fast = self.fits & (self.largest < z_ms * (1 - TOLERANCE))
        least = np.minimum.reduceat(np.where(fast[:, None], self._spread, np.inf), self.first, axis=0)
        low = self.count @ np.where(np.isfinite(least), least, 0.0)
        room = np.append(z_ms * (1 - TOLERANCE), self.space.capacity_bytes.max(axis=0)) - low
        fits: Bools = fast & ((self._movable == 0) | (self._movable <= room)).all(axis=1)
        return fits

    def takes_at_most(self, part: float) -> Bools:
        """The options whose shards take at most a part of a rank's memory, or the least of their table: ``[O]``."""
        taken = (self.space.largest_bytes / np.maximum(self.space.capacity_bytes.max(axis=0), 1)).max(axis=1)
        least = np.minimum.reduceat(taken, self.first)[self.space.options.table]
        result: Bools = taken <= np.maximum(least, part)
        return result

    def choose(self, cost: Floats, share: Floats, multipliers: Floats) -> Choice:
        """The cheapest option of each table at some multipliers.

        Args:
            cost: cost of each option, infinite for those that are not allowed; each table has one that is: ``[O]``.
            share: the part of each resource that an option takes: ``[O, M]``.
            multipliers: multipliers of the resources: ``[M]``.
        """
        priced = cost + share @ multipliers
        least = np.minimum.reduceat(priced, self.first)
        of_table = self.space.options.table
        at = (priced == least[of_table]).nonzero()[0]
        option = at[of_table[at].searchsorted(self._distinct)]
        used: Floats = self.count @ share[option]
        value = float(self.count @ least - multipliers.sum())
        return Choice(option, float(self.count @ cost[option]), used, multipliers, value)
