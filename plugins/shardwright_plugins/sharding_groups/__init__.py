"""Two-dimensional parallelism: tables sharded inside groups of ranks, and averaged over the groups."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported

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


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer sharding groups, and the costs of averaging over them."""
    return [
        imported(
            "method:sharding_group",
            "shardwright_plugins.sharding_groups.grid:sharding_group",
            "Tables are sharded inside groups of ranks, and averaged over the groups.",
        ),
        imported(
            "method:averaging",
            "shardwright_plugins.sharding_groups.costs:averaging_costs",
            "Bytes that are averaged over sharding groups, and the time that takes.",
        ),
    ]
