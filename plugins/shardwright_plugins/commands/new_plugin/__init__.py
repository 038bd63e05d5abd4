"""`shardwright plugin`: the beginning of a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension


class NewPlugin(Extension):
    """Writes distributions with a plugin."""

    name = "command:plugin"
    help = "Write plugins."

    def load(self) -> Callable[..., Any]:
        """The commands `plugin`."""
        from shardwright_plugins.commands.new_plugin.command import plugin

        return plugin
