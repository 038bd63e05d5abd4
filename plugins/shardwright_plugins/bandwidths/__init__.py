"""Bandwidths of accelerators and of their links, measured where a model's ranks plan without a topology."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the measurement."""
    return [
        imported(
            "topology:bandwidths",
            "shardwright_plugins.bandwidths.measured:bandwidths",
            "Bandwidths of accelerators and links are measured before a plan.",
        )
    ]
