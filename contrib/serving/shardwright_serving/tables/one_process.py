"""Quantized collections cut by a plan, all their shards in one process, on one device or several.

Legend: B batch size, D columns of a table, N ids of a feature.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright import (
    InvalidInputError,
    ParameterSharding,
    ShardingPlan,
    UnsupportedError,
)
from shardwright_serving.tables.collections import (
    QuantEmbeddingBagCollection,
)
from shardwright_serving.tables.placed_collections import (
    PlacedCollection,
    PlacedQuantEmbeddingBagCollection,
    PlacedQuantEmbeddingCollection,
)
from shardwright_serving.tables.quantized_collection import QuantizedCollection


def shard_for_serving(
    model: nn.Module,
    plan: ShardingPlan,
    *,
    devices: Sequence[torch.device | str] = ("cpu",),
    inplace: bool = False,
) -> nn.Module:
    """Cut the quantized collections of a model by a plan, all shards in this process.

    Outputs equal those of the model to the last bit where rows are whole; sums of tables whose rows are cut are added
    up part by part. Of tables that the plan copies to every rank there is one copy, on the first's device.

    Args:
        model: a model with quantized collections, or one such.
        plan: plan of the collections by their paths, such as ``EmbeddingShardingPlanner`` makes it. Each table is
            looked up by its compute kernel; an empty name is the preferred one.
        devices: device of each rank of the plan; one device is that of all.
        inplace: change this model; else a copy. Rows of shards are new either way, and copied once.

    Returns:
        The model; the placed collection, if ``model`` is a collection. Outputs are on the input's device.

    Raises:
        InvalidInputError: the plan leaves a collection or a table out, or there are fewer devices than ranks.
        UnsupportedError: a collection is cut already, a table's ids are keys, or its kernel does not serve it.
        UnknownPluginError: there is no such compute kernel.
        PlanError: a layout does not fit its table.

    Example:
        >>> import torch, shardwright as sw, shardwright_serving as serving
        >>> table = sw.EmbeddingBagConfig(
        ...     num_embeddings=100, embedding_dim=8, name="item", feature_names=["item"]
        ... )
        >>> model = serving.quantize_embeddings(sw.EmbeddingBagCollection([table]))
        >>> plan = sw.EmbeddingShardingPlanner(sw.Topology(world_size=2, compute_device="cpu")).plan(
        ...     model, [serving.QuantEmbeddingBagCollectionSharder()]
        ... )
        >>> serving.shard_for_serving(model, plan)(sw.KeyedJaggedTensor.from_lists({"item": [[3], []]})).values().shape
        torch.Size([2, 8])
    """
    found = _collections_of(model)
    if not found:
        raise InvalidInputError(
            f"this {type(model).__name__} has no quantized collection to cut: quantize_embeddings(model) makes them"
        )
    made: dict[QuantizedCollection, PlacedCollection] = {}
    for path, one in found.items():
        if one not in made:  # one that is used twice is planned under its first path
            made[one] = _placed(one, plan, devices, path)
    if "" in found:
        return made[found[""]]
    # A copy takes the placed collections for its own, so that rows are copied once.
    memo: dict[int, Any] = {} if inplace else {id(one): own for one, own in made.items()}
    result = model if inplace else copy.deepcopy(model, memo)
    for path, one in found.items():
        result.set_submodule(path, made[one])
    return result


def _collections_of(model: nn.Module) -> dict[str, QuantizedCollection]:
    """The quantized collections of a model by path; one that is used twice has several."""
    found = {}
    for path, one in model.named_modules(remove_duplicate=False):
        if isinstance(one, PlacedCollection):
            raise UnsupportedError(
                f"the collection at {path!r} is cut already: give the model that it was made of"
            )
        if isinstance(one, QuantizedCollection):
            found[path] = one
    return found


def _placed(
    collection: QuantizedCollection, plan: ShardingPlan, devices: Sequence[torch.device | str], path: str
) -> PlacedCollection:
    params = plan.get_plan_for_module(path)
    if params is None:
        raise InvalidInputError(f"the plan has nothing for the {type(collection).__name__} at {path!r}")
    return place_collection(collection, params, devices, path)


def place_collection(
    collection: QuantizedCollection,
    params: Mapping[str, ParameterSharding],
    devices: Sequence[torch.device | str] = ("cpu",),
    path: str = "",
) -> PlacedCollection:
    """Cut one collection; see `shard_for_serving`."""
    is_pooled = isinstance(collection, QuantEmbeddingBagCollection)
    kind = PlacedQuantEmbeddingBagCollection if is_pooled else PlacedQuantEmbeddingCollection
    return kind(collection, params, _devices_of(devices), path)


def _devices_of(devices: Sequence[torch.device | str]) -> list[torch.device]:
    given = [devices] if isinstance(devices, str | torch.device) else list(devices)
    if not given:
        raise InvalidInputError("there are no devices: give one for each rank of the plan, or one for all")
    try:
        return [torch.device(device) for device in given]
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"devices are {given}: {error}") from None
