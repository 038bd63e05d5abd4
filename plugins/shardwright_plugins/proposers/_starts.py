"""Places for the choices of options that look possible at a time: where searches for a plan begin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import define

from shardwright.planning.cases import CaseSearch
from shardwright.planning.options import Floats, Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.proposers._choices import MARGINS
from shardwright_plugins.proposers._descent import descended
from shardwright_plugins.proposers._folded import ENOUGH
from shardwright_plugins.proposers._patterns import Patterns, packed

# Patterns are made where each table is like so many others, over so many ranks.
_ALIKE, _MANY_RANKS = 4, 32
# With more tables than these, looking for the best other option of each on a rank takes too long.
SOME_TABLES = 400
_REPAIR_STEPS = 60
# Times, in parts beyond the bound, and parts of memory left free, with which a plan is made in haste.
_HASTE = ((0.2, 0.03), (0.5, 0.2), (10.0, 0.2))


@define(eq=False)
class Starts:
    """Choices of options with places.

    Args:
        catalogue: of the space.
        patterns: of the space.
    """

    catalogue: Catalogue
    patterns: Patterns

    @property
    def space(self) -> SearchSpace:
        """Options and costs."""
        return self.catalogue.space

    def of(self, cases: CaseSearch) -> Iterator[Assignment]:
        """Places for choices of options that look possible.

        Where many tables are alike over many ranks, patterns say what lies together.
        """
        if cases.possible is None:
            return
        if self.is_folded:
            start = packed(self.patterns, cases.possible, cases.z_ms, part=ENOUGH)
            if start is not None:
                yield start
        start = self._repaired(cases)
        if start is not None:
            yield start

    def _repaired(self, cases: CaseSearch) -> Assignment | None:
        """The first of these choices that little repair brings within the time, or the one that comes nearest."""
        nearest: tuple[float, Assignment] | None = None
        for proposal, _ in self.with_margins(cases):
            trial = self.filled(proposal, cases.z_ms)
            if trial.repair(_REPAIR_STEPS, changes=self.few_changes):
                return trial
            over = float(trial.bins.over().sum())
            if nearest is None or over < nearest[0]:
                nearest = over, trial
        return None if nearest is None or self.is_folded else nearest[1]

    def descended(self, start: Assignment) -> Assignment:
        """A plan brought nearer to its limit by little repair, or by descent."""
        if start.repair(_REPAIR_STEPS, changes=0):
            return start
        result = descended(start, self.catalogue.is_efficient)
        result.repair(_REPAIR_STEPS, changes=self.few_changes)
        return result

    @property
    def few_changes(self) -> int:
        """Options that a quick repair may change: none of many tables, since looking for them takes too long."""
        return 3 if len(self.space.options.all_tables) <= SOME_TABLES else 0

    def with_margins(self, cases: CaseSearch) -> Iterator[tuple[Ints, Floats]]:
        """Choices of options that look possible, more and more of memory left free, with the options' prices."""
        seen: set[bytes] = set()
        if cases.possible is None or cases.price is None:
            return
        seen.add(cases.possible.tobytes())
        yield cases.possible, cases.price
        for margin in MARGINS:
            dual = self.space.bound.problem.maximise(cases.z_ms, margin=margin, case=cases.open_case)
            proposal = dual.proposal()
            if proposal is not None and proposal.tobytes() not in seen:
                seen.add(proposal.tobytes())
                yield proposal, cases.price

    @property
    def is_folded(self) -> bool:
        """Whether there are so many tables alike, and so many ranks, that patterns are what counts."""
        options, world_size = self.space.options, len(self.space.capacity_bytes)
        return world_size >= _MANY_RANKS and len(options.all_tables) >= _ALIKE * len(options.tables)

    def in_haste(self) -> Assignment | None:
        """Any plan, where time was over before there was one."""
        if not self.space.watch.is_over:
            return None
        for part, margin in _HASTE:
            limit = self.space.bound.possible_ms * (1 + part)
            proposal = self.space.bound.problem.maximise(limit, margin=margin).proposal()
            found = None if proposal is None else self.filled(proposal, limit)
            if found is not None and np.isfinite(found.value_ms):
                return found
        return None

    def filled(self, proposal: Ints, limit_ms: float) -> Assignment:
        """The options of all tables ``[A]`` with their shards put where there is room, the largest first."""
        trial = Assignment(self.catalogue, proposal, limit_ms)
        trial.fill()
        return trial
