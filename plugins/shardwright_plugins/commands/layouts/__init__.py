"""`shardwright layouts`: how each sharding type cuts a table, drawn from its layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension


class Layouts(Extension):
    """Draws how sharding types cut a table."""

    name = "command:layouts"
    help = "Draw how each sharding type cuts a table and where its blocks may go."

    def load(self) -> Callable[..., Any]:
        """The command `layouts`."""
        from shardwright_plugins.commands.layouts.command import layouts

        return layouts
