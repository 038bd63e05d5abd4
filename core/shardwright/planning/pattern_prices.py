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
from shardwright.planning.distinct import distinct, distinct_rows, without
from shardwright.planning.dual import TOLERANCE
from shardwright.planning.fillings import fillings, many_fillings, orders_of
from shardwright.planning.groups import groups
from shardwright.planning.knapsack import most_worth
from shardwright.planning.options import FREE, Floats, Ints
from shardwright.planning.simplex import Simplex
from shardwright.planning.solver import most_worth as solved_most_worth

# Linear programs of one case; patterns added to one; those that are kept for other cases.
_MOST_PROGRAMS, _MOST_NEW, _MOST_KEPT = 120, 30, 3000
# Pivots of one program.
_MOST_PIVOTS = 3000
# What one rank more than there are costs, in parts of all ranks' time.
_PENALTY = 1e4


@frozen
class Limits:
    """What a proof may take.

    Args:
        kinds: of shards; where there are more, those of about one size are one. With fewer, less is proven.
        solved: how often the solver is asked, where there are too many sets to find the best pattern by them.
        work: entries of all linear programs: ten million take a second or two.
    """

    kinds: int = 120
    solved: int = 12
    work: int = 60_000_000


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
        for option in distinct(options.option[self.shard > 0]).tolist():
            table = int(options.table[option])
            position = str(option - int(options.first_option[table]))
            of_table = found.setdefault(options.tables[table].path, {})
            of_table[position] = self.shard[options.shards_of(option)].tolist()
        return found


@frozen(eq=False)
class Possible:
    """What seems possible in a case: tables in parts.

    Args:
        spread: the spread load, and what goes with it of each tier: ``[1 + M]``.
        option: the options of the case: ``[O']``.
        amount: how many tables take each: ``[O']``.
    """

    spread: Floats
    option: Ints
    amount: Floats


@define(eq=False)
class PatternPrices:
    """Finds such prices, and keeps the patterns that it has seen.

    Args:
        problem: the relaxed problem.
        most_ms: the longest time that is asked about.
        limits: of all proofs together.
    """

    problem: Relaxation
    most_ms: float
    limits: Limits = Limits()
    _needs: Floats = field(init=False)
    _kind: Ints = field(init=False)
    _patterns: Floats = field(init=False)
    _left: int = field(init=False)
    work_left: int = field(init=False)
    """Entries of the linear programs that may still be solved."""

    def __attrs_post_init__(self) -> None:
        space, self._left, self.work_left = self.problem.space, self.limits.solved, self.limits.work
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
        group[fitting] = len(needs) + groups(needs[fitting] / np.maximum(room, 1e-300), self.limits.kinds)
        _, result = np.unique(group, return_inverse=True)
        return result.reshape(-1)

    @property
    def _nothing(self) -> Priced:
        """No prices: where some table has no option, or nothing is left of a rank, there is nothing to prove."""
        tiers = len(self.problem.capacity)
        return Priced(np.zeros(tiers), np.zeros(1 + tiers), np.zeros(len(self._kind)))

    def refute(self, case: Case, z_ms: float) -> Priced | Possible | None:
        """Prices by which no plan of a case is faster than a time, if the program proves that.

        Otherwise what seems possible; ``None`` where that is not known.
        """
        room = self.problem.within(case, z_ms)
        has_options = np.logical_or.reduceat(room.allowed, self.problem.first).all()
        if not has_options or room.size[0] <= 0 or room.size.min() < 0:
            return self._nothing
        options = np.flatnonzero(room.allowed)
        run = np.flatnonzero((self._kind != FREE) & room.allowed[self.problem.space.options.option])
        kinds = distinct(self._kind[run])
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

    def solve(self) -> Priced | Possible | None:
        """Patterns are added until the case is refuted, or shown to be possible."""
        num_shared = self._shared.shape[1]
        program = self._begun()
        for _ in range(_MOST_PROGRAMS):
            self._of.work_left -= program.size
            is_least = program.solve(_MOST_PIVOTS)
            amount: Floats = program.solution[: len(self._options)]
            possible = Possible(amount @ self._spread, self._options, amount)
            if program.value <= 1:
                return possible
            if not is_least or self._of.work_left <= 0 or self._problem.space.watch.is_over:
                return None
            duals = np.maximum(-program.prices, 0.0)
            shared, prices = duals[:num_shared], duals[num_shared : num_shared + len(self._kinds)]
            rank = max(duals[num_shared + len(self._kinds)] / self._problem.world_size, 1e-12)
            new = self._greedy(prices, rank)
            if not len(new):
                enough = self._enough(shared, prices)
                most, new = self._of.best_patterns(self._size, prices, max(enough, rank))
                if most <= enough:
                    return self._priced(shared, prices)
            if not len(new):
                return possible
            self.patterns = np.vstack([self.patterns, new])
            program.add(self._as_columns(new), np.zeros(len(new)))
        return None

    def _begun(self) -> Simplex:
        """The program with the patterns known, at a solution that may exceed what there is at a price.

        Rows: what is shared, kinds of shards, ranks, tables. Columns: tables that take each option, what is left of
        each row but the last, what there is too little of, ranks with each pattern.
        """
        kinds, shared, count = len(self._kinds), self._shared, self._problem.count
        num_options, num_shared, limited = shared.shape[0], shared.shape[1], shared.shape[1] + kinds + 1
        option = np.zeros((limited + len(count), num_options))
        option[:num_shared], option[num_shared : limited - 1] = shared.T, self._needs
        option[limited + self._table, np.arange(num_options)] = 1
        short = np.append(np.arange(num_shared), limited - 1)
        rest = np.eye(len(option))[:, :limited]
        columns = np.hstack([option, rest, -rest[:, short], self._as_columns(self.patterns)])
        cost = np.zeros(columns.shape[1])
        cost[:num_options], cost[num_options + limited : num_options + limited + len(short)] = (
            self._cost,
            _PENALTY,
        )
        # Degenerate vertices are many. A little of each kind is free, so that kinds that are not in use have no price.
        limit = np.concatenate([np.ones(num_shared), 1e-7 * (1 + np.arange(kinds) / kinds), [1], count])
        base = _cheapest(self._cost + shared.sum(axis=1) + self._needs.sum(axis=0), self._table)
        more = self._needs[:, base] @ count - limit[num_shared : limited - 1]
        alone = num_options + np.where(
            more > 0, limited + len(short) + np.arange(kinds), num_shared + np.arange(kinds)
        )
        ranks = np.maximum(more, 0.0) / self.patterns.max(axis=1)[:kinds]
        used = np.append(count @ shared[base], ranks.sum() / self._problem.world_size)
        over = np.where(used > 1, num_options + limited + np.arange(len(short)), num_options + short)
        program = Simplex(columns, cost, limit)
        program.begin(np.concatenate([over[:-1], alone, over[-1:], base]))
        return program

    def _as_columns(self, patterns: Floats) -> Floats:
        num_shared, kinds = self._shared.shape[1], len(self._kinds)
        columns = np.zeros((num_shared + kinds + 1 + len(self._problem.count), len(patterns)))
        columns[num_shared : num_shared + kinds] = -patterns.T
        columns[num_shared + kinds] = 1 / self._problem.world_size
        return columns

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
        """Patterns worth more than a rank, from filling ranks by worth for size in many orders."""
        found, orders = np.empty((0, len(prices))), orders_of(self._size.shape[1])
        if not (prices > 1e-9).any():
            return found
        for fill in (_quick_fillings, many_fillings):
            found = fill(self._size, prices, orders)
            value = found @ prices
            best = np.argsort(-value, kind="stable")
            found = distinct_rows(found[best[value[best] > rank * (1 + 1e-4)]])[:_MOST_NEW]
            if len(found):
                break
        return found


def _quick_fillings(size: Floats, prices: Floats, orders: Floats) -> Floats:
    starts = np.vstack([np.zeros(len(size)), np.eye(len(size))[prices > 1e-9]])
    return fillings(size, prices, orders[: size.shape[1] + 2], starts)


def _cheapest(price: Floats, table: Ints) -> Ints:
    """The position of the cheapest option of each table, which stand together: ``[T]``."""
    order = np.lexsort((price, table))
    return order[np.flatnonzero(np.diff(table[order], prepend=-1))]
