"""Two-dimensional parallelism: tables sharded inside groups of ranks, and averaged over the groups."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwright_plugins.sharding_groups.dmp_collection import DMPCollection
    from shardwright_plugins.sharding_groups.environment import ShardingEnv2D

__all__ = ["DMPCollection", "ShardingEnv2D", "shardwright_extensions"]

# Imported on first use: planning for a group needs no torch.
_MODULE_OF_NAME = {"DMPCollection": "dmp_collection", "ShardingEnv2D": "environment"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)


class ShardingGroup(Extension):
    """Makes the topology of one sharding group of several."""

    name = "method:sharding_group"
    help = "Tables are sharded inside groups of ranks, and averaged over the groups."

    def load(self) -> Callable[..., Any]:
        """The function that makes the topology."""
        from shardwright_plugins.sharding_groups.grid import sharding_group

        return sharding_group


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer sharding groups."""
    return [ShardingGroup]
