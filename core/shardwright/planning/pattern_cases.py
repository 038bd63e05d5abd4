"""Proofs by cases with the prices of patterns: the plans are parted by what lies on every rank.

What options with a shard on every rank take of each, of its time and of its memory, is room that no pattern has. How
much that is, is not known beforehand, so the plans are parted in two by it, where the program of patterns takes more of
it than the case grants, and again (:mod:`shardwright.planning.cases` has the proof's form; nodes ``{"spread_bytes":
[tier, b], "below": node, "above": node}`` come to it, and leaves have ``"spread_multipliers": {tier: ms per byte}`` and
``"prices": {path: {position of the option: [ms of each shard of a run]}}``). This takes
seconds, so it is done where a gap is wide.

Legend: M memory tiers.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from attrs import define, field

from shardwright.planning.bound import Case, Certificate
from shardwright.planning.cases import Prover
from shardwright.planning.options import Floats
from shardwright.planning.pattern_prices import PatternPrices, Priced

# Cases of the proof of one time; times that are tried; how near to a time out of reach the bound is brought.
_MOST_CASES, _MOST_TIMES, _PRECISION = 60, 10, 1.5e-3
# The parts of the way to a plan's value that a quick proof tries.
_QUICK_PARTS = (0.6, 0.3)
# A case that grants the spread load but for this part of a rank is not parted further; it is parted at this part.
_FINE, _PART = 0.004, 0.55


@define(eq=False)
class PatternCases:
    """Raises a bound by prices of patterns.

    Args:
        prover: what is proven so far.
        most_ms: the longest time that is asked about: that of the best plan.
    """

    prover: Prover
    most_ms: float
    _prices: PatternPrices = field(init=False)
    _left: float = 0
    _left_in_all: float = np.inf

    def __attrs_post_init__(self) -> None:
        self._prices = PatternPrices(self.prover.space.bound.problem, self.most_ms)

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

    def sharpen(self, enough: float = 0.0, most_cases: float = np.inf) -> None:
        """Bring the bound as near to the longest time as it goes, or until the gap is ``enough``.

        Args:
            enough: the gap.
            most_cases: that may be looked at in all.
        """
        self._left_in_all = most_cases
        low, high = self.prover.bound_ms, self.most_ms
        for _ in range(_MOST_TIMES):
            is_near = high <= low * (1 + _PRECISION) or self.most_ms <= low * (1 + enough)
            if is_near or self._left_in_all <= 0 or self.prover.space.watch.is_over:
                return
            middle = low + 0.6 * (high - low)
            if self.refute(middle):
                low = middle
            else:
                high = middle

    def refute(self, z_ms: float) -> bool:
        """Try to prove that no plan is faster than a time."""
        self._left = min(_MOST_CASES, self._left_in_all)
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

    def _parted(self, case: Case, z_ms: float, spread: Floats) -> dict[str, Any] | None:
        """Part a case where what seems possible takes most of every rank that is not counted there."""
        problem = self._prices.problem
        size = np.append(z_ms, problem.space.capacity_bytes.max(axis=0))
        low = size - problem.within(case, z_ms).size
        # The program keeps to its limits but for rounding.
        spread = np.minimum(spread, np.append(case.high_ms, np.array(case.high_bytes)))
        uncounted = (spread - low) / np.maximum(size, 1e-300)
        dimension = int(np.argmax(uncounted))
        if uncounted[dimension] <= _FINE:
            return None
        limit = float(low[dimension] + _PART * (spread - low)[dimension])
        below, above = _halves(case, dimension, limit)
        proofs: dict[str, Any] = {}
        # What seems possible is above: where it is, no more cases are looked at.
        for name, half in (("above", above), ("below", below)):
            proof = self._proof(half, z_ms)
            if proof is None:
                return None
            proofs[name] = proof
        tiers = problem.space.tiers
        return (
            {"spread_bytes": [tiers[dimension - 1], limit]} if dimension else {"spread_ms": limit}
        ) | proofs


def _halves(case: Case, dimension: int, limit: float) -> tuple[Case, Case]:
    """The plans with no more on every rank than a limit, and those with no less."""
    if dimension == 0:
        return attrs.evolve(case, high_ms=limit), attrs.evolve(case, low_ms=limit)
    low, high = np.array(case.low_bytes), np.array(case.high_bytes)
    low[dimension - 1] = high[dimension - 1] = limit
    return attrs.evolve(case, high_bytes=high), attrs.evolve(case, low_bytes=low)
