"""Any plan within memory, whatever its time, where simpler searches find none."""

from __future__ import annotations

from attrs import frozen

from shardwright.planning.options import Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment
from shardwright_plugins.packing.patience import packed_soon
from shardwright_plugins.proposers._dives import LITTLE, packed_by_dives
from shardwright_plugins.proposers._memory_patterns import packed_last
from shardwright_plugins.proposers._programs import Programs
from shardwright_plugins.proposers._starts import Starts

# A little more than any plan takes; cases that are looked at for a proof that there is none.
_MORE, _FEW_CASES = 1 + 1e-4, 12
# A solver gets problems of so many columns, at once or where all else takes long, for plans that take no more than so
# many times the time that may be possible, or any.
_FEW_COLUMNS, _MOST_COLUMNS = 250, 1500
_FIRST_LIMIT = 10.0


@frozen(eq=False)
class Packings:
    """The searches for such a plan.

    Args:
        starts: of the space.
        programs: of the space.
    """

    starts: Starts
    programs: Programs

    @property
    def _space(self) -> SearchSpace:
        return self.starts.space

    def _is_over(self) -> bool:
        return self._space.watch.is_over

    @property
    def _any_ms(self) -> float:
        """A time that every plan keeps within."""
        return self._space.most_ms * _MORE

    @property
    def _is_hopeless(self) -> bool:
        """Whether it is proven that there is no plan."""
        return self._space.prover.bound_ms > self._space.most_ms

    @property
    def _possible(self) -> Ints | None:
        """Options that fit in memory as a whole, ``[A]``; ``None`` where there are none, or time is over."""
        if self._space.watch.is_over:
            return None
        return self._space.prover.refute(self._any_ms, max_cases=_FEW_CASES).possible

    def soon(self) -> Assignment | None:
        """A plan by a solver if there are few columns, a few dives, or a short turn of patience: a second or two each.

        None by the latter where so many tables are alike that patterns are what counts.
        """
        solved = self._solved(_FEW_COLUMNS)
        if solved is not None:
            return solved
        possible = None if self.starts.is_folded or self._is_hopeless else self._possible
        if possible is None:
            return None
        catalogue, limit = self.starts.catalogue, self._any_ms
        found = packed_by_dives(catalogue, limit, self._is_over, effort=LITTLE)
        return found or packed_soon(catalogue, possible, limit, self._is_over)

    def last(self) -> Assignment | None:
        """A plan by all that takes long; none where it is proven that there is none."""
        solved = self._solved(_MOST_COLUMNS)
        if solved is not None:
            return solved
        possible = None if self._is_hopeless else self._possible
        if possible is None:
            return None
        catalogue, folded = self.starts.catalogue, self.starts.is_folded
        return packed_last(catalogue, possible, self._any_ms, by_patterns_first=folded)

    def _solved(self, most_columns: int) -> Assignment | None:
        """A plan by a solver; or the proof that there is none."""
        for limit in (_FIRST_LIMIT * self._space.bound.possible_ms, self._any_ms):
            found = self.programs.plan(limit, most_columns)
            if found is not None or self._is_over():
                return found
        return None
