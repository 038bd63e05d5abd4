"""Guards over training loops: what would train otherwise than one process does, and no single operation shows."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the guards."""
    return [
        imported(
            "step:guards",
            "shardwright_plugins.guards._listener:guards",
            "Loops that would train otherwise than one process does are refused.",
        )
    ]
