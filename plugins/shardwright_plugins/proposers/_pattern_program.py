"""The linear program of patterns: the fewest ranks that hold all tables, by the revised simplex method.

The program has as many rows as there are kinds of shards, a few dozen, and the inverse of its basis is kept: a pivot
takes microseconds, while a general solver is imported in half a second. Patterns, its columns, are made as they are
needed (Gilmore and Gomory 1961) by filling ranks greedily in many orders at once. So not all patterns are seen, and
the program is no proof of anything.

Legend: K kinds of shards, O' options, T distinct tables, D dimensions (time, memory tiers), V orders, N patterns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import frozen

from shardwright.planning.fillings import MOST_SHARDS, fillings, many_fillings, orders_of
from shardwright.planning.options import Bools, Floats, Ints
from shardwright.planning.simplex import Simplex
from shardwright_plugins.packing.limits import never

# Pivots between new patterns, and rounds of these.
_MOST_PIVOTS, _MOST_ROUNDS = 400, 120
# New patterns are made as long as so many rounds of them make the ranks fewer by this part.
_PATIENCE, _LEAST_PROGRESS = 12, 2e-3
TOLERANCE = 1e-9
# New patterns of a round, those that are worth most.
_MOST_NEW, _MOST_SEEN = 6, 100
# Patterns are looked for harder where the best is worth no more.
_MEAGRE = 1.005


@frozen(eq=False)
class Pattern:
    """Ranks that hold the same.

    Args:
        shards: of each kind: ``[K]``.
        ranks: how many ranks, by the program.
    """

    shards: Ints
    ranks: float


@frozen(eq=False)
class HostPattern:
    """Hosts that hold the same gangs.

    Args:
        gangs: of each kind: ``[K]``.
        hosts: how many hosts.
        patterns: what their ranks hold else; no more ranks than there are.
    """

    gangs: Ints
    hosts: int
    patterns: tuple[Pattern, ...]


@frozen(eq=False)
class Kinds:
    """The kinds of shards that may go to any rank or host, and what options need of them.

    Args:
        options: the options: ``[O']``.
        table: the distinct table of each: ``[O']``.
        needs: shards of each kind: ``[K, O']``.
        size: of each kind, in parts of what a rank has beside what lies on every rank: ``[K, D]``.
        kind_of: the kind of each run, or -1: ``[S]``.
        is_gang: shards of this kind go to all ranks of a host: ``[K]``.
        spread: what each option takes of every rank, in parts of all it has: ``[O', D]``.
        budget: of that, at most: ``[D]``.
        labels: what tells the kinds apart, whatever the time: ``K``.
    """

    options: Ints
    table: Ints
    needs: Floats
    size: Floats
    kind_of: Ints
    is_gang: Bools
    spread: Floats
    budget: Floats
    labels: tuple[bytes, ...] = ()

    def least_spread(self, multiplicity: Ints) -> Floats:
        """What lies on every rank at least, in parts of all it has: ``[D]``.

        Args:
            multiplicity: how many tables each distinct table stands for: ``[T]``.
        """
        starts = np.flatnonzero(np.diff(self.table, prepend=-1))
        least: Floats = np.minimum.reduceat(self.spread, starts, axis=0)
        return least.T @ multiplicity.astype(np.float64)


@frozen(eq=False)
class Solution:
    """What the program says.

    Args:
        ranks: how many are needed.
        tables: how many tables take each option: ``[O']``.
        patterns: in use.
    """

    ranks: float
    tables: Floats
    patterns: tuple[Pattern, ...]


class Program:
    """The linear program, and its basis.

    Rows: one for each kind of shards (those in patterns, without those of the options, are none), one for each distinct
    table (its options are as many as it stands for), one for each dimension (the spread load).

    Args:
        kinds: of shards.
        multiplicity: how many tables each distinct table stands for: ``[T]``.
        given: patterns to begin with, beside those that are made: ``[P, K]``.
        before: a program that was solved; its basis is a good one to begin with where it is about the same shards.
    """

    def __init__(
        self,
        kinds: Kinds,
        multiplicity: Ints,
        given: Floats | None = None,
        before: Program | None = None,
    ) -> None:
        self._kinds, self._multiplicity = kinds, multiplicity
        num_kinds, num_tables, dims = len(kinds.size), len(multiplicity), kinds.size.shape[1]
        self._rows = num_kinds + num_tables + dims
        rhs = np.concatenate([np.zeros(num_kinds), multiplicity, kinds.budget * (1 + 1e-6) + 1e-9])
        # Degenerate vertices are many: a little more of each kind tells them apart.
        rhs[:num_kinds] = 1e-6 * (1 + np.arange(num_kinds) / num_kinds)
        option = np.zeros((self._rows, len(kinds.options)))
        option[:num_kinds] = -kinds.needs
        option[num_kinds + kinds.table, np.arange(len(kinds.options))] = 1
        option[num_kinds + num_tables :] = kinds.spread.T
        slack = np.zeros((self._rows, num_kinds + dims))
        slack[np.arange(num_kinds), np.arange(num_kinds)] = -1
        slack[num_kinds + num_tables + np.arange(dims), num_kinds + np.arange(dims)] = 1
        self._first_pattern = option.shape[1] + slack.shape[1]
        alone = np.diag(np.floor((1 + TOLERANCE) / kinds.size.max(axis=1))).astype(np.float64)
        self._patterns: list[Floats] = list(np.minimum(alone, MOST_SHARDS))
        self._orders = orders_of(dims)
        self._patterns += self._fullest()
        self._patterns += [] if given is None else list(given)
        self._known = {pattern.tobytes() for pattern in self._patterns}
        columns = np.hstack([option, slack, self._as_columns(self._patterns)])
        cost = (np.arange(columns.shape[1]) >= self._first_pattern).astype(np.float64)
        self._simplex = Simplex(columns, cost, rhs)
        self._looks_hard = False
        if before is None or not self._begin_as(before):
            self._begin()

    def _begin(self) -> None:
        """At first each table takes an option with the least spread load, and each kind of shards has its own ranks."""
        kinds, num_kinds, num_tables = self._kinds, len(self._kinds.size), len(self._multiplicity)
        order = np.lexsort((kinds.needs.sum(axis=0), kinds.spread.sum(axis=1), kinds.table))
        base = order[np.searchsorted(kinds.table[order], np.arange(num_tables))]
        of_base = len(kinds.options) + num_kinds + np.arange(kinds.size.shape[1])
        self._simplex.begin(np.concatenate([self._first_pattern + np.arange(num_kinds), base, of_base]))

    def _begin_as(self, before: Program) -> bool:
        """Begin where another program ended, if its patterns fit here; whether they do."""
        is_alike = before._kinds.labels == self._kinds.labels and np.array_equal(
            before._kinds.options, self._kinds.options
        )
        if not is_alike:
            return False
        first = self._first_pattern
        position = {pattern.tobytes(): first + index for index, pattern in enumerate(self._patterns)}
        basis = [
            index if index < first else position.get(before._patterns[index - first].tobytes(), -1)
            for index in before._simplex.basis.tolist()
        ]
        return min(basis) >= 0 and len(set(basis)) == len(basis) and self._simplex.begin(np.array(basis))

    def _fullest(self) -> list[Floats]:
        """Ranks filled after one shard of each kind, for the size of what they hold: patterns to begin with."""
        size = self._kinds.size
        prices = np.clip(size.sum(axis=1), 1e-6, None)
        found = fillings(size, prices, self._orders, np.eye(len(size)))
        return list({pattern.tobytes(): pattern for pattern in found}.values())

    def _as_columns(self, patterns: list[Floats]) -> Floats:
        columns = np.zeros((self._rows, len(patterns)))
        columns[: len(self._kinds.size)] = np.array(patterns).T
        return columns

    @property
    def patterns(self) -> Floats:
        """All patterns made so far: ``[N, K]``."""
        return np.array(self._patterns)

    def best_patterns(self, most: int) -> Floats:
        """Those of its patterns that come nearest to what they are worth, in use or not: ``[N, K]``."""
        patterns, prices = self.patterns, self.prices
        worth = patterns @ prices
        return patterns[np.argsort(-worth, kind="stable")[:most]]

    @property
    def prices(self) -> Floats:
        """What a shard of each kind is worth, in ranks: ``[K]``."""
        return np.maximum(self._simplex.prices[: len(self._kinds.size)], 0.0)

    def worth_of(self, kinds: Kinds) -> Floats:
        """What one table less would save, less what each option takes of every rank, in ranks: ``[O']``.

        Args:
            kinds: of all options, those of this program among them.
        """
        prices = self._simplex.prices[len(self._kinds.size) :]
        of_table, of_spread = np.split(prices, [len(self._multiplicity)])
        worth: Floats = of_table[kinds.table] + kinds.spread @ of_spread
        return worth

    def solve(self, enough: float, is_over: Callable[[], bool] = never) -> Solution:
        """The least number of ranks, or one that is enough; or what there is when time is over."""
        history: list[float] = []
        for _ in range(_MOST_ROUNDS):
            is_least = self._simplex.solve(_MOST_PIVOTS, enough)
            history.append(self._simplex.value)
            if not is_least or history[-1] <= enough or is_over():
                break
            is_stuck = len(history) > _PATIENCE and history[-1] > history[-_PATIENCE] * (1 - _LEAST_PROGRESS)
            if is_stuck and self._looks_hard:
                break
            if is_stuck:
                self._looks_hard, history = True, []
            if not self._generate(self._simplex.prices[: len(self._kinds.size)]):
                break
        return self._solution()

    def _generate(self, prices: Floats) -> bool:
        """Add patterns that are worth more than a rank at some prices of shards; whether there are any."""
        size, prices = self._kinds.size, np.maximum(prices, 0.0)
        new, most = self._worthwhile(fillings(size, prices, self._orders, np.zeros((1, len(size)))), prices)
        if most <= _MEAGRE or self._looks_hard:
            new, most = self._worthwhile(many_fillings(size, prices, self._orders), prices)
        if not new:
            return False
        self._patterns += new
        self._simplex.add(self._as_columns(new), np.ones(len(new)))
        return True

    def _worthwhile(self, found: Floats, prices: Floats) -> tuple[list[Floats], float]:
        """New patterns that are worth more than a rank, the best ones, and what the best is worth."""
        worth, new = found @ prices, list[Floats]()
        for index in np.argsort(-worth, kind="stable")[:_MOST_SEEN].tolist():
            if worth[index] <= 1 + 1e-6 or len(new) >= _MOST_NEW:
                break
            key = found[index].tobytes()
            if key not in self._known:
                self._known.add(key)
                new.append(found[index])
        return new, float(worth.max(initial=1.0))

    def _solution(self) -> Solution:
        values, first = self._simplex.solution, self._first_pattern
        used = [
            Pattern(pattern.astype(np.int64), float(value))
            for pattern, value in zip(self._patterns, values[first:], strict=True)
            if value > 1e-4
        ]
        return Solution(float(values[first:].sum()), values[: len(self._kinds.options)], tuple(used))
