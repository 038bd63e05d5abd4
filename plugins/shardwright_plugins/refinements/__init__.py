"""The built-in refinements around a search."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the built-in refinements."""
    return [
        imported(
            "refinement:scale_up_caches",
            "shardwright_plugins.refinements.scale_up_caches:refinement",
            "Caches of rows grow into device memory that a plan leaves free.",
        ),
        imported(
            "refinement:stay_near",
            "shardwright_plugins.refinements.stay_near:StayNear",
            "Plans are rated by what moves to get there, too.",
        ),
    ]
