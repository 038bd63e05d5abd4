"""`shardwright bench`: what estimators predict, held against the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.contracts import Extension

if TYPE_CHECKING:
    from typer import Typer


class Bench(Extension):
    """Measures plans of many kinds beside what estimators predict."""

    name = "command:bench"
    help = "Measure plans beside what estimators predict."

    def load(self) -> Typer:
        """The command `bench truth`."""
        from shardwright_plugins.commands.bench.command import bench

        return bench
