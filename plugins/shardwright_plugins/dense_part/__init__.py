"""The dense part of models, which every rank has the whole of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class DataParallel(Extension):
    """Wraps the dense part of a model in `DistributedDataParallel`."""

    name = "method:dense_part"
    help = "Dense parameters are the same on all ranks, by DistributedDataParallel."

    def load(self) -> Callable[..., Any]:
        """The function that wraps the dense part, called on every rank."""
        from shardwright_plugins.dense_part.data_parallel import data_parallel

        return data_parallel


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the wrapper."""
    return [DataParallel]
