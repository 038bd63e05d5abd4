"""The first plan of many equal tables over many ranks: the least time for which patterns need no more ranks.

For a time, the program of patterns says how many ranks would be needed. That number falls about as the time rises, so
the next time to try follows from the last ones (the secant method, on logarithms): a few programs, where a ladder of
times would take many. What options spread over all ranks is given to the program as a budget; more than one choice of
options may tell how much, and the one that needs fewer ranks counts.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field

from shardwright.planning.options import Floats
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment
from shardwright_plugins.proposers._choices import LADDER
from shardwright_plugins.proposers._patterns import Patterns, Trial

# The part of the ranks that is enough: what is rounded down finds room in the others.
ENOUGH = 0.985
# Times tried at most, and of these after the first plan; how near they come, and how large a step is.
_MOST_TIMES, _NARROWINGS, _NARROW = 14, 5, 0.006
_LEAST_STEP, _MOST_STEP = 0.004, 0.5
# Of the way between a time with too few ranks and one with enough, the part that a step leaves on each side.
_MARGIN = 0.15
_CASES, _REPAIR_STEPS = 12, 60
# Where a choice needs so many times the ranks there are, another choice may need no more than these.
_NEARLY = 1.02


@define(eq=False)
class Folded:
    """The search for the first plan.

    Args:
        space: options and costs.
        patterns: of the space.
    """

    space: SearchSpace
    patterns: Patterns
    _tried: list[tuple[float, float]] = field(factory=list)
    """Times, and the parts of the ranks that they needed."""

    def plan(self) -> Assignment | None:
        """The best plan of a few times; ``None`` if patterns find none."""
        found: Assignment | None = None
        limit, rung, narrowings = self._rung(0), 0, 0
        for _ in range(_MOST_TIMES):
            if self.space.watch.is_over or narrowings > _NARROWINGS:
                break
            trial = self._trial(limit)
            if trial is None:
                rung += 1
                if found is not None or rung == len(LADDER):
                    break
                limit = max(self._rung(rung), limit)
                continue
            better = self._seated(trial)
            if better is not None and (found is None or better.value_ms < found.value_ms):
                found = better
            narrowings += found is not None
            limit = self._next(found)
            if limit <= 0:
                break
        return found

    def _rung(self, rung: int) -> float:
        return self.space.bound.possible_ms * (1 + LADDER[rung])

    def _trial(self, limit_ms: float) -> Trial | None:
        """What the program says of a time; ``None`` where there is no choice of options, or no program."""
        best: Trial | None = None
        for budget in self._budgets(limit_ms):
            trial = self.patterns.trial(budget, limit_ms, part=ENOUGH)
            if trial is not None and (best is None or trial.solution.ranks < best.solution.ranks):
                best = trial
            if best is not None and not 1 < self._part(best) <= _NEARLY:
                break
        return best

    def _part(self, trial: Trial) -> float:
        """The part of the ranks that a program needs."""
        return trial.solution.ranks / len(self.space.capacity_bytes)

    def _budgets(self, limit_ms: float) -> list[Floats]:
        """What the choice of the relaxation spreads, and that of the proof by cases; none where a time is refuted."""
        cases = self.space.prover.refute(limit_ms, max_cases=_CASES)
        if cases.possible is None:
            return []
        whole = self.space.bound.problem.maximise(limit_ms).proposal()
        found = [self.patterns.budget(choice) for choice in (whole, cases.possible) if choice is not None]
        return found[: 1 if np.array_equal(found[0], found[-1]) else 2]

    def _seated(self, trial: Trial) -> Assignment | None:
        """The plan of a program that needs no more ranks than there are, if its shards find room."""
        part, found = self._part(trial), None
        if part <= 1:
            found = self.patterns.seated(trial)
            found.repair(_REPAIR_STEPS, changes=0)
        if found is None or not np.isfinite(found.value_ms):
            self._tried.append((trial.limit_ms, max(part, 1 + _LEAST_STEP)))
            return None
        self._tried.append((found.value_ms, part))
        return found

    def _next(self, found: Assignment | None) -> float:
        """The time to try next; 0 if none is worth it."""
        last_ms, last = self._tried[-1]
        if found is None:
            return last_ms * float(np.clip(last, 1 + _LEAST_STEP, 1 + _MOST_STEP))
        low_ms, low = max(
            ((time, part) for time, part in self._tried if part > 1 and time < found.value_ms),
            default=(self.space.prover.bound_ms, 1 / ENOUGH),
        )
        if found.value_ms <= low_ms * (1 + _NARROW):
            return 0.0
        way = np.log(low) / (np.log(low) - np.log(ENOUGH))
        return low_ms * (found.value_ms / low_ms) ** float(np.clip(way, _MARGIN, 1 - _MARGIN))
