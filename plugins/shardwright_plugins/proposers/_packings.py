"""Any plan within memory, whatever its time, where simpler searches find none."""

from __future__ import annotations

from attrs import frozen

from shardwright.planning.options import Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment
from shardwright_plugins.proposers._dives import packed_by_dives
from shardwright_plugins.proposers._memory_patterns import packed_last
from shardwright_plugins.proposers._starts import Starts

# A little more than any plan takes; cases that are looked at for a proof that there is none.
_MORE, _FEW_CASES = 1 + 1e-4, 12


@frozen(eq=False)
class Packings:
    """The searches for such a plan.

    Args:
        starts: of the space.
    """

    starts: Starts

    @property
    def _space(self) -> SearchSpace:
        return self.starts.space

    @property
    def any_ms(self) -> float:
        """A time that every plan keeps within."""
        return self._space.most_ms * _MORE

    @property
    def _possible(self) -> Ints | None:
        """Options that fit in memory as a whole, ``[A]``; ``None`` where there are none, or time is over."""
        if self._space.watch.is_over:
            return None
        return self._space.prover.refute(self.any_ms, max_cases=_FEW_CASES).possible

    def by_dives(self) -> Assignment | None:
        """A plan by dives, which take seconds; none where so many tables are alike that patterns are what counts."""
        if self.starts.is_folded or self._possible is None:
            return None
        return packed_by_dives(self.starts.catalogue, self.any_ms, lambda: self._space.watch.is_over)

    def last(self) -> Assignment | None:
        """A plan by all that takes long; none where it is proven that there is none."""
        possible = self._possible
        if possible is None or self._space.prover.bound_ms > self._space.most_ms:
            return None
        catalogue, folded = self.starts.catalogue, self.starts.is_folded
        return packed_last(catalogue, possible, self.any_ms, by_patterns_first=folded)
