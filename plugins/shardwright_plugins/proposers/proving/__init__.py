"""proving: the search that knows how far from the best it can be at most."""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.rules import within_rules
from shardwright_plugins.proposers.proving.search import Search


@frozen
class Proving(Proposer):
    """Looks for a plan as fast as the bound allows, and for less and less if there is none.

    For a time that no rank should exceed, each table takes the option that is cheapest at the multipliers of the
    bound's proof; shards are placed longest first, and what is over a limit is repaired by moves and swaps, by a
    descent, and by tables that are taken out and put back. Times between the bound and the best plan are tried; a
    solver is asked where the problem is small.

    Args:
        effort: amount of work that the search may do.
    """

    name: ClassVar[str] = "proving"
    preference: ClassVar[int] = 30
    effort: Effort = field(factory=Effort)

    def proposals(self, space: SearchSpace, watch: Watch) -> Proposals:
        """Bounds with their proofs, and plans of falling time with ranks."""
        search = Search(space, self.effort, watch)
        return search.plans() if space.rules is None else within_rules(search)
