"""The built-in partitioners."""

from __future__ import annotations

from shardwright.contracts import Partitioner
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_partitioners() -> list[type[Partitioner]]:
    """Offer the built-in partitioners."""
    return []
