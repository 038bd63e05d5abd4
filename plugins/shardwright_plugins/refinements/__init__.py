"""The built-in refinements around a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class StayNear(Extension):
    """Keeps a plan near the one that a model has."""

    name = "refinement:stay_near"
    help = "Plans are rated by what moves to get there, too."

    def load(self) -> Callable[..., Any]:
        """The class of the refinement, which takes the plan and the cost of a move."""
        from shardwright_plugins.refinements.stay_near import StayNear

        return StayNear


class ScaleUpCaches(Extension):
    """Lets caches of rows fill the device memory that is left."""

    name = "refinement:scale_up_caches"
    help = "Caches of rows grow into device memory that a plan leaves free."

    def load(self) -> Callable[..., Any]:
        """The function that gives the refinement, which takes no arguments."""
        from shardwright_plugins.refinements.scale_up_caches import scale_up_caches

        return lambda: scale_up_caches


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the built-in refinements."""
    return [ScaleUpCaches, StayNear]
