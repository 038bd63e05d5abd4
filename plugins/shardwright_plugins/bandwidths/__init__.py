"""Bandwidths of machines, measured where a model's ranks plan without a topology, or read from a document."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the measurement, and the reading."""
    return [
        imported(
            "topology:bandwidths",
            "shardwright_plugins.bandwidths.measured:bandwidths",
            "Bandwidths of accelerators and links are measured before a plan.",
        ),
        imported(
            "method:machine",
            "shardwright_plugins.bandwidths.documents:machine_topology",
            "Topologies of machines that `shardwright calibrate` measured.",
        ),
    ]
