"""The built-in proposers."""

from __future__ import annotations

from shardwright.contracts import Proposer
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_proposers() -> list[type[Proposer]]:
    """Offer the built-in proposers."""
    from shardwright_plugins.proposers.greedy import Greedy
    from shardwright_plugins.proposers.proving import Proving
    from shardwright_plugins.proposers.uniform import Uniform

    return [Greedy, Proving, Uniform]
