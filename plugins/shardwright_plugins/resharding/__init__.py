"""Resharding of a running model: rows travel between the ranks in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class Resharding(Extension):
    """Takes a model from one plan to another between two steps."""

    name = "method:reshard"
    help = "Models go from one plan to another while they are trained."

    def load(self) -> Callable[..., Any]:
        """The function that reshards a model, called on every rank."""
        from shardwright_plugins.resharding.reshard import reshard_model

        return reshard_model


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the resharding."""
    return [Resharding]
