"""The linear program of patterns for a plan that is partly made: what is left to place, on the ranks that are left.

The program of :mod:`~shardwright_plugins.proposers._pattern_program` is about many tables that are alike. This one is
about tables of which each is like no other: no pattern holds more of a kind than there are shards left of it, which
says far more (the linear bounds of such proper patterns: Belov and Scheithauer 2006), and the best new patterns are
found exactly (:mod:`~shardwright_plugins.packing.knapsacks`). So where the program needs more ranks than are left,
there is no plan but for rounding, and the bound of Farley (1990) mostly says so after a few rounds.

Legend: K kinds of shards, O' options, T distinct tables, N patterns of a group, G groups of ranks, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import attrs
import numpy as np
from attrs import define, field, frozen

from shardwright.planning.options import Bools, Floats, Ints
from shardwright.planning.solver import LinearProgram, LinearSolution
from shardwright_plugins.packing.knapsacks import TOLERANCE, Joint
from shardwright_plugins.packing.limits import Effort
from shardwright_plugins.proposers._pattern_program import Kinds

# What a shard without a rank costs, in ranks; a value that is zero but for rounding; ranks needed beyond those left.
_LEFT_OUT, ZERO, _MORE = 4.0, 1e-6, 1e-6
# A pattern is new if it is worth more than a rank by this; rounds of new patterns, and patterns of a round.
_GAIN, _MOST_ROUNDS, _MOST_NEW = 1e-6, 60, 120
# First patterns are made by size. Patterns are kept, so many a row at most: those that were the nearest to a use.
_FIRST, _KEPT = 1.02, 12
# So many cells of a knapsack take as long as one of a linear program.
_CELLS_AT_ONCE = 40
# Of many groups, new patterns are looked for around so many shards together.
_MOST_AROUND = 200


@define(eq=False)
class Group:
    """Ranks that hold nothing yet but what lies on all ranks of their host, equally much.

    Args:
        ranks: their numbers.
        room: of each, in parts of what a rank has beside what lies on every rank: ``[D]``.
        most: shards of each kind on them together, at most: ``[K]``.
        patterns: that one of them may hold: ``[N, K]``.
        uses: how many of the ranks hold each, by the program: ``[N]``.
        barred: patterns that they are not to hold.
    """

    ranks: list[int]
    room: Floats
    most: Floats
    patterns: Floats
    uses: Floats
    barred: frozenset[bytes] = frozenset()

    def add(self, patterns: Floats) -> int:
        """Add those that are not known yet; how many that were."""
        known = {row.tobytes() for row in self.patterns} | self.barred
        new = [row for row in patterns if row.tobytes() not in known]
        if new:
            self.patterns = np.concatenate([self.patterns, np.array(new)])
            self.uses = np.concatenate([self.uses, np.zeros(len(new))])
        return len(new)

    def keep(self, which: Bools | Ints) -> None:
        """Forget all other patterns."""
        self.patterns, self.uses = self.patterns[which], self.uses[which]

    def bar(self, pattern: Floats) -> None:
        """No rank is to hold a pattern from now on; nor any shard of it, if it is one shard of a gang."""
        self.barred |= {pattern.tobytes()}
        self.keep((self.patterns != pattern).any(axis=1))

    def split(self, ranks: list[int]) -> Group:
        """Take ranks away; a group of their own."""
        self.ranks = [rank for rank in self.ranks if rank not in ranks]
        return attrs.evolve(self, ranks=ranks)

    def copy(self) -> Group:
        """The same; arrays are never changed in place."""
        return attrs.evolve(self, ranks=list(self.ranks))


@frozen(eq=False)
class Fractions:
    """What the program says.

    Args:
        ranks: how many are needed.
        tables: how many tables take each option: ``[O']``.
    """

    ranks: float
    tables: Floats


@define(eq=False)
class DiveProgram:
    """What is left to place.

    Args:
        kinds: of shards.
        multiplicity: how many tables each distinct table stands for: ``[T]``.
        scarce: the dimension that counts.
        groups: the ranks that are left.
        effort: of linear programs, in cells of their matrices.
        is_allowed: options that are still open: ``[O']``.
    """

    kinds: Kinds
    multiplicity: Ints
    scarce: int
    groups: list[Group]
    effort: Effort
    is_allowed: Bools
    covered: Floats = field(init=False)
    """Shards of each kind that have a rank: ``[K]``."""
    _prices: Floats = field(init=False)
    """What a shard of each kind was worth at last: ``[K]``."""

    def __attrs_post_init__(self) -> None:
        self.covered = np.zeros(len(self.kinds.size))
        self._prices = self.kinds.size[:, self.scarce] * _FIRST

    @property
    def ranks_left(self) -> int:
        """How many ranks hold nothing yet."""
        return sum(len(group.ranks) for group in self.groups)

    @property
    def most(self) -> Floats:
        """Shards of each kind that may still get a rank: ``[K]``."""
        kinds, most = self.kinds, np.zeros(len(self.kinds.size))
        for table in np.unique(kinds.table[self.is_allowed]).tolist():
            mine = self.is_allowed & (kinds.table == table)
            most += self.multiplicity[table] * kinds.needs[:, mine].max(axis=1)
        return np.maximum(most - self.covered, 0.0)

    def solve(self) -> Fractions | None:
        """The fewest ranks, by column generation; ``None`` where more are needed than are left."""
        most, num_groups = self.most, len(self.groups)
        for group in self.groups:
            group.uses = np.zeros(len(group.patterns))
            are_there = (group.patterns <= np.minimum(most, group.most)).all(axis=1)
            fit = (group.patterns @ self.kinds.size <= group.room + TOLERANCE).all(axis=1)
            group.keep(np.flatnonzero(are_there & fit))
        if not all(len(group.patterns) for group in self.groups):
            self._generate(most, np.zeros(num_groups))
        found = None
        for _ in range(_MOST_ROUNDS):
            found = self._solved()
            if found is None or self.effort.is_spent:
                return None
            self._prices = found.prices[: len(self.kinds.size)]
            group_prices = found.prices[len(found.prices) - num_groups :]
            self._forget(group_prices)
            worth, num_new = self._generate(most, group_prices)
            if found.value / max(worth, 1.0) > self.ranks_left + _MORE:
                return None
            if not num_new:
                break
        return None if found is None else self._fractions(found)

    def copy(self) -> DiveProgram:
        """The same state, to come back to."""
        twin = copy(self)
        twin.groups = [group.copy() for group in self.groups]
        return twin

    # -- the program --------------------------------------------------------------------------------------------

    def _solved(self) -> LinearSolution | None:
        """Columns: options, patterns of each group, shards without a rank. Rows: kinds, what lies on all, groups."""
        from scipy.sparse import csr_matrix

        kinds, open_options = self.kinds, np.flatnonzero(self.is_allowed)
        patterns = np.concatenate(
            [np.empty((0, len(kinds.size))), *(group.patterns for group in self.groups)]
        )
        group_of = np.repeat(np.arange(len(self.groups)), [len(group.patterns) for group in self.groups])
        at_most = self._matrix(open_options, patterns, group_of)
        table = csr_matrix(
            (np.ones(len(open_options)), (kinds.table[open_options], np.arange(len(open_options)))),
            shape=(len(self.multiplicity), at_most.shape[1]),
        )
        self.effort.left -= at_most.shape[0] * at_most.shape[1]
        none, each = np.zeros(len(open_options)), np.ones(len(patterns))
        ranks = [float(len(group.ranks)) for group in self.groups]
        found = LinearProgram(
            cost=np.concatenate([none, each, np.full(len(kinds.size), _LEFT_OUT)]),
            at_most=at_most,
            limits=np.concatenate([self.covered, kinds.budget + TOLERANCE, ranks]),
            equal=table,
            wanted=self.multiplicity.astype(np.float64),
        ).solve()
        if found is not None:
            uses = found.x[len(none) : len(none) + len(each)]
            for index, group in enumerate(self.groups):
                group.uses = uses[group_of == index]
        return found

    def _matrix(self, open_options: Ints, patterns: Floats, group_of: Ints) -> Any:
        """The rows and columns of the program, from what is not zero: far quicker than from blocks."""
        from scipy.sparse import csr_matrix

        kinds, num_kinds = self.kinds, len(self.kinds.size)
        taken, spread = kinds.needs[:, open_options], kinds.spread[open_options].T
        blocks = [
            (taken, 0, 0),
            (-patterns.T, 0, len(open_options)),
            (spread, num_kinds, 0),
        ]
        entries = []
        for block, first_row, first_column in blocks:
            row, column = np.nonzero(block)
            entries.append((row + first_row, column + first_column, block[row, column]))
        pattern, alone = np.arange(len(patterns)), np.arange(num_kinds)
        ranks, left_out = num_kinds + len(spread), len(open_options) + len(patterns)
        entries.append((ranks + group_of, len(open_options) + pattern, np.ones(len(patterns))))
        entries.append((alone, left_out + alone, -np.ones(num_kinds)))
        row, column, value = (np.concatenate(part) for part in zip(*entries, strict=True))
        shape = (ranks + len(self.groups), left_out + num_kinds)
        return csr_matrix((value, (row, column)), shape=shape)

    def _fractions(self, found: LinearSolution) -> Fractions | None:
        is_short = found.x[-len(self.kinds.size) :].sum() > ZERO
        if is_short or found.value > self.ranks_left + _MORE:
            return None
        tables = np.zeros(len(self.kinds.options))
        tables[self.is_allowed] = found.x[: int(self.is_allowed.sum())]
        return Fractions(found.value, tables)

    def _forget(self, group_prices: Floats) -> None:
        """Forget patterns that are far from any use, where there are many."""
        most = _KEPT * (len(self.kinds.size) + len(self.multiplicity))
        if sum(len(group.patterns) for group in self.groups) <= 2 * most:
            return
        cost = [
            1 + price - group.patterns @ self._prices
            for group, price in zip(self.groups, group_prices.tolist(), strict=True)
        ]
        enough = np.sort(np.concatenate(cost))[most]
        for group, mine in zip(self.groups, cost, strict=True):
            group.keep((mine <= enough) | (group.uses > 0))

    # -- new patterns -------------------------------------------------------------------------------------------

    def _generate(self, most: Floats, group_prices: Floats) -> tuple[float, int]:
        """Add the patterns that are worth most; by what the best exceeds its price, and how many are new."""
        tables = list(self._tables(most, group_prices))
        step = max(1, -(-sum(of.num_units for _, _, of in tables) // _MOST_AROUND))
        num_new = self._add(tables, step)
        if not num_new and step > 1:
            num_new = self._add(tables, 1)
        worth = [of.most_worth(group.room) - price for group, price, of in tables]
        return max(worth, default=1.0), num_new

    def _add(self, tables: list[tuple[Group, float, Joint]], step: int) -> int:
        """Add the best patterns around every so-many-th shard; how many are new."""
        num_new = 0
        for index, (group, price, of) in enumerate(tables):
            self.effort.left -= of.num_cells / step / _CELLS_AT_ONCE
            shards = of.best(self._prices, group.room, np.arange(index % step, of.num_units, step))
            value = shards @ self._prices - price
            order = np.argsort(-value, kind="stable")[:_MOST_NEW]
            num_new += group.add(shards[order[value[order] > 1 + _GAIN]] if len(group.patterns) else shards)
        return num_new

    def _tables(self, most: Floats, group_prices: Floats) -> Iterator[tuple[Group, float, Joint]]:
        """Each group, its price, and the best sets of its shards; groups with the same shards have these in common."""
        known: dict[bytes, Joint] = {}
        for group, price in zip(self.groups, group_prices.tolist(), strict=True):
            mine = np.minimum(most, group.most)
            if mine.tobytes() not in known:
                sets = Joint.of(self.kinds.size, mine.astype(np.int64), self.scarce, self._prices)
                self.effort.left -= sets.num_cells / _CELLS_AT_ONCE
                known[mine.tobytes()] = sets
            yield group, price, known[mine.tobytes()]
