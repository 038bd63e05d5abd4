"""`shardwright checkpoint`: what checkpoints hold, whether they are whole, and other forms of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.contracts import Extension

if TYPE_CHECKING:
    from typer import Typer


class Checkpoint(Extension):
    """Shows, verifies and converts checkpoints."""

    name = "command:checkpoint"
    help = "Show, verify and convert checkpoints."

    def load(self) -> Typer:
        """The commands `checkpoint show`, `verify` and `convert`."""
        from shardwright_plugins.commands.checkpoint.command import checkpoint

        return checkpoint
