"""The sharders of shardwright's own collections, and what planner and ``DistributedModelParallel`` ask of them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve
from torch import nn

from shardwright.errors import PluginLoadError
from shardwright.host.extensions import load_at, words_at
from shardwright.host.plugin_host import host
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.collections.sharded_embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from shardwright.runtime.sharded.collections.sharded_embedding_bag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from shardwright.runtime.sharded.collections.sharded_module import (
    LeaveAlone,
    ModuleSharder,
    find_sharder,
    shardable_modules,
)

__all__ = [
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "LeaveAlone",
    "ModuleSharder",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "collect_tables",
    "default_sharders",
    "find_sharder",
    "shardable_modules",
]


def default_sharders() -> list[ModuleSharder]:
    """One sharder for each class that has one: those of core's collections, and all at the extension point ``sharder``.

    Raises:
        PluginLoadError: an extension does not make a sharder, or two serve one class.
    """
    offered = host().extensions
    sharders: dict[type[nn.Module], ModuleSharder] = {}
    made = [("core", cls()) for cls in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)]
    made += [
        (f"'sharder:{word}'", load_at("sharder", word, offered)()) for word in words_at("sharder", offered)
    ]
    for whose, sharder in made:
        if not isinstance(sharder, ModuleSharder):
            raise PluginLoadError(f"the extension {whose} makes {sharder!r}, which is no ModuleSharder")
        known = sharders.setdefault(sharder.module_type, sharder)
        if known is not sharder:
            raise PluginLoadError(
                f"the extension {whose} serves {sharder.module_type.__name__}, which has a sharder already: "
                f"{type(known).__module__}.{type(known).__qualname__}"
            )
    return list(sharders.values())


def collect_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder] | None = None,
    *,
    compute_device: str | None = None,
) -> list[TableSpec]:
    """The specifications of all tables in ``module`` that are to be sharded, in module order.

    Args:
        module: the model.
        sharders: one for each class of collections in it; the registered ones by default.
        compute_device: type of the devices to plan for; with it, tables say what their sharder allows there.

    Raises:
        UnknownPluginError: a sharder allows a sharding type or compute kernel that is not known.
    """
    sharders = default_sharders() if sharders is None else sharders
    return [
        table if compute_device is None else evolve(table, allowed=sharder.allowed(table, compute_device))
        for path, child, sharder in shardable_modules(module, sharders)
        for table in sharder.tables(child, path)
    ]
