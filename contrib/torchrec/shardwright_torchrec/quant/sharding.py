"""Quantized tables cut by a plan, over the devices of one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import shardwright_serving as serving
import torch
from attrs import evolve
from torch import nn

import shardwright as sw
from shardwright_torchrec.quant.collections import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantizedCollection,
)

KERNEL = "quant"
"""Name of the kernel of quantized tables in plans, as TorchRec has it."""
PlacedCollection = serving.PlacedQuantEmbeddingBagCollection | serving.PlacedQuantEmbeddingCollection
"""Every collection that is cut."""


class QuantizedSharder:
    """Cuts the tables of a quantized collection as a plan says; each block keeps the scales of its whole rows.

    Args:
        fused_params: taken, as by TorchRec's sharder, and of no use: nothing is trained.
        shardable_params: not needed; constraints say how tables are cut.
    """

    module_type: ClassVar[type[nn.Module]]

    def __init__(
        self, fused_params: Mapping[str, Any] | None = None, shardable_params: list[str] | None = None
    ) -> None:
        self.fused_params = fused_params

    def shard(
        self, module: QuantizedCollection, params: Mapping[str, sw.ParameterSharding], device: Any = None
    ) -> nn.Module:
        """The collection, cut.

        Args:
            module: a quantized collection that is not cut yet.
            params: table name -> how it is cut.
            device: device of the blocks of all ranks, which are of one process.

        Raises:
            UnsupportedError: the row map gives keys.
        """
        own = {name: _with_preferred_kernel(one) for name, one in params.items()}
        plan = sw.ShardingPlan({"": sw.EmbeddingModuleShardingPlan(own)})
        return serving.shard_for_serving(module, plan, devices=[device or module.device], inplace=True)


def _with_preferred_kernel(sharding: sw.ParameterSharding) -> sw.ParameterSharding:
    """The sharding; where its kernel has TorchRec's name, which is none of ours, with the preferred."""
    return evolve(sharding, compute_kernel="") if sharding.compute_kernel == KERNEL else sharding


class QuantEmbeddingBagCollectionSharder(QuantizedSharder):
    """The sharder of quantized collections of bags."""

    module_type = QuantEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(QuantizedSharder):
    """The sharder of quantized collections of sequences."""

    module_type = QuantEmbeddingCollection


def default_sharders() -> list[QuantizedSharder]:
    """One of each."""
    return [QuantEmbeddingBagCollectionSharder(), QuantEmbeddingCollectionSharder()]


def shard_modules(
    module: nn.Module,
    env: Any = None,
    device: torch.device | str | None = None,
    plan: sw.ShardingPlan | None = None,
    sharders: Sequence[QuantizedSharder] | None = None,
) -> nn.Module:
    """A copy of a model whose quantized collections are cut by a plan.

    Args:
        module: the model.
        env: ignored: quantized tables are served by one process.
        device: device of the tables.
        plan: plan by which they are cut; by default every table is whole.
        sharders: sharders of the collections; by default one for each class of quantized collections.

    Raises:
        InvalidInputError: the plan has nothing of a table.
        UnsupportedError: a collection is cut already.
    """
    sharded = copy.deepcopy(module)
    by_type = {sharder.module_type: sharder for sharder in sharders or default_sharders()}
    plan = plan or whole_tables(module)
    for path, found in list(sharded.named_modules()):
        if isinstance(found, PlacedCollection):
            raise sw.UnsupportedError(
                f"the collection at {path!r} is cut already: give the model that it was made of"
            )
        if type(found) not in by_type:
            continue
        made = by_type[type(found)].shard(found, _of(plan, path, found), device)
        if not path:
            return made
        sharded.set_submodule(path, made)
    return sharded


def _of(plan: sw.ShardingPlan, path: str, module: QuantizedCollection) -> Mapping[str, sw.ParameterSharding]:
    params = plan.get_plan_for_module(path) or {}
    missing = [table.name for table in module.tables if table.name not in params]
    if missing:
        raise sw.InvalidInputError(
            f"the plan has nothing of the tables {', '.join(missing)} of module {path!r}"
        )
    return params


def whole_tables(module: nn.Module) -> sw.ShardingPlan:
    """The plan of uncut tables."""
    return placed(module, sw.Topology(world_size=1, compute_device="cpu"), {})


def placed(
    model: nn.Module, topology: sw.Topology, constraints: Mapping[str, sw.ParameterConstraints]
) -> sw.ShardingPlan:
    """A plan: each table by the first sharding type that its constraints name, the largest first where least is held.

    Raises:
        UnsupportedError: the sharding type has no layout for a table.
    """
    held = [0] * topology.world_size
    plans: dict[str, dict[str, sw.ParameterSharding]] = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedCollection):
            biggest = sorted(module.tables, key=lambda table: -table.num_embeddings * table.embedding_dim)
            own = {table.name: _sharding(table, topology, constraints, held) for table in biggest}
            plans[path] = {table.name: own[table.name] for table in module.tables}
    return sw.ShardingPlan({path: sw.EmbeddingModuleShardingPlan(own) for path, own in plans.items()})


def _sharding(
    table: Any, topology: sw.Topology, constraints: Mapping[str, sw.ParameterConstraints], held: list[int]
) -> sw.ParameterSharding:
    rule = constraints.get(table.name, sw.ParameterConstraints())
    name = (rule.sharding_types or ["table_wise"])[0]
    spec = sw.TableSpec(
        table.name, table.num_embeddings, table.embedding_dim, table.feature_names, table.data_type
    )
    kind = sw.host.host().sharding_types.create(name)
    layout = next(iter(kind.layouts(spec, topology, rule)), None)
    if layout is None:
        raise sw.UnsupportedError(
            f"{name!r} has no layout for table {spec.describe()} on {topology.world_size} devices"
        )
    ranks = []
    for block in layout.blocks:
        rank = block.rank if block.rank is not None else held.index(min(held))
        held[rank] += block.num_rows * block.num_columns
        ranks.append(rank)
    return sw.ParameterSharding(name, KERNEL, layout.placed(ranks))
