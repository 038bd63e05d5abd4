"""The built-in proposers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension, Proposer
from shardwright.hookspecs import hookimpl


class ProgramProof(Extension):
    """Checks bounds that a mixed-integer program proves."""

    name = "proof:program"
    help = "Makes the mixed-integer program of the claim, and solves it."

    def load(self) -> Callable[..., Any]:
        """The function that checks a certificate."""
        from shardwright_plugins.proposers.proving.proof import why_unproven

        return why_unproven


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
    return [ProgramProof]
