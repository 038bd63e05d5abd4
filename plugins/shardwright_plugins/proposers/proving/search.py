"""The search for plans of ever less time, between what is proven and what is found.

1. The bound of the relaxation, by bisection of the time.
2. A plan at once, from options whose shards are small beside a rank's memory. Then one to go on from: for a time a
   little above the bound, options that are cheapest at the multipliers of its proof; their shards are put where there
   is room, repaired, and brought down by descent. Where that fails, a longer time is tried, in the end by the
   solver. Many tables that are alike over many ranks are planned by patterns.
3. Better plans, as long as the gap is worth it: by repair and descent towards times between the bound and the best
   plan, and by the solver, where it is a small problem, which raises the bound too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
from attrs import define, field

from shardwright.contracts.proposer import Proposals
from shardwright.planning.arrays import Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.placement import Placed
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.bounds.prover import Prover
from shardwright_plugins.proposers.proving.bounds.relaxation import Relaxation
from shardwright_plugins.proposers.proving.columns.plans import ColumnSearch
from shardwright_plugins.proposers.proving.descent import descended
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.packing.assignment import Assignment, Catalogue
from shardwright_plugins.proposers.proving.program import Program

# Gains, parts of a plan's time, that make it better than another, and that make the same step worth another try.
_LEAST_GAIN, _WORTHWHILE = 1e-4, 2e-3
# A plan brought down a little at a time: the first step, the most, and the least that is worth a try; how a step
# changes after a success and a failure; and tries.
_FIRST_STEP, _MOST_STEP, _LEAST_STEP, _MORE, _LESS, _MOST_TRIES = 0.1, 0.3, 4e-3, 1.5, 0.5, 60
# Gaps that small steps are to close before a plan is brought to the bound, and that no other patterns are worth.
_FAR, _NEAR = 0.06, 0.02
# What ranks are over their limits by, in the mean, that no descent mends.
_HOPELESS = 0.1
# Turns of tables taken out and put back that a first plan gets.
_FEW_ROUNDS = 6
# The part of the solver's nodes that a program gets at first.
_FIRST_PART, _MOST_PROGRAMS = 0.125, 6


@define(eq=False)
class Search:
    """The search of one space.

    Args:
        space: options and costs; rules on ranks are none of its business.
        effort: amount of work that may be done.
        watch: ends it, and counts its work.
        least_ms: time that no plan can beat, ms, for reasons that options and capacities do not show.
    """

    space: SearchSpace
    effort: Effort
    watch: Watch
    least_ms: float = 0.0
    best: Assignment | None = None
    """The best plan so far."""
    prover: Prover = field(init=False)
    catalogue: Catalogue = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.prover = Prover(Relaxation(self.space, self.least_ms), self.watch)
        self.catalogue = Catalogue(self.space, self.watch)
        self.prover.begin()

    def plans(self) -> Proposals:
        """Each plan that is better than those before; each bound as soon as it is proven."""
        yield self.prover.proven
        if not np.isfinite(self.prover.possible_ms):
            return
        for attempt in (self._hasty, self._first_plan):
            if (found := attempt()) is not None and found.value_ms < self._value_ms:
                yield self._keep(found)
        if self.best is None:
            yield self.prover.proven
            yield from self.choices()
            return
        rest = (self._solved, self._rebuilt) if self._is_small else (self._rebuilt, self._solved)
        for stage in (self._tightened, self._patterned, *rest):
            if self._is_close():
                break
            for better in stage():
                yield self._keep(better)
        yield self.prover.proven

    def _keep(self, found: Assignment) -> Placed:
        self.best = found
        return Placed(found.proposal.copy(), found.ranks)

    @property
    def _value_ms(self) -> float:
        return np.inf if self.best is None else self.best.value_ms

    @property
    def _is_small(self) -> bool:
        """True if there are few tables."""
        return len(self.space.options.all_tables) <= self.effort.few_tables

    def _is_close(self) -> bool:
        """True if the best plan is proven to be about as good as can be, or nothing more is to be done."""
        enough = 1 + (self.effort.fine if self._is_small else self.effort.close)
        return self.watch.is_over or self._value_ms <= self.prover.bound_ms * enough

    def _towards(self, part: float) -> float:
        """A time part of the way from the bound to the best plan."""
        return self.prover.bound_ms + part * (self._value_ms - self.prover.bound_ms)

    # -- a first plan -------------------------------------------------------------------------------------------

    def _hasty(self) -> Assignment | None:
        """Any plan: of options whose shards take small parts of a rank's memory, so that they go in somewhere."""
        for part in self.effort.parts:
            proposal = self.prover.maximise(np.inf, margin=self.effort.margins[-1], part=part).proposal()
            found = None if proposal is None else self._filled(proposal, self.space.most_ms)
            if found is not None and np.isfinite(found.value_ms):
                return found
        return None

    def _first_plan(self) -> Assignment | None:
        """A plan to go on from: by patterns, or of the least of some times that little repair and a descent reach."""
        found = self._by_patterns(self.effort.column_enough[0])
        for part in self.effort.ladder:
            if found is not None or self.watch.is_over:
                return found
            nearest = self._nearest(self.prover.possible_ms * (1 + part))
            if nearest is not None and nearest.excess <= _HOPELESS * len(self.space.capacity_bytes):
                nearest = self._descended(nearest)
                found = nearest if np.isfinite(nearest.value_ms) else None
        return self._program(self.space.most_ms * (1 + _LEAST_GAIN), 1.0) if self.best is None else None

    def _nearest(self, limit_ms: float) -> Assignment | None:
        """The first plan that little repair brings within a time, or what came nearest."""
        nearest: Assignment | None = None
        for proposal in self._possible(limit_ms):
            trial = self._filled(proposal, limit_ms)
            if trial.bins.repair(self.effort.few_moves) or (
                self._may_rebuild and trial.rebuild(_FEW_ROUNDS, self.space.total_cost_ms)
            ):
                return trial
            if nearest is None or trial.excess < nearest.excess:
                nearest = trial
            if self.watch.is_over:
                break
        return nearest

    def _possible(self, limit_ms: float) -> Iterator[Ints]:
        """Choices of options that look possible at a time, more and more of memory left free."""
        seen = set[bytes]()
        for margin in (0.0, *self.effort.margins):
            proposal = self.prover.choice(limit_ms, margin)
            if proposal is None and not margin:
                return
            if proposal is not None and proposal.tobytes() not in seen:
                seen.add(proposal.tobytes())
                yield proposal

    def choices(self) -> Iterator[Ints]:
        """Choices of options for a partitioner, at longer and longer times, where no plan was found."""
        for part in self.effort.ladder:
            for margin in self.effort.margins:
                if self.watch.is_over:
                    return
                proposal = self.prover.maximise(
                    self.prover.possible_ms * (1 + part), margin=margin
                ).proposal()
                if proposal is not None:
                    yield proposal

    def _filled(self, proposal: Ints, limit_ms: float) -> Assignment:
        """The options of all tables ``[A]`` with their shards put where there is room, the largest first."""
        (trial := Assignment(self.catalogue, proposal, limit_ms)).fill()
        return trial

    def _by_patterns(self, enough: float) -> Assignment | None:
        """A plan by patterns that need a part of the ranks, if there are many tables alike over many ranks."""
        columns = ColumnSearch(self.catalogue, self.prover, self.effort, enough)
        return columns.plan() if columns.is_worth_it else None

    # -- better plans -------------------------------------------------------------------------------------------

    @property
    def _may_rebuild(self) -> bool:
        """True if there are so few tables that some may be taken out and put back."""
        return (
            self.effort.has("neighbourhoods")
            and len(self.space.options.all_tables) <= self.effort.many_tables
        )

    def _descended(self, start: Assignment) -> Assignment:
        """A plan brought nearer to its limit by little repair, or by descent."""
        if start.bins.repair(self.effort.few_moves) or not self.effort.has("descent"):
            return start
        result = descended(start, self.effort)
        result.bins.repair(self.effort.few_moves)
        return result

    def _patterned(self) -> Iterator[Assignment]:
        """Better plans by patterns that leave more or fewer ranks for what is rounded down."""
        for enough in self.effort.column_enough[1:]:
            if self._value_ms <= self.prover.bound_ms * (1 + _NEAR):
                return
            saved = self.best
            if (found := self._by_patterns(enough)) is not None:
                yield found
                yield from self._tightened()
                self.best = saved if saved and saved.value_ms <= self._value_ms else self.best

    def _tightened(self) -> Iterator[Assignment]:
        """Plans brought down a little at a time, then towards the bound."""
        yield from self._gradually()
        step = 0
        while step < len(self.effort.steps_down) and not self._is_close():
            before = self._value_ms
            found = self._descended(self._at(self._towards(self.effort.steps_down[step])))
            if found.value_ms < before * (1 - _LEAST_GAIN):
                yield found
            step += self._value_ms >= before * (1 - _WORTHWHILE)

    def _at(self, limit_ms: float) -> Assignment:
        """The best plan, to be brought within a time."""
        assert self.best is not None
        start = self.best.copy()
        start.bins.within(limit_ms)
        return start

    def _gradually(self) -> Iterator[Assignment]:
        """Plans a little better each time, where the gap is wide: each within reach of the one before.

        A repair that is asked for too much finds nothing at all. Asked for a few percent, it changes the options of a
        few tables on the fullest ranks, and goes on from there.
        """
        step = _FIRST_STEP
        for _ in range(_MOST_TRIES):
            value = self._value_ms
            if step < _LEAST_STEP or value <= self.prover.bound_ms * (1 + _FAR) or self.watch.is_over:
                return
            limit = value * (1 - step)
            found = self._descended(self._at(limit)) if limit > self.prover.bound_ms else None
            if found is None or found.value_ms > value * (1 - _WORTHWHILE):
                step *= _LESS
                continue
            step = min(step * _MORE, _MOST_STEP)
            yield found

    def _rebuilt(self) -> Iterator[Assignment]:
        """Better plans by large neighbourhood search: a few tables taken out and put back, again and again.

        Tables are drawn by a generator with a fixed seed; it ends after some turns without a gain.
        """
        vain = 0
        for seed in count():
            if not self._may_rebuild or vain == self.effort.vain_turns or self._is_close():
                return
            before = self._value_ms
            trial = self._at(self._towards(self.effort.steps_down[seed % len(self.effort.steps_down)]))
            trial.rebuild(self.effort.rounds, self.space.total_cost_ms, seed=seed)
            if trial.value_ms < before * (1 - _LEAST_GAIN):
                yield trial
            vain = 0 if self._value_ms < before * (1 - _WORTHWHILE) else vain + 1

    def _solved(self) -> Iterator[Assignment]:
        """Better plans and a better bound by a solver, if the problem is small.

        It is asked again after an improvement: with a lesser limit the program is smaller and its solver quicker. So
        it gets little to do at first, and all there is where that finds nothing.
        """
        part = _FIRST_PART
        for _ in range(_MOST_PROGRAMS):
            before = self._value_ms
            found = self._program(before * (1 - _LEAST_GAIN), part)
            if found is not None and found.value_ms < before:
                yield found
            if self._is_close():
                return
            if self._value_ms > before * (1 - _WORTHWHILE):
                if part >= 1:
                    return
                part = 1.0

    def _program(self, limit_ms: float, part: float) -> Assignment | None:
        """Ask a solver for a plan within a time, if the problem is small; its bound is kept."""
        is_asked = self.effort.has("program") and not self.watch.is_over
        program = Program.of(self.space, limit_ms, self.effort.program_columns) if is_asked else None
        if program is None:
            return None
        proven, plan = program.solve(self.effort, self.watch, part)
        self.prover.accept(proven)
        if plan is None:
            return None
        found = Assignment(self.catalogue, plan[0], limit_ms)
        found.bins.place(plan[1])
        if not np.isfinite(found.value_ms):  # the solver is exact to a millionth
            found.bins.repair(self.effort.few_moves)
        return found if np.isfinite(found.value_ms) else None
