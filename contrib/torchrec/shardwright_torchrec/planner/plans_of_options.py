"""A plan of the options that a search has chosen."""

from __future__ import annotations

from collections.abc import Sequence

import shardwright as sw
from shardwright.host import host
from shardwright_torchrec.parallel.kernel_names import NamedSharding
from shardwright_torchrec.planner.types import ShardingOption

__all__ = ["to_sharding_plan"]


def to_sharding_plan(sharding_options: Sequence[ShardingOption], topology: sw.Topology) -> sw.ShardingPlan:
    """The plan that has each option's shards on the ranks that they were given.

    Args:
        sharding_options: an option of each table, whose shards have ranks.
        topology: ranks and devices.

    Raises:
        PlanError: shards are not those of the sharding type, or one has no rank.
    """
    modules: dict[str, dict[str, sw.ParameterSharding]] = {}
    for option in sharding_options:
        modules.setdefault(option.path, {})[option.name] = _sharding(option, topology)
    return sw.ShardingPlan({path: sw.EmbeddingModuleShardingPlan(own) for path, own in modules.items()})


def _sharding(option: ShardingOption, topology: sw.Topology) -> sw.ParameterSharding:
    ranks = [shard.rank for shard in option.shards]
    if None in ranks:
        raise sw.PlanError(f"{option.fqn}: shard {ranks.index(None)} has no rank: a partitioner gives it one")
    kernel = option.own_kernel or host().compute_kernels.canonical(option.compute_kernel)
    placed = _layout(option, topology).placed(ranks)
    sharding = sw.ParameterSharding(
        option.sharding_type,
        kernel,
        placed,
        topology.compute_device,
        local_world_size=topology.local_world_size,
    )
    return NamedSharding.of(sharding) if kernel != option.compute_kernel else sharding


def _layout(option: ShardingOption, topology: sw.Topology) -> sw.Layout:
    """The sharding type's layout that has the option's shards."""
    rows, columns = option.tensor.shape
    sizes = [list(shard.size) for shard in option.shards]
    table = sw.TableSpec(
        name=option.name, num_embeddings=rows, embedding_dim=columns, feature_names=[option.name]
    )
    narrow = sw.ParameterConstraints(
        sharding_types=[option.sharding_type],
        min_partition=min((width for _, width in sizes), default=columns),
    )
    for layout in host().sharding_types.create(option.sharding_type).layouts(table, topology, narrow):
        if [[block.num_rows, block.num_columns] for block in layout.blocks] == sizes:
            return layout
    raise sw.PlanError(f"{option.fqn}: {option.sharding_type} has no layout of shards of the sizes {sizes}")
