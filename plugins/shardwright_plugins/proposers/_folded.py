"""The first plan of many equal tables over many ranks: the least time for which patterns need no more ranks.

For a time, the program of patterns says how many ranks would be needed. That number falls about as the time rises, so
the next time to try follows from the last ones (the secant method, on logarithms): a few programs, where a ladder of
times would take many. What options spread over all ranks is given to the program as a budget; more than one choice of
options may tell how much, and the one that needs fewer ranks counts.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field

from shardwright.planning.bound import NOTHING_MS
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
# Steps that made the ranks no fewer, at most.
_MOST_VAIN = 3
# So many times that do not hold a plan, though the ranks are enough, are taken for no bound of the times that do.
_MOST_FAILURES = 2
# What may be left open between times, or else so many more are tried.
_FAR, _SECOND_TRIES = 0.015, 3
# A plan that exceeds its time by no more is within it.
_NEAR = 1e-3
# Of the way between a time with too few ranks and one with enough, the part that a step leaves on each side.
_MARGIN = 0.15
_CASES, _REPAIR_STEPS = 12, 60
# Where a choice needs so many times the ranks there are, another choice may need no more than these; so
# many times those of the first choice are many more.
_NEARLY, _BEHIND = 1.02, 1.03


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
    """Times at which no plan was found, and the parts of the ranks that they needed."""
    _best: Assignment | None = None
    _is_case_first: bool = False
    _failures: int = 0
    _is_second_behind: bool = False
    _vain: int = 0
    """Times that needed no fewer ranks than the one before."""
    _top_ms: float = np.inf
    """Shorter times are to be tried next."""

    def plan(self) -> Assignment | None:
        """The best plan of a few times; ``None`` if patterns find none."""
        limit, rung, narrowings = self._rung(0), 0, 0
        for _ in range(_MOST_TIMES):
            part = self._try(limit)
            narrowings += self._best is not None
            if self.space.watch.is_over or narrowings > _NARROWINGS:
                break
            if self._best is None and part is None:
                rung += 1
                if rung == len(LADDER):
                    break
                limit = max(self._rung(rung), limit)
                continue
            limit = self._between() if part is None or self._best is not None else self._above(limit, part)
            if limit <= 0:
                break
        self._try_again()
        return self._best

    def _try_again(self) -> None:
        """Halve what is open between the best plan and times that need too many ranks, the other choice first."""
        low_ms = max([self._low_ms, *(time for time, part in self._tried if part > 1 + _LEAST_STEP)])
        self._is_case_first = True
        for _ in range(_SECOND_TRIES):
            value = np.inf if self._best is None else self._best.value_ms
            if not low_ms * (1 + _FAR) < value < np.inf or self.space.watch.is_over:
                return
            limit = float(np.sqrt(low_ms * value))
            if self._try(limit) != 1:
                low_ms = limit

    @property
    def _low_ms(self) -> float:
        """No plan is faster; more than 0, so that there are times between."""
        return max(self.space.prover.bound_ms, NOTHING_MS)

    def _rung(self, rung: int) -> float:
        return self.space.bound.possible_ms * (1 + LADDER[rung])

    def _try(self, limit_ms: float) -> float | None:
        """The part of the ranks that a time needs, 1 where they hold a plan; ``None`` where there is no choice."""
        least: float | None = None
        budgets = self._budgets(limit_ms)
        # A choice that needed many more ranks than the other is left out once.
        self._is_second_behind, was_behind = False, self._is_second_behind
        for budget in budgets[:1] if was_behind else budgets:
            trial = self.patterns.trial(budget, limit_ms, part=ENOUGH)
            if trial is None:
                continue
            part = trial.solution.ranks / len(self.space.capacity_bytes)
            if part <= 1 and self._holds_plan(trial):
                self._top_ms = np.inf
                return 1.0
            self._is_second_behind = least is not None and part > least * _BEHIND
            least = part if least is None else min(least, part)
            if part > _NEARLY:
                break
        if least is None:
            return None
        self._failures += least <= 1
        # Ranks enough that hold no plan all the same say little of shorter times: these get a chance first.
        if least <= 1 and self._best is not None and self._failures <= _MOST_FAILURES:
            self._top_ms = limit_ms
        else:
            self._top_ms = np.inf
            self._tried.append((limit_ms, max(least, 1 + _LEAST_STEP)))
        return max(least, 1 + _LEAST_STEP)

    def _holds_plan(self, trial: Trial) -> bool:
        """Whether all shards of a program find room within about its time; what comes of it is kept if it is best."""
        found = self.patterns.seated(trial)
        found.repair(_REPAIR_STEPS, changes=0)
        value = found.value_ms
        if np.isfinite(value) and (self._best is None or value < self._best.value_ms):
            self._best = found
        return value <= trial.limit_ms * (1 + _NEAR)

    def _budgets(self, limit_ms: float) -> list[Floats]:
        """What the choice of the relaxation spreads, and that of the proof by cases; none where a time is refuted."""
        cases = self.space.prover.refute(limit_ms, max_cases=_CASES)
        if cases.possible is None:
            return []
        whole = self.space.bound.problem.maximise(limit_ms).proposal()
        choices = (cases.possible, whole) if self._is_case_first else (whole, cases.possible)
        found = [self.patterns.budget(choice) for choice in choices if choice is not None]
        return found[: 1 if np.array_equal(found[0], found[-1]) else 2]

    def _above(self, limit_ms: float, part: float) -> float:
        """A longer time, after one that needs too many ranks; 0 where the ranks do not fall with the time."""
        step = float(np.clip(part, 1 + _LEAST_STEP, 1 + _MOST_STEP))
        if len(self._tried) < 2:
            return limit_ms * step
        (time, before), last = self._tried[-2], limit_ms
        if part > before * (1 - _LEAST_STEP):
            self._vain += 1
            step = max(step, (last / time) ** 2)
        else:
            slope = np.log(before / part) / np.log(last / time)
            step = max(step, (part / ENOUGH) ** (1 / slope))
        return 0.0 if self._vain > _MOST_VAIN else limit_ms * min(step, 1 + _MOST_STEP, (last / time) ** 3)

    def _between(self) -> float:
        """A time between the best plan's and one that is too short; 0 if these are close."""
        if self._best is None:
            return 0.0
        low = max([(self._low_ms, 1 / ENOUGH), *self._tried])
        if self._top_ms <= low[0] * (1 + _NARROW):
            low = self._top_ms, 1 + _LEAST_STEP
            self._tried.append(low)
            self._top_ms = np.inf
        low_ms, part = low
        high_ms = min(self._best.value_ms, self._top_ms)
        if high_ms <= low_ms * (1 + _NARROW):
            return 0.0
        way = np.log(part) / (np.log(part) - np.log(ENOUGH))
        return low_ms * float((high_ms / low_ms) ** np.clip(way, _MARGIN, 1 - _MARGIN))
