"""What takes long, for gaps that are wide when all else was tried: better bounds and plans, by patterns and solver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import define

from shardwright.planning.distinct import distinct_rows
from shardwright.planning.options import FREE
from shardwright.planning.pattern_cases import PatternCases
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.neighbourhoods import quickened
from shardwright_plugins.proposers._programs import Programs
from shardwright_plugins.proposers._timed_patterns import packed_within

# A gap that is worth it, and one where tables times ranks are more, unless memory has a price: that takes long.
_WIDE_GAP, _MANY, _WIDE_OF_MANY = 0.03, 300_000, 0.12
# With so many tables, and tables times ranks, a bound is raised with so many cases, if kinds of shards are as few, or
# for a gap as wide as that, and that is all.
_MANY_TABLES, _LARGE, _FEW_CASES, _FEW_KINDS = 600, 125_000, 80, 60
# So many times the solver's nodes, for programs of so many columns.
_HARD, _MOST_COLUMNS = 12.0, 1500
# The part of such a gap that a plan by patterns is to close at first, and how much less is asked after a failure;
# and tries.
_FIRST_STEP, _STEP, _MOST_TRIES = 0.4, 0.05, 8
# The part of such a gap that groups of ranks shared out anew are to leave, how often at most, and rounds; and the least
# gain that is worth the next.
_SHARED_PART, _MOST_SHARINGS, _ROUNDS, _WORTHWHILE = 0.5, 12, 40, 5e-3
# A gap for which a plan comes first that is better, and then a bound, unless a few cases raise that.
_LARGE_GAP = 1.0
_LEAST_GAIN = 1e-4


def extent(space: SearchSpace) -> int:
    """Tables times ranks."""
    return len(space.options.all_tables) * len(space.capacity_bytes)


def is_large(space: SearchSpace) -> bool:
    """Whether all that takes long takes too long."""
    return extent(space) > _LARGE and len(space.options.all_tables) > _MANY_TABLES


@define(eq=False)
class WideGap:
    """The search for a better bound and better plans.

    Args:
        catalogue: of the space.
        programs: of the space.
        best: the best plan so far.
    """

    catalogue: Catalogue
    programs: Programs
    best: Assignment

    @property
    def is_wide(self) -> bool:
        """Whether the gap is still worth it, and there is time."""
        space = self.catalogue.space
        is_quick = extent(space) <= _MANY or is_large(space) or space.bound.multipliers.any()
        wide = _WIDE_GAP if is_quick else _WIDE_OF_MANY
        return self.best.value_ms > space.prover.bound_ms * (1 + wide) and not space.watch.is_over

    @property
    def _is_far(self) -> bool:
        return self.best.value_ms > self.catalogue.space.prover.bound_ms * (1 + _LARGE_GAP)

    @property
    def _num_kinds(self) -> int:
        """Different shards that may lie on any rank, of options as fast as the best plan."""
        space, options = self.catalogue.space, self.catalogue.space.options
        is_fast = space.bound.problem.allowed(self.best.value_ms)
        run = np.flatnonzero((options.rank == FREE) & is_fast[options.option])
        return len(distinct_rows(np.column_stack([space.cost_ms[run], space.memory_bytes[run]])))

    def plans(self) -> Iterator[Assignment]:
        """Each plan that is better than those before; the bound is raised first, unless the plan is to blame."""
        if not self.is_wide:
            return
        prover = self.catalogue.space.prover
        if is_large(self.catalogue.space):
            if self._num_kinds <= _FEW_KINDS:
                PatternCases(prover, self.best.value_ms).raise_once(_FEW_CASES)
            elif self.best.value_ms > prover.bound_ms * (1 + _WIDE_OF_MANY):
                PatternCases.quick(prover, self.best.value_ms).raise_some()
            return
        if self._is_far:
            PatternCases(prover, self.best.value_ms).sharpen(_LARGE_GAP, _FEW_CASES)
        if self._is_far:
            yield from self._shared_out()
        PatternCases(prover, self.best.value_ms).sharpen()
        part = _FIRST_STEP
        for _ in range(_MOST_TRIES):
            if part >= 1 or not self.is_wide:
                break
            before, low = self.best, prover.bound_ms
            yield from self._better(packed_within(self.catalogue, low + part * (before.value_ms - low)))
            if self.best is not before:
                continue
            part = (1 + part) / 2 + _STEP
            if self._is_far:
                yield from self._shared_out()
        if self.is_wide:
            limit = self.best.value_ms * (1 - _LEAST_GAIN)
            yield from self._better(self.programs.plan(limit, _MOST_COLUMNS, _HARD))
        yield from self._shared_out()

    def _shared_out(self) -> Iterator[Assignment]:
        """Better plans by sharing out what lies on a few ranks anew, as long as that is worth it."""
        for _ in range(_MOST_SHARINGS):
            before, low = self.best, self.catalogue.space.prover.bound_ms
            if not self.is_wide:
                return
            limit = low + _SHARED_PART * (before.value_ms - low)
            yield from self._better(quickened(self.catalogue, before, limit, _ROUNDS))
            if self.best.value_ms > before.value_ms * (1 - _WORTHWHILE):
                return

    def _better(self, found: Assignment | None) -> Iterator[Assignment]:
        if found is not None and found.value_ms < self.best.value_ms * (1 - _LEAST_GAIN):
            self.best = found
            yield found
