"""Prices of shards by what fits into a rank together: the bound of cutting stock, where lumps are what counts.

That all shards of all options find room is relaxed to this: there are *patterns*, sets of shards that fit into a rank
together, and the ranks hold patterns in any parts, as many as there are ranks (Gilmore and Gomory 1961). The dual of
that linear program has a price for each kind of shards, and no set that fits into a rank is worth more than the rank.
Hence, added to what an option costs, the prices of its shards are paid back by the ranks at most, and a case is refuted
as by other multipliers (:mod:`shardwright.planning.cases`): it is the best of all dual feasible functions. Shards of
gangs count as shards that may go to any rank. Where there are too many kinds, those of about one size count as the
least of them: what fits together still does, so all that is proven holds of the shards as they are.

Legend: K kinds of shards, N patterns, O' options, M memory tiers, W ranks, D dimensions (time, then memory tiers).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field, frozen

from shardwright.planning.bound import Case, Relaxation, Room
from shardwright.planning.distinct import distinct_rows, without
from shardwright.planning.dual import TOLERANCE
from shardwright.planning.groups import groups
from shardwright.planning.knapsack import most_worth
from shardwright.planning.options import FREE, Floats, Ints
from shardwright.planning.solver import most_worth as solved_most_worth

# Linear programs of one case; patterns added to one; those that are kept for other cases.
_MOST_PROGRAMS, _MOST_NEW, _MOST_KEPT = 120, 12, 3000
# Kinds at most.
_MOST_KINDS = 120
# What one rank more than there are costs, in parts of all ranks' time.
_PENALTY = 1e4
# Where there are too many sets to find the best pattern by them, the solver is asked, so often at most.
_MOST_SOLVED = 12
# Entries of all linear programs of a proof: a million take about a second.
_MOST_WORK = 12_000_000


@frozen(eq=False)
class Priced:
    """Multipliers that refute a case.

    Args:
        memory: of all ranks' memory of each tier, ms: ``[M]``.
        spread: of the spread load, ms per ms, and of what goes with it of each tier, ms per byte: ``[1 + M]``.
        shard: of each shard of a run, ms: ``[S]``.
    """

    memory: Floats
    spread: Floats
    shard: Floats

    def to_data(self, problem: Relaxation) -> dict[str, Any]:
        """A leaf of a proof by cases, as JSON data."""
        tiers, per_byte = problem.space.tiers, self.memory / np.maximum(problem.capacity, 1)
        return {
            "multipliers": dict(zip(tiers, per_byte.tolist(), strict=True)),
            "spread_multiplier": float(self.spread[0]),
            "spread_multipliers": dict(zip(tiers, self.spread[1:].tolist(), strict=True)),
            "prices": self._prices(problem),
        }

    def _prices(self, problem: Relaxation) -> dict[str, dict[str, list[float]]]:
        """``{path: {position of the option: [price of each run]}}``."""
        options, found = problem.space.options, dict[str, dict[str, list[float]]]()
        for option in np.unique(options.option[self.shard > 0]).tolist():
            table = int(options.table[option])
            position = str(option - int(options.first_option[table]))
            of_table = found.setdefault(options.tables[table].path, {})
            of_table[position] = self.shard[options.shards_of(option)].tolist()
        return found


@define(eq=False)
class PatternPrices:
    """Finds such prices, and keeps the patterns that it has seen.

    Args:
        problem: the relaxed problem.
        most_ms: the longest time that is asked about.
    """

    problem: Relaxation
    most_ms: float
    _needs: Floats = field(init=False)
    _kind: Ints = field(init=False)
    _patterns: Floats = field(init=False)
    _left: int = _MOST_SOLVED
    work_left: int = _MOST_WORK
    """Entries of the linear programs that may still be solved."""

    def __attrs_post_init__(self) -> None:
        space = self.problem.space
        needs, kind = np.unique(
            np.column_stack([space.cost_ms, space.memory_bytes]), axis=0, return_inverse=True
        )
        kind = np.where(space.options.rank == FREE, kind.reshape(-1), FREE)
        group = self._groups(needs, kind)
        self._needs = np.full((int(group.max()) + 1, needs.shape[1]), np.inf)
        np.minimum.at(self._needs, group, needs)
        self._kind = np.where(kind == FREE, FREE, group[kind])
        self._patterns = np.empty((0, len(self._needs)))

    def _groups(self, needs: Floats, kind: Ints) -> Ints:
        """The groups of kinds that count as one, ``[K]``; what no rank has room for is one of its own."""
        is_free = np.zeros(len(needs), dtype=bool)
        is_free[kind[kind != FREE]] = True
        room = np.append(self.most_ms, self.problem.space.capacity_bytes.max(axis=0))
        fitting = np.flatnonzero(is_free & (needs <= room).all(axis=1))
        group = np.arange(len(needs))
        group[fitting] = len(needs) + groups(needs[fitting] / np.maximum(room, 1e-300), _MOST_KINDS)
        _, result = np.unique(group, return_inverse=True)
        return result.reshape(-1)

    @property
    def _nothing(self) -> Priced:
        """No prices: where some table has no option, or nothing is left of a rank, there is nothing to prove."""
        tiers = len(self.problem.capacity)
        return Priced(np.zeros(tiers), np.zeros(1 + tiers), np.zeros(len(self._kind)))

    def refute(self, case: Case, z_ms: float) -> Priced | Floats | None:
        """Prices by which no plan of a case is faster than a time, if the program proves that.

        Otherwise the spread load, and what goes with it of each tier, of what seems possible, ``[1 + M]``; ``None``
        where that is not known.
        """
        room = self.problem.within(case, z_ms)
        has_options = np.logical_or.reduceat(room.allowed, self.problem.first).all()
        if not has_options or room.size[0] <= 0 or room.size.min() < 0:
            return self._nothing
        options = np.flatnonzero(room.allowed)
        run = np.flatnonzero((self._kind != FREE) & room.allowed[self.problem.space.options.option])
        kinds = np.unique(self._kind[run])
        if not len(kinds):
            return None
        program = _Program(self, case, z_ms, room, options, kinds)
        found = program.solve()
        self._keep(kinds, program.patterns)
        return found

    def best_patterns(self, size: Floats, prices: Floats, floor: float) -> tuple[float, Floats]:
        """What a pattern may be worth at most, and the best ones that are worth more than a floor, ``[N, K]``."""
        most, found = most_worth(size, prices, floor, _MOST_NEW)
        if most <= floor or len(found) or not self._left:
            return most, found
        self._left -= 1
        most, pattern = solved_most_worth(size, prices)
        return most, pattern[None][: int(pattern @ prices > floor)]

    def known(self, kinds: Ints, size: Floats) -> Floats:
        """Patterns of some kinds that were seen before and fit: ``[N, K]``."""
        others = without(np.arange(len(self._needs)), kinds)
        mine = self._patterns[(self._patterns[:, others] == 0).all(axis=1)][:, kinds]
        fitting: Floats = mine[(mine @ size <= 1).all(axis=1)]
        return fitting

    def _keep(self, kinds: Ints, patterns: Floats) -> None:
        whole = np.zeros((len(patterns), len(self._needs)))
        whole[:, kinds] = patterns
        self._patterns = distinct_rows(np.vstack([self._patterns, whole])[-_MOST_KEPT:])


class _Program:
    """The linear program of one case; all in parts of all ranks' time, of memory, and of all ranks."""

    def __init__(
        self, prices: PatternPrices, case: Case, z_ms: float, room: Room, options: Ints, kinds: Ints
    ) -> None:
        self._of, problem = prices, prices.problem
        self._problem = problem
        space, columns = problem.space, problem.space.options
        self._unit = problem.world_size * z_ms
        self._options, self._kinds, self._kind_of = options, kinds, prices._kind
        self._size: Floats = prices._needs[kinds] / np.maximum(room.size, 1e-300)
        self._cost: Floats = problem.cost[options] / self._unit
        self._spread: Floats = np.column_stack([problem.spread, problem.spread_bytes])[options]
        tiers = np.full(problem.share.shape[1], np.inf)
        self._high: Floats = np.append(case.high_ms, tiers if case.high_bytes is None else case.high_bytes)
        self._limited = np.flatnonzero(np.isfinite(self._high))
        limited = self._spread[:, self._limited] / np.maximum(self._high[self._limited], 1e-30)
        self._shared: Floats = np.hstack([problem.share[options], limited])
        run = np.flatnonzero((prices._kind != FREE) & room.allowed[columns.option])
        self._needs: Floats = np.zeros((len(kinds), len(options)))
        place = np.searchsorted(kinds, prices._kind[run]), np.searchsorted(options, columns.option[run])
        np.add.at(self._needs, place, columns.count[run])
        alone = np.diag(np.floor((1 / np.maximum(self._size, 1e-9)).min(axis=1)))
        self.patterns: Floats = np.vstack([alone, prices.known(kinds, self._size)])
        self._table, self._runs = columns.table[options], space.options.num_shards

    def solve(self) -> Priced | Floats | None:
        """Patterns are added until the case is refuted, or shown to be possible: then the spread load."""
        for _ in range(_MOST_PROGRAMS):
            is_over = self._problem.space.watch.is_over or self._of.work_left <= 0
            found = None if is_over else self._solved()
            if found is None:
                return None
            chosen: Floats = found.x[: len(self._options)] @ self._spread
            if found.fun <= 1:
                return chosen
            shared, prices = np.split(-found.ineqlin.marginals[:-1], [self._shared.shape[1]])
            shared, prices = np.maximum(shared, 0.0), np.maximum(prices, 0.0)
            rank = max(-found.ineqlin.marginals[-1] / self._problem.world_size, 1e-12)
            new = self._greedy(prices, rank)
            if not len(new):
                enough = self._enough(shared, prices)
                most, new = self._of.best_patterns(self._size, prices, max(enough, rank))
                if most <= enough:
                    return self._priced(shared, prices)
            if not len(new):
                return chosen
            self.patterns = np.vstack([self.patterns, new])
        return None

    def _solved(self) -> Any:
        """Columns: tables that take each option, parts of ranks with each pattern, and what there is too little of."""
        from scipy.optimize import linprog

        num_options, num_patterns, num_shared = len(self._options), len(self.patterns), self._shared.shape[1]
        over = np.zeros((num_shared + len(self._kinds) + 1, num_options + num_patterns + num_shared + 1))
        over[:num_shared, :num_options] = self._shared.T
        over[num_shared:-1, :num_options] = self._needs
        over[num_shared:-1, num_options : num_options + num_patterns] = -self.patterns.T
        over[-1, num_options : num_options + num_patterns] = 1 / self._problem.world_size
        short = np.append(np.arange(num_shared), len(over) - 1)
        over[short, num_options + num_patterns + np.arange(num_shared + 1)] = -1
        self._of.work_left -= over.size
        limit = np.zeros(len(over))
        limit[short] = 1
        equal = np.zeros((len(self._problem.count), over.shape[1]))
        equal[self._table, np.arange(num_options)] = 1
        cost = np.concatenate([self._cost, np.zeros(num_patterns), np.full(num_shared + 1, _PENALTY)])
        found = linprog(cost, A_ub=over, b_ub=limit, A_eq=equal, b_eq=self._problem.count, method="highs")
        return found if found.status == 0 else None

    def _enough(self, shared: Floats, prices: Floats) -> float:
        """The case is refuted where no pattern is worth more."""
        priced = self._cost + self._shared @ shared + prices @ self._needs
        starts = np.flatnonzero(np.diff(self._table, prepend=-1))
        least = np.minimum.reduceat(priced, starts)
        value = float(self._problem.count @ least - shared.sum()) - 1 - 20 * TOLERANCE
        return value / self._problem.world_size

    def _priced(self, shared: Floats, prices: Floats) -> Priced:
        of_kind = np.zeros(int(self._kind_of.max()) + 1)
        of_kind[self._kinds] = prices * self._unit
        tiers = len(self._problem.capacity)
        spread = np.zeros(1 + tiers)
        spread[self._limited] = shared[tiers:] * self._unit / np.maximum(self._high[self._limited], 1e-30)
        return Priced(
            shared[:tiers] * self._unit, spread, np.where(self._kind_of == FREE, 0.0, of_kind[self._kind_of])
        )

    def _greedy(self, prices: Floats, rank: float) -> Floats:
        """Patterns worth more than a rank, from filling ranks by worth for size after one shard of each kind."""
        worth = np.flatnonzero(prices > 1e-12)
        if not len(worth):
            return np.empty((0, len(prices)))
        dims = self._size.shape[1]
        weights = np.vstack([np.eye(dims) + 1e-3, np.ones(dims), 1 / (1 + np.arange(dims))])
        density = prices[worth] / np.maximum(weights @ self._size[worth].T, 1e-12)
        order = worth[np.argsort(-density, axis=1, kind="stable")]
        starts = np.vstack([np.zeros(len(prices)), np.eye(len(prices))[worth]])
        filled = np.repeat(starts, len(order), axis=0)
        ways, left = np.tile(order, (len(starts), 1)), 1 - filled @ self._size
        rows, least = np.arange(len(filled)), np.maximum(self._size, 1e-9)
        for kind in ways.T:
            number = np.floor(np.maximum((left / least[kind]).min(axis=1), 0.0))
            filled[rows, kind] += number
            left -= number[:, None] * self._size[kind]
        value = filled @ prices
        best = np.argsort(-value, kind="stable")
        return distinct_rows(filled[best[value[best] > rank * (1 + 1e-4)]])[:_MOST_NEW]
