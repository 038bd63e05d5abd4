"""proving: the search that knows how far from the best it can be at most."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.space import SearchSpace
from shardwright_plugins.proposers._bisection import Bisection
from shardwright_plugins.proposers._choices import choices


class Proving(Proposer):
    """Looks for a plan as fast as the bound allows, and for less and less if there is none.

    For a time that no rank should exceed, each table takes the option that is cheapest at the multipliers of the
    bound's proof; shards are placed longest first, and what is over a limit is repaired by moves, swaps, sharing two
    ranks' shards out anew, and other options. The time is bisected between the bound and the best plan.
    """

    name: ClassVar[str] = "proving"
    preference: ClassVar[int] = 30

    def proposals(self, space: SearchSpace) -> Proposals:
        """Plans of falling time, with ranks; under rules on ranks, choices of options alone."""
        bound = space.bound
        if not np.isfinite(bound.possible_ms):
            return
        if space.rules is not None:
            yield from choices(space)
            return
        search = Bisection(space)
        yield from search.plans()
