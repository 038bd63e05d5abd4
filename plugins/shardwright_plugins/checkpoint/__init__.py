"""Checkpoints in shards, over ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import names_of


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the checkpoints."""
    return [
        names_of(
            "names:checkpoints",
            (
                "shardwright_plugins.checkpoint.loading",
                "shardwright_plugins.checkpoint.reading",
                "shardwright_plugins.checkpoint.saving",
            ),
            "Checkpoints in shards, whatever plan and ranks save and load them.",
        )
    ]
