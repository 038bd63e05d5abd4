"""Checkpoints in shards, over ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class Checkpoints(Extension):
    """Saves and loads checkpoints, and reads what is in them: `shardwright.save_checkpoint` and similar functions."""

    name = "names:checkpoints"
    help = "Checkpoints in shards, whatever plan and ranks save and load them."

    def load(self) -> Callable[[str], Any]:
        """The function that gives what has a public name."""
        from shardwright_plugins.checkpoint import loading, reading, saving

        return (vars(loading) | vars(reading) | vars(saving)).__getitem__


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the checkpoints."""
    return [Checkpoints]
