"""The built-in comm backends."""

from __future__ import annotations

from shardwright.contracts import CommBackend
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_comm_backends() -> list[type[CommBackend]]:
    """Offer the built-in comm backends."""
    return []
