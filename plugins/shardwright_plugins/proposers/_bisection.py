"""The proving search: plans of ever less time, from what is found at once to what a solver finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from attrs import define, field

from shardwright.contracts.proposer import Proposals
from shardwright.planning.cases import CLOSE
from shardwright.planning.options import Floats
from shardwright.planning.pattern_cases import PatternCases
from shardwright.planning.placement import Placed
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.limits import Effort
from shardwright_plugins.proposers._choices import LADDER, choices, kicks
from shardwright_plugins.proposers._counted import counted
from shardwright_plugins.proposers._descent import descended
from shardwright_plugins.proposers._folded import Folded
from shardwright_plugins.proposers._gradual import gradually
from shardwright_plugins.proposers._packings import Packings
from shardwright_plugins.proposers._patterns import Patterns
from shardwright_plugins.proposers._programs import Programs
from shardwright_plugins.proposers._starts import SOME_TABLES, Starts
from shardwright_plugins.proposers._wide_gaps import WideGap, is_large

# From the bound up to the best plan, the parts of the way at which times are tried; all over again after an improvement
# by the last number at least.
_STEPS_DOWN = (0.15, 0.4, 0.7)
_WORTHWHILE = 2e-3
_NEAR_FAILURE = 1e-3
# A plan found at once is taken for one within a time if it exceeds it by no more.
_NEAR = 1e-3
# So many cases are looked at for a choice of options that none of them refutes.
_CASES, _FEW_CASES = 40, 12
# Times tried between one that was possible at once and one that was not, and how near they come over many ranks.
_NARROWINGS = 5
_FEW_RANKS, _NARROW, _NARROW_FOLDED = 32, 0.03, 0.01
# With so few tables, a plan that is close to the best is repaired to come closer.
_FEW_TABLES = 64
# So it is from so many tables on until its gap is no more than this.
_SOME_MORE_TABLES, _FINE = 16, 5e-4
# At last a solver says how far from the best it is, if there are so few columns.
_FINE_COLUMNS, _FINEST = 300, 2e-5
# Steps of all tries together, tries, and rounds of one try in which tables are taken out and put back.
_EFFORT, _MOST_TRIES, _ROUNDS = 1500, 10, 40
# Moves, swaps and sharings of an attempt.
_STEPS, _CHANGES, _PAIRS, _FEW_STEPS = 200, 30, 4, 60
# A solver gets problems of so many columns, at once or where all else has not closed the gap.
_FEW_COLUMNS, _MOST_COLUMNS = 700, 1500
_MOST_PROGRAMS, _FIRST_PART, _HARD = 6, 0.125, 6.0
# A gap that is small enough for a problem of many columns, and one that is worth twice as many.
_SMALL_GAP, _LARGE_GAP = 0.01, 0.2
# The same where more tables than these were counted: there the solver needs seconds, and finds little.
_MANY_COUNTED, _COUNTED_GAP = 200, 0.015
_LEAST_GAIN = 1e-4
# A gap that is good enough for more than a few tables, and descents to reach it.
_GOOD, _MOST_DESCENTS = 5e-3, 6
# A gap that descents from a plan will not close.
_TOO_FAR = 0.06
# Descents with one table forced to another option, towards this part of the way from the bound to the best plan.
_MOST_KICKS, _KICK_PART = 24, 0.2


@define(eq=False)
class Bisection:
    """The times tried so far.

    Args:
        space: options and costs.
        best: the best plan.
    """

    space: SearchSpace
    catalogue: Catalogue = field(init=False)
    best: Assignment | None = None
    _is_counted: bool = False
    _starts: Starts = field(init=False)
    _programs: Programs = field(init=False)
    _packings: Packings = field(init=False)

    def __attrs_post_init__(self) -> None:
        watch = self.space.watch
        self.catalogue = Catalogue(self.space, Effort(is_over=lambda: watch.is_over))
        self._starts = Starts(self.catalogue, Patterns(self.catalogue, self.space.bound.problem.covers))
        self._programs = Programs(self.catalogue)
        self._packings = Packings(self._starts, self._programs)

    def plans(self) -> Proposals:
        """Each plan that is better than those before."""
        found = counted(self.catalogue)
        self._is_counted = found is not None
        found = found or self._at_once()
        packed = self._packings.soon() if found is None else None
        if packed is not None:
            yield self._keep(packed)
        found = found or self._with_work() or packed or self._starts.in_haste()
        if found is None:
            yield from () if self.space.watch.is_over else choices(self.space)
            return
        if self.best is None or found.value_ms < self.best.value_ms:
            yield self._keep(found)
        assert self.best is not None
        if not self._is_good_count:
            yield from self._tightened()
            if len(self.space.capacity_bytes) <= _FEW_RANKS:
                yield from self._kicked()
        is_hard = not self._is_close()
        if is_hard:
            if self._is_worth_more:  # patterns prove more than the solver, and sooner
                PatternCases(self.space.prover, self.best.value_ms).sharpen(self._enough, 4 * _CASES)
            yield from self._solved(_FEW_COLUMNS)
        elif len(found.proposal) <= _FEW_TABLES:
            yield from self._polished()
        elif self._gap > CLOSE:
            yield from self._evened()
        if (is_hard or self._is_fine) and self._is_close():
            yield from self._finely_solved()
        is_small = len(found.proposal) <= SOME_TABLES and not self._is_good_count
        if not self._is_close() and (self._gap > _SMALL_GAP or is_small):
            yield from self._improvements()
        for better in WideGap(self.catalogue, self._programs, self.best).plans():
            yield self._keep(better)
        if not self._is_close() and self._gap > (_COUNTED_GAP if self._is_counted_of_many else _SMALL_GAP):
            is_far = self._gap > _LARGE_GAP and len(self.space.capacity_bytes) <= _FEW_RANKS
            yield from self._solved(2 * _MOST_COLUMNS if is_far else _MOST_COLUMNS)

    def _tightened(self) -> Proposals:
        """Better plans by descent: from new choices, if the bound is better than theirs; then from the best."""
        assert self.best is not None
        bound = self._low_ms
        if not self._is_close() and not is_large(self.space):
            for found in gradually(self.best, self._low_ms, enough=_TOO_FAR):
                yield self._keep(found)
        if self._is_close() or self._gap > _TOO_FAR:
            return
        fresh, step = self._low_ms > bound * (1 + _LEAST_GAIN), 0
        for _ in range(_MOST_DESCENTS):
            before = self.best.value_ms
            limit = self._low_ms + _STEPS_DOWN[step] * (before - self._low_ms)
            new = self._starts.of(self.space.prover.refute(limit, max_cases=_FEW_CASES)) if fresh else None
            for start in new or self._again(limit):
                found = self._starts.descended(start)
                if found.value_ms < self.best.value_ms * (1 - _LEAST_GAIN):
                    yield self._keep(found)
            if self._is_close():
                return
            is_better = self.best.value_ms < before * (1 - _WORTHWHILE)
            step += not (fresh or is_better)
            fresh = False
            if step == len(_STEPS_DOWN):
                return

    def _again(self, limit_ms: float) -> Iterator[Assignment]:
        """The best plan, to be brought within a time."""
        assert self.best is not None
        start = self.best.copy()
        start.limit_ms = limit_ms
        yield start

    def _kicked(self, enough: float | None = None) -> Proposals:
        """Better plans by descents in which one table takes another option that costs little more.

        All tables of the rank that is fullest may be too large for what is left elsewhere; with another cut of one of
        them the rest may go together well.

        Args:
            enough: the gap at which a plan is good enough, if not the tolerance.
        """
        assert self.best is not None
        if self._is_close(enough):
            return
        price = self.space.prover.refute(self.best.value_ms, max_cases=1).price
        found = [] if price is None else kicks(self.catalogue, self.best, price, self._low_ms)
        for table, option in found[:_MOST_KICKS]:
            if self._is_close(enough):
                return
            start = self.best.copy()
            start.limit_ms = self._low_ms + _KICK_PART * (start.value_ms - self._low_ms)
            kicked = descended(start, self.catalogue.is_efficient, [(table, option)])
            kicked.repair(_FEW_STEPS, changes=0)
            if kicked.value_ms < self.best.value_ms * (1 - _LEAST_GAIN):
                yield self._keep(kicked)

    @property
    def _gap(self) -> float:
        """By what part of the bound the best plan exceeds it."""
        assert self.best is not None
        return self.best.value_ms / max(self._low_ms, 1e-300) - 1

    @property
    def _is_good_count(self) -> bool:
        """Whether many tables were counted, and the gap is small: other choices of options hardly come nearer."""
        return self._is_counted_of_many and self._gap <= _SMALL_GAP

    @property
    def _is_counted_of_many(self) -> bool:
        return self._is_counted and len(self.space.options.all_tables) > _MANY_COUNTED

    @property
    def _tolerance(self) -> float:
        """The gap at which a plan is good enough: small problems are solved further."""
        return CLOSE if len(self.space.options.all_tables) <= _FEW_TABLES else _GOOD

    @property
    def _enough(self) -> float:
        """The gap of few tables at which they get no more work than others."""
        return CLOSE if len(self.space.options.all_tables) < _SOME_MORE_TABLES else _SMALL_GAP

    @property
    def _is_worth_more(self) -> bool:
        return len(self.space.options.all_tables) <= _FEW_TABLES and self._gap > self._enough

    @property
    def _is_fine(self) -> bool:
        """Whether there are few tables, but not so few that a plan is the best anyway."""
        return _SOME_MORE_TABLES <= len(self.space.options.all_tables) <= _FEW_TABLES

    def _polished(self) -> Proposals:
        """A plan a little better than one that is close to the best, if that takes little work."""
        assert self.best is not None
        if self._is_fine:
            self.space.prover.sharpen(self.best.value_ms, precision=_FINE, max_cases=_CASES)
        for part in _STEPS_DOWN:
            trial = self.best.copy()
            trial.limit_ms = self._low_ms + part * (self.best.value_ms - self._low_ms)
            if trial.repair(_FEW_STEPS, changes=3, pairs=_PAIRS):
                yield self._keep(trial)
                break
        if self._is_fine:
            yield from self._kicked(_FINE)

    def _evened(self) -> Proposals:
        """A plan a little better, where what lies on two ranks goes together better in another way."""
        assert self.best is not None
        trial = self.best.copy()
        trial.limit_ms = self._low_ms + _STEPS_DOWN[1] * (self.best.value_ms - self._low_ms)
        trial.repair(_FEW_STEPS, changes=0, pairs=_PAIRS)
        if trial.value_ms < self.best.value_ms:
            yield self._keep(trial)

    def _finely_solved(self) -> Proposals:
        """What the solver still finds of a small program."""
        assert self.best is not None
        if self._gap > _FINEST:
            limit = self.best.value_ms * (1 - _FINEST / 2)
            found = self._programs.plan(limit, _FINE_COLUMNS, precision=_FINEST / 2)
            if found is not None and found.value_ms < self.best.value_ms:
                yield self._keep(found)

    def _solved(self, most_columns: int) -> Proposals:
        """Better plans and a better bound by a solver, if the problem is small.

        It is asked again after an improvement: with a lesser limit the program is smaller and its solver quicker. So it
        gets little to do at first, and all there is where that finds nothing; more of it where there are few tables.
        """
        assert self.best is not None
        part = _FIRST_PART
        for _ in range(_MOST_PROGRAMS):
            before = self.best.value_ms
            found = self._programs.plan(before * (1 - _LEAST_GAIN), most_columns, part)
            if found is not None and found.value_ms < before:
                yield self._keep(found)
            if self._is_close():
                return
            if self.best.value_ms > before * (1 - _WORTHWHILE):
                if part > 1 or (part == 1 and (most_columns > _FEW_COLUMNS or not self._is_worth_more)):
                    return
                part = 1 if part < 1 else _HARD

    def _with_work(self) -> Assignment | None:
        """A plan that is found with some work; with little, if there is one."""
        self.catalogue.effort.left = np.inf if self.best is None else _EFFORT
        found = self._first(self._attempt)
        self.catalogue.effort.left = np.inf
        if found is not None or self.best is not None:
            return found
        return self._packings.last()

    def _improvements(self) -> Proposals:
        assert self.best is not None
        self.catalogue.effort.left = _EFFORT
        step = tries = 0
        while step < len(_STEPS_DOWN) and tries < _MOST_TRIES and not self._is_close():
            if self.catalogue.effort.is_spent:
                return
            limit = self._low_ms + (self.best.value_ms - self._low_ms) * _STEPS_DOWN[step]
            before, tries = self.best.value_ms, tries + 1
            for found in self._better(limit):
                yield self._keep(found)
            step = 0 if self.best.value_ms < before * (1 - _WORTHWHILE) else step + 1

    def _better(self, limit_ms: float) -> Iterator[Assignment]:
        """Plans better than the best, from trying to keep within a time."""
        assert self.best is not None
        is_many = len(self.best.proposal) > SOME_TABLES or self._starts.is_folded or self._is_good_count
        for attempt in (self._improved,) if is_many else (self._improved, self._attempt):
            found = attempt(limit_ms)
            if found is not None and found.value_ms < self.best.value_ms * (1 - 1e-6):
                yield found
            if self.best.value_ms <= limit_ms * (1 + _NEAR_FAILURE) or self.space.watch.is_over:
                return

    @property
    def _low_ms(self) -> float:
        """No time below is worth a try."""
        return self.space.prover.bound_ms

    def _at_once(self) -> Assignment | None:
        """A plan that is found at once."""
        found = Folded(self.space, self._starts.patterns).plan() if self._starts.is_folded else None
        return found or self._first(self._quick)

    def _first(self, attempt: Callable[[float], Assignment | None]) -> Assignment | None:
        """A plan of the least of some times at which an attempt finds one."""
        below = self.space.prover.bound_ms
        for part in LADDER:
            limit = self.space.bound.possible_ms * (1 + part)
            found = attempt(limit)
            if found is not None and np.isfinite(found.value_ms):
                return self._narrowed(below, found)
            if self.space.watch.is_over:
                return None
            below = limit
        return None

    def _narrowed(self, below_ms: float, found: Assignment) -> Assignment:
        """A plan found at once, within a time between that of another and one at which none was found."""
        if len(self.space.capacity_bytes) <= _FEW_RANKS and len(found.proposal) > _FEW_TABLES:
            return found
        for _ in range(_NARROWINGS):
            below_ms = max(below_ms, self.space.prover.bound_ms)
            near = _NARROW_FOLDED if self._starts.is_folded else _NARROW
            if found.value_ms <= below_ms * (1 + near) or self.space.watch.is_over:
                break
            middle = (below_ms * found.value_ms) ** 0.5
            trial = self._quick(middle)
            if trial is not None and trial.value_ms < found.value_ms:
                found = trial
            if found.value_ms > middle * (1 + _NEAR):
                below_ms = middle
        return found

    def _is_close(self, gap: float | None = None) -> bool:
        """Whether the best plan is proven to be about as good as can be, or time is over."""
        assert self.best is not None
        value, prover = self.best.value_ms, self.space.prover
        enough = 1 + (self._tolerance if gap is None else gap)
        if value > prover.bound_ms * enough:
            prover.sharpen(value, precision=CLOSE, max_cases=_CASES)
        return value <= prover.bound_ms * enough or self.space.watch.is_over

    def _keep(self, found: Assignment) -> Placed:
        self.best = found
        return Placed(found.proposal.copy(), found.ranks)

    def _quick(self, limit_ms: float) -> Assignment | None:
        """A plan about within a time, if little work is enough."""
        best: Assignment | None = None
        for start in self._starts.of(self.space.prover.refute(limit_ms, max_cases=_FEW_CASES)):
            found = self._starts.descended(start)
            if np.isfinite(found.value_ms) and (best is None or found.value_ms < best.value_ms):
                best = found
            if best is not None and best.value_ms <= limit_ms * (1 + _NEAR):
                break
        return best

    def _attempt(self, limit_ms: float) -> Assignment | None:
        """A plan within a time, from the choices at its multipliers."""
        nearest: tuple[float, Assignment, Floats] | None = None
        cases = self.space.prover.refute(limit_ms, max_cases=_CASES)
        for proposal, price in self._starts.with_margins(cases):
            trial = self._starts.filled(proposal, limit_ms)
            if trial.repair(_STEPS, changes=_CHANGES, pairs=_PAIRS):
                return trial
            over = float(trial.bins.over().sum())
            if nearest is None or over < nearest[0]:
                nearest = over, trial, price
            if self.space.watch.is_over:
                return None
        if nearest is None:
            return None
        _, trial, price = nearest
        trial.rebuild(_ROUNDS, price)
        return trial

    def _improved(self, limit_ms: float) -> Assignment | None:
        """The best plan, repaired to keep within a lesser time."""
        assert self.best is not None
        trial = self.best.copy()
        trial.limit_ms = limit_ms
        changes = _CHANGES if len(trial.proposal) <= SOME_TABLES else 0
        trial.repair(_STEPS, changes=changes, pairs=_PAIRS)
        return trial
