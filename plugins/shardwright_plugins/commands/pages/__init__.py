"""`shardwright docs`: the pages of documentation that are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension


class Docs(Extension):
    """Lists the pages of core and of plugins, or prints one."""

    name = "command:docs"
    help = "List the pages of documentation that are installed, or print one."

    def load(self) -> Callable[..., Any]:
        """The command `docs`."""
        from shardwright_plugins.commands.pages.command import docs

        return docs
