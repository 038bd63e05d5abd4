"""The best multipliers of a relaxation: the maximum of its Lagrangian, as far as needed.

Along one multiplier the Lagrangian is the least of lines, one for each choice of options. Its maximum lies where the
line of a choice that uses too much meets that of one that does not. Where they meet, either a lower line is found,
which takes the place of one of the two, or none, and the maximum is found (the cutting planes of Kelley 1960, in one
dimension). Multipliers are raised so one after the other (coordinate ascent).

Legend: A tables, T distinct tables, O options, M resources.
"""

from __future__ import annotations

import numpy as np

from shardwright.planning.arrays import Bools, Floats, Ints, without
from shardwright_plugins.proposers.proving.bounds.relaxation import TOLERANCE, Choice, Relaxation

# Lines tried along one multiplier, and sweeps over all of them.
_MOST_LINES, _MOST_SWEEPS = 60, 3


class Dual:
    """The Lagrangian's maximum over the multipliers, for some options.

    Args:
        relaxation: the problem.
        z_ms: the time that is to be refuted; the ascent ends where it is.
        allowed: the options: ``[O]``.
        share: part of each resource that each option takes: ``[O, M]``.
        start: multipliers to begin with: ``[M]``.
    """

    def __init__(
        self, relaxation: Relaxation, z_ms: float, allowed: Bools, share: Floats, start: Floats | None = None
    ) -> None:
        self.relaxation, self.allowed, self.share = relaxation, allowed, share
        self._enough_ms = relaxation.world_size * z_ms * (1 + 1e-3)
        self.best: Choice | None = None
        self.lean: Choice | None = None
        """The cheapest choice met that fits in memory as a whole."""
        self.is_empty = not np.logical_or.reduceat(allowed, relaxation.first).all()
        """True if some table has no option."""
        self._cost: Floats = np.where(allowed, relaxation.cost, np.inf)
        self._seen: list[Ints] = []
        if not self.is_empty:
            num_resources = share.shape[1]
            self._ascend(np.zeros(num_resources) if start is None else np.resize(start, num_resources))

    @property
    def num_evaluated(self) -> int:
        """Number of evaluations of the Lagrangian."""
        return len(self._seen)

    @property
    def value_ms(self) -> float:
        """The best value found; infinite where there is no plan."""
        return np.inf if self.best is None else self.best.value_ms

    def proposal(self) -> Ints | None:
        """A choice for each of all tables that fits in memory as a whole, if one was met: ``[A]``.

        Of tables that are alike, as many take the option that is cheaper but takes more as there is memory for.
        """
        lean = self.lean or self.best
        if lean is None:
            return None
        problem, alike = self.relaxation, self.relaxation.space.options.distinct_table
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
        """Go along each multiplier in turn."""
        current = self._at(multipliers)
        for _ in range(_MOST_SWEEPS):
            before = self.value_ms
            over = np.flatnonzero((current.used > 1) | ((current.used < 1) & (current.multipliers > 0)))
            for resource in over.tolist():
                if self._is_proven:
                    return
                current = self._along(current, resource)
            if len(multipliers) == 1 or self.value_ms <= before * (1 + TOLERANCE):
                return

    @property
    def _is_proven(self) -> bool:
        """True if the time is refuted by so much that more would be no use."""
        return self.value_ms > self._enough_ms

    def _at(self, multipliers: Floats) -> Choice:
        choice = self.relaxation.choose(self._cost, self.share, multipliers)
        self._seen.append(choice.option)
        if self.best is None or choice.value_ms > self.best.value_ms:
            self.best = choice
        if (choice.used <= 1).all() and (self.lean is None or choice.cost_ms < self.lean.cost_ms):
            self.lean = choice
        return choice

    def _along(self, current: Choice, resource: int) -> Choice:
        """The best choice along one multiplier, the others as they are."""
        high: Choice | None
        if current.used[resource] > 1:
            low, high = current, self._feasible(current, resource)
        else:
            low, high = self._at(_with(current.multipliers, resource, 0.0)), current
        if high is None or low.used[resource] <= 1:
            return low
        for _ in range(_MOST_LINES):
            if self._is_proven:
                break
            # Lines over this multiplier: rest + multiplier * (used - 1).
            rest_low, rest_high = _rest(low, resource), _rest(high, resource)
            meet = (rest_high - rest_low) / (low.used[resource] - high.used[resource])
            middle = self._at(_with(current.multipliers, resource, float(meet)))
            line = rest_low + meet * (low.used[resource] - 1)
            if middle.value_ms >= line - TOLERANCE * abs(line):
                break
            if middle.used[resource] > 1:
                low = middle
            else:
                high = middle
        return high

    def _feasible(self, current: Choice, resource: int) -> Choice | None:
        """A choice that uses no more of a resource than there is, at a multiplier that is large enough, if one is."""
        multiplier = max(2 * float(current.multipliers[resource]), 0.1 * abs(current.cost_ms) or 1.0)
        for _ in range(_MOST_LINES):
            choice = self._at(_with(current.multipliers, resource, multiplier))
            if choice.used[resource] <= 1:
                return choice
            if self._is_proven:
                return None
            multiplier *= 8
        return None


def _with(multipliers: Floats, resource: int, value: float) -> Floats:
    changed = multipliers.copy()
    changed[resource] = max(value, 0.0)
    return changed


def _rest(choice: Choice, resource: int) -> float:
    """The Lagrangian of a choice without one resource's part."""
    return choice.value_ms - float(choice.multipliers[resource] * (choice.used[resource] - 1))
