"""The best multipliers of a relaxation: its Lagrangian's maximum, as far as needed.

Legend: A tables, T distinct tables, O options, M resources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from shardwright.planning.distinct import without
from shardwright.planning.options import Bools, Floats, Ints

if TYPE_CHECKING:
    from shardwright.planning.bound import Relaxation

# A claim must hold by this much more than rounding: relative.
TOLERANCE = 1e-9
_MOST_STEPS = 60
_POLYAK_STEPS = 16
_MOST_SWEEPS = 3


@frozen(eq=False)
class Choice:
    """The cheapest options at some multipliers.

    Args:
        option: of each distinct table: ``[T]``.
        cost_ms: of all shards of all tables together.
        used: the part of all ranks' memory that is used, by tier: ``[M]``.
        multipliers: ms for all ranks' memory of each tier: ``[M]``.
        value_ms: the Lagrangian, ``cost + multipliers . (used - 1)``.
    """

    option: Ints
    cost_ms: float
    used: Floats
    multipliers: Floats
    value_ms: float


class Dual:
    """The Lagrangian's maximum over the multipliers, for the options of one time.

    One tier after the other: along one tier the Lagrangian is the least of lines, one for each choice, and its maximum
    lies where the line of a choice that uses too much meets that of one that does not. Where these two meet, either a
    lower line is found, which takes the place of one of them, or none, and the maximum is found.
    """

    def __init__(
        self, problem: Relaxation, z_ms: float, allowed: Bools, share: Floats, start: Floats | None
    ) -> None:
        self._problem = problem
        self.allowed, self.share = allowed, share
        self._enough_ms = problem.world_size * z_ms * (1 + 1e-3)
        num_tiers = share.shape[1]
        self.best: Choice | None = None
        self.lean: Choice | None = None
        """The cheapest choice met that fits in memory as a whole."""
        self.is_empty = not np.logical_or.reduceat(self.allowed, problem.first).all()
        """Whether some table has no option."""
        self._cost: Floats = np.where(allowed, problem.cost, np.inf)
        self._seen: list[Ints] = []
        if not self.is_empty:
            self._ascend(np.zeros(num_tiers) if start is None else np.resize(start, num_tiers))
            self._climb()

    @property
    def value_ms(self) -> float:
        """The best value found."""
        return np.inf if self.best is None else self.best.value_ms

    def proposal(self) -> Ints | None:
        """A choice for each of all tables that fits in memory as a whole, if one was met: ``[A]``.

        Of tables that are alike, as many take the option that is cheaper but takes more as there is memory for.
        """
        lean = self.lean or self.best
        if lean is None:
            return None
        problem, alike = self._problem, self._problem.space.options.alike
        chosen = lean.option[alike]
        if self.lean is None:
            return chosen
        options = without(np.concatenate(self._seen), lean.option)
        table = problem.space.options.table[options]
        saved = problem.cost[lean.option[table]] - problem.cost[options]
        more = self.share[options] - self.share[lean.option[table]]
        free = 1 - lean.used
        worth = saved / np.maximum((more / np.maximum(free, 1e-9)).max(axis=1), 1e-12)
        left = [np.flatnonzero(alike == index) for index in range(len(problem.count))]
        for index in np.argsort(-worth, kind="stable").tolist():
            mine = left[table[index]]
            if saved[index] <= 0 or not len(mine):
                continue
            takes = more[index] > 0
            room = (free[takes] / more[index][takes]).min(initial=np.inf)
            count = int(np.clip(np.floor(room * (1 + TOLERANCE)), 0, len(mine)))
            chosen[mine[:count]] = options[index]
            left[table[index]] = mine[count:]
            free = free - count * more[index]
        return chosen

    def _ascend(self, multipliers: Floats) -> None:
        current = self._at(multipliers)
        for _ in range(_MOST_SWEEPS):
            if self._is_proven:
                return
            over = np.flatnonzero((current.used > 1) | ((current.used < 1) & (current.multipliers > 0)))
            before = self.value_ms
            for tier in over.tolist():
                current = self._along(current, tier)
            if len(multipliers) == 1 or self.value_ms <= before * (1 + TOLERANCE) or self._is_proven:
                return

    def _climb(self) -> None:
        """Subgradient steps (Polyak 1969), where two resources are short and going along each in turn got stuck."""
        if self.best is None or self._is_proven or not np.isfinite(self._enough_ms):
            return
        choice, steps = self.best, _POLYAK_STEPS
        while steps and not self._is_proven:
            steps -= 1
            slope = choice.used - 1
            slope = np.where((choice.multipliers <= 0) & (slope < 0), 0.0, slope)
            size = float(slope @ slope)
            if np.count_nonzero(slope) < 2 or size == 0:
                return
            step = (self._enough_ms - choice.value_ms) / size
            choice = self._at(np.maximum(choice.multipliers + step * slope, 0.0))

    @property
    def _is_proven(self) -> bool:
        """Whether the time is refuted by so much that more would be no use."""
        return self.value_ms > self._enough_ms

    def _at(self, multipliers: Floats) -> Choice:
        choice = self._problem.choose(self._cost, self.share, multipliers)
        self._seen.append(choice.option)
        if self.best is None or choice.value_ms > self.best.value_ms:
            self.best = choice
        if (choice.used <= 1).all() and (self.lean is None or choice.cost_ms < self.lean.cost_ms):
            self.lean = choice
        return choice

    def _along(self, current: Choice, tier: int) -> Choice:
        """The best choice along one tier's multiplier, the others as they are."""
        high: Choice | None
        if current.used[tier] > 1:
            low, high = current, self._feasible(current, tier)
        else:
            low, high = self._at(_with(current.multipliers, tier, 0.0)), current
        if high is None or low.used[tier] <= 1:
            return low
        for _ in range(_MOST_STEPS):
            if self._is_proven:
                break
            # Lines over this multiplier: rest + multiplier * (used - 1).
            rest_low, rest_high = _rest(low, tier), _rest(high, tier)
            meet = (rest_high - rest_low) / (low.used[tier] - high.used[tier])
            middle = self._at(_with(current.multipliers, tier, float(meet)))
            line = rest_low + meet * (low.used[tier] - 1)
            if middle.value_ms >= line - TOLERANCE * abs(line):
                break
            if middle.used[tier] > 1:
                low = middle
            else:
                high = middle
        return high

    def _feasible(self, current: Choice, tier: int) -> Choice | None:
        """A choice that uses no more of a tier than there is, at a multiplier that is large enough; none if none is."""
        multiplier = max(2 * float(current.multipliers[tier]), 0.1 * abs(current.cost_ms) or 1.0)
        for _ in range(_MOST_STEPS):
            choice = self._at(_with(current.multipliers, tier, multiplier))
            if choice.used[tier] <= 1:
                return choice
            if self._is_proven:
                return None
            multiplier *= 8
        return None


def _with(multipliers: Floats, tier: int, value: float) -> Floats:
    changed = multipliers.copy()
    changed[tier] = max(value, 0.0)
    return changed


def _rest(choice: Choice, tier: int) -> float:
    """The Lagrangian of a choice without one tier's part."""
    return choice.value_ms - float(choice.multipliers[tier] * (choice.used[tier] - 1))
