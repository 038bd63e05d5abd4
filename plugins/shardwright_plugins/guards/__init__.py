"""Guards over training loops: what would train otherwise than one process does, and no single operation shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class Guards(Extension):
    """Refuses loops that would train otherwise than one process does."""

    name = "step:guards"
    help = "Loops that would train otherwise than one process does are refused."

    def load(self) -> Callable[..., Any]:
        """The function that gives the listener."""
        from shardwright_plugins.guards._listener import guards

        return guards


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the guards."""
    return [Guards]
