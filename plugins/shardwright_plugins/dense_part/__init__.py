"""The dense part of models, which every rank has the whole of."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the wrapper of the dense part."""
    return [
        imported(
            "method:dense_part",
            "shardwright_plugins.dense_part.data_parallel:data_parallel",
            "Dense parameters are the same on all ranks, by DistributedDataParallel.",
        )
    ]
