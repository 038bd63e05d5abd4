"""Resharding of a running model: rows travel between the ranks in pieces of bounded size."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the resharding."""
    return [
        imported(
            "method:reshard",
            "shardwright_plugins.resharding.reshard:reshard_model",
            "Models go from one plan to another while they are trained.",
        )
    ]
