"""Proofs by cases with the prices of patterns: the plans are parted by what lies on every rank.

What options with a shard on every rank take of each, of its time and of its memory, is room that no pattern has. How
much that is, is not known beforehand, so the plans are parted in two by it, where the program of patterns takes more of
it than the case grants, and again (:mod:`shardwright.planning.cases` has the proof's form; nodes ``{"spread_bytes":
[tier, b], "below": node, "above": node}`` come to it, and leaves have ``"spread_multipliers": {tier: ms per byte}`` and
``"prices": {path: {position of the option: [ms of each shard of a run]}}``). Where there are few tables,
plans are parted by one table's options, of which the program takes parts, too: first where these parts make much of
every rank, and where nothing else is left to part by. This takes seconds, so it is done where a gap is wide.

Legend: M memory tiers.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from attrs import define, field

from shardwright.planning.bound import Case, Certificate, Relaxation
from shardwright.planning.cases import Prover
from shardwright.planning.options import Floats
from shardwright.planning.pattern_prices import Limits, PatternPrices, Possible, Priced

# Cases of the proof of one time; times that are tried; how near to a time out of reach the bound is brought.
_MOST_CASES, _MOST_TIMES, _PRECISION = 60, 10, 1.5e-3
# The parts of the way to a plan's value that a quick proof tries.
_QUICK_PARTS = (0.6, 0.3)
# Where shards are of many kinds: limits of a quick proof, its first step, of which each next is half, steps and cases.
_QUICK = Limits(kinds=90, solved=0, work=1_500_000)
_FIRST_PART, _STEPS, _FEW_CASES = 0.25, 3, 8
# A case that grants the spread load but for this part of a rank is not parted further; it is parted at this part.
_FINE, _PART = 0.004, 0.55
# Cases of so few tables are parted by their options too, and there may be so many for a time and in all: at first where
# parts of a table's options make this much of every rank, at last where a table takes this part of an option.
_FEW_TABLES, _MORE_CASES, _MORE_IN_ALL, _MUCH, _LEAST_PART = 64, 150, 450, 0.02, 0.02
# Where cases are counted, a time gets this part of them, and each case so many entries of linear programs on average.
_TIMES, _WORK = 4, 100_000
# The precision for these, unless they are very few, and what the proofs may take.
_ROUGH, _VERY_FEW_TABLES, _MORE = 5e-3, 15, Limits(work=120_000_000)


@define(eq=False)
class PatternCases:
    """Raises a bound by prices of patterns.

    Args:
        prover: what is proven so far.
        most_ms: the longest time that is asked about: that of the best plan.
        limits: of all proofs together; by default as many as it takes seconds to reach.
    """

    prover: Prover
    most_ms: float
    limits: Limits | None = None
    _prices: PatternPrices = field(init=False)
    _left: float = 0
    _left_in_all: float = np.inf
    _most_for_a_time: float = _MOST_CASES

    def __attrs_post_init__(self) -> None:
        limits = self.limits or (_MORE if self._has_few_tables else Limits())
        self._prices = PatternPrices(self.prover.space.bound.problem, self.most_ms, limits)

    def raise_once(self, most_cases: int) -> None:
        """Bring the bound nearer to the longest time in one step, a lesser one if that fails.

        Args:
            most_cases: that may be looked at in all.
        """
        self._left_in_all = most_cases
        low = self.prover.bound_ms
        for part in _QUICK_PARTS:
            if self.prover.space.watch.is_over or self._left_in_all <= 0:
                return
            if self.refute(low + part * (self.most_ms - low)):
                return

    @classmethod
    def quick(cls, prover: Prover, most_ms: float) -> PatternCases:
        """One for :meth:`raise_some`, for shards of many kinds."""
        return cls(prover, most_ms, _QUICK)

    def raise_some(self) -> None:
        """Bring the bound nearer to the longest time by a few steps: from part of the way, on or back."""
        low, way, part, step = self.prover.bound_ms, self.most_ms - self.prover.bound_ms, 0.0, _FIRST_PART
        for _ in range(_STEPS):
            self._left_in_all = _FEW_CASES
            if self.prover.space.watch.is_over or self._prices.work_left <= 0:
                return
            part += step if self.prover.bound_ms >= low + part * way else -step
            self.refute(low + part * way)
            step /= 2

    def sharpen(self, enough: float = 0.0, most_cases: float = np.inf) -> None:
        """Bring the bound as near to the longest time as it goes, or until the gap is ``enough``.

        Args:
            enough: the gap.
            most_cases: that may be looked at in all.
        """
        self._left_in_all = min(most_cases, _MORE_IN_ALL if self._has_few_tables else np.inf)
        self._prices.work_left = min(self._prices.work_left, int(min(most_cases * _WORK, 1e12)))
        self._most_for_a_time = min(_MORE_CASES if self._has_few_tables else _MOST_CASES, most_cases / _TIMES)
        low, high = self.prover.bound_ms, self.most_ms
        number = len(self.prover.space.options.all_tables)
        precision = _ROUGH if _VERY_FEW_TABLES < number <= _FEW_TABLES else _PRECISION
        for _ in range(_MOST_TIMES):
            is_near = high <= low * (1 + precision) or self.most_ms <= low * (1 + enough)
            if is_near or self._left_in_all <= 0 or self.prover.space.watch.is_over:
                return
            middle = low + 0.6 * (high - low)
            if self.refute(middle):
                low = middle
            else:
                high = middle

    def refute(self, z_ms: float) -> bool:
        """Try to prove that no plan is faster than a time."""
        self._left = min(self._most_for_a_time, self._left_in_all)
        tiers = len(self._prices.problem.capacity)
        everything = Case(
            np.ones(len(self._prices.problem.cost), dtype=bool),
            low_bytes=np.zeros(tiers),
            high_bytes=np.full(tiers, np.inf),
        )
        proof = self._proof(everything, z_ms)
        if proof is not None:
            self.prover.accept(Certificate(z_ms, proof))
        return proof is not None

    def _proof(self, case: Case, z_ms: float) -> dict[str, Any] | None:
        self._left -= 1
        self._left_in_all -= 1
        found = self._prices.refute(case, z_ms)
        if isinstance(found, Priced):
            return found.to_data(self._prices.problem)
        if found is None or self._left <= 0 or self.prover.space.watch.is_over:
            return None
        return self._parted(case, z_ms, found)

    @property
    def _has_few_tables(self) -> bool:
        return len(self.prover.space.options.all_tables) <= _FEW_TABLES

    def _parted(self, case: Case, z_ms: float, found: Possible) -> dict[str, Any] | None:
        """Part a case by what lies on every rank, or by what one of a few tables takes of it."""
        problem = self._prices.problem
        size = np.append(z_ms, problem.space.capacity_bytes.max(axis=0))
        if self._has_few_tables:
            some = _parted_options(problem, found, size, _MUCH)
            if some is not None:
                return self._parted_by_options(case, z_ms, some)
        low = size - problem.within(case, z_ms).size
        # The program keeps to its limits but for rounding.
        spread = np.minimum(found.spread, np.append(case.high_ms, np.array(case.high_bytes)))
        uncounted = (spread - low) / np.maximum(size, 1e-300)
        dimension = int(np.argmax(uncounted))
        if uncounted[dimension] > _FINE:
            # Where what seems possible takes most of every rank that is not counted.
            limit = float(low[dimension] + _PART * (spread - low)[dimension])
            return self._parted_by_spread(case, z_ms, dimension, limit)
        some = _parted_options(problem, found, size, 0.0) if self._has_few_tables else None
        return None if some is None else self._parted_by_options(case, z_ms, some)

    def _parted_by_spread(
        self, case: Case, z_ms: float, dimension: int, limit: float
    ) -> dict[str, Any] | None:
        below, above = _halves(case, dimension, limit)
        # What seems possible is above: where it is, no more cases are looked at.
        proofs = self._proofs(z_ms, above=above, below=below)
        tiers = self._prices.problem.space.tiers
        split = {"spread_bytes": [tiers[dimension - 1], limit]} if dimension else {"spread_ms": limit}
        return None if proofs is None else split | proofs

    def _parted_by_options(self, case: Case, z_ms: float, some: list[int]) -> dict[str, Any] | None:
        """Part a case by whether a table takes some of its options."""
        options = self._prices.problem.space.options
        table = int(options.table[some[0]])
        is_among = np.isin(np.arange(options.num_options), some)
        among = attrs.evolve(case, allowed=case.allowed & (is_among | (options.table != table)))
        others = attrs.evolve(case, allowed=case.allowed & ~is_among)
        proofs = self._proofs(z_ms, among=among, others=others)
        positions = [option - int(options.first_option[table]) for option in some]
        split = {"table": options.tables[table].path, "options": positions}
        return None if proofs is None else split | proofs

    def _proofs(self, z_ms: float, **cases: Case) -> dict[str, Any] | None:
        """The proofs of some cases; none if one of them is not proven."""
        proofs: dict[str, Any] = {}
        for name, case in cases.items():
            proof = self._proof(case, z_ms)
            if proof is None:
                return None
            proofs[name] = proof
        return proofs


def _parted_options(problem: Relaxation, found: Possible, size: Floats, least: float) -> list[int] | None:
    """The options with a shard on every rank of the table that takes most of every rank by a part of them.

    Args:
        problem: the relaxed problem.
        found: what seems possible.
        size: of a rank: ``[1 + M]``.
        least: the part of a rank from which on it counts; where that is 0, any option of which a part is taken does.
    """
    options, mine = problem.space.options, found.option
    table, covers = options.table[mine], problem.covers[mine]
    amount = np.where(options.multiplicity[table] == 1, found.amount, 0.0)
    spread = np.column_stack([problem.spread, problem.spread_bytes])[mine] / np.maximum(size, 1e-300)
    taken = np.bincount(table, np.where(covers, amount, 0.0))
    part, total = np.minimum(taken, 1 - taken), np.bincount(table, amount * spread.max(axis=1))
    load = total / np.maximum(taken, 1e-300) * part
    chosen = int(np.argmax(load))
    if load[chosen] > least and part[chosen] > _LEAST_PART:
        return [int(option) for option in mine[(table == chosen) & covers]]
    parted = np.minimum(amount, 1 - amount)
    is_parted = least == 0 and parted.max(initial=0.0) > _LEAST_PART
    return [int(mine[np.argmax(parted)])] if is_parted else None


def _halves(case: Case, dimension: int, limit: float) -> tuple[Case, Case]:
    """The plans with no more on every rank than a limit, and those with no less."""
    if dimension == 0:
        return attrs.evolve(case, high_ms=limit), attrs.evolve(case, low_ms=limit)
    low, high = np.array(case.low_bytes), np.array(case.high_bytes)
    low[dimension - 1] = high[dimension - 1] = limit
    return attrs.evolve(case, high_bytes=high), attrs.evolve(case, low_bytes=low)
