"""The sets of shards that fit into a rank and are worth most, one around each shard: by dynamic programming.

Of each kind there are only so many shards, so a set is one that a plan can have: patterns of such sets say far more
about tables that are not alike than sets in which a shard may be twice. Memory is counted in cells, sizes rounded up,
so every set fits; what is lost by rounding is little against what a rank holds of a few shards. For each shard the best
set with it is found at once, from the best sets of the shards before it and of those after it. Kinds that take nothing
of the scarcest dimension, as of host memory alone, have knapsacks of their own, and a set is one of each. What is still
over in a dimension that was not counted is taken out again, the least worth first.

Legend: K kinds of shards, D dimensions, U units (a kind's shards by ones, twos, fours ...), C cells, X sets.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field, frozen

from shardwright.planning.distinct import sorted_rows
from shardwright.planning.options import Bools, Floats, Ints

# Cells times units, and cells at least and at most.
_CELLS_UNITS, _FEWEST_CELLS, _MOST_CELLS = 1 << 21, 1 << 10, 1 << 14
# Sizes are cut by this part of a cell before they are rounded up; a shard that is over by less still fits.
_ROUNDING = 1e-6
TOLERANCE = 1e-9
# A shard takes nothing of a dimension of which it takes no more: a few counters for each table, say.
NEGLIGIBLE = 1e-6


@define(eq=False)
class Knapsacks:
    """The knapsacks of some shards.

    Args:
        size: of each kind, in parts of a rank: ``[K, D]``.
        most: shards of each kind at most: ``[K]``.
        scarce: the dimension that is counted.
    """

    size: Floats
    most: Ints
    scarce: int
    _kind: Ints = field(init=False)
    """The kind of each unit, the largest first: ``[U]``."""
    _number: Ints = field(init=False)
    """How many shards it is: ``[U]``."""
    _cells: Ints = field(init=False)
    """How many cells these take: ``[U]``."""
    _num_cells: int = field(init=False)
    """Of a rank."""

    def __attrs_post_init__(self) -> None:
        fitting = np.floor((1 + TOLERANCE) / np.maximum(self.size.max(axis=1), _ROUNDING))
        most = np.minimum(self.most, fitting).astype(np.int64)
        units = [(kind, part) for kind, number in enumerate(most.tolist()) for part in _parts(number)]
        kind, number = np.array(units, dtype=np.int64).reshape(-1, 2).T
        order = np.argsort(-self.size[kind, self.scarce], kind="stable")
        self._kind, self._number = kind[order], number[order]
        self._num_cells = int(
            np.clip(_CELLS_UNITS // max(len(order), 1), _FEWEST_CELLS, _MOST_CELLS),
        )
        size = self.size[self._kind, self.scarce] * self._number * self._num_cells
        self._cells = np.ceil(size - _ROUNDING).astype(np.int64)

    def tables(self, prices: Floats) -> Tables:
        """The best sets of each size at these prices of the kinds ``[K]``."""
        worth = prices[self._kind] * self._number
        before = self._table(worth, range(len(worth)))
        after = self._table(worth, range(len(worth) - 1, -1, -1))
        return Tables(self, worth, before, after[::-1])

    def _table(self, worth: Floats, order: range) -> Floats:
        """What is worth most among the first units of an order, in so many cells: ``[1 + U, 1 + C]``."""
        table = np.zeros((1 + len(worth), 1 + self._num_cells))
        for row, unit in enumerate(order):
            cells, one = int(self._cells[unit]), float(worth[unit])
            table[row + 1] = table[row]
            if one > 0 and cells <= self._num_cells:
                room = table[row][: 1 + self._num_cells - cells]
                np.maximum(table[row + 1][cells:], room + one, out=table[row + 1][cells:])
        return table

    def trimmed(self, shards: Floats, prices: Floats, room: Floats) -> Floats:
        """Sets ``[X, K]`` without what is over in other dimensions: what is worth least for its size goes first."""
        over = (shards @ self.size > room + TOLERANCE).any(axis=1)
        for index in np.flatnonzero(over).tolist():
            one = shards[index]
            while True:
                excess = np.maximum(one @ self.size / np.maximum(room, _ROUNDING) - 1 - TOLERANCE, 0.0)
                if not excess.any():
                    break
                relief = self.size @ excess
                is_in = np.flatnonzero((one > 0) & (relief > 0))
                if not len(is_in):
                    break
                one[is_in[np.argmin(prices[is_in] / relief[is_in])]] -= 1
        return shards


@frozen(eq=False)
class Tables:
    """The best sets of each size.

    Args:
        of: the knapsacks.
        worth: of each unit: ``[U]``.
        before: what is worth most among the units before each, in so many cells: ``[1 + U, 1 + C]``.
        after: among each unit and those after it: ``[1 + U, 1 + C]``.
    """

    of: Knapsacks
    worth: Floats
    before: Floats
    after: Floats

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return len(self.worth)

    def most_worth(self, room: Floats) -> float:
        """What the best set of all is worth, up to rounding.

        Args:
            room: of the rank, in parts of it: ``[D]``.
        """
        return float(self.before[-1, self._cells(room)])

    def best(self, prices: Floats, room: Floats, around: Ints) -> Floats:
        """The best sets around units that are worth something: ``[X, K]``.

        Args:
            prices: of the kinds: ``[K]``.
            room: of the rank, in parts of it: ``[D]``.
            around: these units.
        """
        cells = self._cells(room)
        units = around[(self.worth[around] > 0) & (self.of._cells[around] <= cells)]
        if not len(units):
            return np.empty((0, len(prices)))
        at = np.array([self._split(unit, cells) for unit in units.tolist()])
        shards = self.of.trimmed(self._traced(units, at, cells), prices, room)
        return sorted_rows(shards[shards.any(axis=1)])

    def top(self, room: Floats) -> Floats:
        """The best set of all: ``[K]``."""
        shards, left = np.zeros(len(self.of.most)), self._cells(room)
        for unit in range(len(self.worth) - 1, -1, -1):
            if self.before[unit + 1, left] > self.before[unit, left]:
                shards[self.of._kind[unit]] += self.of._number[unit]
                left -= int(self.of._cells[unit])
        return shards

    def _cells(self, room: Floats) -> int:
        return max(int(np.floor(room[self.of.scarce] * self.of._num_cells + _ROUNDING)), 0)

    def _split(self, unit: int, cells: int) -> int:
        """How many of the cells beside a unit are best left to those before it."""
        left = cells - int(self.of._cells[unit])
        return int(np.argmax(self.before[unit, : left + 1] + self.after[unit + 1, left::-1]))

    def _traced(self, units: Ints, at: Ints, cells: int) -> Floats:
        """The sets of which the tables hold the worth: ``[X, K]``."""
        kind, number, size = self.of._kind, self.of._number, self.of._cells
        rows = np.arange(len(units))
        shards = np.zeros((len(units), len(self.of.most)))
        shards[rows, kind[units]] = number[units]
        rest = cells - size[units] - at
        for unit in range(len(self.worth)):
            mine: Bools = (units < unit) & (self.after[unit, rest] > self.after[unit + 1, rest])
            shards[mine, kind[unit]] += number[unit]
            rest = rest - mine * size[unit]
        for unit in range(len(self.worth) - 1, -1, -1):
            mine = (units > unit) & (self.before[unit + 1, at] > self.before[unit, at])
            shards[mine, kind[unit]] += number[unit]
            at = at - mine * size[unit]
        return shards


@frozen(eq=False)
class Joint:
    """The best sets of kinds that share no dimension, or hardly: one of each knapsack together.

    Args:
        tables: of each.
    """

    tables: tuple[Tables, ...]

    @classmethod
    def of(cls, size: Floats, most: Ints, scarce: int, prices: Floats) -> Joint:
        """The best sets at some prices.

        Args:
            size: of each kind, in parts of a rank: ``[K, D]``.
            most: shards of each kind at most: ``[K]``.
            scarce: the dimension that is counted for all kinds that take of it.
            prices: of the kinds: ``[K]``.
        """
        others = [dimension for dimension in range(size.shape[1]) if dimension != scarce]
        counted = np.full(len(size), scarce)
        for dimension in others:
            is_there = (size[:, scarce] <= NEGLIGIBLE) & (size[:, dimension] > NEGLIGIBLE)
            counted[is_there] = dimension
        used = [scarce, *(dimension for dimension in others if (most[counted == dimension] > 0).any())]
        return cls(
            tuple(
                Knapsacks(size, np.where(counted == dimension, most, 0), dimension).tables(prices)
                for dimension in used
            )
        )

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return sum(table.num_units for table in self.tables)

    @property
    def num_cells(self) -> int:
        """How many cells all tables have."""
        return sum(2 * table.before.size for table in self.tables)

    def most_worth(self, room: Floats) -> float:
        """What the best set of all is worth, up to rounding."""
        return sum(table.most_worth(room) for table in self.tables)

    def best(self, prices: Floats, room: Floats, around: Ints) -> Floats:
        """The best sets around units: ``[X, K]``; arguments as for :meth:`Tables.best`."""
        found, first = list[Floats](), 0
        for table in self.tables:
            mine = around[(around >= first) & (around < first + table.num_units)] - first
            sets = table.best(prices, room, mine)
            for other in self.tables:
                if other is not table and len(sets):
                    left = room - sets @ other.of.size
                    sets = sets + np.array([other.top(row) for row in left])
                    sets = other.of.trimmed(sets, prices, room)
            found.append(sets)
            first += table.num_units
        return found[0] if len(found) == 1 else sorted_rows(np.concatenate(found))


def _parts(number: int) -> list[int]:
    """Ones, twos, fours ... whose sums are all numbers up to one."""
    parts = list[int]()
    while number > 0:
        parts.append(min(1 << len(parts), number))
        number -= parts[-1]
    return parts
