"""The built-in proposers."""

from __future__ import annotations

from shardwright.contracts import Proposer
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_proposers() -> list[type[Proposer]]:
    """Offer the built-in proposers."""
    from shardwright_plugins.proposers.dynamic_programming import DynamicProgramming
    from shardwright_plugins.proposers.greedy import Greedy
    from shardwright_plugins.proposers.grid_search import GridSearch
    from shardwright_plugins.proposers.proving import Proving
    from shardwright_plugins.proposers.uniform import Uniform

    return [DynamicProgramming, Greedy, GridSearch, Proving, Uniform]
