"""The built-in proposers."""

from __future__ import annotations

from shardwright.contracts import Extension, Proposer
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported


@hookimpl
def shardwright_proposers() -> list[type[Proposer]]:
    """Offer the built-in proposers."""
    from shardwright_plugins.proposers.greedy import Greedy
    from shardwright_plugins.proposers.grid_search import GridSearch
    from shardwright_plugins.proposers.proving import Proving
    from shardwright_plugins.proposers.uniform import Uniform

    return [Greedy, GridSearch, Proving, Uniform]


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the checker of what the proposer ``proving`` proves by a program."""
    return [
        imported(
            "proof:program",
            "shardwright_plugins.proposers.proving.proof:why_unproven",
            "Makes the mixed-integer program of the claim, and solves it.",
        )
    ]
