"""`shardwright bench`: how long things take, beside another program where one is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.contracts import Extension

if TYPE_CHECKING:
    from typer import Typer


class Bench(Extension):
    """Times training steps and planning, beside another program where one is given."""

    name = "command:bench"
    help = "Time things, beside another program where one is given."

    def load(self) -> Typer:
        """The commands `bench plan` and `bench step`."""
        from shardwright_plugins.commands.bench.command import bench

        return bench
