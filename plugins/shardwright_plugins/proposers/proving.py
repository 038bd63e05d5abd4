"""proving: the search that knows how far from the best it can be at most."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.ruled_space import RuledSpace
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
        """Plans of falling time, with ranks."""
        if not np.isfinite(space.bound.possible_ms):
            return
        if space.rules is None:
            yield from Bisection(space).plans()
        else:
            yield from _within_rules(space)


def _within_rules(space: SearchSpace) -> Proposals:
    """Plans that keep rules on ranks, of a space in which rules are resources; choices of options if there is none."""
    first = next(choices(space), None)
    if first is not None:
        yield first  # over many ranks it may be better than what is found at once
    ruled = RuledSpace.of(space)
    if ruled is not None and np.isfinite(ruled.plain.bound.possible_ms):
        for proposed in Bisection(ruled.plain).plans():
            yield ruled.as_given(proposed)
    if not np.isfinite(space.watch.progress.value_ms):
        yield from choices(space)
