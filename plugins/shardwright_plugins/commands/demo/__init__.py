"""`shardwright demo`: a DLRM whose embedding tables are sharded over local processes, trained end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension


class Demo(Extension):
    """Trains a DLRM with sharded embedding tables on local processes."""

    name = "command:demo"
    help = "Train a DLRM with sharded embedding tables on local processes, and evaluate it."

    def load(self) -> Callable[..., Any]:
        """The command `demo`."""
        from shardwright_plugins.commands.demo.command import demo

        return demo
