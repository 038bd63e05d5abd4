"""Bandwidths of accelerators and of their links, measured where a model's ranks plan without a topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class Bandwidths(Extension):
    """Measures the bandwidths of a device's memory and of its links to the host and to other ranks."""

    name = "topology:bandwidths"
    help = "Bandwidths of accelerators and links are measured before a plan."

    def load(self) -> Callable[..., Any]:
        """The function that measures, together with all other ranks."""
        from shardwright_plugins.bandwidths.measured import bandwidths

        return bandwidths


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the measurement."""
    return [Bandwidths]
