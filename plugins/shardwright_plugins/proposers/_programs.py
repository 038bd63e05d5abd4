"""Plans by the solver: small problems as programs, and which were solved or found to be too large."""

from __future__ import annotations

import numpy as np
from attrs import define, field

from shardwright.planning.program import MOST_NODES, PRECISION, Program
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue

# The nodes of the solver's tree, times columns, and the seconds that only far slower machines need.
_NODE_COLUMNS, _LEAST_NODES = 150_000, 50
_MOST_SECONDS = 300.0
# With less time left nothing is solved.
_LEAST_SECONDS = 0.7
# A program that is too large is so for times that are less by no more than this part.
_ABOUT_THE_SAME = 0.02
_REPAIR_STEPS = 60


@define(eq=False)
class Programs:
    """The programs of a space.

    Args:
        catalogue: of the space.
    """

    catalogue: Catalogue
    _solved_ms: set[tuple[float, float]] = field(factory=set)
    """The limits of the programs that were solved, and with what part of the nodes."""
    _too_large: dict[float, int] = field(factory=dict)
    """Limits of programs with more than so many columns, or without a plan."""

    @property
    def space(self) -> SearchSpace:
        """Options and costs."""
        return self.catalogue.space

    def plan(
        self, limit_ms: float, most_columns: int, part: float = 1, *, precision: float = PRECISION
    ) -> Assignment | None:
        """What a solver finds within a time, if the problem is small; its bound is kept.

        Args:
            limit_ms: the time.
            most_columns: how large the problem may be.
            part: of the nodes that the solver may look at.
            precision: how near the solver is to come.
        """
        watch = self.space.watch
        if watch.seconds_left < _LEAST_SECONDS or watch.is_over:
            return None
        if (limit_ms, part) in self._solved_ms or self._is_too_large(limit_ms, most_columns):
            return None
        program = Program.of(self.space, limit_ms, most_columns=most_columns)
        if program is None:
            self._too_large[limit_ms] = most_columns
            return None
        self._solved_ms.add((limit_ms, part))
        nodes = int(part * np.clip(_NODE_COLUMNS / program.num_columns, _LEAST_NODES, MOST_NODES))
        seconds = watch.seconds_at_most(_MOST_SECONDS)
        solution = program.solve(most_nodes=nodes, seconds=seconds, precision=precision)
        self.space.prover.accept(program.certificate(solution))
        if solution.proposal is None or solution.ranks is None:
            return None
        found = Assignment(self.catalogue, solution.proposal, limit_ms)
        found.place(solution.ranks)
        # The solver is exact to a millionth.
        if not np.isfinite(found.value_ms):
            found.repair(_REPAIR_STEPS, changes=3)
        return found if np.isfinite(found.value_ms) else None

    def _is_too_large(self, limit_ms: float, most_columns: int) -> bool:
        """Whether the program of a time, or of one about the same, is known to have more columns."""
        return any(
            most_columns <= most and time * (1 - _ABOUT_THE_SAME) <= limit_ms
            for time, most in self._too_large.items()
        )
