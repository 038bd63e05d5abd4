"""A table's part of a plan, made by hand of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import shardwright as sw
from shardwright_torchrec.distributed.comm import get_local_size
from shardwright_torchrec.plans import read_sharding

__all__ = ["ParameterSharding"]


class _AnySharding(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        """True for shardwright's own, which plans have."""
        return isinstance(instance, sw.ParameterSharding)


class ParameterSharding(sw.ParameterSharding, metaclass=_AnySharding):
    """Sharding of one table, given by its shards; the object made is a `shardwright.ParameterSharding`.

    Args:
        sharding_type: name of the sharding type.
        compute_kernel: name of the compute kernel.
        ranks: the rank of each shard; by default those of their placements.
        sharding_spec: the shards, in TorchRec's form. Needed: they tell the table's size.
        others: TorchRec's further fields, which must be `None`.

    Raises:
        UnsupportedError: There are no shards, or another field is given.
        PlanError: The sharding type does not cut a table so; ranks contradict placements.
    """

    def __new__(  # type: ignore[misc]  # gives the base class
        cls,
        sharding_type: str,
        compute_kernel: str,
        ranks: Sequence[int] | None = None,
        sharding_spec: Any = None,
        cache_params: Any = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: Any = None,
        output_dtype: Any = None,
        key_value_params: Any = None,
    ) -> sw.ParameterSharding:
        """Make shardwright's own of the shards."""
        others = (
            cache_params,
            enforce_hbm,
            stochastic_rounding,
            bounds_check_mode,
            output_dtype,
            key_value_params,
        )
        if any(value is not None for value in others):
            raise sw.UnsupportedError(
                "ParameterSharding has no cache_params, enforce_hbm, stochastic_rounding, bounds_check_mode, "
                "output_dtype or key_value_params of its own: give fused_params to the sharder"
            )
        if sharding_spec is None:
            raise sw.UnsupportedError(
                f"ParameterSharding({str(sharding_type)!r}, ..., ranks={ranks}) does not tell the table's size: give "
                "sharding_spec=EnumerableShardingSpec([ShardMetadata(...), ...]), or make the plan by "
                "construct_module_sharding_plan(module, {table: data_parallel()}) with table_wise(rank=0), ..."
            )
        return read_sharding(sharding_type, compute_kernel, ranks, sharding_spec.shards, _topology)


def _topology(world_size: int, device: str) -> sw.Topology:
    """The ranks of the process group; without one as few as the shards need."""
    world_size = dist.get_world_size() if dist.is_initialized() else world_size
    return sw.Topology(world_size, device, local_world_size=get_local_size(world_size))
