"""Proofs by cases: where one relaxation of all plans proves too little, that of some of them each may prove enough.

Branch and bound (Land and Doig 1960) over the choice of options. A proof is a tree. Its inner nodes part the plans in
two: by the spread load (below or above a time), or by the options of one table (some of them or the others). A leaf
proves by multipliers that no plan of its case is faster than ``z``. Two things are known of a case:

- the spread load is no less than what the options allowed need, table by table, nor than ``low``; a shard that its
  layout gives no rank finds room beside it, ``z - low``: it lies on a rank that has the spread load already. So for
  memory.
- where the spread load is at most ``high``, that is one more resource with a capacity and a multiplier.

As JSON data, a leaf is ``{"multipliers": {tier: ms per byte}, "spread_multiplier": number, "roundings": [{"of": "time"
or tier, "parts": k, "multiplier": ms}]}``, of which the last two may be missing; an inner node is ``{"spread_ms": b,
"below": node, "above": node}`` or ``{"table": path, "options": [positions], "among": node, "others": node}``, where a
position counts the options of the table from 0. Further nodes and prices: :mod:`shardwright.planning.pattern_cases`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from attrs import define, field

from shardwright.planning.bound import TIME, Case, Certificate, Relaxation, Rounding
from shardwright.planning.distinct import without
from shardwright.planning.dual import TOLERANCE, Dual
from shardwright.planning.options import Floats, Ints
from shardwright.planning.space import SearchSpace

_MOST_ROUNDINGS = 2
# How much dearer another option may be, against what it takes more or less, for a branch on it to be of use.
_REGRET_WEIGHT = 10.0
_PARTS = np.array([1, 2, 3, 4, 5, 6, 8])
# A plan is as good as proven to be the best if it exceeds the bound by no more than this part of it.
CLOSE = 3e-3
# How many cases the proof of one time may look at, and how near to a possible time the bound is brought.
_MOST_CASES = 300
_PRECISION = 1e-3
# Options that differ by less, in parts of the time, make no branch.
_LEAST_WEIGHT = 1e-3


@define(eq=False)
class CaseSearch:
    """Tries to prove that no plan is faster than a time, or finds a choice of options that looks possible.

    Args:
        problem: the relaxed problem.
        z_ms: the time.
        num_cases: how many cases may be looked at.
        possible: a choice for each of all tables, of the first case that could not be refuted: ``[A]``.
        open_case: that case.
        price: of each option there, its cost with what it takes of memory: ``[O]``.
    """

    problem: Relaxation
    z_ms: float
    num_cases: int
    possible: Ints | None = None
    price: Floats | None = None
    open_case: Case | None = None

    def proof(self) -> dict[str, Any] | None:
        """A proof, or ``None`` if a case could not be refuted or there are too many."""
        everything = Case(np.ones(len(self.problem.cost), dtype=bool))
        return self._proof(everything, None)

    def _proof(self, case: Case, start: Floats | None) -> dict[str, Any] | None:
        self.num_cases -= 1
        first = self.problem.maximise(self.z_ms, start, case=case)
        dual, roundings = self._rounded(case, first)
        if dual.is_empty:
            return self._leaf(np.zeros(len(self.problem.capacity)), case, ())
        assert dual.best is not None  # each table has an option
        if self._is_refuted(dual):
            return self._leaf(dual.best.multipliers, case, roundings)
        branch = self._by_spread(case, first) or self._by_table(case, dual)
        if branch is None or self.num_cases <= 0:
            self.possible, self.open_case = dual.proposal(), case
            tiers = len(self.problem.capacity)
            self.price = self.problem.cost + self.problem.share @ dual.best.multipliers[:tiers]
            return None
        node, *children = branch
        proofs: dict[str, Any] = {}
        for name, child in children:
            proof = self._proof(child, dual.best.multipliers)
            if proof is None:
                return None
            proofs[name] = proof
        return {**node, **proofs}

    def _is_refuted(self, dual: Dual) -> bool:
        return dual.value_ms >= self.problem.world_size * self.z_ms * (1 + TOLERANCE)

    def _rounded(self, case: Case, dual: Dual) -> tuple[Dual, tuple[Rounding, ...]]:
        """The relaxation of a case with the roundings that its choices exceed."""
        roundings: tuple[Rounding, ...] = ()
        for _ in range(_MOST_ROUNDINGS):
            if dual.is_empty or self._is_refuted(dual):
                break
            exceeded = self._exceeded(case, dual)
            if exceeded is None or exceeded in roundings:
                break
            assert dual.best is not None
            roundings = (*roundings, exceeded)
            start = np.append(dual.best.multipliers, 0.0)
            dual = self.problem.maximise(self.z_ms, start, case=case, roundings=roundings)
        return dual, roundings

    def _exceeded(self, case: Case, dual: Dual) -> Rounding | None:
        """The rounding by which a choice needs the most ranks, if these are more than there are."""
        choice, problem = dual.lean or dual.best, self.problem
        assert choice is not None
        used = problem.rounded_uses(_PARTS, problem.within(case, self.z_ms), choice.option)
        of, parts = (int(index) for index in np.unravel_index(np.argmax(used), used.shape))
        if used[of, parts] <= 1 + 1e-6:
            return None
        return Rounding((TIME, *problem.space.tiers)[of], int(_PARTS[parts]))

    def _leaf(self, multipliers: Floats, case: Case, roundings: Sequence[Rounding]) -> dict[str, Any]:
        tiers = len(self.problem.capacity)
        per_byte = multipliers[:tiers] / np.maximum(self.problem.capacity, 1)
        leaf: dict[str, Any] = {
            "multipliers": dict(zip(self.problem.space.tiers, per_byte.tolist(), strict=True))
        }
        further = multipliers[tiers:].tolist()
        if np.isfinite(case.high_ms) and further:
            leaf["spread_multiplier"] = further.pop(0) / max(case.high_ms, 1e-30)
        if roundings:
            leaf["roundings"] = [
                {"of": rounding.of, "parts": rounding.parts, "multiplier": multiplier}
                for rounding, multiplier in zip(roundings, further, strict=True)
            ]
        return leaf

    def _by_spread(self, case: Case, dual: Dual) -> Any:
        """Part the plans by their spread load, where the choice's does not go with its largest movable shard."""
        choice = dual.lean or dual.best
        assert choice is not None
        spread = float(self.problem.count @ self.problem.spread[choice.option])
        largest = float(self.problem.movable[choice.option].max())
        room = self.z_ms - largest
        if spread + largest <= self.z_ms * (1 + 1e-6):
            room = 0.97 * spread
            if case.high_ms < np.inf and case.high_ms - case.low_ms < 0.05 * self.z_ms:
                return None
        if not case.low_ms < room < case.high_ms:
            return None
        below, above = attrs.evolve(case, high_ms=room), attrs.evolve(case, low_ms=room)
        return {"spread_ms": room}, ("below", below), ("above", above)

    def _by_table(self, case: Case, dual: Dual) -> Any:
        """Part the plans by the option of the table that weighs most among those with another at about its price."""
        assert dual.best is not None
        problem, chosen = self.problem, dual.best.option
        of = problem.space.options.table
        price = dual.share * dual.best.multipliers
        regret = problem.cost + price.sum(axis=1)
        regret = regret - regret[chosen][of]
        weight = np.abs(price - price[chosen][of]).sum(axis=1)
        worth = np.where(dual.allowed & (problem.count[of] == 1), weight - _REGRET_WEIGHT * regret, -np.inf)
        worth[chosen] = -np.inf
        best = int(np.argmax(worth))
        if worth[best] <= 0:
            cheap = np.where(np.isfinite(worth) & (weight > _LEAST_WEIGHT * self.z_ms), regret, np.inf)
            best = int(np.argmin(cheap))
            if not np.isfinite(cheap[best]):
                return None
        return self._parted(case, int(of[best]), self._like(best, int(chosen[of[best]]), dual))

    def _parted(self, case: Case, table: int, among: Ints) -> Any:
        mine = np.array(self.problem.space.options.of_table(table))
        node = {
            "table": self.problem.space.options.tables[table].path,
            "options": (among - mine[0]).tolist(),
        }
        one, other = case.allowed.copy(), case.allowed.copy()
        one[without(mine, among)] = False
        other[among] = False
        return (
            node,
            ("among", attrs.evolve(case, allowed=one)),
            ("others", attrs.evolve(case, allowed=other)),
        )

    def _like(self, one: int, other: int, dual: Dual) -> Ints:
        """The options of a table that take no more of what is dearest than the leaner of two."""
        assert dual.best is not None
        mine = np.array(self.problem.space.options.of_table(int(self.problem.space.options.table[one])))
        price = dual.share[mine] * dual.best.multipliers
        resource = int(np.argmax(np.abs(price[one - mine[0]] - price[other - mine[0]])))
        middle = (price[one - mine[0], resource] + price[other - mine[0], resource]) / 2
        leaner: Ints = mine[price[:, resource] <= middle]
        return leaner


@define(eq=False)
class Prover:
    """The best bound proven so far, and what has been tried in vain.

    Args:
        space: options and costs.
        certificate: of the bound.
        unproven_ms: number of cases -> the least time that could not be refuted with so many; infinite: with any.
        cases_left: how many cases may still be looked at, in all.
    """

    space: SearchSpace
    certificate: Certificate
    unproven_ms: dict[float, float] = field(factory=dict)
    cases_left: int = 800

    @property
    def bound_ms(self) -> float:
        """What no plan is faster than."""
        return self.certificate.z_ms

    def refute(self, z_ms: float, *, max_cases: int = _MOST_CASES) -> CaseSearch:
        """Try to prove that no plan is faster than a time; what came of it."""
        search = CaseSearch(self.space.bound.problem, z_ms, max_cases)
        proof = search.proof()
        self.cases_left -= max_cases - search.num_cases
        if proof is None:
            # A search that ended with cases to spare would end there with any number of them.
            cases = np.inf if search.num_cases > 0 else max_cases
            self.unproven_ms[cases] = min(self.unproven_ms.get(cases, np.inf), z_ms)
        else:
            self.accept(Certificate(z_ms, proof))
        return search

    def accept(self, certificate: Certificate) -> None:
        """Keep a bound that was proven elsewhere, if it is the best."""
        if certificate.z_ms > self.bound_ms:
            self.certificate = certificate
            self.space.watch.tell(lower_bound_ms=certificate.z_ms)

    def sharpen(
        self, value_ms: float, *, precision: float = _PRECISION, max_cases: int = _MOST_CASES
    ) -> None:
        """Bring the bound as near to a plan's value as it goes.

        Args:
            value_ms: of the plan.
            precision: relative, of the bound.
            max_cases: for each time tried.
        """
        high = self._open_ms(value_ms, max_cases)
        while high > self.bound_ms * (1 + precision) and self.cases_left > 0 and not self.space.watch.is_over:
            middle = self.bound_ms + (high - self.bound_ms) * 0.6
            self.refute(middle, max_cases=max_cases)
            high = self._open_ms(high, max_cases)

    def _open_ms(self, value_ms: float, max_cases: int) -> float:
        """The least time that is known to be out of reach with so many cases."""
        tried = (time for cases, time in self.unproven_ms.items() if cases >= max_cases)
        return min(value_ms, *tried, np.inf)
