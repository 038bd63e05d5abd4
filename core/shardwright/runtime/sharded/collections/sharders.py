"""The sharders of shardwright's own collections, and what planner and ``DistributedModelParallel`` ask of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from attrs import evolve
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.errors import InvalidInputError, PluginLoadError, UnsupportedError, nearest
from shardwright.host.extensions import load_at, words_at
from shardwright.host.plugin_host import host
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.environment import ShardingEnv
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


def warn_of_plain_tables(module: nn.Module) -> None:
    """Warn of torch's own tables in a model that has no collection: nobody shards them."""
    plain = {
        type(own).__name__ for own in module.modules() if isinstance(own, nn.Embedding | nn.EmbeddingBag)
    }
    if plain:
        warnings.warn(
            f"no table of the model is sharded: every rank has all of each {' and '.join(sorted(plain))} of torch. "
            "Take EmbeddingBagCollection or EmbeddingCollection: `shardwright docs two_ranks` shows how",
            RuntimeWarning,
            stacklevel=6,
        )


def replaced(
    model: nn.Module,
    sharders: Sequence[ModuleSharder],
    plan: ShardingPlan,
    env: ShardingEnv,
    device: torch.device,
    sharded: dict[str, nn.Module],
) -> nn.Module:
    """Shard the collections of a model in place.

    Args:
        model: the model.
        sharders: one for each class of collections.
        plan: plan of all of them.
        env: the ranks.
        device: this rank's device.
        sharded: receives the sharded modules by their paths.

    Returns:
        The model; the sharded module, if the model itself is a collection.

    Raises:
        InvalidInputError: plan and model have different collections, or one is inside a ``DistributedDataParallel``.
        UnsupportedError: a sharder gives no module.
    """
    found = list(shardable_modules(model, sharders))
    paths = [path for path, _, _ in found]
    for path in plan.plan:
        if path not in paths:
            raise InvalidInputError(
                f"the plan is for a module at {path!r}, and no sharder shards what the model has there: give the "
                f"model and the sharders that the plan was made with.{nearest(path, paths)}"
            )
    _refuse_wrapped(model, paths)
    for path, child, sharder in found:
        if path not in plan.plan and sharder.tables(child, path):
            raise InvalidInputError(
                f"the plan has nothing for {type(child).__name__} at {path!r}; it is for {sorted(plan.plan)}"
            )
        made = sharder.shard(child, plan.plan.get(path, {}), env, device, path)
        if not isinstance(made, nn.Module):
            raise UnsupportedError(
                f"sharder {type(sharder).__name__} broke its contract: shard() of the module at {path!r} gave "
                f"{made!r}; it must give a Module, as LeaveAlone gives the module itself"
            )
        sharded[path] = made
        if not path:
            return made
        _replace(model, child, made)
    return model


def _refuse_wrapped(model: nn.Module, paths: Sequence[str]) -> None:
    """Check that no collection at ``paths`` is inside a ``DistributedDataParallel``, which has taken its tables in.

    Raises:
        InvalidInputError: one is.
    """
    for outer, module in model.named_modules():
        inside = [path for path in paths if not outer or path.startswith(outer + ".")]
        if inside and isinstance(module, DistributedDataParallel):
            raise InvalidInputError(
                f"the collection at {inside[0]!r} is inside a DistributedDataParallel ({outer!r}), which "
                "copies and averages whole tables: give DistributedModelParallel the model unwrapped; it wraps what is "
                "not sharded by itself"
            )


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` stands in ``model``: a collection may be shared by several parents."""
    for path in [path for path, child in model.named_modules(remove_duplicate=False) if child is old]:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
